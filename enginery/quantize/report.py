"""Report of the quantize stage: layers, accuracy and trial engines, and the accuracy curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.accuracy import wilson_interval
from enginery.core.artifact.reports import (
    AccuracyMetrics,
    CalibrationRecord,
    EngineTrial,
    LayerCounts,
    MixAccuracy,
    MultiplyAdds,
    QuantizationReport,
    SearchRecord,
)
from enginery.core.figures import save_figure
from enginery.passes.qdq.layers import Layer
from enginery.quantize.calibrate import AccuracySearch
from enginery.quantize.calibration.cache import CalibrationCache
from enginery.quantize.calibration.data import CalibrationData
from enginery.quantize.config import QuantizeConfig

COUNTED = (
    "multiply-adds of MatMul, Gemm and Conv with constant weights, for one calibration input of "
    "mean length; with attention: the total includes products of two activations"
)


def make_report(
    layers: Sequence[Layer],
    cache: CalibrationCache,
    measured: AccuracySearch | None,
    accuracy: AccuracyMetrics | None,
    trials: Sequence[EngineTrial],
    config: QuantizeConfig,
    data: CalibrationData | None,
    notes: Sequence[str],
    fields: Mapping[str, str],
) -> QuantizationReport:
    """Return the report. `measured` and `accuracy` are None if ranges were reused."""
    quantized = [layer.name for layer in cache.quantized_layers(layers)]
    kind = config.scheme.upper()
    parts = [f"{len(quantized)} of {len(layers)} layers in {kind}"]
    if measured is not None:
        parts[0] += f", {measured.multiply_adds.share(quantized):.1%} of their multiply-adds"
    if accuracy is not None:
        parts.append(describe_accuracy(accuracy, held_out=data is None or data.has_held_out_rows))
        if measured is not None and measured.budget.kind == "accuracy":
            parts[-1] += f" (FP32 {measured.budget.reference:.1%})"
    parts += [
        f"TensorRT {trial.tensorrt} for {trial.capability}: {trial.quantized_layers} of "
        f"{len(quantized)} multiplied in {kind}, {trial.fused_attentions} fused attentions"
        for trial in trials
    ]
    return QuantizationReport(
        summary="; ".join(parts),
        scheme=config.scheme,
        residual=config.residual,
        per_channel=config.per_channel,
        layers=LayerCounts(quantized=len(quantized), all=len(layers)),
        quantized_layers=quantized,
        left_out=cache.left_out,
        fp32_nodes=cache.fp32_nodes,
        calibration=CalibrationRecord(
            inputs=data.description if data else "none, ranges were reused",
            kind=data.kind if data else "none",
            method=config.method,
        ),
        activations=_activations(cache),
        engines=list(trials),
        multiply_adds=_multiply_adds(measured, quantized) if measured else None,
        search=_search(measured) if measured else None,
        accuracy=accuracy,
        notes=list(notes),
        fields=dict(fields),
    )


def describe_accuracy(accuracy: AccuracyMetrics, *, held_out: bool = True) -> str:
    """Describe an accuracy in one line.

    `held_out` is False if there were so few inputs that all of them calibrated, too.
    """
    which = "held-out rows" if held_out else "rows, which were also used for calibration"
    words = f"mean cosine {accuracy.cosine:.5f} to FP32 on {accuracy.rows} {which}"
    for name, value in (
        ("nearest neighbours", accuracy.neighbour_agreement),
        ("largest scores", accuracy.argmax_agreement),
    ):
        if value is not None:
            words += f", {value:.1%} of the {name} agree"
    if accuracy.neighbour_agreement is not None:
        same = round(accuracy.neighbour_agreement * accuracy.rows)
        low, high = wilson_interval(same, accuracy.rows)
        words += f" (95 % confidence: {low:.0%} to {high:.0%}; more --rows narrow it)"
    if accuracy.label_accuracy is not None:
        words += f", accuracy {accuracy.label_accuracy:.1%}"
    return words


def save_curve(path: Path, measured: AccuracySearch, scheme: str) -> bool:
    """Plot accuracy against the quantized share as SVG.

    Returns:
        False if matplotlib is not installed; no file is written then.
    """
    budget, points = measured.budget, measured.result.curve
    chosen = next(p for p in points if p.accuracy == measured.result.accuracy)
    shares = [100 * point.share for point in points]
    values = [budget.value(point.accuracy) for point in points]

    def draw(axes: Any) -> None:
        axes.plot(shares, values, label="measured")
        axes.plot(
            [100 * chosen.share],
            [budget.value(chosen.accuracy)],
            linestyle="none",
            marker="o",
            markersize=11,
            markerfacecolor="none",
            label="chosen",
        )
        least = budget.reference - budget.allowed
        if least > min(values) - 3 * (max(values) - min(values)) - 1e-3:
            axes.axhline(least, color="black", linestyle="--", linewidth=1, label="budget")
        axes.set(xlabel=f"multiply-adds in {scheme.upper()}, %", ylabel=_AXES[budget.kind])

    return save_figure(path, draw)


_AXES = {
    "cosine": "mean cosine to FP32",
    "agreement": "answers equal to FP32's",
    "accuracy": "accuracy",
}


def _activations(cache: CalibrationCache) -> dict[str, Any]:
    """Return scale and smoothing of each activation; the vectors are only in ranges.json."""
    return {
        name: {
            "scale": params.scale,
            **(asdict(cache.smoothed[name]) if name in cache.smoothed else {}),
        }
        for name, params in cache.ranges.items()
    }


def _multiply_adds(measured: AccuracySearch, quantized: Sequence[str]) -> MultiplyAdds:
    work = measured.multiply_adds
    return MultiplyAdds(
        counted=COUNTED,
        positions=work.positions,
        all=sum(work.by_layer.values()),
        attention=work.attention,
        share=work.share(quantized),
        share_with_attention=work.share(quantized, with_attention=True),
    )


def _search(measured: AccuracySearch) -> SearchRecord:
    found = measured.result
    return SearchRecord(
        budget=str(measured.budget),
        about=measured.budget.kind,
        reference=measured.budget.reference,
        allowed=measured.budget.allowed,
        simulated=found.accuracy,
        effects=found.effects,
        curve=[
            MixAccuracy(left_out=p.left_out, share=p.share, **asdict(p.accuracy))
            for p in found.curve
        ],
    )
