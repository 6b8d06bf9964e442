"""Python values as Arrow arrays of a known type.

    >>> to_arrow(["warm", None], pa.string()).to_pylist()
    ['warm', None]

`pyarrow.array` would import pandas, where that is installed, to see whether a list is a Series: a
third of a second and 60 MB. Arrays are made of their buffers here, as Arrow's columnar format
lays them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS = {"int64": np.int64, "float": np.float32, "double": np.float64}
"""Arrow's names of the numbers that rows have."""


def to_arrow(values: Sequence[Any], kind: Any) -> Any:
    """A `pyarrow.Array`.

    Args:
        values: None for null; strings, numbers, lists, or dicts with a struct's fields.
        kind: string, bool, int64, float32, float64, or lists and structs of these. A fixed-size
            list takes numpy arrays of its size.

    Raises:
        TypeError: another type.
        OverflowError: an integer that has more than 64 bits.
    """
    import pyarrow as pa

    there = np.fromiter((value is not None for value in values), bool, len(values))
    valid = None if there.all() else _bits(there)
    if pa.types.is_string(kind):
        cells = [b"" if value is None else value.encode() for value in values]
        offsets = _offsets([len(cell) for cell in cells])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise OverflowError("a column of one piece has more than 2 GiB of text")
        buffers = [valid, _buffer(offsets), pa.py_buffer(b"".join(cells))]
        return pa.Array.from_buffers(kind, len(values), buffers)
    if pa.types.is_fixed_size_list(kind):
        flat = np.zeros((len(values), kind.list_size), np.float32)
        for row, value in enumerate(values):
            if value is not None:
                flat[row] = value
        child = _numbers(flat.reshape(-1), kind.value_type, None)
        return pa.Array.from_buffers(kind, len(values), [valid], children=[child])
    if pa.types.is_list(kind):
        lists = [() if value is None else value for value in values]
        child = to_arrow([item for items in lists for item in items], kind.value_type)
        buffers = [valid, _buffer(_offsets([len(items) for items in lists]))]
        return pa.Array.from_buffers(kind, len(values), buffers, children=[child])
    if pa.types.is_struct(kind):
        children = [
            to_arrow([None if value is None else value[field.name] for value in values], field.type)
            for field in kind
        ]
        return pa.Array.from_buffers(kind, len(values), [valid], children=children)
    if pa.types.is_boolean(kind):
        ones = np.fromiter((bool(value) for value in values), bool, len(values))
        return pa.Array.from_buffers(kind, len(values), [valid, _bits(ones)])
    if str(kind) not in _NUMBERS:
        raise TypeError(f"no arrays of {kind} are made here")
    numbers = np.array([0 if value is None else value for value in values], _NUMBERS[str(kind)])
    return _numbers(numbers, kind, valid)


def numeric_view(array: Any) -> NDArray[Any]:
    """The numbers of a `pyarrow.Array` of one of the types above, or int32, as a view.

    Those of nulls mean nothing. `to_numpy` would import pandas, too.
    """
    dtype = np.dtype(np.int32 if str(array.type) == "int32" else _NUMBERS[str(array.type)])
    data = array.buffers()[1]
    count = len(array)
    if data is None or not count:
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, count, array.offset * dtype.itemsize)


def value_lengths(array: Any) -> NDArray[Any]:
    """The sizes in bytes of a `pyarrow.Array` of strings or binaries; a null's mean nothing."""
    import pyarrow as pa

    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    dtype = np.dtype(np.int64 if is_large else np.int32)
    places = np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * dtype.itemsize)
    return np.diff(places)


def _numbers(numbers: NDArray[Any], kind: Any, valid: Any) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(numbers), [valid, _buffer(numbers)])


def _offsets(lengths: Sequence[int]) -> NDArray[Any]:
    """int32, or int64 where that overflows: where each item begins, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets.astype(np.int32) if offsets[-1] <= np.iinfo(np.int32).max else offsets


def _bits(flags: NDArray[np.bool_]) -> Any:
    """A bitmap, the lowest bit first."""
    return _buffer(np.packbits(flags, bitorder="little"))


def _buffer(array: NDArray[Any]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.ascontiguousarray(array))
