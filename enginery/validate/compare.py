"""One graph in ONNX Runtime against PyTorch's answers, case by case.

    >>> with OrtRunner(artifact) as runner:
    ...     results = compare_graph(runner, record, cases, answers, limits)
    >>> all(result.passed for result in results)
    True

Each case is measured as soon as it has run, so that the outputs of one case are in memory at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import EngineryError
from enginery.core.feeds import Feeds
from enginery.core.manifest import GraphRecord
from enginery.core.precision import QuantizedTolerance, Tolerance
from enginery.core.progress import SILENT, Progress
from enginery.core.reports import CaseResult, OutputMetrics
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers import Provider
from enginery.runtime.providers.known import CUDA
from enginery.validate.budget import is_quantized, quantization_budget
from enginery.validate.cases import Case
from enginery.validate.config import ValidateConfig
from enginery.validate.embeddings import EmbeddingComparison
from enginery.validate.metrics import measure, unmatched
from enginery.validate.overall import OverallComparison
from enginery.validate.padding import kept_positions
from enginery.validate.reference import Answers, Expected

Outputs = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Limits:
    """How far outputs may be apart: by the tolerance, or as the user set it."""

    tolerance: Tolerance | QuantizedTolerance
    max_abs_error: float | None = None
    min_cosine: float | None = None
    overall_cosine: float | None = None
    """Over all real inputs together, for a quantized artifact; None where nothing is asked."""
    rule: str = ""
    """Where that comes from, in words."""

    @classmethod
    def of(cls, artifact: Artifact, config: ValidateConfig) -> Limits:
        """The limits for an artifact; those that the user set go before its own.

        Raises:
            OptionError: the artifact is quantized, nothing says how near it was when it was made,
                and the user has not set a cosine either.
        """
        precision = artifact.manifest.precision
        error = None if isinstance(config.max_abs_error, str) else config.max_abs_error
        cosine = None if isinstance(config.min_cosine, str) else config.min_cosine
        if not is_quantized(artifact):
            return cls(Tolerance.for_precision(precision), error, cosine)
        tolerance = QuantizedTolerance(precision)
        if cosine is not None:
            return cls(tolerance, error, cosine)
        budget = quantization_budget(artifact)
        own_data = bool(config.data)
        return cls(
            tolerance,
            error,
            overall_cosine=budget.min_cosine(own_data=own_data),
            rule=budget.describe(own_data=own_data),
        )

    def where(self, providers: Sequence[Provider]) -> Limits:
        """The limits where providers multiply float32 less exactly than it is."""
        options = providers[0].options if providers else {}
        in_tf32 = providers[0].name == CUDA and options.get("use_tf32", "1") not in ("0", "False")
        if not in_tf32 or self.tolerance != Tolerance.for_precision("fp32"):
            return self
        rule = (
            "FP32 is multiplied in TensorFloat-32 on NVIDIA GPUs from Ampere on, and held to its "
            "tolerance; --provider-option cuda.use_tf32=0 multiplies in FP32"
        )
        return replace(self, tolerance=Tolerance.for_precision("tf32"), rule=rule)

    @property
    def embedding_cosine(self) -> float:
        """What pooled embeddings are held to."""
        if self.overall_cosine is not None:
            return self.overall_cosine
        return self.tolerance.min_cosine if self.min_cosine is None else self.min_cosine


def compare_graph(
    runner: OrtRunner,
    record: GraphRecord,
    cases: Sequence[Case],
    answers: Answers,
    limits: Limits,
    *,
    embeddings: EmbeddingComparison | None = None,
    overall: OverallComparison | None = None,
    progress: Progress = SILENT,
) -> list[CaseResult]:
    """Runs every case and compares; what fails is in the results.

    An output that PyTorch lacks in one case only is left out there (a merged decoder hands on what
    its other branch computes); one that it lacks in all fails.
    """
    known = {name for expected in answers.expected for name in expected.files}
    results = []
    with progress.task(f"ONNX Runtime, {record.file}", total=len(cases)) as advance:
        for case, expected in zip(cases, answers.expected, strict=True):
            feeds = case.make()
            result = _without_outputs(record, case, feeds, expected)
            if not expected.problem:
                try:
                    found = runner(feeds)
                except EngineryError as error:
                    said = f"ONNX Runtime fails where PyTorch answers: {error.message}"
                    result = replace(result, problem=said)
                else:
                    outputs = _measured(record, feeds, found, expected, answers, limits, known)
                    result = replace(result, outputs=outputs)
                    if case.kind == "real" and embeddings is not None:
                        embeddings.add(feeds, found, expected)
                    if case.kind == "real" and overall is not None:
                        overall.add(record, feeds, found, expected)
            results.append(result)
            advance()
    return results


def _without_outputs(
    record: GraphRecord, case: Case, feeds: Feeds, expected: Expected
) -> CaseResult:
    # A size that the model itself rejects is nobody's fault, unless a profile promises it.
    promised = case.kind != "sweep"
    return CaseResult(
        graph=record.file,
        name=case.name,
        kind=case.kind,
        shapes={name: list(array.shape) for name, array in feeds.items()},
        outputs=[],
        problem=expected.problem if promised else "",
        skipped="" if promised else expected.problem,
    )


def _measured(
    record: GraphRecord,
    feeds: Feeds,
    found: Outputs,
    expected: Expected,
    answers: Answers,
    limits: Limits,
    known: set[str],
) -> list[OutputMetrics]:
    outputs = []
    for spec in record.outputs:
        if spec.name not in known:
            outputs.append(unmatched(spec.name, found[spec.name]))
        elif spec.name in expected.files:
            outputs.append(
                measure(
                    spec.name,
                    found[spec.name],
                    expected.load(spec.name),
                    dtype=spec.dtype,
                    noise=answers.floors[spec.name],
                    tolerance=limits.tolerance,
                    max_abs_error=limits.max_abs_error,
                    min_cosine=limits.min_cosine,
                    kept=kept_positions(spec, record.inputs, feeds),
                )
            )
    return outputs
