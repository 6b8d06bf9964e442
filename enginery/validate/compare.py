"""Compare one graph in ONNX Runtime with the reference's outputs, case by case.

Each case is measured as soon as it has run, so that memory holds the outputs of one case only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, raise_system_error
from enginery.core.model.feeds import Feeds, is_padding_mask
from enginery.core.progress import SILENT, Progress
from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.reports.validation import OutputMetrics, ValidationCaseResult
from enginery.runtime.decoder_graphs import is_past
from enginery.runtime.providers import Provider
from enginery.runtime.providers.precision import compute_precision
from enginery.validate.cases.padding import find_padding_mask
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.config import ValidateConfig
from enginery.validate.embeddings import EmbeddingComparison
from enginery.validate.findings import Findings
from enginery.validate.labels import LabelComparison
from enginery.validate.metrics.budget import (
    AccuracyExpectation,
    LayerExpectation,
    accuracy_expectation,
)
from enginery.validate.metrics.differences import compute_differences
from enginery.validate.metrics.outputs import (
    NoiseFloor,
    OutputLimits,
    compare_output,
    unmatched_output,
)
from enginery.validate.quantized_answers import AnswerComparison
from enginery.validate.reference import ReferenceOutputs, ReferenceRun

Outputs = dict[str, NDArray[Any]]
Run = Callable[[Feeds], Outputs]
"""Runs a graph."""


@dataclass(frozen=True)
class ComparisonLimits:
    """Tolerances of the comparison, from the artifact or from the user."""

    tolerance: Tolerance | QuantizedTolerance
    max_abs_error: float | None = None
    min_cosine: float | None = None
    accuracy: AccuracyExpectation | None = None
    """For a quantized artifact: what all real inputs together must reach."""
    layers: LayerExpectation | None = None
    """For a statically quantized artifact: what each layer must reach; None if the user has set the
    limits."""
    rule: str = ""
    """Origin of the limit, in words."""
    generated_outside_ranges: bool = False
    """True for a statically quantized graph whose generated inputs are noise, far outside the
    calibrated ranges, so that their cosine has no limit."""

    @classmethod
    def of(cls, artifact: Artifact, config: ValidateConfig) -> ComparisonLimits:
        """Return the limits for an artifact. Those that the user sets take precedence.

        Raises:
            OptionError: the artifact is quantized, its accuracy is not recorded, and `min_cosine`
                is not set.
        """
        precision = artifact.manifest.float_precision
        error = None if isinstance(config.max_abs_error, str) else config.max_abs_error
        cosine = None if isinstance(config.min_cosine, str) else config.min_cosine
        if not artifact.manifest.is_quantized:
            return cls(Tolerance.for_precision(precision), error, cosine)
        tolerance = QuantizedTolerance(precision)
        if cosine is not None:
            return cls(tolerance, error, cosine)
        own_data = bool(config.data)
        expected = accuracy_expectation(artifact, own_data=own_data)
        layers = None
        if expected.scheme != "dynamic":
            layers = LayerExpectation.of(artifact, own_data=own_data)
        return cls(tolerance, error, accuracy=expected, layers=layers, rule=expected.describe())

    def where(self, providers: Sequence[Provider]) -> ComparisonLimits:
        """Return the limits for these providers, which may compute FP32 in a lower precision."""
        if not providers or self.tolerance != Tolerance.for_precision("fp32"):
            return self
        computed = compute_precision(providers[0].name, providers[0].options)
        if not computed.reason:
            return self
        remedy = f"; {computed.remedy}" if computed.remedy else ""
        return replace(
            self,
            tolerance=Tolerance.for_precision(computed.precision),
            rule=f"{computed.reason}, so its tolerance applies{remedy}",
        )

    def of_case(self, case: ValidationCase) -> ComparisonLimits:
        """Return the limits for one case."""
        generated = self.generated_outside_ranges and case.kind in ("sweep", "profile")
        if generated and isinstance(self.tolerance, QuantizedTolerance):
            return replace(self, tolerance=replace(self.tolerance, min_cosine=-1.0))
        return self

    def ratio(self, actual: NDArray[Any], expected: NDArray[Any], noise: NoiseFloor) -> float:
        """Return the difference of two outputs divided by the largest one that the limits allow.

        For a quantized graph, the difference is that of the direction, 1 - cosine, and its limit
        that of the budget: two runs of the same graph differ much less than from PyTorch.
        """
        differences = compute_differences(actual, expected, None)
        if differences.unequal:
            return math.inf
        largest = self.tolerance.limit(noise_floor=noise.max_abs, largest=differences.largest)
        limits = [
            (differences.max_abs, largest if self.max_abs_error is None else self.max_abs_error)
        ]
        if self.max_abs_error is None:
            rms_limit = self.tolerance.rms_limit(noise_rms=noise.rms, rms=differences.rms)
            limits.append((differences.rms_error, rms_limit))
        if math.isfinite(limits[0][1]):
            # With a limit of 0, every error is too large.
            return max(error / limit if limit else error and math.inf for error, limit in limits)
        # A quantized graph has no limit of the error.
        shortfall = self.accuracy.shortfall if self.accuracy else 1 - (self.embedding_cosine or 0)
        return (1 - differences.cosine) / shortfall if shortfall else math.inf

    @property
    def embedding_cosine(self) -> float | None:
        """Minimum cosine of every pooled embedding; None if only all together have a limit."""
        if self.accuracy is not None:
            return None
        return self.tolerance.min_cosine if self.min_cosine is None else self.min_cosine


def outside_calibrated_ranges(record: GraphRecord, cases: Sequence[ValidationCase]) -> str:
    """Return which generated inputs are noise that no calibration has seen; empty for none.

    In place of images and sounds, noise only has no limit if real ones are compared as well.
    """
    if any(is_past(spec.name) for spec in record.inputs):
        return "caches that are made up"
    floats = [
        spec.name
        for spec in record.inputs
        if spec.dtype.startswith("float") and not is_padding_mask(spec)
    ]
    is_real = any(case.kind == "real" for case in cases)
    return f"random numbers for {', '.join(floats)}" if floats and is_real else ""


@dataclass(frozen=True)
class RealAnswers:
    """Collects the outputs of real inputs for what all of them together must reach."""

    embeddings: EmbeddingComparison | None = None
    """None if the model has no pooled embeddings."""
    answers: AnswerComparison | None = None
    """None if the graph's outputs are not the answers, or have no limit."""
    labels: LabelComparison | None = None
    """None if the data have no labels for this graph."""

    def add(
        self, case: ValidationCase, feeds: Feeds, actual: Outputs, expected: ReferenceOutputs
    ) -> None:
        """Add the outputs of a case; those of made-up inputs are no answers to anything."""
        if case.kind == "real" and self.embeddings is not None:
            self.embeddings.add(feeds, actual, expected)
        if case.kind == "real" and self.answers is not None:
            self.answers.add(feeds, actual, expected)
        if case.labels and self.labels is not None:
            self.labels.add(case.labels, actual, expected)

    def findings(self, limits: ComparisonLimits, *, label_column: str, reference: str) -> Findings:
        """Return the figures over all real inputs.

        Args:
            limits: what they must reach.
            label_column: the column of the labels.
            reference: name of the reference.
        """
        findings = Findings()
        if self.embeddings is not None:
            pooled = self.embeddings.metrics(min_cosine=limits.embedding_cosine)
            findings = replace(findings, embeddings=pooled)
        if self.answers is not None and limits.accuracy is not None:
            findings = replace(findings, accuracy=self.answers.metrics(limits.accuracy))
        if self.labels is not None:
            findings = replace(findings, labels=self.labels.metrics(label_column, reference))
        return findings


@dataclass(frozen=True)
class GraphComparison:
    """Compares graphs with one run of the reference, case by case."""

    reference: ReferenceRun
    """Its outputs, in the order of the cases."""
    limits: ComparisonLimits
    real_answers: RealAnswers = field(default_factory=RealAnswers)
    progress: Progress = SILENT

    def compare(
        self,
        run: Run,
        record: GraphRecord,
        cases: Sequence[ValidationCase],
    ) -> list[ValidationCaseResult]:
        """Run every case and compare its outputs. Failures are part of the results.

        An output that the reference lacks in some cases is skipped in those, such as that of the
        other branch of an If. An output that it lacks in all cases fails.
        """
        reference, results = self.reference, []
        with self.progress.task(f"ONNX Runtime, {record.file}", total=len(cases)) as advance:
            for case, expected in zip(cases, reference.outputs, strict=True):
                feeds = case.make()
                result = _without_metrics(record, case, feeds, expected)
                # Inputs that the reference rejects are skipped, and counted in the report.
                if not expected.problem:
                    try:
                        actual = run(feeds)
                    except EngineryError as error:
                        raise_system_error(error)
                        # A usual cause is a size that the tracer recorded as a constant.
                        problem = f"the graph fails but {reference.name} does not: {error.message}"
                        result = replace(result, problem=problem)
                    else:
                        outputs = self._compare_outputs(record, case, feeds, actual, expected)
                        result = replace(result, outputs=outputs)
                        self.real_answers.add(case, feeds, actual, expected)
                results.append(result)
                advance()
        return results

    def _compare_outputs(
        self,
        record: GraphRecord,
        case: ValidationCase,
        feeds: Feeds,
        actual: Outputs,
        expected: ReferenceOutputs,
    ) -> list[OutputMetrics]:
        reference, limits = self.reference, self.limits.of_case(case)
        outputs = []
        for spec in record.outputs:
            # The reference may lack an output in some cases: that of the other branch of an If.
            if spec.name not in reference.noise_floors:
                outputs.append(unmatched_output(spec.name, actual[spec.name], reference.name))
            elif spec.name in expected.files:
                noise = reference.noise_floor(spec.name, real=case.kind == "real")
                outputs.append(
                    compare_output(
                        spec,
                        actual[spec.name],
                        expected.load(spec.name),
                        OutputLimits(
                            noise, limits.tolerance, limits.max_abs_error, limits.min_cosine
                        ),
                        # Fused kernels may leave any value at padded positions, and nobody reads
                        # it.
                        padding=find_padding_mask(spec, record.inputs, feeds),
                        name=reference.name,
                    )
                )
        return outputs


def _without_metrics(
    record: GraphRecord, case: ValidationCase, feeds: Feeds, expected: ReferenceOutputs
) -> ValidationCaseResult:
    # Generated inputs that PyTorch rejects are skipped; those of a profile must work.
    promised = case.kind in ("profile", "real")
    return ValidationCaseResult(
        graph=record.file,
        name=case.name,
        kind=case.kind,
        shapes={name: list(array.shape) for name, array in feeds.items()},
        outputs=[],
        problem=expected.problem if promised else "",
        skipped="" if promised else expected.problem,
    )
