"""The report of quantize, `reports/quantization.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from enginery.core.accuracy import AccuracyMetrics, LayerError, Number
from enginery.core.artifact.manifest import Count
from enginery.core.table import Row, format_number
from enginery.reports.base import Report, format_cosine_limit


@dataclass(frozen=True)
class MixAccuracy(AccuracyMetrics):
    """Accuracy of one combination of quantized layers."""

    left_out: Count
    """Number of layers that are not quantized."""
    share: float
    """Quantized share of the multiply-adds, 0 to 1."""


@dataclass(frozen=True)
class LayerCounts:
    """Number of layers that could be quantized, and of those that were."""

    quantized: Count
    all: Count


@dataclass(frozen=True)
class CalibrationRecord:
    """The calibration: its data and its method."""

    inputs: str
    kind: str
    method: str


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of the graph for one input, and the quantized shares of them."""

    counted: str
    """Description of what is counted."""
    positions: Count
    all: Count
    attention: Count
    share: float
    share_with_attention: float


@dataclass(frozen=True)
class SearchRecord:
    """How the quantized layers were chosen."""

    budget: str
    about: str
    """`cosine`, `agreement`, `accuracy` or `boxes`."""
    reference: float
    allowed: float
    simulated: AccuracyMetrics
    effects: dict[str, Number]
    """Layer -> loss of accuracy when only that layer is quantized."""
    curve: list[MixAccuracy]
    """Measured combinations, from the smallest quantized share to the largest."""


@dataclass(frozen=True)
class EngineTrial:
    """Results of one trial engine; the engine itself is discarded."""

    capability: str
    tensorrt: str
    profiles: tuple[str, ...]
    layers: dict[str, Count]
    """Kind and precision, such as `gemm int8` -> number of engine layers."""
    quantized_layers: Count
    """Number of quantized layers that the engine multiplies in INT8 or FP8."""
    not_quantized: tuple[str, ...]
    """Quantized layers that run in another precision, or whose kernel the engine does not name."""
    fused_attentions: Count
    plan_bytes: Count
    seconds: float
    graph: str
    """The graph's file."""


@dataclass(frozen=True, repr=False)
class QuantizationReport(Report):
    """The content of `reports/quantization.json`; dynamic quantization sets only a few members."""

    FILE = "quantization.json"

    summary: str
    scheme: str
    notes: list[str]
    fields: dict[str, str]
    """Fields of the stage's fingerprint."""
    residual: str = ""
    """Precision of the rest of the graph; empty for dynamic quantization."""
    per_channel: bool | None = None
    layers: LayerCounts | None = None
    quantized_layers: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Layers that are not quantized -> reason."""
    fp32_nodes: dict[str, str] = field(default_factory=dict)
    """Nodes that stay in FP32 because they exceed the range of FP16 -> reason."""
    calibration: CalibrationRecord | None = None
    activations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Activation -> scale and smoothing; the vectors are in ranges.json."""
    engines: list[EngineTrial] = field(default_factory=list)
    multiply_adds: MultiplyAdds | None = None
    """None for dynamic quantization, like the member below."""
    search: SearchRecord | None = None
    accuracy: AccuracyMetrics | None = None
    builtin: AccuracyMetrics | None = None
    """On built-in texts or images, which `validate` compares with its own measurement; None if the
    model takes neither."""
    layer_errors: dict[str, LayerError] = field(default_factory=dict)
    """Layer -> error of its output on held-out rows; empty for dynamic quantization."""
    builtin_layer_errors: dict[str, LayerError] = field(default_factory=dict)
    """The same on built-in texts or images; empty if the model takes neither."""
    encoder_accuracy: AccuracyMetrics | None = None
    """Of a model with two graphs, the encoder's; `accuracy` and `search` are the decoder's."""
    layers_by_graph: dict[str, list[str]] = field(default_factory=dict)
    """Graph -> its quantized layers; empty for dynamic quantization."""
    products: dict[str, dict[str, Count]] = field(default_factory=dict)
    """Dynamic quantization: graph -> op type -> number of integer nodes."""

    def headline(self) -> Row:
        """Return the accuracy, and what of it was needed, as columns of a run's table."""
        if self.accuracy is None:
            return {}
        row = {"cosine": f"{self.accuracy.cosine:.6f}"}
        if self.search and self.search.about == "cosine":
            row["at least"] = format_cosine_limit(self.search.reference - self.search.allowed)
        if self.search and self.search.about == "accuracy":
            row["accuracy"] = (
                f"{self.accuracy.label_accuracy:.1%} (FP32 {self.search.reference:.1%})"
            )
        return row

    def accuracy_rows(self) -> list[Row]:
        """Return what was measured, one figure a row."""
        scheme = self.scheme.upper()
        figures: list[tuple[str, float | None, str]] = []
        if work := self.multiply_adds:
            figures += [
                (f"Share of multiply-adds in {scheme}", work.share, ".1%"),
                ("The same, with attention", work.share_with_attention, ".1%"),
            ]
        if accuracy := self.accuracy:
            figures += [
                (f"Mean cosine to FP32, {accuracy.rows} rows", accuracy.cosine, ".5f"),
                ("Minimum cosine to FP32", accuracy.worst_cosine, ".5f"),
                ("Same nearest neighbour as FP32", accuracy.neighbour_agreement, ".1%"),
                ("Same argmax as FP32", accuracy.argmax_agreement, ".1%"),
                ("F1 of boxes to FP32's", accuracy.box_f1, ".1%"),
                ("Accuracy on labels", accuracy.label_accuracy, ".1%"),
            ]
        return [
            {"Measure": label, "Value": format_number(value, form)}
            for label, value, form in figures
            if value is not None
        ]

    def left_out_rows(self) -> list[Row]:
        """Return a row for each layer that is not quantized."""
        return [
            {"Layer not quantized": layer, "Reason": reason}
            for layer, reason in self.left_out.items()
        ]

    def mix_rows(self) -> list[Row]:
        """Return a row for each combination of quantized layers that was measured."""
        rows = []
        for mix in self.search.curve if self.search else []:
            row = {
                "multiply-adds quantized": f"{mix.share:.1%}",
                "mean cosine": format_number(mix.cosine, ".5f"),
            }
            if mix.label_accuracy is not None:
                row["accuracy"] = f"{mix.label_accuracy:.1%}"
            rows.append(row)
        return rows
