r"""Tensors of the Open Inference Protocol, as JSON and as bytes.

    >>> Tensor("text", "BYTES", (1,), [b"warm"]).raw()
    b'\x04\x00\x00\x00warm'

Numbers are little-endian and row-major; an element of BYTES is its length in four bytes, then
itself; BF16 is the upper half of a float32. Source: the protocol's "Tensor Data" and Triton's
extension_binary_data.md.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import nearest
from enginery.serve.reading import EmptyInputError, FieldError, JsonObject, found, shown
from enginery.serve.refusals import InvalidBodyError

DATATYPES: dict[str, str] = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16",
    "FP32": "float32", "FP64": "float64", "BF16": "bfloat16", "BYTES": "object",
}  # fmt: skip
"""The protocol's names, and what numpy calls them."""
DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items()}

_MOST_DIMS = 8
_MOST_ELEMENTS = 2**31 - 1
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Tensor:
    """A named tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | list[bytes]
    """A list of the elements for BYTES; float32 for BF16, which numpy has not."""

    def raw(self) -> bytes:
        """The elements as bytes."""
        if isinstance(self.values, list):
            return b"".join(_LENGTH.pack(len(item)) + item for item in self.values)
        values: NDArray[Any] = np.ascontiguousarray(self.values)
        if self.datatype == "BF16":
            bits = values.astype("<f4").view("<u4")
            # To the nearest, ties to even, as float32 becomes bfloat16 everywhere.
            values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        return bytes(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())

    def plain(self) -> Any:
        """The elements as JSON holds them, flat."""
        if isinstance(self.values, list):
            return [item.decode("utf-8", "replace") for item in self.values]
        flat = np.ascontiguousarray(self.values).reshape(-1)
        return flat.astype(np.float32) if flat.dtype == np.float16 else flat


class Tail:
    """The bytes behind a request's JSON, taken piece by piece."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, size: int, name: str) -> memoryview:
        """The next bytes; raises InvalidBodyError where there are fewer."""
        piece = self._data[self._at : self._at + size]
        if len(piece) < size:
            raise InvalidBodyError(
                f"{name}: binary_data_size is {size}, but {len(piece)} bytes are left of the body."
            )
        self._at += size
        return piece

    def end(self) -> None:
        """Raises InvalidBodyError where bytes are left."""
        if left := len(self._data) - self._at:
            raise InvalidBodyError(f"{left} bytes behind the JSON belong to no input.")


def read_tensor(given: JsonObject, tail: Tail) -> Tensor:
    """One input of a request.

    Raises:
        FieldError: a field is missing or wrong, or the data does not fit datatype and shape.
        InvalidBodyError: there are fewer bytes than the input says.
    """
    given.need("name", "a string")
    name = given.string("name")
    where = f"input {shown(name)}"
    given.need("datatype", "a datatype of the protocol")
    datatype = given.string("datatype")
    if datatype not in DATATYPES:
        raise FieldError(
            f"{where}: datatype {shown(datatype)} is not known{nearest(datatype[:20], DATATYPES)}",
            field=f"{given.where}datatype",
            do=f"Known: {', '.join(DATATYPES)}.",
        )
    shape = _shape(given, where)
    parameters = given.object("parameters")
    parameters.only(("binary_data_size",))
    size = parameters.whole("binary_data_size", -1, least=0)
    data = given.values.get("data")
    if size >= 0:
        if data is not None:
            raise FieldError(
                f"{where} has data and binary_data_size, expected one of them.",
                field=f"{given.where}data",
            )
        values = _from_bytes(tail.take(size, where), datatype, shape, where)
    else:
        given.need("data", "a list")
        values = _from_json(data, datatype, shape, where)
    if not isinstance(values, list) and values.dtype.kind == "f" and not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values.reshape(-1)))[0])
        raise FieldError(
            f"{where}: element {index} is {values.reshape(-1)[index]}, expected finite numbers.",
            field=f"{given.where}data",
        )
    return Tensor(name, datatype, shape, values)


def _shape(given: JsonObject, where: str) -> tuple[int, ...]:
    shape = given.need("shape", "a list of sizes")
    field = f"{given.where}shape"
    if type(shape) is not list:
        raise given.wrong("shape", "a list of sizes", shape)
    if len(shape) > _MOST_DIMS:
        raise FieldError(
            f"{where} has {len(shape)} dims, expected {_MOST_DIMS} at most.", field=field
        )
    for index, size in enumerate(shape):
        if type(size) is not int or not 0 <= size <= _MOST_ELEMENTS:
            expected = f"a whole number from 0 to {_MOST_ELEMENTS}"
            raise given.wrong(f"shape[{index}]", expected, size)
    count = math.prod(shape)
    if count > _MOST_ELEMENTS:
        raise FieldError(f"{where}: a shape of {count} elements is too large.", field=field)
    if count == 0:
        raise EmptyInputError(f"{where}: shape {shape} has no elements.", field=field)
    return tuple(shape)


def _from_bytes(
    data: memoryview, datatype: str, shape: tuple[int, ...], where: str
) -> NDArray[Any] | list[bytes]:
    count = math.prod(shape)
    if datatype == "BYTES":
        return _elements(data, count, shape, where)
    width = 2 if datatype == "BF16" else np.dtype(DATATYPES[datatype]).itemsize
    if len(data) != count * width:
        raise FieldError(
            f"{where}: found {len(data)} bytes, expected {count * width}: "
            f"shape {list(shape)} of {datatype}.",
            field="binary_data_size",
        )
    if datatype == "BF16":
        halves = np.frombuffer(data, "<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(shape)
    if datatype == "BOOL":
        return np.frombuffer(data, np.uint8).astype(bool).reshape(shape)
    dtype = np.dtype(DATATYPES[datatype])
    # A copy: aligned, and its own, where the body is freed.
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def _elements(data: memoryview, count: int, shape: Sequence[int], where: str) -> list[bytes]:
    items: list[bytes] = []
    at = 0
    while at < len(data):
        if len(data) - at < _LENGTH.size:
            raise FieldError(
                f"{where}: {len(data) - at} bytes are left where a length of four is expected.",
                field="binary_data_size",
            )
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise FieldError(
                f"{where}: element {len(items)} says {length} bytes, found {len(data) - at}.",
                field="binary_data_size",
            )
        items.append(bytes(data[at : at + length]))
        at += length
    _check_count(len(items), count, shape, where)
    return items


def _check_count(size: int, count: int, shape: Sequence[int], where: str) -> None:
    if size != count:
        raise FieldError(
            f"{where}: found {size} elements, expected {count}: shape {list(shape)}.",
            field="data",
        )


def _from_json(
    data: Any, datatype: str, shape: tuple[int, ...], where: str
) -> NDArray[Any] | list[bytes]:
    flat = _flattened(data, shape, where)
    _check_count(len(flat), math.prod(shape), shape, where)
    kinds = set(map(type, flat))
    if datatype == "BYTES":
        _check_kinds(kinds, {str}, "strings", flat, where)
        return [item.encode() for item in flat]
    if datatype == "BOOL":
        _check_kinds(kinds, {bool}, "true or false", flat, where)
        return np.array(flat, dtype=bool).reshape(shape)
    if datatype in ("FP16", "FP32", "FP64", "BF16"):
        _check_kinds(kinds, {int, float}, "numbers", flat, where)
        dtype = np.float32 if datatype == "BF16" else np.dtype(DATATYPES[datatype])
        with np.errstate(over="ignore"):  # found with the infinities
            values = np.array(flat, dtype=np.float64).astype(dtype).reshape(shape)
        if datatype != "BF16":
            return values
        rounded = Tensor("", "BF16", shape, values).raw()
        return _from_bytes(memoryview(rounded), "BF16", shape, where)
    _check_kinds(kinds, {int}, "whole numbers", flat, where)
    limits = np.iinfo(DATATYPES[datatype])
    if min(flat) < limits.min or max(flat) > limits.max:
        wrong = next(item for item in flat if not limits.min <= item <= limits.max)
        raise FieldError(
            f"{where}: found {wrong}, expected {limits.min} to {limits.max} for {datatype}.",
            field="data",
        )
    return np.array(flat, dtype=DATATYPES[datatype]).reshape(shape)


def _flattened(data: Any, shape: tuple[int, ...], where: str) -> list[Any]:
    """The elements of data that is flat or nested as the shape is; raises FieldError."""
    if type(data) is not list:
        raise FieldError(f"{where}: data is {found(data)}, expected a list.", field="data")
    if not data or type(data[0]) is not list:
        return data
    rows: list[Any] = [data]
    for size in shape:
        if not all(type(row) is list and len(row) == size for row in rows):
            raise FieldError(
                f"{where}: data is nested otherwise than shape {list(shape)} says.", field="data"
            )
        rows = list(itertools.chain.from_iterable(rows))
    return rows


def _check_kinds(
    kinds: set[type], allowed: set[type], expected: str, flat: Sequence[Any], where: str
) -> None:
    if kinds <= allowed:
        return
    index = next(i for i, item in enumerate(flat) if type(item) not in allowed)
    wrong = JsonObject({}).wrong(f"data[{index}]", expected, flat[index])
    raise FieldError(f"{where}: {wrong.message}", field="data")
