"""Convert FP32 constants to FP16 or BF16, one at a time, when they are written.

    >>> cast_tensor(ir.tensor(np.float32([-3.4e38, 1e-12, np.inf])), ir.DataType.FLOAT16).numpy()
    array([-6.55e+04,  5.96e-08,       inf], dtype=float16)

A finite number stays finite, and a nonzero one nonzero: attention masks and epsilons need that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.errors import OptionError

FP16_MAX = 65504.0
"""The largest finite FP16 number, (2 - 2**-10) * 2**15."""
FP16_MIN_NORMAL = 2.0**-14
"""The smallest normal FP16 number. Smaller ones lose significand bits."""

LOW_TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
SCHEMA_NAMES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}

# A large weight is converted in chunks of this many elements, to bound the memory.
_CHUNK = 1 << 22


def low_precision_type(precision: str) -> ir.DataType:
    """Return the ONNX type of `fp16` or `bf16`; raise OptionError for another precision."""
    if precision not in LOW_TYPES:
        raise OptionError(f"unknown precision '{precision}': expected {' or '.join(LOW_TYPES)}.")
    return LOW_TYPES[precision]


def cast_tensor(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.LazyTensor:
    """Return an FP32 tensor in a low-precision type; it is converted each time it is read."""

    def convert() -> ir.TensorProtocol:
        return ir.Tensor(cast_array(read_values(tensor), dtype), dtype=dtype, name=tensor.name)

    shape = ir.Shape(tensor.shape.numpy())
    return ir.LazyTensor(convert, dtype, shape, name=tensor.name)


def cast_array(values: NDArray[Any], dtype: ir.DataType) -> NDArray[Any]:
    """Round FP32 values to FP16 or BF16; finite values stay finite, and nonzero ones nonzero."""
    flat = np.ravel(values)
    result = np.empty(flat.shape, dtype.numpy())
    largest, smallest = _extremes(dtype)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        with np.errstate(over="ignore", under="ignore"):
            low = part.astype(result.dtype)
        wide = low.astype(np.float32)
        # Attention masks are filled with the lowest FP32 number. As -inf, it would make Softmax
        # return NaN for a row that is masked as a whole.
        over = np.isinf(wide) & np.isfinite(part)
        low[over] = np.copysign(largest, part[over]).astype(result.dtype)
        # An epsilon keeps a divisor from being 0, and must not become 0 itself.
        under = (wide == 0) & (part != 0)
        low[under] = np.copysign(smallest, part[under]).astype(result.dtype)
        result[start : start + _CHUNK] = low
    return result.reshape(values.shape)


def overflow_limits(tensor: ir.TensorProtocol) -> tuple[float, float] | None:
    """Return the lowest and the highest finite element if one is beyond FP16's range, else None."""
    low, high = 0.0, 0.0
    for part in _chunks(tensor):
        # An infinity stays one in FP16, so it does not overflow.
        finite = part[np.isfinite(part)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return (low, high) if max(-low, high) > FP16_MAX else None


def is_mask_constant(tensor: ir.TensorProtocol) -> bool:
    """Return True if one negative number is all that is beyond FP16's range, as in masks."""
    limits = overflow_limits(tensor)
    # A mask only lowers scores: large positive numbers are data.
    if limits is None or limits[1] > FP16_MAX:
        return False
    return all(
        bool(np.all(part[np.isfinite(part) & (part < -FP16_MAX)] == np.float32(limits[0])))
        for part in _chunks(tensor)
    )


def read_values(tensor: ir.TensorProtocol) -> NDArray[Any]:
    """Read the values of a tensor. External data is read from its file each time."""
    if not isinstance(tensor, ir.ExternalTensor):
        return np.asarray(tensor.numpy())
    shape = tuple(tensor.shape.numpy())
    # `tensor.numpy()` would map the whole file, and keep it mapped as long as the graph exists.
    values: NDArray[Any] = np.fromfile(
        tensor.path, tensor.dtype.numpy(), count=tensor.size, offset=tensor.offset or 0
    )
    return values.reshape(shape)


def _chunks(tensor: ir.TensorProtocol) -> Iterator[NDArray[Any]]:
    flat = np.ravel(read_values(tensor))
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]


def _extremes(dtype: ir.DataType) -> tuple[float, float]:
    """Return the largest finite number and the smallest positive one. BF16 has FP32's exponents."""
    if dtype == ir.DataType.FLOAT16:
        # The smallest subnormal numbers are 2**-14 / 2**10, and for BF16 2**-126 / 2**7.
        return FP16_MAX, 2.0**-24
    return (2.0 - 2.0**-7) * 2.0**127, 2.0**-133
