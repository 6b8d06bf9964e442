"""Outlier channels: scaled into the weights and shifted into the bias, before they are quantized.

Takes what was seen of one activation and the weights that it meets; leaves the multiplier and the
offset of its channels.

    >>> choice = choose_smoothing(channels, [(layer, weight)], INT8, strength="search", shift=True)
    >>> choice.strength, choice.shifted, choice.error
    (0.9, True, 0.0004)

Scaling: s_k = max|x_k|^a / max|W_k|^(1-a), of geometric mean 1 (Xiao et al., "SmoothQuant", 2023,
eq. 4). Shift: the middle of each channel (Wei et al., "Outlier Suppression+", 2023, eq. 3). What
follows a GELU or a ReLU is nearly one-sided; centred, it uses both halves of a symmetric INT8.
Both are pointwise, and TensorRT fuses them into the kernel that quantizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from enginery.passes.layers import Layer
from enginery.passes.qdq import (
    ActivationQuantParams,
    bias_shift,
    fake_quantize_weight,
    scale_weight,
)
from enginery.passes.scheme import Scheme, Vector
from enginery.quantize.calibration import Channels, largest_magnitude, transformed

STRENGTHS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
_FACTOR_LIMIT = 2.0**10
"""Multipliers beyond would lose FP16 its digits."""

Weighted = tuple[Layer, Vector]
"""A layer and its weight, (K, N) or as stored."""


@dataclass(frozen=True)
class Smoothing:
    """What was chosen for one activation."""

    ready: ActivationQuantParams
    """With its multiplier and offset; its scale is that of the largest magnitude."""
    strength: float
    """How much of the outliers the weights take, 0 to 1; 0 with no multiplier at all."""
    shifted: bool
    error: float
    """Squared error of its layers' outputs on the sample, relative to the outputs themselves."""


def choose_smoothing(
    channels: Channels,
    weighted: Sequence[Weighted],
    scheme: Scheme,
    *,
    strength: float | Literal["search", "none"],
    shift: bool,
) -> Smoothing:
    """The multiplier and offset with which the layers' outputs err least on the sample.

    Args:
        channels: of the activation that all the layers take.
        weighted: those layers.
        scheme: the type that they are quantized to.
        strength: `search` tries none and `STRENGTHS`; a number is taken as it is.
        shift: whether centring the channels is tried.
    """
    unscaled = with_scale(channels, ActivationQuantParams(1.0), scheme)
    plain = Smoothing(unscaled, 0.0, shifted=False, error=0.0)
    if channels.width == 1 or not all(layer.linear for layer, _ in weighted):
        return plain
    strengths: Sequence[float] = STRENGTHS
    if not isinstance(strength, str):
        strengths = (strength,)
    elif strength == "none":
        strengths = ()
    candidates = [] if strengths and strength != "search" else [(0.0, plain.ready)]
    candidates += [(a, _scaled(channels, weighted, a, shift=False)) for a in strengths]
    if shift:
        candidates.append((0.0, _centred(channels)))
        candidates += [(a, _scaled(channels, weighted, a, shift=True)) for a in strengths]
    exact = [channels.sample @ _matrix(layer, weight) for layer, weight in weighted]
    total = sum(float(np.square(output).sum()) for output in exact) or 1.0
    found = []
    for tried, unscaled in candidates:
        ready = with_scale(channels, unscaled, scheme)
        error = 0.0
        for (layer, weight), output in zip(weighted, exact, strict=True):
            found_output = quantized_output(channels.sample, layer, weight, ready, scheme)
            error += float(np.square(found_output - output).sum())
        found.append(Smoothing(ready, tried, ready.offset is not None, error / total))
    return min(found, key=lambda choice: choice.error)


def with_scale(
    channels: Channels, ready: ActivationQuantParams, scheme: Scheme
) -> ActivationQuantParams:
    """The same with the scale at which nothing that was seen is clipped."""
    scale = largest_magnitude(channels, ready) / scheme.largest
    return ActivationQuantParams(scale, ready.multiplier, ready.offset)


def quantized_output(
    sample: Vector, layer: Layer, weight: Vector, ready: ActivationQuantParams, scheme: Scheme
) -> Vector:
    """(rows, N): what the quantized layer gives for the sample, its bias left out."""
    scaled = scale_weight(layer, weight, ready)
    rounded = fake_quantize_weight(layer, scaled, scheme)
    product = rounded_rows(sample, ready, scheme) @ _matrix(layer, rounded)
    return np.asarray(product + bias_shift(layer, scaled, ready), dtype=np.float32)


def rounded_rows(sample: Vector, ready: ActivationQuantParams, scheme: Scheme) -> Vector:
    """Rows (n, K) scaled, shifted, and rounded to the scheme's numbers."""
    scale = max(ready.scale, 1e-12)
    return np.asarray(scheme.nearest(transformed(sample, ready) / scale) * scale, dtype=np.float32)


def mean_error(
    sample: Vector, layer: Layer, weight: Vector, ready: ActivationQuantParams, scheme: Scheme
) -> Vector:
    """(N,): what the quantized layer's outputs lack on average; added to the bias, it is gone.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
    2019, section 4.2, on real inputs.
    """
    exact = sample @ _matrix(layer, weight)
    lacking = exact - quantized_output(sample, layer, weight, ready, scheme)
    return np.asarray(lacking.mean(axis=0, dtype=np.float64), dtype=np.float32)


def _scaled(
    channels: Channels, weighted: Sequence[Weighted], strength: float, *, shift: bool
) -> ActivationQuantParams:
    middle = _middle(channels) if shift else np.zeros(channels.width, dtype=np.float32)
    reach = np.maximum(channels.largest - middle, middle - channels.smallest)
    reach = np.maximum(reach, 1e-5 * max(float(reach.max()), 1e-12))
    met = np.max([np.abs(_matrix(layer, w)).max(axis=1) for layer, w in weighted], axis=0)
    met = np.maximum(met, 1e-5 * max(float(met.max()), 1e-12))
    logarithm = strength * np.log(reach) - (1 - strength) * np.log(met)
    factor = np.exp(logarithm - logarithm.mean())
    # Exact in FP16, so that casting the graph changes neither the activation nor its weight.
    multiplier = _fp16(1 / np.clip(factor, 1 / _FACTOR_LIMIT, _FACTOR_LIMIT))
    offset = _fp16(-middle * multiplier) if shift else None
    return ActivationQuantParams(1.0, multiplier, offset)


def _centred(channels: Channels) -> ActivationQuantParams:
    return ActivationQuantParams(1.0, None, _fp16(-_middle(channels)))


def _middle(channels: Channels) -> Vector:
    return np.asarray((channels.smallest + channels.largest) / 2, dtype=np.float32)


def _fp16(values: Vector) -> Vector:
    return np.asarray(values).astype(np.float16).astype(np.float32)


def _matrix(layer: Layer, weight: Vector) -> Vector:
    """The weight as (K, N)."""
    return weight.T if layer.weight_axis == 0 else weight
