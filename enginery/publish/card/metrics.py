"""Metrics of an artifact's reports by name, for registries that chart them.

metrics(Reports.of(artifact))["validation.max_abs_error"]  # 3.8e-06
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from enginery.core.artifact.reports import (
    BenchResult,
    QuantizationReport,
    Reports,
    ValidationReport,
)

Figures = Iterator[tuple[str, float | None]]


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
