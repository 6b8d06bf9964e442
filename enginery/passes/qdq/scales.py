"""Compute the scales of activations and weights, and what SmoothQuant does to a weight and a bias.

>>> fp16_scale(0.1).item(), fp16_scale(0.0).item() == MIN_SCALE
(0.0999755859375, True)

A scale is the largest magnitude divided by the largest number of the type, because both are
quantized symmetrically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from enginery.passes.qdq.layers import Layer
from enginery.passes.qdq.scheme import Scheme, Vector

MIN_SCALE = 2.0**-20
"""The smallest scale, for channels that are all zero. FP16 represents it with four significand
bits."""


@dataclass(frozen=True)
class ActivationQuantParams:
    """The parameters that quantize an activation: round((x * multiplier + offset) / scale)."""

    scale: float
    multiplier: Vector | None = None
    """The factor of each channel, (K,); None if channels are not scaled."""
    offset: Vector | None = None
    """The shift of each channel after scaling, (K,); None if channels are not shifted."""


def fp16_scale(scale: Any) -> Vector:
    """Round scales to FP16 numbers, at least `MIN_SCALE`, because the graph may be cast later."""
    floored = np.maximum(np.asarray(scale, dtype=np.float32), MIN_SCALE)
    return floored.astype(np.float16).astype(np.float32)


def channel_scales(layer: Layer, weight: Vector, scheme: Scheme) -> Vector:
    """Return the scale of each output channel (N,), or of the whole weight ()."""
    others = tuple(axis for axis in range(weight.ndim) if axis != layer.weight_axis)
    max_abs = np.abs(weight).max(axis=others if scheme.per_channel else None)
    return fp16_scale(max_abs / scheme.largest)


def weight_scales(layer: Layer, weight: Vector, scheme: Scheme) -> Vector:
    """Return the scale of each output channel (N,), or of the weight (), as stored in the graph."""
    scales = channel_scales(layer, weight, scheme)
    if has_shared_scale(layer, scheme):
        shared, factors = split_scales(scales)
        return np.asarray(shared * factors, dtype=np.float32)
    return scales


def has_shared_scale(layer: Layer, scheme: Scheme) -> bool:
    """Return True if TensorRT quantizes such a weight only with one scale for all channels."""
    return scheme.per_channel and layer.split and layer.linear


def split_scales(scales: Vector) -> tuple[Vector, Vector]:
    """Split scales (N,) into a shared one () and the factor of each channel (N,)."""
    shared = fp16_scale(np.exp(np.log(scales).mean()))
    return shared, (scales / shared).astype(np.float16).astype(np.float32)


def broadcast_scales(layer: Layer, weight: Vector, scales: Vector) -> Vector:
    """Reshape scales (N,) or () so that they multiply the weight's output channels."""
    shape = [1] * weight.ndim
    shape[layer.weight_axis] = -1
    return scales.reshape(shape)


def fake_quantize_weight(layer: Layer, weight: Vector, scheme: Scheme) -> Vector:
    """Quantize and dequantize a weight: return the values of the quantized layer as float32."""
    scales = broadcast_scales(layer, weight, weight_scales(layer, weight, scheme))
    return np.asarray(scheme.nearest(weight / scales) * scales, dtype=np.float32)


def scale_weight(layer: Layer, weight: Vector, params: ActivationQuantParams) -> Vector:
    """Return W[k] / multiplier[k], with which the scaled activation yields the same product."""
    if params.multiplier is None:
        return weight
    shape = (1, -1) if layer.weight_axis == 0 else (-1, 1)
    return np.asarray(weight / params.multiplier.reshape(shape), dtype=np.float32)


def bias_shift(layer: Layer, scaled: Vector, params: ActivationQuantParams) -> Vector:
    """Return the vector (N,) that compensates the activation's offset in the bias: -offset @ W."""
    if params.offset is None:
        return np.zeros(layer.out_channels, dtype=np.float32)
    matrix = scaled.T if layer.weight_axis == 0 else scaled
    return np.asarray(-(params.offset.astype(np.float64) @ matrix), dtype=np.float32)
