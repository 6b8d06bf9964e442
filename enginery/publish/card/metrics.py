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
    found: list[tuple[str, float | None]] = []
    if reports.validation:
        found += _validation_metrics(reports.validation)
    if reports.quantization:
        found += _quantization_metrics(reports.quantization)
    if reports.benchmark:
        found += _benchmark_metrics(reports.benchmark)
    return {
        re.sub(r"[^A-Za-z0-9_.-]+", "_", name): float(value)
        for name, value in found
        if value is not None and math.isfinite(value)
    }


def _validation_metrics(found: ValidationReport) -> Figures:
    outputs = [output for case in found.cases for output in case.outputs]
    yield "validation.passed", float(found.passed)
    yield "validation.outputs", len(outputs)
    yield "validation.max_abs_error", _largest(o.max_abs for o in outputs)
    yield "validation.min_cosine", _least(o.cosine for o in outputs)
    yield "validation.argmax_agreement", _least(o.argmax_agreement for o in outputs)
    if found.accuracy:
        yield "validation.mean_cosine", found.accuracy.found.cosine
    if found.embeddings:
        yield "validation.embeddings_min_cosine", found.embeddings.min_cosine
        yield "validation.embeddings_neighbour_agreement", found.embeddings.neighbour_agreement
    if found.generation:
        yield "validation.generation_agreement", found.generation.agreement
    if found.labels:
        names = ("validation.reference_label_accuracy", "validation.label_accuracy")
        for name, each in zip(names, found.labels.accuracies, strict=False):
            yield name, each.accuracy


def _quantization_metrics(found: QuantizationReport) -> Figures:
    if found.layers:
        yield "quantization.layers", found.layers.quantized
    if found.multiply_adds:
        yield "quantization.multiply_adds_share", found.multiply_adds.share
    if found.accuracy:
        for name, value in asdict(found.accuracy).items():
            if name != "rows":
                yield f"quantization.{name}", value


def _benchmark_metrics(found: BenchResult) -> Figures:
    for contender in found.contenders:
        yield f"peak_rss_bytes.{contender.name}", contender.peak_rss_bytes
    for case in found.cases:
        at = "-".join(f"{name}_{size}" for name, size in case.sizes.items())
        for one in case.measurements:
            yield f"latency_ms_p50.{one.contender}.{at}", one.latency.p50_ms
            yield f"inputs_per_second.{one.contender}.{at}", one.inputs_per_second
        for two in case.comparisons:
            yield f"speedup.{two.contender}_beside_{two.base}.{at}", two.speedup


def _largest(values: Iterable[float]) -> float | None:
    return max(filter(math.isfinite, values), default=None)


def _least(values: Iterable[float]) -> float | None:
    return min(filter(math.isfinite, values), default=None)
