"""The quantization schemes: INT8, and FP8 in the E4M3 format.

    >>> INT8.nearest(np.array([1.4, 300.0], np.float32))
    array([  1., 127.], dtype=float32)
    >>> FP8.nearest(np.array([1.4, 300.0], np.float32))
    array([  1.375, 288.   ], dtype=float32)

INT8 has equal steps, so an outlier costs all other numbers precision. FP8 has three significand
bits at every magnitude from 2**-6 to 448. Source of E4M3: Micikevicius et al., "FP8 Formats for
Deep Learning", 2022, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Scheme:
    """A quantized type, and the granularity of the scales of weights."""

    name: Literal["int8", "fp8"]
    largest: float
    """The largest magnitude, in units of the scale. INT8's -128 is not used: TensorRT requires a
    symmetric range."""
    per_channel: bool = True
    """True for one scale per output channel of a weight, False for one scale per weight."""
    unsigned: bool = False
    """True for ONNX Runtime on the CPU: activations are uint8, the type that its kernels for x86
    multiply with signed weights. Ranges need not be symmetric: each has its own zero point."""

    @property
    def dtype(self) -> ir.DataType:
        """The ONNX type."""
        return ir.DataType.INT8 if self.name == "int8" else ir.DataType.FLOAT8E4M3FN

    @property
    def activation_dtype(self) -> ir.DataType:
        """The ONNX type of quantized activations."""
        return ir.DataType.UINT8 if self.unsigned else self.dtype

    @property
    def supports_fusions(self) -> bool:
        """True if ONNX Runtime can fuse such a graph; its CPU kernels lack FP8 fusions."""
        return self.name == "int8"

    def nearest(self, values: NDArray[Any]) -> Vector:
        """Round values to the nearest numbers of the type, clipped to its range, as float32."""
        clipped = np.clip(values, -self.largest, self.largest, dtype=np.float32)
        if self.name == "int8":
            # Half to even, as QuantizeLinear rounds.
            return np.asarray(np.rint(clipped), dtype=np.float32)
        return np.asarray(clipped.astype(ml_dtypes.float8_e4m3fn), dtype=np.float32)

    def stored(self, values: NDArray[Any]) -> NDArray[Any]:
        """Round values to the nearest numbers of the type, in that type."""
        return np.asarray(self.nearest(values).astype(self.dtype.numpy()))

    def zeros(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return zero points of this shape. Q/DQ nodes derive their type from them."""
        return np.zeros(shape, dtype=self.dtype.numpy())

    def activation_zero(self) -> NDArray[Any]:
        """Return the zero point of an activation, a scalar."""
        return np.asarray(128 if self.unsigned else 0, dtype=self.activation_dtype.numpy())


INT8 = Scheme("int8", 127.0)
FP8 = Scheme("fp8", 448.0)
