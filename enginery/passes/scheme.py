"""What a quantized number is: INT8, or FP8 of the kind E4M3.

    >>> INT8.nearest(np.array([1.4, 300.0], np.float32))
    array([  1., 127.], dtype=float32)
    >>> FP8.nearest(np.array([1.4, 300.0], np.float32))
    array([  1.375, 288.   ], dtype=float32)

INT8 has steps of one size, so that an outlier costs every other number its precision; FP8 has three
significand bits at every size, from 2**-6 to 448. Source of E4M3: Micikevicius et al., "FP8 Formats
for Deep Learning", 2022, section 3.
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
    """How numbers are stored, and how many weights share a scale."""

    name: Literal["int8", "fp8"]
    largest: float
    """The largest magnitude, in units of the scale. INT8's -128 is left out, so that the range is
    symmetric as TensorRT has it."""
    per_channel: bool = True
    """A scale for each output channel of a weight; else one for all of it."""

    @property
    def dtype(self) -> ir.DataType:
        """The type of ONNX."""
        return ir.DataType.INT8 if self.name == "int8" else ir.DataType.FLOAT8E4M3FN

    @property
    def supports_fusions(self) -> bool:
        """Whether ONNX Runtime's fusions can be on: its CPU kernels have none for FP8."""
        return self.name == "int8"

    def nearest(self, values: NDArray[Any]) -> Vector:
        """The nearest numbers of the type, in float32; what lies beyond the largest is clipped."""
        clipped = np.clip(values, -self.largest, self.largest, dtype=np.float32)
        if self.name == "int8":
            return np.asarray(np.rint(clipped), dtype=np.float32)
        return np.asarray(clipped.astype(ml_dtypes.float8_e4m3fn), dtype=np.float32)

    def stored(self, values: NDArray[Any]) -> NDArray[Any]:
        """The same in the type itself."""
        return np.asarray(self.nearest(values).astype(self.dtype.numpy()))

    def zeros(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Zero points: Q/DQ take the type from them."""
        return np.zeros(shape, dtype=self.dtype.numpy())


INT8 = Scheme("int8", 127.0)
FP8 = Scheme("fp8", 448.0)
