"""Compute the scales of activations and weights, and what SmoothQuant does to a weight and a bias.

>>> fp16_scale(0.1).item(), fp16_scale(0.0).item() == MIN_SCALE
(0.0999755859375, True)

A scale is the largest magnitude divided by the largest number of the type, because both are
quantized symmetrically. For the CPU, activations use all of uint8 instead, with a zero point of
their own: the output of a ReLU has no negative numbers, and that of a GELU only small ones.

Only layers with a constant weight have scales. Products of two activations, as in attention, have
none: `layers.find_layers` leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.passes.qdq.layers import Layer
from enginery.passes.qdq.scheme import Scheme, Vector

MIN_SCALE = 2.0**-20
"""The smallest scale, for channels that are all zero. FP16 represents it with four significand
bits."""
_UINT8 = 255
"""The largest number."""


@dataclass(frozen=True)
class ActivationQuantParams:
    """The parameters that quantize an activation: round((x * multiplier + offset) / scale)."""

    scale: float
    multiplier: Vector | None = None
    """The factor of each channel, (K,); None if channels are not scaled."""
    offset: Vector | None = None
    """The shift of each channel after scaling, (K,); None if channels are not shifted."""
    zero_point: int | None = None
    """The number of uint8 that 0 is quantized to; None for 128."""

    @classmethod
    def of_range(cls, smallest: float, largest: float) -> ActivationQuantParams:
        """Return the parameters with which uint8 covers a range, and 0 is exact."""
        # The padding of a convolution and what a ReLU cuts off are exact only if 0 is in the range.
        smallest, largest = min(smallest, 0.0), max(largest, 0.0)
        scale = float(fp16_scale((largest - smallest) / _UINT8))
        return cls(scale, zero_point=round(min(-smallest / scale, _UINT8)))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ActivationQuantParams:
        """Read what `to_json` has made.

        Raises:
            KeyError: a part is missing.
            TypeError, ValueError: a part has another type, or is out of range.
        """
        multiplier, offset = (
            None if record[name] is None else np.asarray(record[name], dtype=np.float32)
            for name in ("multiplier", "offset")
        )
        zero_point = record.get("zero_point")
        if zero_point is not None and zero_point not in range(_UINT8 + 1):
            raise ValueError(f"zero point {zero_point}, expected a whole number from 0 to {_UINT8}")
        return cls(
            float(record["scale"]),
            multiplier,
            offset,
            None if zero_point is None else int(zero_point),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the parameters as numbers and lists."""
        # Converting float32 to float64 and back is exact.
        vectors = {
            name: None if vector is None else [float(value) for value in vector]
            for name, vector in (("multiplier", self.multiplier), ("offset", self.offset))
        }
        return {"scale": float(self.scale), **vectors, "zero_point": self.zero_point}

    def fake_quantize(self, values: Vector, scheme: Scheme) -> Vector:
        """Quantize and dequantize values that have been scaled and shifted."""
        scale = max(self.scale, 1e-12)
        if self.zero_point is None:
            return np.asarray(scheme.nearest(values / scale) * scale, dtype=np.float32)
        low, high = -self.zero_point, _UINT8 - self.zero_point
        return np.asarray(np.clip(np.rint(values / scale), low, high) * scale, dtype=np.float32)

    def stored_zero_point(self, scheme: Scheme) -> NDArray[Any]:
        """Return the zero point, a scalar of the type that activations are quantized to."""
        if self.zero_point is None:
            return scheme.activation_zero()
        return np.asarray(self.zero_point, dtype=np.uint8)


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
    # The geometric mean, so that the factors lie around 1, far from FP16's limits.
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
    # The multiplier goes along the input channels: (N, K) if outputs come first, else (K, N).
    shape = (1, -1) if layer.weight_axis == 0 else (-1, 1)
    return np.asarray(weight / params.multiplier.reshape(shape), dtype=np.float32)


def bias_shift(layer: Layer, scaled: Vector, params: ActivationQuantParams) -> Vector:
    """Return the vector (N,) that compensates the activation's offset in the bias: -offset @ W."""
    if params.offset is None:
        return np.zeros(layer.out_channels, dtype=np.float32)
    matrix = scaled.T if layer.weight_axis == 0 else scaled
    return np.asarray(-(params.offset.astype(np.float64) @ matrix), dtype=np.float32)
