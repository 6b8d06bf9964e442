"""Metrics of an artifact's reports by name, for registries that chart them.

metrics(Reports.of(artifact))["validation.max_abs_error"]  # 3.8e-06
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Self

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import REPORTS
from enginery.reports.benchmark import BenchResult
from enginery.reports.quantization import QuantizationReport
from enginery.reports.validation import ValidationReport

Figures = Iterator[tuple[str, float | None]]


@dataclass(frozen=True)
class Reports:
    """The reports of an artifact; None for those that it lacks."""

    validation: ValidationReport | None
    quantization: QuantizationReport | None
    benchmark: BenchResult | None
    benchmark_sha256: str
    """sha256 of the file; empty without a benchmark."""

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Read the reports that the manifest records.

        Raises:
            ArtifactError: one of them is damaged.
        """
        measured = artifact.manifest.reports.get(f"{REPORTS}/{BenchResult.FILE}")
        return cls(
            ValidationReport.of(artifact),
            QuantizationReport.of(artifact),
            BenchResult.of(artifact),
            measured.sha256 if measured else "",
        )


def metrics(reports: Reports) -> dict[str, float]:
    """Return the finite metrics of the reports, under names that MLflow accepts."""
    figures: list[tuple[str, float | None]] = []
    if reports.validation:
        figures += _validation_metrics(reports.validation)
    if reports.quantization:
        figures += _quantization_metrics(reports.quantization)
    if reports.benchmark:
        figures += _benchmark_metrics(reports.benchmark)
    return {
        re.sub(r"[^A-Za-z0-9_.-]+", "_", name): float(value)
        for name, value in figures
        if value is not None and math.isfinite(value)
    }


def _validation_metrics(report: ValidationReport) -> Figures:
    outputs = [output for case in report.cases for output in case.outputs]
    yield "validation.passed", float(report.passed)
    yield "validation.outputs", len(outputs)
    yield "validation.max_abs_error", _largest(o.max_abs for o in outputs)
    yield "validation.min_cosine", _least(o.cosine for o in outputs)
    yield "validation.argmax_agreement", _least(o.argmax_agreement for o in outputs)
    if report.accuracy:
        yield "validation.mean_cosine", report.accuracy.found.cosine
    if report.embeddings:
        yield "validation.embeddings_min_cosine", report.embeddings.min_cosine
        yield "validation.embeddings_neighbour_agreement", report.embeddings.neighbour_agreement
    if report.generation:
        yield "validation.generation_agreement", report.generation.agreement
    if report.labels:
        names = ("validation.reference_label_accuracy", "validation.label_accuracy")
        for name, accuracy in zip(names, report.labels.accuracies, strict=False):
            yield name, accuracy.accuracy


def _quantization_metrics(report: QuantizationReport) -> Figures:
    if report.layers:
        yield "quantization.layers", report.layers.quantized
    if report.multiply_adds:
        yield "quantization.multiply_adds_share", report.multiply_adds.share
    if report.accuracy:
        for name, value in asdict(report.accuracy).items():
            if name != "rows":
                yield f"quantization.{name}", value


def _benchmark_metrics(result: BenchResult) -> Figures:
    for contender in result.contenders:
        yield f"peak_rss_bytes.{contender.name}", contender.peak_rss_bytes
    for case in result.cases:
        at = "-".join(f"{name}_{size}" for name, size in case.sizes.items())
        for measurement in case.measurements:
            yield f"latency_ms_p50.{measurement.contender}.{at}", measurement.latency.p50_ms
            yield f"inputs_per_second.{measurement.contender}.{at}", measurement.inputs_per_second
        for comparison in case.comparisons:
            yield (
                f"speedup.{comparison.contender}_beside_{comparison.base}.{at}",
                comparison.speedup,
            )


def _largest(values: Iterable[float]) -> float | None:
    return max(filter(math.isfinite, values), default=None)


def _least(values: Iterable[float]) -> float | None:
    return min(filter(math.isfinite, values), default=None)
