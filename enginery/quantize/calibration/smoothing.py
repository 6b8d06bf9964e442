"""Smoothing: move outlier channels of an activation into the weights and biases of its layers.

An activation has one scale for all its channels. In transformers a few channels are many times
larger than the others; they set the scale, and little precision is left for the rest.

Scaling divides channel k of the activation by s_k and multiplies row k of the weights by it, which
leaves the product unchanged. The strength says how much of the outliers the weights take over.

Shifting subtracts the midpoint of each channel and corrects the bias. The output of a GELU or ReLU
is almost one-sided; centered, it uses both halves of a symmetric INT8 range. For the CPU, the range
itself need not be symmetric.

Every strength is tried with and without the shift on a sample of rows, and the candidate with the
smallest squared error in the layers' outputs wins. Scaling and shifting are pointwise, and TensorRT
fuses them into the kernel that quantizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from enginery.passes.qdq.layers import Layer
from enginery.passes.qdq.scales import (
    ActivationQuantParams,
    bias_shift,
    fake_quantize_weight,
    scale_weight,
)
from enginery.passes.qdq.scheme import Scheme, Vector
from enginery.quantize.calibration.activation_statistics import (
    ChannelMeans,
    ChannelStatistics,
    scale_and_shift,
)

STRENGTHS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
_FACTOR_LIMIT = 2.0**10
"""Limit of the multipliers; larger ones would lose precision in FP16."""

LayerWeight = tuple[Layer, Vector]
"""A layer and its weight as stored: (K, N), or (N, K) if `weight_axis` is 0."""


@dataclass(frozen=True)
class SmoothingChoice:
    """Smoothing chosen for one activation."""

    params: ActivationQuantParams
    """Multiplier, offset, and the scale at which nothing is clipped."""
    strength: float
    """Migration strength, 0 to 1; 0 without a multiplier."""
    shifted: bool
    error: float
    """Squared error of the layers' outputs on the sample, relative to their squared norm."""


def choose_smoothing(
    channels: ChannelStatistics,
    layer_weights: Sequence[LayerWeight],
    scheme: Scheme,
    *,
    strength: float | Literal["search", "none"],
    shift: bool,
) -> SmoothingChoice:
    """Choose the multiplier and offset with the smallest output error on the sample.

    Args:
        channels: statistics of the activation that all the layers read.
        layer_weights: those layers with their weights.
        scheme: the quantized type.
        strength: `search` tries no scaling and all `STRENGTHS`; `none`, no scaling; a number, only
            that strength.
        shift: also try shifting.
    """
    unscaled = with_observed_range(channels, ActivationQuantParams(1.0), scheme)
    plain = SmoothingChoice(unscaled, 0.0, shifted=False, error=0.0)
    # Only a product over the last axis can take up the scales of channels in its weight.
    if channels.width == 1 or not all(layer.linear for layer, _ in layer_weights):
        return plain
    strengths: Sequence[float] = STRENGTHS
    if not isinstance(strength, str):
        strengths = (strength,)
    elif strength == "none":
        strengths = ()
    # A single strength is not compared with none.
    candidates = [] if strengths and strength != "search" else [(0.0, plain.params)]
    candidates += [(a, _smoothed(channels, layer_weights, a, shift=False)) for a in strengths]
    if shift:
        candidates.append((0.0, _shifted(channels)))
        candidates += [(a, _smoothed(channels, layer_weights, a, shift=True)) for a in strengths]
    exact = [channels.sample @ _as_matrix(layer, weight) for layer, weight in layer_weights]
    total = sum(float(np.square(output).sum()) for output in exact) or 1.0
    choices = []
    for tried, unscaled in candidates:
        params = with_observed_range(channels, unscaled, scheme)
        error = 0.0
        for (layer, weight), output in zip(layer_weights, exact, strict=True):
            simulated = simulate_layer(channels.sample, layer, weight, params, scheme)
            # Of the outputs: an error of the activation counts by what the layers make of it.
            error += float(np.square(simulated - output).sum())
        choices.append(SmoothingChoice(params, tried, params.offset is not None, error / total))
    return min(choices, key=lambda choice: choice.error)


def with_observed_range(
    channels: ChannelStatistics,
    params: ActivationQuantParams,
    scheme: Scheme,
    *,
    limit: float = math.inf,
) -> ActivationQuantParams:
    """Return parameters whose range covers all values that were seen, up to a magnitude.

    Args:
        channels: statistics of the activation.
        params: how its channels are scaled and shifted.
        scheme: the quantized type. If it is unsigned, the range need not be symmetric.
        limit: the largest magnitude, after scaling and shifting.
    """
    ends = scale_and_shift(np.stack([channels.smallest, channels.largest]), params)
    low, high = max(float(ends.min()), -limit), min(float(ends.max()), limit)
    if scheme.unsigned:
        asymmetric = ActivationQuantParams.of_range(low, high)
        return replace(params, scale=asymmetric.scale, zero_point=asymmetric.zero_point)
    return replace(params, scale=max(-low, high) / scheme.largest)


def simulate_layer(
    sample: Vector, layer: Layer, weight: Vector, params: ActivationQuantParams, scheme: Scheme
) -> Vector:
    """Return the quantized layer's output for the sample, without its bias: float32 (rows, N)."""
    scaled = scale_weight(layer, weight, params)
    rounded = fake_quantize_weight(layer, scaled, scheme)
    quantized = params.fake_quantize(scale_and_shift(sample, params), scheme)
    product = quantized @ _as_matrix(layer, rounded)
    return np.asarray(product + bias_shift(layer, scaled, params), dtype=np.float32)


def mean_output_error(
    sample: Vector, layer: Layer, weight: Vector, params: ActivationQuantParams, scheme: Scheme
) -> Vector:
    """Return the mean error of each output channel: float32 (N,). Adding it to the bias removes it.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
    2019, section 4.2, on real inputs.
    """
    exact = sample @ _as_matrix(layer, weight)
    error = exact - simulate_layer(sample, layer, weight, params, scheme)
    return np.asarray(error.mean(axis=0, dtype=np.float64), dtype=np.float32)


def mean_convolution_error(
    means: ChannelMeans, layer: Layer, weight: Vector, scheme: Scheme
) -> Vector:
    """Return the mean error of each output channel of a convolution: float32 (N,).

    It is that of positions away from the border, where the padding's zeros have no error.

    Args:
        means: those of the convolution's input.
        layer: the convolution.
        weight: its weight, (N, channels of a group, …).
        scheme: the quantized type.
    """
    kernel = tuple(range(2, weight.ndim))
    # Each element of the kernel multiplies its channel once for each output, so the mean output is
    # the kernel's sum times the channel's mean. Groups (g) have n outputs and c inputs each.
    exact = weight.sum(axis=kernel, dtype=np.float64)
    rounded = fake_quantize_weight(layer, weight, scheme).sum(axis=kernel, dtype=np.float64)
    groups = len(means.exact) // exact.shape[1]
    in_groups = (groups, -1, exact.shape[1])
    error = np.einsum("gnc,gc->gn", exact.reshape(in_groups), means.exact.reshape(groups, -1))
    error -= np.einsum(
        "gnc,gc->gn", rounded.reshape(in_groups), means.quantized.reshape(groups, -1)
    )
    return np.asarray(error.ravel(), dtype=np.float32)


def _smoothed(
    channels: ChannelStatistics,
    layer_weights: Sequence[LayerWeight],
    strength: float,
    *,
    shift: bool,
) -> ActivationQuantParams:
    middle = _midpoints(channels) if shift else np.zeros(channels.width, dtype=np.float32)
    activation_max = np.maximum(channels.largest - middle, middle - channels.smallest)
    # Channels of zeros would have no logarithm.
    activation_max = np.maximum(activation_max, 1e-5 * max(float(activation_max.max()), 1e-12))
    # (K,): over the output channels of all layers, which share the activation.
    weight_max = np.max(
        [np.abs(_as_matrix(layer, w)).max(axis=1) for layer, w in layer_weights], axis=0
    )
    weight_max = np.maximum(weight_max, 1e-5 * max(float(weight_max.max()), 1e-12))
    # s_k = max|x_k|^a / max|W_k|^(1-a) with the strength a, normalized to a geometric mean of 1
    # (Xiao et al., "SmoothQuant", 2023, eq. 4).
    logarithm = strength * np.log(activation_max) - (1 - strength) * np.log(weight_max)
    factor = np.exp(logarithm - logarithm.mean())
    # Rounded to FP16, so that casting the graph changes neither the activation nor the weight.
    multiplier = _fp16(1 / np.clip(factor, 1 / _FACTOR_LIMIT, _FACTOR_LIMIT))
    offset = _fp16(-middle * multiplier) if shift else None
    return ActivationQuantParams(1.0, multiplier, offset)


def _shifted(channels: ChannelStatistics) -> ActivationQuantParams:
    return ActivationQuantParams(1.0, None, _fp16(-_midpoints(channels)))


def _midpoints(channels: ChannelStatistics) -> Vector:
    # Wei et al., "Outlier Suppression+", 2023, eq. 3.
    return np.asarray((channels.smallest + channels.largest) / 2, dtype=np.float32)


def _fp16(values: Vector) -> Vector:
    return np.asarray(values).astype(np.float16).astype(np.float32)


def _as_matrix(layer: Layer, weight: Vector) -> Vector:
    """Return the weight as (K, N)."""
    return weight.T if layer.weight_axis == 0 else weight
