"""What was quantized, how near the answers are, and what TensorRT made of it, as numbers.

>>> report = make_report(layers, recorded, measured, accuracy, trials, …)
>>> report.summary
'36 of 36 layers in INT8, 100.0 % of their multiply-adds; mean cosine 0.9985 …'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.figures import save_figure
from enginery.core.reports import (
    Accuracy,
    CalibrationRecord,
    EngineTrial,
    LayerCounts,
    MixAccuracy,
    MultiplyAdds,
    QuantizationReport,
    SearchRecord,
)
from enginery.passes.layers import Layer
from enginery.quantize.calibrate import Measured
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.data import CalibrationData
from enginery.quantize.recorded import Recorded
from enginery.quantize.search import HEADROOM, Budget

COUNTED = (
    "multiply-adds of MatMul, Gemm and Conv with stored weights, for one calibration input of mean "
    "length; with attention: products of two activations are counted in the whole, too"
)


def make_report(
    layers: Sequence[Layer],
    recorded: Recorded,
    measured: Measured | None,
    accuracy: Accuracy | None,
    trials: Sequence[EngineTrial],
    config: QuantizeConfig,
    data: CalibrationData | None,
    notes: Sequence[str],
    fields: Mapping[str, str],
) -> QuantizationReport:
    """Return the report of what the stage found.

    `measured` and `accuracy` are None where ranges were reused.
    """
    quantized = [layer.name for layer in recorded.quantized(layers)]
    kind = config.scheme.upper()
    said = [f"{len(quantized)} of {len(layers)} layers in {kind}"]
    if measured is not None:
        said[0] += f", {measured.arithmetic.share(quantized):.1%} of their multiply-adds"
    if accuracy is not None:
        said.append(accuracy_words(accuracy, held_out=data is None or data.holds_out))
        if measured is not None and measured.budget.kind == "accuracy":
            said[-1] += f" (FP32 {measured.budget.reference:.1%})"
    said += [
        f"TensorRT {trial.tensorrt} for {trial.capability}: {trial.quantized_layers} of "
        f"{len(quantized)} multiplied in {kind}, {trial.fused_attentions} fused attentions"
        for trial in trials
    ]
    return QuantizationReport(
        summary="; ".join(said),
        scheme=config.scheme,
        residual=config.residual,
        per_channel=config.per_channel,
        layers=LayerCounts(quantized=len(quantized), all=len(layers)),
        quantized_layers=quantized,
        left_out=recorded.left_out,
        fp32_nodes=recorded.fp32_nodes,
        calibration=CalibrationRecord(
            inputs=data.description if data else "none, ranges were reused",
            kind=data.kind if data else "none",
            method=config.method,
        ),
        activations=_activations(recorded),
        engines=list(trials),
        multiply_adds=_multiply_adds(measured, quantized) if measured else None,
        search=_search(measured) if measured else None,
        accuracy=accuracy,
        notes=list(notes),
        fields=dict(fields),
    )


def accuracy_words(accuracy: Accuracy, *, held_out: bool = True) -> str:
    """An accuracy in one line.

    `held_out` is false where so few inputs were given that the same ones calibrated.
    """
    which = "held-out rows" if held_out else "rows, those of the calibration themselves"
    words = f"mean cosine {accuracy.cosine:.5f} to FP32 on {accuracy.rows} {which}"
    for name, value in (
        ("nearest neighbours", accuracy.neighbour_agreement),
        ("largest scores", accuracy.argmax_agreement),
    ):
        if value is not None:
            words += f", {value:.1%} of the {name} agree"
    if accuracy.label_accuracy is not None:
        words += f", accuracy {accuracy.label_accuracy:.1%}"
    return words


def save_curve(path: Path, measured: Measured, scheme: str) -> bool:
    """Draws accuracy against the quantized share; False, and no file, without matplotlib."""
    budget, points = measured.budget, measured.search.curve
    chosen = next(p for p in points if p.accuracy == measured.search.accuracy)
    shares = [100 * point.share for point in points]
    values = [budget.value(point.accuracy) for point in points]

    def draw(axes: Any) -> None:
        axes.plot(shares, values, label="measured mixes")
        axes.plot(
            [100 * chosen.share],
            [budget.value(chosen.accuracy)],
            linestyle="none",
            markersize=11,
            markerfacecolor="none",
            label="chosen",
        )
        least = budget.reference - budget.allowed
        if least > min(values) - 3 * (max(values) - min(values)) - 1e-3:
            axes.axhline(least, color="black", linestyle="--", linewidth=1, label="budget")
        axes.set(xlabel=f"multiply-adds in {scheme.upper()}, %", ylabel=_AXES[budget.kind])
        axes.legend(loc="lower left")

    return save_figure(path, draw)


_AXES = {
    "cosine": "mean cosine to FP32",
    "agreement": "answers as FP32's",
    "accuracy": "accuracy",
}


def budget_notes(budget: Budget, rows: int) -> list[str]:
    """What a budget cannot say on so few rows."""
    if budget.kind == "cosine" or HEADROOM * budget.allowed * rows >= 1:
        return []
    return [
        f"of {rows} held-out rows, one is {1 / rows:.2%}: with a budget of {budget.allowed:.2%} "
        "not one answer may change; --rows takes more"
    ]


def _activations(recorded: Recorded) -> dict[str, Any]:
    """Scale and smoothing by activation; the vectors themselves are in ranges.json."""
    return {
        name: {
            "scale": ready.scale,
            **(asdict(recorded.smoothed[name]) if name in recorded.smoothed else {}),
        }
        for name, ready in recorded.ranges.items()
    }


def _multiply_adds(measured: Measured, quantized: Sequence[str]) -> MultiplyAdds:
    work = measured.arithmetic
    return MultiplyAdds(
        counted=COUNTED,
        positions=work.positions,
        all=sum(work.by_layer.values()),
        attention=work.attention,
        share=work.share(quantized),
        share_with_attention=work.share(quantized, with_attention=True),
    )


def _search(measured: Measured) -> SearchRecord:
    found = measured.search
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
