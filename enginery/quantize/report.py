"""Report of the quantize stage: layers, accuracy and trial engines, and the accuracy curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginery.core.accuracy import AccuracyMetrics, LayerError, wilson_interval
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.figures import save_figure
from enginery.passes.qdq.layers import Layer
from enginery.quantize.calibrate import AccuracySearch, BeyondLayers
from enginery.quantize.calibration.result import Calibration
from enginery.quantize.config import QuantizeConfig, residual_precision
from enginery.quantize.job import QuantizeJob
from enginery.reports.quantization import (
    CalibrationRecord,
    EngineTrial,
    LayerCounts,
    MixAccuracy,
    MultiplyAdds,
    QuantizationReport,
    SearchRecord,
)

COUNTED = (
    "multiply-adds of MatMul, Gemm and Conv with constant weights, for one calibration input of "
    "mean length, and for one step of a decoder with an encoder; with attention: the total "
    "includes products of two activations"
)


@dataclass(frozen=True)
class QuantizedGraph:
    """A graph that was quantized, and what was measured."""

    record: GraphRecord
    layers: Sequence[Layer]
    """All layers that could be quantized."""
    calibration: Calibration
    measured: AccuracySearch
    accuracy: AccuracyMetrics
    """Of the saved graph."""
    trials: Sequence[EngineTrial]
    layer_errors: dict[str, LayerError]
    builtin_layer_errors: dict[str, LayerError]
    more: BeyondLayers

    @property
    def quantized(self) -> list[str]:
        """The names of the quantized layers."""
        return [layer.name for layer in self.calibration.quantized_layers(self.layers)]

    def summarize(self, config: QuantizeConfig, *, held_out: bool, named: bool) -> str:
        """Return a summary.

        Args:
            config: the options.
            held_out: whether rows were held out.
            named: begin with the graph's file.
        """
        kind = config.scheme.upper()
        share = self.measured.multiply_adds.share(self.quantized)
        parts = [
            f"{len(self.quantized)} of {len(self.layers)} layers in {kind}, {share:.1%} of their "
            "multiply-adds",
            describe_accuracy(self.accuracy, held_out=held_out),
        ]
        if self.measured.budget.kind == "accuracy":
            parts[-1] += f" (FP32 {self.measured.budget.reference:.1%})"
        parts += [
            f"TensorRT {trial.tensorrt} for {trial.capability}: {trial.quantized_layers} of "
            f"{len(self.quantized)} multiplied in {kind}, {trial.fused_attentions} fused attentions"
            for trial in self.trials
        ]
        return f"{f'{self.record.file}: ' if named else ''}{'; '.join(parts)}"


def make_report(
    job: QuantizeJob,
    graphs: Sequence[QuantizedGraph],
    answers: QuantizedGraph,
    calibration: Calibration,
    notes: Sequence[str],
) -> QuantizationReport:
    """Return the report.

    Args:
        job: the options and the calibration inputs.
        graphs: all graphs.
        answers: the one of them that computes the answers.
        calibration: what was calibrated for all of them.
        notes: notes of the stage.
    """
    config, data = job.config, job.require_data()
    quantized = [name for graph in graphs for name in graph.quantized]
    held_out, named = data.has_held_out_rows, len(graphs) > 1
    # An encoder is reported beside its decoder, which computes the answers.
    others = [graph for graph in graphs if graph is not answers]
    return QuantizationReport(
        summary="; ".join(g.summarize(config, held_out=held_out, named=named) for g in graphs),
        scheme=config.scheme,
        residual=residual_precision(config),
        per_channel=config.per_channel,
        layers=LayerCounts(quantized=len(quantized), all=sum(len(g.layers) for g in graphs)),
        quantized_layers=quantized,
        layers_by_graph={graph.record.file: graph.quantized for graph in graphs},
        left_out=calibration.left_out,
        fp32_nodes=calibration.fp32_nodes,
        calibration=CalibrationRecord(
            inputs=data.description,
            kind=data.kind,
            method=config.method,
        ),
        activations=_activations(calibration),
        engines=[trial for graph in graphs for trial in graph.trials],
        multiply_adds=_multiply_adds(graphs),
        search=_search(answers.measured),
        accuracy=answers.accuracy,
        encoder_accuracy=others[0].accuracy if others else None,
        layer_errors={n: e for graph in graphs for n, e in graph.layer_errors.items()},
        builtin_layer_errors={
            n: e for graph in graphs for n, e in graph.builtin_layer_errors.items()
        },
        notes=list(notes),
        fields=dict(job.fields),
    )


def describe_accuracy(accuracy: AccuracyMetrics, *, held_out: bool = True) -> str:
    """Describe an accuracy in one line.

    `held_out` is False if there were so few inputs that all of them calibrated, too.
    """
    which = "held-out rows" if held_out else "rows"
    if accuracy.rows == 1:
        which = which.removesuffix("s")
    words = f"mean cosine {accuracy.cosine:.5f} to FP32 on {accuracy.rows} {which}"
    if not held_out:
        words += " that calibrated it, too"
    for name, value in (
        ("nearest neighbours", accuracy.neighbour_agreement),
        ("predicted classes", accuracy.argmax_agreement),
    ):
        if value is not None:
            words += f", {value:.1%} of the {name} agree"
    # With a few hundred rows, the share of equal neighbours is uncertain by several percent.
    if accuracy.neighbour_agreement is not None:
        same = round(accuracy.neighbour_agreement * accuracy.rows)
        low, high = wilson_interval(same, accuracy.rows)
        words += f" (95 % confidence: {low:.0%} to {high:.0%}; more --rows narrow it)"
    if accuracy.box_f1 is not None:
        words += f", F1 of the boxes {accuracy.box_f1:.1%}"
    if accuracy.label_accuracy is not None:
        low, high = wilson_interval(round(accuracy.label_accuracy * accuracy.rows), accuracy.rows)
        words += f", accuracy {accuracy.label_accuracy:.1%} ({low:.1%} to {high:.1%})"
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
        minimum = budget.reference - budget.allowed
        # A line far below all points would squeeze them together.
        if minimum > min(values) - 3 * (max(values) - min(values)) - 1e-3:
            axes.axhline(minimum, color="black", linestyle="--", linewidth=1, label="budget")
        axes.set(xlabel=f"multiply-adds in {scheme.upper()}, %", ylabel=_AXES[budget.kind])

    return save_figure(path, draw)


_AXES = {
    "cosine": "mean cosine to FP32",
    "agreement": "answers equal to FP32's",
    "accuracy": "accuracy",
    "boxes": "F1 of the boxes to FP32's",
}


def _activations(calibration: Calibration) -> dict[str, Any]:
    """Return scale and smoothing of each activation; the vectors are only in ranges.json."""
    activations: dict[str, Any] = {}
    for name, params in calibration.ranges.items():
        activations[name] = {"scale": params.scale}
        # A tensor whose numbers are only moved has no smoothing of its own.
        if name in calibration.smoothed:
            activations[name] |= asdict(calibration.smoothed[name])
    return activations


def _multiply_adds(graphs: Sequence[QuantizedGraph]) -> MultiplyAdds:
    counted = [(graph.measured.multiply_adds, graph.quantized) for graph in graphs]
    total = sum(sum(work.by_layer.values()) for work, _ in counted)
    attention = sum(work.attention for work, _ in counted)
    done = sum(work.by_layer[name] for work, names in counted for name in names)
    return MultiplyAdds(
        counted=COUNTED,
        positions=max(work.positions for work, _ in counted),
        all=total,
        attention=attention,
        share=done / total if total else 0.0,
        share_with_attention=done / (total + attention) if total else 0.0,
    )


def _search(measured: AccuracySearch) -> SearchRecord:
    result = measured.result
    return SearchRecord(
        budget=str(measured.budget),
        about=measured.budget.kind,
        reference=measured.budget.reference,
        allowed=measured.budget.allowed,
        simulated=result.accuracy,
        effects=result.effects,
        curve=[
            MixAccuracy(left_out=p.left_out, share=p.share, **asdict(p.accuracy))
            for p in result.curve
        ],
    )
