"""Read the structure of an ONNX file without its weights and without the package onnx.

>>> model = read_structure(artifact.model)
>>> "MatMul" in {node.op_type for node in model.graph.nodes}
True

Every load runs this, so the file is memory-mapped and the bytes of weights are skipped. The package
onnx would read and copy the whole file, and is not part of the bare install.

Field numbers: onnx.proto of ONNX 1.21. Wire format: protobuf's "Encoding" page. As in protobuf, a
repeated occurrence of a singular field is merged if it is a message; otherwise the last one counts.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.json_file import require_regular_file
from enginery.core.shapes import TensorSpec

MAX_FIELDS = 5_000_000
"""Largest number of protobuf fields in one file; a decoder of 10,000 nodes has 200,000."""
MAX_MESSAGES = 2_000_000
"""Largest number of nodes, tensors and other messages; two bytes in a file become hundreds in
memory."""
MAX_NODES = 1_000_000
"""Largest number of nodes after each call of a function is replaced by its body; thirty short
functions may have a billion."""
MAX_CALLS = 100
"""Deepest nesting of functions that call functions; readers of graphs follow them by recursion."""
MAX_DEPTH = 100
"""Deepest nesting of messages, as in protobuf; a graph in a graph takes three."""
MAX_VALUES = 256
"""Largest number of values that are read of a tensor or an attribute; shapes have fewer."""
_MAX_RANK = 64

_M = TypeVar("_M")

_TYPE_NAMES = (
    "float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64 "
    "complex64 complex128 bfloat16 float8e4m3fn float8e4m3fnuz float8e5m2 float8e5m2fnuz uint4 "
    "int4 float4e2m1 float8e8m0 uint2 int2 float6e2m3 float6e3m2"
)
ELEMENT_TYPES = dict(enumerate(_TYPE_NAMES.split(), start=1))
"""TensorProto.DataType -> name of the dtype; see `core.shapes.DTYPES`."""
BITS = {
    number: int(size[0])
    for number, name in ELEMENT_TYPES.items()
    if (size := re.findall(r"\d+", name.replace("bool", "bool8")))
}
"""TensorProto.DataType -> bits of one element; strings have no fixed size."""
_LISTS = {
    **dict.fromkeys((1, 14), "float_data"),
    **dict.fromkeys((11, 15), "double_data"),
    **dict.fromkeys((12, 13), "uint64_data"),
    7: "int64_data",
    8: "string_data",
}
"""TensorProto.DataType -> the list that a tensor of this type may have; else `int32_data`."""
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
"""Attributes of ONNX's operators that hold a TensorProto.DataType."""


def numpy_type(data_type: int) -> np.dtype[Any] | None:
    """Return numpy's dtype for a TensorProto.DataType; None if it has none."""
    try:
        return np.dtype(ELEMENT_TYPES[data_type])
    except (KeyError, TypeError):
        return None


class AttributeType(IntEnum):
    """The types of AttributeProto whose values are read."""

    INT = 2
    TENSOR = 4
    INTS = 7
    SPARSE_TENSOR = 11


class Raw(NamedTuple):
    """A field of bytes: its length, and the bytes if they are few."""

    length: int
    content: bytes | None


class Numbers(list[Any]):
    """The numbers of a repeated field; of more than `MAX_VALUES`, not all are here."""

    written = 0
    """Upper bound on how many the file has."""
    is_whole = True


@dataclass(slots=True)
class Entry:
    """A key and its value."""

    key: Annotated[str, 1] = ""
    value: Annotated[str, 2] = ""


@dataclass(slots=True)
class Tensor:
    """A stored tensor: its metadata and the number of bytes stored."""

    dims: Annotated[Numbers, {1: "varints"}] = field(default_factory=Numbers)
    data_type: Annotated[int, 2] = 0
    name: Annotated[str, 8] = ""
    raw: Annotated[Raw | None, 9] = None
    float_data: Annotated[Numbers | None, {4: "f"}] = None
    int32_data: Annotated[Numbers | None, {5: "varints"}] = None
    string_data: Annotated[Numbers | None, {6: "strings"}] = None
    int64_data: Annotated[Numbers | None, {7: "varints"}] = None
    double_data: Annotated[Numbers | None, {10: "d"}] = None
    uint64_data: Annotated[Numbers | None, {11: "varints"}] = None
    entries: Annotated[list[Entry], 13] = field(default_factory=list)
    location: Annotated[int, 14] = 0

    @property
    def listed(self) -> Numbers | None:
        """The list that holds the values of this type, if they are in no other place."""
        numbers: Numbers | None = getattr(self, _LISTS.get(self.data_type, "int32_data"))
        return numbers

    @property
    def external(self) -> dict[str, str] | None:
        """`location`, `offset` and `length` of external data; None without it."""
        return {entry.key: entry.value for entry in self.entries} if self.location == 1 else None

    @property
    def values(self) -> NDArray[Any] | None:
        """The values of a small tensor in one row; None for another."""
        try:
            dtype = numpy_type(self.data_type)
            if dtype is None or self.external is not None:
                return None
            if self.raw is not None:
                content = self.raw.content
                return None if content is None else np.frombuffer(content, dtype)
            # FP16 and complex numbers are listed in parts.
            if self.listed and self.listed.is_whole and dtype.char in "?bBhHiIlLqQfd":
                return np.array(self.listed).astype(dtype)
        except ValueError:  # half a number
            pass
        return None

    def complete(self) -> None:
        """Check what has been read."""
        _require_type(self.data_type, f"the tensor '{self.name}'")
        _require_rank(self.dims, self.name)


@dataclass(slots=True)
class SparseTensor:
    """A tensor stored as its nonzero values, which is dense once it is loaded."""

    stored: Annotated[Tensor, 1] = field(default_factory=Tensor)
    dims: Annotated[Numbers, {3: "varints"}] = field(default_factory=Numbers)

    def complete(self) -> None:
        """Check what has been read."""
        _require_rank(self.dims, self.stored.name)


@dataclass(slots=True)
class _Dim:
    size: Annotated[int, 1] = -1


@dataclass(slots=True)
class _Shape:
    dims: Annotated[list[_Dim], 1] = field(default_factory=list)


@dataclass(slots=True)
class _TensorType:
    element: Annotated[int, 1] = 0
    shape: Annotated[_Shape | None, 2] = None


@dataclass(slots=True)
class _Type:
    tensor: Annotated[_TensorType, 1] = field(default_factory=_TensorType)


@dataclass(slots=True)
class Value:
    """An input or output of a graph."""

    name: Annotated[str, 1] = ""
    type: Annotated[_Type, 2] = field(default_factory=_Type)
    data_type: int = 0
    """0 for one that is no tensor."""
    dims: list[int] = field(default_factory=list)
    """A dynamic dim is -1; an unknown rank has no dims."""
    has_rank: bool = False

    def complete(self) -> None:
        """Check what has been read."""
        self.data_type, shape = self.type.tensor.element, self.type.tensor.shape
        _require_type(self.data_type, f"the input or output '{self.name}'")
        self.has_rank = shape is not None and len(shape.dims) <= _MAX_RANK
        self.dims = [dim.size for dim in shape.dims] if shape and self.has_rank else []

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and dims; `?` stands for any dynamic dim."""
        dtype = ELEMENT_TYPES.get(self.data_type, f"type {self.data_type}")
        return TensorSpec(self.name, dtype, tuple(dim if dim >= 0 else "?" for dim in self.dims))


@dataclass(slots=True)
class Attribute:
    """One attribute of a node."""

    name: Annotated[str, 1] = ""
    number: Annotated[int | None, 3] = None
    tensor: Annotated[Tensor | None, 5] = None
    graph: Annotated[Graph | None, 6] = None
    floats: Annotated[Numbers | None, {7: "f"}] = None
    ints: Annotated[Numbers | None, {8: "varints"}] = None
    tensors: Annotated[list[Tensor], 10] = field(default_factory=list)
    graphs: Annotated[list[Graph], 11] = field(default_factory=list)
    type: Annotated[int, 20] = 0
    """An `AttributeType`, or another: which of these is the value."""
    sparse: Annotated[SparseTensor | None, 22] = None

    def complete(self) -> None:
        """Put a single graph among the graphs, and check what has been read."""
        if self.graph is not None:
            self.graphs.append(self.graph)
        if self.name in _TYPE_ATTRIBUTES and self.number:
            _require_type(self.number, f"the attribute {self.name} of a node")


@dataclass(slots=True)
class Node:
    """One node; its subgraphs are in its attributes."""

    inputs: Annotated[list[str], 1] = field(default_factory=list)
    outputs: Annotated[list[str], 2] = field(default_factory=list)
    name: Annotated[str, 3] = ""
    op_type: Annotated[str, 4] = ""
    listed: Annotated[list[Attribute], 5] = field(default_factory=list)
    domain: Annotated[str, 7] = ""
    overload: Annotated[str, 8] = ""
    attributes: dict[str, Attribute] = field(default_factory=dict)

    def complete(self) -> None:
        """Name the attributes."""
        self.attributes = {attribute.name: attribute for attribute in self.listed}

    @property
    def subgraphs(self) -> list[Graph]:
        """The graphs in all attributes."""
        return [graph for attribute in self.listed for graph in attribute.graphs]


@dataclass(slots=True)
class Graph:
    """A graph."""

    nodes: Annotated[list[Node], 1] = field(default_factory=list)
    initializers: Annotated[list[Tensor], 5] = field(default_factory=list)
    inputs: Annotated[list[Value], 11] = field(default_factory=list)
    outputs: Annotated[list[Value], 12] = field(default_factory=list)
    sparse: Annotated[list[SparseTensor], 15] = field(default_factory=list)

    @property
    def computed_inputs(self) -> list[Value]:
        """The tensor inputs of known rank to which no initializer gives a value."""
        stored = {tensor.name for tensor in self.initializers}
        stored |= {sparse.stored.name for sparse in self.sparse}
        return [value for value in self.inputs if value.has_rank and value.name not in stored]


@dataclass(slots=True)
class Function:
    """A local function: its body, and what nodes call it by."""

    name: Annotated[str, 1] = ""
    nodes: Annotated[list[Node], 7] = field(default_factory=list)
    domain: Annotated[str, 10] = ""
    overload: Annotated[str, 13] = ""


@dataclass(slots=True)
class _Opset:
    domain: Annotated[str, 1] = ""
    version: Annotated[int, 2] = 0


@dataclass(slots=True)
class ModelStructure:
    """The graph of a model and its local functions."""

    graph: Annotated[Graph, 7] = field(default_factory=Graph)
    opsets: Annotated[list[_Opset], 8] = field(default_factory=list)
    functions: Annotated[list[Function], 25] = field(default_factory=list)

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators; 0 if the file does not say."""
        versions = [opset.version for opset in self.opsets if opset.domain in ("", "ai.onnx")]
        return versions[-1] if versions else 0

    @property
    def graphs(self) -> list[Graph]:
        """The graph and the bodies of the functions."""
        return [self.graph, *(Graph(nodes=function.nodes) for function in self.functions)]

    def interface(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the specs of the inputs and outputs; `?` stands for any dynamic dim."""
        inputs = tuple(value.spec for value in self.graph.computed_inputs)
        return inputs, tuple(value.spec for value in self.graph.outputs)

    def external_files(self) -> set[str]:
        """Return the files with the graph's external data, relative to the graph's directory."""
        entries = (tensor.external or {} for tensor in self.graph.initializers)
        return {name for entry in entries if (name := entry.get("location"))}

    def op_types(self) -> Iterator[str]:
        """Yield the op types of ONNX's own domain in the graph, its subgraphs and functions."""
        for node in _all_nodes(*self.graphs):
            if not node.domain:
                yield node.op_type


def _all_nodes(*graphs: Graph) -> Iterator[Node]:
    """Yield the nodes of graphs and their subgraphs."""
    remaining = list(graphs)
    while remaining:
        for node in remaining.pop().nodes:
            yield node
            remaining += node.subgraphs


class _DamagedError(Exception):
    """The file is not valid protobuf; the message says where."""


def _require_type(number: int, subject: str) -> None:
    if number and number not in ELEMENT_TYPES:
        raise _DamagedError(f"{subject} has the element type {number}, which ONNX does not define")


def _require_rank(dims: Numbers, name: str) -> None:
    if len(dims) > _MAX_RANK or not dims.is_whole:
        raise _DamagedError(f"the tensor '{name}' has more than {_MAX_RANK} dims")


# Wire types, by protobuf's names: how the bytes of a field are to be read.
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5

_WIRES: dict[object, int] = {int: _VARINT, "varints": _VARINT, "f": _I32, "d": _I64}


class _Field(NamedTuple):
    """How a field is read: into which attribute, and as what."""

    name: str
    kind: Any
    """int, str, Raw, a message, or how repeated numbers are written: `varints`, or the letter of
    `struct` for one of them; `strings` are only counted."""
    is_list: bool


def _fields(message: type) -> dict[int, _Field]:
    """Return the fields that a class is annotated with, by their tags: number and wire type."""
    fields = dict[int, _Field]()
    for name, hint in get_type_hints(message, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        declared, numbers = get_args(hint)
        kind = next(iter(get_args(declared)), declared)  # of `list[Node]` and `Tensor | None`
        for number, written in (numbers if isinstance(numbers, dict) else {numbers: kind}).items():
            read = _Field(name, written, get_origin(declared) is list)
            if written is not int:  # numbers may be packed into a field of this wire type
                fields[number << 3 | _LEN] = read
            if written in _WIRES:
                fields[number << 3 | _WIRES[written]] = read
    return fields


_FIELDS: dict[type, dict[int, _Field]] = {
    message: _fields(message)
    for message in (
        *(ModelStructure, Graph, Function, Node, Attribute, Tensor, SparseTensor, Value),
        *(Entry, _Dim, _Opset, _Shape, _TensorType, _Type),
    )
}


def read_structure(path: Path, *, error: type[EngineryError] = ArtifactError) -> ModelStructure:
    """Read the nodes of a model, and names, types, dims and byte counts of its tensors.

    Raises:
        EngineryError: the file cannot be read, is damaged, or exceeds the limits above; the class
            is `error`.
    """
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise _DamagedError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).model()
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}.") from problem
    except _DamagedError as problem:
        raise error(
            f"{path} is not an ONNX model, or a damaged one: {problem}.",
            do="Export it again.",
        ) from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.fields_left, self.messages_left = MAX_FIELDS, MAX_MESSAGES

    def model(self) -> ModelStructure:
        model = self._read(ModelStructure(), 0, len(self.data), 1)
        if not model.graph.nodes and not model.graph.outputs:
            raise _DamagedError("it has no graph")
        if model.functions:
            _require_few_nodes(model)
        return model

    def _read(self, message: _M, low: int, high: int, depth: int) -> _M:
        """Read the fields of a message between two places; return the message."""
        self.messages_left -= 1
        if self.messages_left < 0:
            raise _DamagedError(f"it has more than {MAX_MESSAGES} nodes, tensors and other parts")
        if depth > MAX_DEPTH:
            raise _DamagedError(f"it is nested more than {MAX_DEPTH} deep")
        fields, end = _FIELDS[type(message)], low
        while end < high:
            low = end
            tag, start, end = self._field(low, high)
            if tag not in fields:
                continue
            name, kind, is_list = fields[tag]
            before = getattr(message, name)
            if is_list:
                before.append(self._value(kind, start, end, depth))
            elif isinstance(kind, str):
                if before is None:
                    setattr(message, name, before := Numbers())
                end = self._read_numbers(before, kind, low, high)
            elif kind in _FIELDS and before is not None:
                self._read(before, start, end, depth + 1)
            else:
                setattr(message, name, self._value(kind, start, end, depth))
        if isinstance(message, Tensor | SparseTensor | Value | Attribute | Node):
            message.complete()
        return message

    def _value(self, kind: Any, start: int, end: int, depth: int) -> Any:
        """Return the value of one field: a number, bytes, or a message."""
        if kind is str:
            # Only names; an invalid one just has to stay distinct.
            return self.data[start:end].decode("utf-8", "replace")
        if kind is int:
            return _signed(start)
        if kind is Raw:
            length = end - start
            return Raw(length, self.data[start:end] if length <= 8 * MAX_VALUES else None)
        return self._read(kind(), start, end, depth + 1)

    def _read_numbers(self, numbers: Numbers, kind: str, low: int, high: int) -> int:
        """Read a field of numbers, or a run of them with the same tag; return where it ends."""
        tag, start, end = self._field(low, high)
        skip = 0
        if tag & 7 != _LEN:
            # A run is skipped at once, and only read if it is short: decision trees have millions.
            run = _run(tag).match(self.data, low, high)
            if run is None:
                raise _DamagedError(f"byte {low} begins a field with a tag of too many bytes")
            skip, start, end = 1, low, run.end()
        if kind == "strings":
            numbers.written += 1
            numbers.is_whole = False
        elif kind == "varints":
            # A number takes at least one byte and holds up to four small elements.
            numbers.written += 4 * (end - start) // (1 + skip)
        else:
            numbers.written += (end - start) // (struct.calcsize(f"<{kind}") + skip)
        if max(len(numbers), (end - start) // 11) > MAX_VALUES:
            numbers.is_whole = False
        if not numbers.is_whole:
            return end
        if kind != "varints":
            layout = struct.Struct(f"<{'x' * skip}{kind}")
            if remainder := (end - start) % layout.size:
                raise _DamagedError(f"byte {start} begins a list with {remainder} bytes too many")
            numbers += [number for (number,) in layout.iter_unpack(self.data[start:end])]
            return end
        while start < end:
            value, start = self._varint(start + skip, end)
            numbers.append(_signed(value))
        return end

    def _field(self, at: int, high: int) -> tuple[int, int, int]:
        """Return a field's tag, the value of a varint or the start of its bytes, and its end."""
        self.fields_left -= 1
        if self.fields_left < 0:
            raise _DamagedError(f"it has more than {MAX_FIELDS} fields")
        tag, at = self._varint(at, high)
        if tag >> 3 == 0:
            raise _DamagedError(f"byte {at} begins a field without a number")
        wire = tag & 7
        if wire == _VARINT:
            return tag, *self._varint(at, high)
        if wire == _LEN:
            length, at = self._varint(at, high)
        elif wire in (_I64, _I32):
            length = 8 if wire == _I64 else 4
        else:
            raise _DamagedError(f"byte {at} begins a field of the unknown kind {wire}")
        if length > high - at:
            raise _DamagedError(
                f"byte {at} begins a field of {length} bytes, and {high - at} are left"
            )
        return tag, at, at + length

    def _varint(self, at: int, high: int) -> tuple[int, int]:
        """Return an unsigned integer and the offset of its end."""
        value = shift = 0
        while at < high:
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at
            shift += 7
            if shift > 63:
                raise _DamagedError(f"byte {at} is within a number of more than 10 bytes")
        raise _DamagedError(f"it ends within a number at byte {at}")


_PAYLOADS = {_VARINT: rb"[\x80-\xff]{0,9}+[\x00-\x7f]", _I64: rb".{8}", _I32: rb".{4}"}


@cache
def _run(tag: int) -> re.Pattern[bytes]:
    """Return the pattern of consecutive fields with this tag of one byte."""
    return re.compile(rb"(?:" + re.escape(bytes([tag])) + _PAYLOADS[tag & 7] + rb")++", re.DOTALL)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_FunctionId = tuple[str, str, str]


def _function_id(domain: str, name: str, overload: str) -> _FunctionId:
    return ("" if domain == "ai.onnx" else domain, name, overload)


def _require_few_nodes(model: ModelStructure) -> None:
    """Check how many nodes the graph has after each call of a function is replaced by its body.

    ONNX's checker, ONNX Runtime and TensorRT do that, however many nodes it gives.
    """
    calls: dict[_FunctionId, Counter[_FunctionId]] = {}
    for function in model.functions:
        key = _function_id(function.domain, function.name, function.overload)
        if key in calls:
            raise _DamagedError(f"it has two functions with the name {function.name!r}")
        calls[key] = _calls(Graph(nodes=function.nodes))
    sizes, depths = dict[_FunctionId, int](), dict[_FunctionId, int]()

    def expanded(inner: Counter[_FunctionId]) -> int:
        return sum(count * (1 + sizes.get(key, 0)) for key, count in inner.items())

    try:
        order = TopologicalSorter(
            {key: inner.keys() & calls.keys() for key, inner in calls.items()}
        )
        for key in order.static_order():
            sizes[key] = expanded(calls[key])
            depths[key] = 1 + max((depths.get(inner, 0) for inner in calls[key]), default=0)
    except CycleError as problem:
        names = " → ".join(name for _, name, _ in problem.args[1][:5])
        raise _DamagedError(f"its functions call each other in a circle: {names}") from None
    if (total := expanded(_calls(model.graph))) > MAX_NODES:
        raise _DamagedError(f"its functions expand to {total} nodes, expected at most {MAX_NODES}")
    if (deepest := max(depths.values())) > MAX_CALLS:
        raise _DamagedError(
            f"its functions call each other {deepest} deep, expected at most {MAX_CALLS}"
        )


def _calls(graph: Graph) -> Counter[_FunctionId]:
    """Return how many nodes of a graph and its subgraphs have each operator."""
    return Counter(
        _function_id(node.domain, node.op_type, node.overload) for node in _all_nodes(graph)
    )
