"""Accuracy of a quantized graph: its answers against the FP32 graph's in ONNX Runtime.

`AccuracyBudget` says how much of it may be lost, `AccuracyEvaluator` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from enginery.core.accuracy import AccuracyMetrics
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, EngineryError, InputError, OptionError
from enginery.core.model.feeds import Feeds
from enginery.quantize.calibration.data import Batch
from enginery.quantize.config import QuantizeConfig, parse_accuracy_budget
from enginery.quantize.source_graph import SourceGraph
from enginery.runtime.agreement import (
    AnswerAgreement,
    Outputs,
    argmax_of_finite,
)
from enginery.runtime.builtin_inputs import builtin_batches, has_builtin_inputs
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.runtime.sample_inputs import SampleBatch

Graph = Callable[[Feeds], Outputs]

HEADROOM = 0.95
"""Share of the budget that the search may spend at first; FP16 rounding needs some of it."""
_ROUNDING = 1e-12
"""In floating point, 1 - 0.99 is slightly more than 0.01."""


@dataclass(frozen=True)
class AccuracyBudget:
    """Accuracy that a quantized model may lose against FP32."""

    kind: Literal["cosine", "agreement", "accuracy", "boxes"]
    """`cosine`: mean cosine to FP32's outputs. `agreement`: share of answers with the same argmax
    as FP32. `accuracy`: share of correct labels. `boxes`: F1 of a detector's boxes to FP32's."""
    allowed: float
    """Largest loss: 0 to 1, or 0 to 2 for the cosine."""
    reference: float = 1.0
    """Value of the FP32 model."""
    spendable: float = HEADROOM
    """Share of the budget that the search's simulation may spend. The graph itself loses more: FP16
    changes a sum a little, and a product that reads it rounds to another integer."""

    @classmethod
    def of(cls, config: QuantizeConfig, reference: AccuracyMetrics) -> AccuracyBudget:
        """Return the budget that the options set.

        Args:
            config: the options.
            reference: accuracy of the FP32 model against itself and against the labels.

        Raises:
            OptionError: `accuracy_budget` is set, but the model has neither logits nor boxes.
        """
        if not config.accuracy_budget:
            return cls("cosine", 1 - config.min_cosine)
        allowed = parse_accuracy_budget(config.accuracy_budget)
        if reference.label_accuracy is not None:
            return cls("accuracy", allowed, reference.label_accuracy)
        if reference.box_f1 is not None:
            return cls("boxes", allowed)
        if reference.argmax_agreement is None:
            raise OptionError(
                "option 'accuracy_budget' is set, but the model has no output 'logits', and no "
                "boxes are found in its outputs, so its answers cannot be counted as right or "
                "wrong.",
                do="Set a minimum cosine instead: --min-cosine 0.998",
            )
        return cls("agreement", allowed)

    @staticmethod
    def notes(config: QuantizeConfig, record: GraphRecord, rows: int) -> list[str]:
        """Return a note if there are too few held-out rows for the `accuracy_budget`.

        Args:
            config: the options.
            record: the graph that computes the answers.
            rows: number of held-out rows.
        """
        allowed = parse_accuracy_budget(config.accuracy_budget) if config.accuracy_budget else 0.0
        # Rows of a token classifier or a detector have several answers, so that their number says
        # nothing about how many may change.
        has_one_answer = any(s.name == "logits" and len(s.dims) == 2 for s in record.outputs)
        is_image_model = any(spec.name == "pred_boxes" for spec in record.outputs)
        if not (allowed and has_one_answer) or is_image_model or HEADROOM * allowed * rows >= 1:
            return []
        needed = math.ceil(1 / (HEADROOM * allowed))
        return [
            f"of {rows} held-out rows, one is {1 / rows:.2%}: with a budget of {allowed:.2%} no "
            f"answer may change. From {needed} on, one may: --rows {4 * needed}, of which a "
            "quarter is held out, or --held-out with a file of as many"
        ]

    @property
    def remedy(self) -> str:
        """What lets more accuracy be lost, as the beginning of a sentence."""
        option = "a lower --min-cosine" if self.kind == "cosine" else "a larger --accuracy-budget"
        return f"Pass {option}"

    def is_met_by(self, metrics: AccuracyMetrics) -> bool:
        """Return True if the loss is at most the budget."""
        return self.loss(metrics) <= self.allowed + _ROUNDING

    def is_met_in_search(self, metrics: AccuracyMetrics) -> bool:
        """Return True if the loss is at most what the search may spend."""
        return self.loss(metrics) <= self.spendable * self.allowed + _ROUNDING

    def loss(self, metrics: AccuracyMetrics) -> float:
        """Return by how much the metric is below that of the FP32 model."""
        return self.reference - self.value(metrics)

    def value(self, metrics: AccuracyMetrics) -> float:
        """Return the metric that the budget limits."""
        values = {
            "cosine": metrics.cosine,
            "agreement": metrics.argmax_agreement,
            "accuracy": metrics.label_accuracy,
            "boxes": metrics.box_f1,
        }
        value = values[self.kind]
        if value is None:
            raise AssertionError(f"the quantized graph has no {self.kind}, though FP32 has one")
        return value

    def __str__(self) -> str:
        minimum = self.reference - self.allowed
        words = {
            "cosine": f"mean cosine of at least {minimum:.10g}",
            "agreement": f"agreement with FP32's answers of at least {minimum:.2%}",
            "accuracy": f"accuracy of at least {minimum:.2%}",
            "boxes": f"F1 of the boxes to FP32's of at least {minimum:.2%}",
        }
        return words[self.kind]


class AccuracyEvaluator:
    """Compare graphs with the stored outputs of a reference graph."""

    def __init__(
        self,
        batches: Sequence[Batch],
        reference: Graph,
        outputs: Sequence[str],
        agreement: Callable[[], AnswerAgreement],
        *,
        scratch: Path,
        labels: Sequence[int] = (),
    ) -> None:
        """Run the reference over the batches and store its outputs.

        Args:
            batches: the inputs.
            reference: runs the reference graph.
            outputs: names of the graph's outputs.
            agreement: makes an empty comparison of answers.
            scratch: directory for the outputs, which may take gigabytes. It must exist as long as
                the evaluator is used.
            labels: the right class of each row of the data, for `label_accuracy`.

        Raises:
            EngineryError: the outputs cannot be written to `scratch`.
        """
        self.batches = list(batches)
        self.outputs = tuple(outputs)
        """Names of the graph outputs that are compared."""
        self._labels = labels
        self._agreement = agreement
        self._expected = [
            _save_outputs(reference(batch.load()), scratch / f"expected-{index}")
            for index, batch in enumerate(self.batches)
        ]

    @classmethod
    def of(
        cls,
        source: SourceGraph,
        batches: Sequence[Batch],
        reference: Graph,
        *,
        scratch: Path,
        labels: Sequence[int] = (),
    ) -> AccuracyEvaluator:
        """Return the evaluator of a graph.

        Raises:
            ArtifactError: the model uses a pooling that is not supported.
            EngineryError: the outputs cannot be written to `scratch`.
        """
        return cls(
            batches,
            reference,
            source.outputs,
            partial(AnswerAgreement.of, source.artifact.path),
            scratch=scratch,
            labels=labels,
        )

    @property
    def rows(self) -> int:
        """Number of input rows in the batches."""
        return sum(len(batch.rows) for batch in self.batches)

    def measure_reference(self) -> AccuracyMetrics:
        """Compare the reference with itself and with the labels."""
        return self._measure(None, self.batches)

    def measure(self, graph: Graph, *, batches: int = 0) -> AccuracyMetrics:
        """Compare a graph on all batches, or on the first `batches` of them."""
        return self._measure(graph, self.batches[:batches] if batches else self.batches)

    def _measure(self, graph: Graph | None, part: Sequence[Batch]) -> AccuracyMetrics:
        """Compare a graph, or the reference itself, on the first batches."""
        agreement = self._agreement()
        right: list[bool] = []
        # Not strict: the part may be the first batches alone.
        for batch, files in zip(part, self._expected, strict=False):
            feeds = batch.load()
            expected = {name: np.load(file, mmap_mode="r") for name, file in files.items()}
            outputs = expected if graph is None else graph(feeds)
            agreement.add(outputs, expected, feeds)
            if self._labels and "logits" in outputs:
                right += [
                    int(argmax_of_finite(np.ravel(logits))) == self._labels[row]
                    for row, logits in zip(batch.rows, outputs["logits"], strict=False)
                ]
        return agreement.metrics(label_accuracy=float(np.mean(right)) if right else None)


def _save_outputs(outputs: Outputs, directory: Path) -> dict[str, Path]:
    """Write the float outputs for a batch as .npy files; return their paths by output."""
    # Ids and masks among the outputs have no cosine.
    names = [name for name, array in outputs.items() if array.dtype.kind == "f" and array.size]
    files = {name: directory / f"{index}.npy" for index, name in enumerate(names)}
    try:
        directory.mkdir()
        for name, file in files.items():
            np.save(file, outputs[name], allow_pickle=False)
    except OSError as error:
        raise EngineryError(
            f"FP32's outputs cannot be written to {directory}: {error.strerror or error}.",
            do="Set TMPDIR to a directory with more space, or use fewer --rows.",
        ) from error
    return files


def measure_file(
    graph: Path, evaluator: AccuracyEvaluator, *, fused: bool = True
) -> AccuracyMetrics:
    """Measure the accuracy of an ONNX file in ONNX Runtime on the CPU.

    Args:
        graph: the ONNX file.
        evaluator: has the reference outputs.
        fused: enable ONNX Runtime's fusions.
    """
    with GraphTracer(graph, evaluator.outputs, optimized=fused) as session:
        return evaluator.measure(session)


def find_builtin_batches(source: SourceGraph) -> list[SampleBatch]:
    """Return the built-in texts or images that `validate` uses; none if the graph takes others."""
    artifact, record = source.artifact, source.record
    if not has_builtin_inputs(artifact, record):
        return []
    try:
        return builtin_batches(artifact, record)
    except (ArtifactError, InputError):  # no tokenizer that this package reads
        return []


def measure_builtin(
    source: SourceGraph, graph: Path, *, fused: bool = True
) -> AccuracyMetrics | None:
    """Measure a quantized graph on built-in texts or images, on the CPU.

    These are the ones that `validate` uses, so that it knows what to expect.

    Args:
        source: the FP32 graph.
        graph: the quantized graph.
        fused: enable ONNX Runtime's fusions in the quantized graph.

    Returns:
        None if the graph takes other inputs.
    """
    batches = find_builtin_batches(source)
    if not batches:
        return None
    agreement = AnswerAgreement.of(source.artifact.path)
    with (
        GraphTracer(source.path, source.outputs, optimized=True) as reference,
        GraphTracer(graph, source.outputs, optimized=fused) as quantized,
    ):
        for batch in batches:
            feeds = batch.load()
            agreement.add(quantized(feeds), reference(feeds), feeds)
    return agreement.metrics()
