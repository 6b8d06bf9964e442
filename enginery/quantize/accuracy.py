"""Accuracy of a quantized graph: its answers against the FP32 graph's in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.reports import AccuracyMetrics
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.feeds import Feeds
from enginery.quantize.calibration.data import Batch
from enginery.runtime.agreement import (
    Outputs,
    Rows,
    answer_rows,
    argmax_of_finite,
    compare_answers,
    read_model_pooling,
)
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.runtime.sample_inputs import builtin_batches, takes_real_inputs
from enginery.runtime.text.pooling import Pooling

Graph = Callable[[Feeds], Outputs]


class AccuracyEvaluator:
    """Compare graphs with the stored outputs of a reference graph."""

    def __init__(
        self, batches: Sequence[Batch], labels: Sequence[int], pooling: Pooling | None
    ) -> None:
        self.batches = list(batches)
        self._labels = labels
        self._pooling = pooling
        self._expected: dict[str, Rows] = {}
        self._outputs: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        artifact: Artifact,
        batches: Sequence[Batch],
        reference: Graph,
        *,
        labels: Sequence[int] = (),
    ) -> AccuracyEvaluator:
        """Run the reference over the batches and store its outputs.

        Raises:
            ArtifactError: the model uses a pooling that is not supported.
        """
        evaluator = cls(batches, labels, read_model_pooling(artifact.path))
        evaluator._outputs = tuple(spec.name for spec in artifact.manifest.graphs[0].outputs)
        evaluator._expected = evaluator._collect_rows(reference, evaluator.batches)
        return evaluator

    @property
    def rows(self) -> int:
        """Number of input rows in the batches."""
        return sum(len(batch.rows) for batch in self.batches)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph outputs that are compared."""
        return self._outputs

    def measure_reference(self) -> AccuracyMetrics:
        """Compare the reference with itself and with the labels."""
        return self._compare(self._expected, self.batches)

    def measure(self, graph: Graph, *, batches: int = 0) -> AccuracyMetrics:
        """Compare a graph on all batches, or on the first `batches` of them."""
        part = self.batches[:batches] if batches else self.batches
        return self._compare(self._collect_rows(graph, part), part)

    def _compare(self, found: Mapping[str, Rows], part: Sequence[Batch]) -> AccuracyMetrics:
        accuracy = self._label_accuracy(found, part)
        return compare_answers(found, self._expected, label_accuracy=accuracy)

    def _collect_rows(self, graph: Graph, batches: Sequence[Batch]) -> dict[str, Rows]:
        answers: dict[str, Rows] = {}
        for batch in batches:
            feeds = batch.load()
            for name, rows in answer_rows(graph(feeds), feeds, self._pooling).items():
                answers.setdefault(name, []).extend(rows)
        return answers

    def _label_accuracy(
        self, answers: Mapping[str, Rows], batches: Sequence[Batch]
    ) -> float | None:
        if not self._labels or "logits" not in answers:
            return None
        order = [row for batch in batches for row in batch.rows]
        right = [
            int(argmax_of_finite(logits.ravel())) == self._labels[row]
            for row, logits in zip(order, answers["logits"], strict=False)
        ]
        return float(np.mean(right))


def measure_builtin(source: Artifact, graph: Path, *, fused: bool = True) -> AccuracyMetrics | None:
    """Measure a quantized graph on built-in texts or images, on the CPU.

    These are the ones that `validate` uses, so that it knows what to expect.

    Args:
        source: the artifact with the FP32 graph.
        graph: the quantized graph.
        fused: enable ONNX Runtime's fusions in the quantized graph.

    Returns:
        None if the graph takes other inputs.
    """
    record = source.manifest.graphs[0]
    if not takes_real_inputs(source, record):
        return None
    names = [spec.name for spec in record.outputs]
    try:
        batches = builtin_batches(source, record)
    except (ArtifactError, InputError):  # no tokenizer that this package reads
        return None
    pooling = read_model_pooling(source.path)
    found: dict[str, Rows] = {}
    expected: dict[str, Rows] = {}
    with (
        GraphTracer(source.path / record.file, names, optimized=True) as reference,
        GraphTracer(graph, names, optimized=fused) as quantized,
    ):
        for batch in batches:
            feeds = batch.load()
            for rows, run in ((expected, reference), (found, quantized)):
                for name, more in answer_rows(run(feeds), feeds, pooling).items():
                    rows.setdefault(name, []).extend(more)
    return compare_answers(found, expected)
