"""Convert Python values to Arrow arrays of a known type, and Arrow arrays to numpy.

>>> import pyarrow as pa
>>> to_arrow(["warm", None], pa.string()).to_pylist()
['warm', None]

If pandas is installed, `pyarrow.array` imports it to check whether a list is a Series, which takes
a third of a second and 60 MB. So arrays are built from buffers here, in Arrow's columnar format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS: dict[str, Any] = {
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
    "halffloat": np.float16,
    "float": np.float32,
    "double": np.float64,
}
"""Arrow type -> numpy type."""


def to_arrow(values: Sequence[Any] | NDArray[Any], kind: Any) -> Any:
    """Return a `pyarrow.Array` with the values.

    Args:
        values: strings, numbers, lists, or dicts with the fields of a struct; None for null.
        kind: `pyarrow.DataType`: string, bool, a number, or lists and structs of these. For a list
            the values may be arrays; for a fixed-size list they are arrays of its size, or one
            array (count, size).

    Raises:
        TypeError: the type is not supported.
        OverflowError: an integer has more than 64 bits, or a column more than 2 GiB of text.
    """
    import pyarrow as pa

    if isinstance(values, np.ndarray):
        if not pa.types.is_fixed_size_list(kind):
            return _numbers(values.astype(_NUMBERS[str(kind)], copy=False), kind, None)
        child = to_arrow(values.reshape(-1), kind.value_type)
        return pa.Array.from_buffers(kind, len(values), [None], children=[child])
    is_valid = np.fromiter((value is not None for value in values), bool, len(values))
    validity = None if is_valid.all() else _bits(is_valid)
    if pa.types.is_string(kind):
        texts = values if validity is None else ["" if value is None else value for value in values]
        joined = "".join(texts)
        if joined.isascii():  # a character is a byte
            content, sizes = joined.encode(), list(map(len, texts))
        else:
            cells = [text.encode() for text in texts]
            content, sizes = b"".join(cells), list(map(len, cells))
        offsets = _offsets(sizes)
        if offsets[-1] > np.iinfo(np.int32).max:
            raise OverflowError("a column of one batch has more than 2 GiB of text")
        return pa.Array.from_buffers(
            kind, len(values), [validity, _buffer(offsets), pa.py_buffer(content)]
        )
    if pa.types.is_fixed_size_list(kind):
        flat = np.zeros((len(values), kind.list_size), _NUMBERS[str(kind.value_type)])
        for row, value in enumerate(values):
            if value is not None:
                flat[row] = value
        child = _numbers(flat.reshape(-1), kind.value_type, None)
        return pa.Array.from_buffers(kind, len(values), [validity], children=[child])
    if pa.types.is_list(kind):
        lists = [() if value is None else value for value in values]
        arrays = [items for items in lists if isinstance(items, np.ndarray)]
        items: Any = [item for items in lists for item in items] if not arrays else None
        child = to_arrow(np.concatenate(arrays) if arrays else items, kind.value_type)
        buffers = [validity, _buffer(_offsets([len(items) for items in lists]))]
        return pa.Array.from_buffers(kind, len(values), buffers, children=[child])
    if pa.types.is_struct(kind):
        children = [
            to_arrow([None if value is None else value[field.name] for value in values], field.type)
            for field in kind
        ]
        return pa.Array.from_buffers(kind, len(values), [validity], children=children)
    if pa.types.is_boolean(kind):
        ones = np.fromiter((bool(value) for value in values), bool, len(values))
        return pa.Array.from_buffers(kind, len(values), [validity, _bits(ones)])
    if str(kind) not in _NUMBERS:
        raise TypeError(f"arrays of {kind} are not supported")
    numbers = np.array([0 if value is None else value for value in values], _NUMBERS[str(kind)])
    return _numbers(numbers, kind, validity)


def numeric_view(array: Any) -> NDArray[Any]:
    """Return a view of a `pyarrow.Array` of numbers as a numpy array.

    The values of nulls are undefined. `to_numpy` would import pandas as well.
    """
    dtype = np.dtype(_NUMBERS[str(array.type)])
    data = array.buffers()[1]
    count = len(array)
    if data is None or not count:
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, count, array.offset * dtype.itemsize)


def value_lengths(array: Any) -> NDArray[Any]:
    """Return the sizes in bytes of strings or binaries; those of nulls are undefined."""
    import pyarrow as pa

    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    dtype = np.dtype(np.int64 if is_large else np.int32)
    places = np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * dtype.itemsize)
    return np.diff(places)


def _numbers(numbers: NDArray[Any], kind: Any, valid: Any) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(numbers), [valid, _buffer(numbers)])


def _offsets(lengths: Sequence[int]) -> NDArray[Any]:
    """Return the start of each item and the end of the last: int32, or int64 if that overflows."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets.astype(np.int32) if offsets[-1] <= np.iinfo(np.int32).max else offsets


def _bits(flags: NDArray[np.bool_]) -> Any:
    """Return a bitmap, least significant bit first."""
    return _buffer(np.packbits(flags, bitorder="little"))


def _buffer(array: NDArray[Any]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.ascontiguousarray(array))
