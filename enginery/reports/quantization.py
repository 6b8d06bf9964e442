"""The report of quantize, `reports/quantization.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from enginery.core.accuracy import AccuracyMetrics, LayerError, Number
from enginery.core.artifact.manifest import Count
from enginery.reports.base import Report


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


@dataclass(frozen=True)
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
    """None if the ranges were reused, like the two members below."""
    search: SearchRecord | None = None
    accuracy: AccuracyMetrics | None = None
    builtin: AccuracyMetrics | None = None
    """On built-in texts or images, which `validate` compares with its own measurement; None if the
    model takes neither."""
    layer_errors: dict[str, LayerError] = field(default_factory=dict)
    """Layer -> error of its output on held-out rows; empty if the ranges were reused, and for
    dynamic quantization."""
    builtin_layer_errors: dict[str, LayerError] = field(default_factory=dict)
    """The same on built-in texts or images; empty if the model takes neither."""
    encoder_accuracy: AccuracyMetrics | None = None
    """Of a model with two graphs, the encoder's; `accuracy` and `search` are the decoder's."""
    layers_by_graph: dict[str, list[str]] = field(default_factory=dict)
    """Graph -> its quantized layers; empty for dynamic quantization."""
    products: dict[str, dict[str, Count]] = field(default_factory=dict)
    """Dynamic quantization: graph -> op type -> number of integer nodes."""
