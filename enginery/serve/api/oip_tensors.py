r"""Convert tensors of the Open Inference Protocol from and to JSON, bytes, task inputs and results.

>>> InferTensor("text", "BYTES", (1,), [b"warm"]).raw()
b'\x04\x00\x00\x00warm'

Binary numbers are little-endian, in row-major order. An element of BYTES is its length in four
bytes, followed by its content. BF16 is the upper half of a float32. Sources: the protocol's "Tensor
Data" and Triton's extension_binary_data.md.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.errors import nearest
from enginery.core.shapes import TensorSpec
from enginery.runtime.tasks.results import VECTOR, output_tensors, result_tensors
from enginery.runtime.tasks.task import Modality, Task, describe_value
from enginery.serve.api.errors import empty_input, invalid_body, invalid_field
from enginery.serve.api.requests import RequestBody, StrictRequestBody, file_from_base64, quote

DATATYPES: dict[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
    "BYTES": "object",
}
"""The protocol's datatypes with numpy's dtypes."""
DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items()}

_MAX_DIMS = 8
_MAX_ELEMENTS = 2**31 - 1
_MAX_STRINGS = 65_536
"""Number of elements of a BYTES tensor; each becomes an object, while numbers share an array."""
_LENGTH = struct.Struct("<I")
_DATATYPE_OF_OUTPUT = {"float32": "FP32", "int64": "INT64", "string": "BYTES"}
# First bytes of PNG, JPEG, GIF, WebP, TIFF, BMP and AVIF files; of WAV, OGG, FLAC and MP3 files.
_FILE_STARTS = (
    *(b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"BM", b"\0\0\0"),
    *(b"RF64", b"OggS", b"fLaC", b"ID3", b"\xff"),
)


Datatype = Annotated[str, Field(json_schema_extra={"enum": list(DATATYPES)})]


class TensorParameters(StrictRequestBody):
    """Parameters of a tensor."""

    binary_data_size: Annotated[int, Field(ge=0)] | None = None


class RequestTensor(RequestBody):
    """A tensor of a request or response ($request_input and $response_output in the protocol)."""

    name: str
    datatype: Datatype
    shape: Annotated[
        list[Annotated[int, Field(ge=0, le=_MAX_ELEMENTS)]], Field(max_length=_MAX_DIMS)
    ]
    data: Any = None
    """A list; of numbers as long as their datatype says."""
    parameters: TensorParameters | None = None


@dataclass(frozen=True)
class InferTensor:
    """A named tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | list[bytes]
    """An array of `shape`; for BYTES a flat list of the elements; for BF16, which numpy lacks, an
    array of float32."""

    def raw(self) -> bytes:
        """Encode the elements as binary data."""
        if isinstance(self.values, list):
            return b"".join(_LENGTH.pack(len(item)) + item for item in self.values)
        values: NDArray[Any] = np.ascontiguousarray(self.values)
        if self.datatype == "BF16":
            bits = values.astype("<f4").view("<u4")
            # Round to nearest, ties to even.
            values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        return bytes(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())

    def plain(self) -> Any:
        """Return the elements as a flat list or array for JSON."""
        if isinstance(self.values, list):
            return [item.decode("utf-8", "replace") for item in self.values]
        flat = np.ascontiguousarray(self.values).reshape(-1)
        return flat.astype(np.float32) if flat.dtype == np.float16 else flat


class BinaryData:
    """The binary data after a request's JSON, which is read in pieces."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, size: int, name: str) -> memoryview:
        """Return the next `size` bytes; raise HTTPError if there are fewer."""
        piece = self._data[self._at : self._at + size]
        if len(piece) < size:
            raise invalid_body(
                f"{name}: binary_data_size is {size}, but {len(piece)} bytes are left of the body."
            )
        self._at += size
        return piece

    def end(self) -> None:
        """Raise HTTPError if bytes are left."""
        if unread := len(self._data) - self._at:
            raise invalid_body(f"{unread} bytes after the JSON belong to no input.")


def read_tensor(tensor: RequestTensor, tail: BinaryData, path: str) -> InferTensor:
    """Parse one input of a request.

    Args:
        tensor: the input.
        tail: the binary data after the JSON.
        path: path of the input for error messages, such as `inputs[0]`.

    Raises:
        HTTPError: the data do not match datatype and shape, or the binary data are too short.
    """
    datatype, shape, where = tensor.datatype, tuple(tensor.shape), f"input {quote(tensor.name)}"
    if datatype not in DATATYPES:
        raise invalid_field(
            f"{where}: unknown datatype {quote(datatype)}{nearest(datatype[:20], DATATYPES)}",
            field=f"{path}.datatype",
            do=f"Supported: {', '.join(DATATYPES)}.",
        )
    count, limit = math.prod(shape), _MAX_STRINGS if datatype == "BYTES" else _MAX_ELEMENTS
    if count > limit:
        raise invalid_field(
            f"{where}: found a shape of {count} elements, expected at most {limit}.",
            field=f"{path}.shape",
        )
    if count == 0:
        raise empty_input(f"{path}.shape", f"{where}: shape {tensor.shape} has no elements.")
    size = tensor.parameters.binary_data_size if tensor.parameters else None
    if size is not None and tensor.data is not None:
        raise invalid_field(
            f"{where} has data and binary_data_size, expected one of them.", field=f"{path}.data"
        )
    if size is not None:
        values = _from_bytes(tail.take(size, where), datatype, shape, where)
    else:
        values = _from_json(tensor.data, datatype, shape, where)
    if not isinstance(values, list) and values.dtype.kind == "f" and not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values.reshape(-1)))[0])
        raise invalid_field(
            f"{where}: element {index} is {values.reshape(-1)[index]}, expected finite numbers.",
            field=f"{path}.data",
        )
    return InferTensor(tensor.name, datatype, shape, values)


def _from_bytes(
    data: memoryview, datatype: str, shape: tuple[int, ...], where: str
) -> NDArray[Any] | list[bytes]:
    count = math.prod(shape)
    if datatype == "BYTES":
        return _elements(data, count, shape, where)
    width = 2 if datatype == "BF16" else np.dtype(DATATYPES[datatype]).itemsize
    if len(data) != count * width:
        raise invalid_field(
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
    # `astype` copies, so that the array is aligned and does not keep the body in memory.
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def _elements(data: memoryview, count: int, shape: Sequence[int], where: str) -> list[bytes]:
    items: list[bytes] = []
    at = 0
    while at < len(data):
        if len(items) == count:
            raise invalid_field(
                f"{where}: found {len(data) - at} bytes after {count} elements: "
                f"shape {list(shape)}.",
                field="data",
            )
        if len(data) - at < _LENGTH.size:
            raise invalid_field(
                f"{where}: found {len(data) - at} bytes at the end, expected the 4 bytes of a "
                "length.",
                field="binary_data_size",
            )
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise invalid_field(
                f"{where}: element {len(items)} declares {length} bytes, found {len(data) - at}.",
                field="binary_data_size",
            )
        items.append(bytes(data[at : at + length]))
        at += length
    _check_count(len(items), count, shape, where)
    return items


def _check_count(size: int, count: int, shape: Sequence[int], where: str) -> None:
    if size != count:
        raise invalid_field(
            f"{where}: found {size} element{'s' * (size != 1)}, expected {count}: "
            f"shape {list(shape)}.",
            field="data",
        )


def _from_json(
    data: Any, datatype: str, shape: tuple[int, ...], where: str
) -> NDArray[Any] | list[bytes]:
    if type(data) is list and data and type(data[0]) is not list:  # before it is looked at
        _check_count(len(data), math.prod(shape), shape, where)
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
        with np.errstate(over="ignore"):  # `read_tensor` rejects infinity
            values = np.array(flat, dtype=np.float64).astype(dtype).reshape(shape)
        if datatype != "BF16":
            return values
        rounded = InferTensor("", "BF16", shape, values).raw()
        return _from_bytes(memoryview(rounded), "BF16", shape, where)
    _check_kinds(kinds, {int}, "whole numbers", flat, where)
    limits = np.iinfo(DATATYPES[datatype])
    if min(flat) < limits.min or max(flat) > limits.max:
        outside = next(item for item in flat if not limits.min <= item <= limits.max)
        raise invalid_field(
            f"{where}: found {outside}, expected {limits.min} to {limits.max} for {datatype}.",
            field="data",
        )
    return np.array(flat, dtype=DATATYPES[datatype]).reshape(shape)


def _flattened(data: Any, shape: tuple[int, ...], where: str) -> list[Any]:
    """Flatten data that is nested according to the shape; return flat data unchanged."""
    if type(data) is not list:
        raise invalid_field(
            f"{where}: data is {describe_value(data)}, expected a list.", field="data"
        )
    if not data or type(data[0]) is not list:
        return data
    rows: list[Any] = [data]
    for size in shape:
        if not all(type(row) is list and len(row) == size for row in rows):
            raise invalid_field(
                f"{where}: the nesting of data does not match shape {list(shape)}.", field="data"
            )
        rows = list(itertools.chain.from_iterable(rows))
    return rows


def _check_kinds(
    kinds: set[type], allowed: set[type], expected: str, flat: Sequence[Any], where: str
) -> None:
    if kinds <= allowed:
        return
    index = next(i for i, item in enumerate(flat) if type(item) not in allowed)
    raise invalid_field(
        f"{where}: data[{index}]: found {describe_value(flat[index])}, expected {expected}.",
        field="data",
    )


# -- tensors of tasks ---------------------------------------------------------------------------


def task_metadata(task: Task | None, dim: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the metadata of a task's inputs and outputs; empty lists without a task.

    Args:
        task: the artifact's task.
        dim: the size of its vectors; 0 if unknown.
    """
    if task is None:
        return [], []
    inputs = [
        {
            "name": field.name,
            "datatype": "BYTES",
            "shape": [-1],
            "parameters": {"of": "task", "optional": field.optional},
        }
        for field in task.inputs
    ]
    outputs = []
    for tensor in output_tensors(task.result_type):
        size = (dim or -1) if tensor.name == VECTOR else -1
        outputs.append(
            {
                "name": tensor.name,
                "datatype": _DATATYPE_OF_OUTPUT[tensor.dtype],
                "shape": [-1] if tensor.rank == 1 else [-1, size],
                "parameters": {"of": "task"},
            }
        )
    return inputs, outputs


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    """Return the metadata of an input or output of the graph; -1 for a dynamic dim."""
    shape = [dim if isinstance(dim, int) else -1 for dim in spec.dims]
    datatype = DATATYPE_OF.get(spec.dtype, "BYTES")
    return {"name": spec.name, "datatype": datatype, "shape": shape, "parameters": {"of": "graph"}}


def inputs_from_tensors(
    tensors: Sequence[InferTensor], task: Task, graph: Sequence[TensorSpec]
) -> list[Any]:
    """Convert BYTES tensors to the inputs of a task.

    Args:
        tensors: the request's tensors, one per part of an input.
        task: the task.
        graph: the graph's inputs, for error messages.

    Raises:
        HTTPError: a tensor is missing, unknown, not a list of BYTES, or not UTF-8.
    """
    names = [field.name for field in task.inputs]
    columns: dict[str, list[Any]] = {}
    for tensor in tensors:
        if tensor.name not in names:
            graph_inputs = [spec.name for spec in graph]
            raise invalid_field(
                f"there is no input {quote(tensor.name)}"
                f"{nearest(tensor.name[:100], names + graph_inputs)}",
                field="inputs",
                do=f"Send {' and '.join(names)}, or the graph's inputs: {', '.join(graph_inputs)}.",
            )
        columns[tensor.name] = _column(tensor, task)
    for field in task.inputs:
        if field.name not in columns and not field.optional:
            raise invalid_field(f"input '{field.name}' is missing.", field="inputs")
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise invalid_field(f"inputs differ in length: {listed}.", field="inputs")
    if len(columns) == 1:
        return next(iter(columns.values()))
    return list(zip(*(columns[name] for name in names), strict=True))


def _column(tensor: InferTensor, task: Task) -> list[Any]:
    where = f"input '{tensor.name}'"
    if not isinstance(tensor.values, list):
        raise invalid_field(
            f"{where} has the datatype {tensor.datatype}, expected BYTES.", field="inputs"
        )
    if tensor.shape and len(tensor.values) != tensor.shape[0]:
        raise invalid_field(
            f"{where} has the shape {list(tensor.shape)}, expected [n] or [n, 1].", field="inputs"
        )
    if task.modality != "text":
        return [_file(item, f"{where}[{i}]", task.modality) for i, item in enumerate(tensor.values)]
    texts = []
    for index, item in enumerate(tensor.values):
        try:
            texts.append(item.decode())
        except UnicodeDecodeError as error:
            raise invalid_field(
                f"{where}[{index}] is not UTF-8: {error.reason} at byte {error.start}.",
                field="inputs",
            ) from None
    return texts


def _file(item: bytes, where: str, modality: Modality) -> bytes:
    """Return the content of an image or audio file, which in JSON is base64."""
    # "RIFF", "GIF8", "BM", "OggS" and others are valid base64, but no such file in base64 starts
    # with them.
    if item.startswith(_FILE_STARTS) or not item.isascii():
        return item
    return file_from_base64(item.decode("ascii"), where, modality)


def tensors_from_results(task: Task, results: Sequence[Any]) -> list[InferTensor]:
    """Convert the results of a task to tensors."""
    named = result_tensors(task.result_type, results)
    return [_tensor(name, array) for name, array in named.items()]


def _tensor(name: str, values: Any, dtype: str = "") -> InferTensor:
    """Return a tensor; `dtype` is that of the graph's output, which tells bfloat16."""
    array = np.asarray(values)
    if dtype == "bfloat16":
        return InferTensor(name, "BF16", array.shape, array.astype(np.float32))
    if array.dtype != object:
        return InferTensor(name, DATATYPE_OF[array.dtype.name], array.shape, array)
    items = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel()]
    return InferTensor(name, "BYTES", array.shape, items)


# -- tensors of the graph -----------------------------------------------------------------------


def feeds_from_tensors(
    tensors: Sequence[InferTensor], inputs: Sequence[TensorSpec]
) -> dict[str, NDArray[Any]]:
    """Convert a request's tensors to the feeds of a graph.

    Raises:
        HTTPError: an input is missing or unknown, or has the wrong datatype or shape.
    """
    specs = {spec.name: spec for spec in inputs}
    feeds: dict[str, NDArray[Any]] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in tensors:
        spec = specs.get(tensor.name)
        if spec is None:
            raise invalid_field(
                f"there is no input {quote(tensor.name)}{nearest(tensor.name[:100], specs)}",
                field="inputs",
                do=f"The graph takes: {'; '.join(map(str, specs.values()))}.",
            )
        feeds[spec.name] = _checked_values(tensor, spec)
        _check_dims(tensor, spec, sizes)
    if missing := [name for name in specs if name not in feeds]:
        raise invalid_field(
            f"input '{missing[0]}' is missing.",
            field="inputs",
            do=f"The graph takes: {'; '.join(map(str, specs.values()))}.",
        )
    return feeds


def _checked_values(tensor: InferTensor, spec: TensorSpec) -> NDArray[Any]:
    # BF16 converts to FP32 without loss.
    widens = tensor.datatype == "BF16" and spec.dtype in ("float32", "bfloat16")
    if isinstance(tensor.values, list) or (DATATYPES[tensor.datatype] != spec.dtype and not widens):
        raise invalid_field(
            f"input '{spec.name}' has the datatype {tensor.datatype}, "
            f"expected {DATATYPE_OF.get(spec.dtype, spec.dtype)}.",
            field="inputs",
        )
    return tensor.values


def _check_dims(tensor: InferTensor, spec: TensorSpec, sizes: dict[str, tuple[int, str]]) -> None:
    """Raise HTTPError if a fixed dim, or a named dim that several inputs share, differs."""
    expected = f"expected ({', '.join(map(str, spec.dims))})"
    where = f"input '{spec.name}' has the shape {list(tensor.shape)}"
    if len(tensor.shape) != len(spec.dims):
        raise invalid_field(f"{where}, {expected}.", field="inputs")
    for size, dim in zip(tensor.shape, spec.dims, strict=True):
        if isinstance(dim, int):
            if dim != size:
                raise invalid_field(f"{where}, {expected}.", field="inputs")
            continue
        first_size, first_name = sizes.setdefault(dim, (size, spec.name))
        if first_size != size:
            raise invalid_field(
                f"{where}: {dim} is {size}, but {first_size} in '{first_name}'.", field="inputs"
            )


def tensors_from_outputs(
    values: Mapping[str, NDArray[Any]], outputs: Sequence[TensorSpec]
) -> list[InferTensor]:
    """Convert the graph's outputs to tensors."""
    dtypes = {spec.name: spec.dtype for spec in outputs}
    return [_tensor(name, value, dtypes.get(name, "")) for name, value in values.items()]
