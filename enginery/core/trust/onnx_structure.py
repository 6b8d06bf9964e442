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
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.json_file import require_regular_file
from enginery.core.shapes import TensorSpec

MAX_FIELDS = 5_000_000
"""Largest number of protobuf fields in one file; a decoder of 10,000 nodes has 200,000."""
MAX_NODES = 1_000_000
"""Largest number of nodes and graphs, also after each call of a function is replaced by its body;
two bytes in a file become hundreds in memory, and thirty short functions a billion nodes."""
MAX_CALLS = 100
"""Deepest nesting of functions that call functions; readers of graphs follow them by recursion."""
MAX_PARTS = 2_000_000
"""Largest number of attributes and tensors."""
MAX_DEPTH = 33
"""Deepest nesting of graphs; protobuf allows 100 messages, three for each graph."""
_MAX_VALUES = 256
"""Largest number of values that are read of a tensor or an attribute; shapes have fewer."""

_MAX_RANK = 64

Span = tuple[int, int]
Number = int | float

BITS = {
    1: 32,
    2: 8,
    3: 8,
    4: 16,
    5: 16,
    6: 32,
    7: 64,
    9: 8,
    10: 16,
    11: 64,
    12: 32,
    13: 64,
    14: 64,
    15: 128,
    16: 16,
    17: 8,
    18: 8,
    19: 8,
    20: 8,
    21: 4,
    22: 4,
    23: 4,
    24: 8,
    25: 2,
    26: 2,
}
"""TensorProto.DataType -> bits of one element; strings (8) have no fixed size."""
ELEMENT_TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8e4m3fn",
    18: "float8e4m3fnuz",
    19: "float8e5m2",
    20: "float8e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float4e2m1",
    24: "float8e8m0",
    25: "uint2",
    26: "int2",
    27: "float6e2m3",
    28: "float6e3m2",
}
"""TensorProto.DataType -> name of the dtype; see `core.shapes.DTYPES`."""
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
"""Attributes of ONNX's operators that hold a TensorProto.DataType."""
_STRUCT = {1: "f", 6: "i", 7: "q", 11: "d"}
"""TensorProto.DataType of sizes and scales -> format character of the module struct."""

# Wire types, by protobuf's names: how the bytes of a field are to be read.
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5


def _tag(number: int, wire: int) -> int:
    """Return the tag that a field begins with: its number and its wire type."""
    return number << 3 | wire


def _repeated(number: int, wire: int) -> tuple[int, int]:
    """Return both tags of a repeated number: one field each, or all packed into one."""
    return _tag(number, wire), _tag(number, _LEN)


class _Field:
    """Tags of the fields that are read, by the message of onnx.proto that has them."""

    MODEL_GRAPH = _tag(7, _LEN)
    MODEL_OPSET_IMPORT = _tag(8, _LEN)
    MODEL_FUNCTIONS = _tag(25, _LEN)

    OPSET_DOMAIN = _tag(1, _LEN)
    OPSET_VERSION = _tag(2, _VARINT)

    FUNCTION_NAME = _tag(1, _LEN)
    FUNCTION_NODE = _tag(7, _LEN)
    FUNCTION_DOMAIN = _tag(10, _LEN)
    FUNCTION_OVERLOAD = _tag(13, _LEN)

    GRAPH_NODE = _tag(1, _LEN)
    GRAPH_INITIALIZER = _tag(5, _LEN)
    GRAPH_INPUT = _tag(11, _LEN)
    GRAPH_OUTPUT = _tag(12, _LEN)
    GRAPH_SPARSE_INITIALIZER = _tag(15, _LEN)

    NODE_INPUT = _tag(1, _LEN)
    NODE_OUTPUT = _tag(2, _LEN)
    NODE_NAME = _tag(3, _LEN)
    NODE_OP_TYPE = _tag(4, _LEN)
    NODE_ATTRIBUTE = _tag(5, _LEN)
    NODE_DOMAIN = _tag(7, _LEN)
    NODE_OVERLOAD = _tag(8, _LEN)

    ATTRIBUTE_NAME = _tag(1, _LEN)
    ATTRIBUTE_I = _tag(3, _VARINT)
    ATTRIBUTE_T = _tag(5, _LEN)
    ATTRIBUTE_G = _tag(6, _LEN)
    ATTRIBUTE_FLOATS = _tag(7, _LEN)
    ATTRIBUTE_INTS = _tag(8, _LEN)
    ATTRIBUTE_TENSORS = _tag(10, _LEN)
    ATTRIBUTE_GRAPHS = _tag(11, _LEN)
    ATTRIBUTE_SPARSE = (_tag(22, _LEN), _tag(23, _LEN))  # sparse_tensor, sparse_tensors

    TENSOR_DIMS = _repeated(1, _VARINT)
    TENSOR_DATA_TYPE = _tag(2, _VARINT)
    TENSOR_FLOAT_DATA = _repeated(4, _I32)
    TENSOR_STRING_DATA = _tag(6, _LEN)
    TENSOR_NAME = _tag(8, _LEN)
    TENSOR_RAW_DATA = _tag(9, _LEN)
    TENSOR_DOUBLE_DATA = _repeated(10, _I64)
    # int32_data, int64_data and uint64_data
    TENSOR_INTEGER_DATA = (*_repeated(5, _VARINT), *_repeated(7, _VARINT), *_repeated(11, _VARINT))
    TENSOR_EXTERNAL_DATA = _tag(13, _LEN)
    TENSOR_DATA_LOCATION = _tag(14, _VARINT)

    SPARSE_TENSOR_VALUES = _tag(1, _LEN)
    SPARSE_TENSOR_DIMS = _repeated(3, _VARINT)

    ENTRY_KEY = _tag(1, _LEN)
    ENTRY_VALUE = _tag(2, _LEN)

    VALUE_INFO_NAME = _tag(1, _LEN)
    VALUE_INFO_TYPE = _tag(2, _LEN)
    TYPE_TENSOR_TYPE = _tag(1, _LEN)
    TENSOR_TYPE_ELEM_TYPE = _tag(1, _VARINT)
    TENSOR_TYPE_SHAPE = _tag(2, _LEN)
    SHAPE_DIM = _tag(1, _LEN)
    DIM_VALUE = _tag(1, _VARINT)


# Consecutive ints or floats of an attribute, one field each; decision trees have millions of them.
_INTS_RUN = re.compile(rb"(?:\x40[\x80-\xff]{0,9}+[\x00-\x7f])++")
_FLOATS_RUN = re.compile(rb"(?:\x3d.{4})++", re.DOTALL)


@dataclass(slots=True)
class Tensor:
    """A stored tensor: its metadata and the number of bytes stored."""

    name: str = ""
    dims: list[int] = field(default_factory=list)
    data_type: int = 0
    values: tuple[Number, ...] | None = None
    """Values of a small tensor of sizes or scales; None for other tensors."""
    raw_bytes: int | None = None
    """Length of `raw_data`; None without it."""
    typed_elements: int = 0
    """Upper bound on the number of elements in `float_data`, `int32_data` and the like."""
    external: dict[str, str] | None = None
    """`location`, `offset` and `length` of external data; None without it."""


@dataclass(slots=True)
class SparseTensor:
    """A tensor stored as its nonzero values, which is dense once it is loaded."""

    name: str
    data_type: int
    dims: list[int]


@dataclass(slots=True)
class Attribute:
    """One attribute of a node."""

    number: int | None = None
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    tensors: list[Tensor] = field(default_factory=list)
    sparse: list[SparseTensor] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)


@dataclass(slots=True)
class Node:
    """One node; its subgraphs are in its attributes."""

    name: str = ""
    op_type: str = ""
    domain: str = ""
    overload: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Attribute] = field(default_factory=dict)


@dataclass(slots=True)
class Graph:
    """A graph."""

    nodes: list[Node] = field(default_factory=list)
    initializers: list[Tensor] = field(default_factory=list)
    sparse: list[SparseTensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    """Tensor inputs with name, type and dims; a dynamic dim is -1."""
    outputs: list[Tensor] = field(default_factory=list)
    """Outputs in the same form; one of unknown rank has no dims, one that is no tensor no type."""


@dataclass(slots=True)
class Function(Graph):
    """A local function: its body, and what nodes call it by."""

    domain: str = ""
    name: str = ""
    overload: str = ""


@dataclass
class ModelStructure:
    """The graph of a model and its local functions."""

    graph: Graph = field(default_factory=Graph)
    functions: list[Function] = field(default_factory=list)
    opset: int = 0
    """The version of ONNX's own operators; 0 if the file does not say."""

    def interface(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the specs of the inputs and outputs; `?` stands for any dynamic dim."""
        stored = {tensor.name for tensor in self.graph.initializers}
        stored |= {tensor.name for tensor in self.graph.sparse}
        inputs = [value for value in self.graph.inputs if value.name not in stored]
        return tuple(map(_spec, inputs)), tuple(map(_spec, self.graph.outputs))

    def external_files(self) -> set[str]:
        """Return the files with the graph's external data, relative to the graph's directory."""
        entries = (tensor.external or {} for tensor in self.graph.initializers)
        return {name for entry in entries if (name := entry.get("location"))}

    def op_types(self) -> Iterator[str]:
        """Yield the op types of ONNX's own domain in the graph, its subgraphs and functions."""
        graphs: list[Graph] = [self.graph, *self.functions]
        while graphs:
            for node in graphs.pop().nodes:
                if not node.domain:
                    yield node.op_type
                for attribute in node.attributes.values():
                    graphs += attribute.graphs


def _spec(value: Tensor) -> TensorSpec:
    dtype = ELEMENT_TYPES.get(value.data_type, f"type {value.data_type}")
    return TensorSpec(value.name, dtype, tuple(dim if dim >= 0 else "?" for dim in value.dims))


class _DamagedError(Exception):
    """The file is not valid protobuf; the message says where."""


_Kept = dict[Path, tuple[object, ModelStructure]]
"""Path of a file -> its state when it was read, and its structure."""
_kept: ContextVar[_Kept | None] = ContextVar("kept structures", default=None)


@contextmanager
def keeping_structures() -> Iterator[None]:
    """Read each file once in the block, and again only if it was changed or replaced.

    Sessions check their graph each time that one is opened. Callers share a structure, which none
    of them may change.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def read_structure(path: Path, *, error: type[EngineryError] = ArtifactError) -> ModelStructure:
    """Read the nodes of a model, and names, types, dims and byte counts of its tensors.

    Raises:
        EngineryError: the file cannot be read, is damaged, or exceeds the limits above; the class
            is `error`.
    """
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            status, kept = os.fstat(file.fileno()), _kept.get()
            state = status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns
            if kept is not None and path in kept and kept[path][0] == state:
                return kept[path][1]
            if not status.st_size:
                raise _DamagedError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                structure = _Reader(data).model()
            if kept is not None:
                kept[path] = state, structure
            return structure
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
        self.fields_left, self.nodes_left, self.parts_left = MAX_FIELDS, MAX_NODES, MAX_PARTS

    def model(self) -> ModelStructure:
        model = ModelStructure()
        has_graph = False
        for tag, start, end in self._fields(0, len(self.data)):
            if tag == _Field.MODEL_GRAPH:
                has_graph = True
                self._read_graph(model.graph, start, end, 1)
            elif tag == _Field.MODEL_FUNCTIONS:
                model.functions.append(self._function(start, end))
            elif tag == _Field.MODEL_OPSET_IMPORT:
                domain, version = self._opset(start, end)
                if domain in ("", "ai.onnx"):
                    model.opset = version
        if not has_graph:
            raise _DamagedError("it has no graph")
        if model.functions:
            _require_few_nodes(model)
        return model

    def _fields(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield (tag, value of a varint or start of the bytes, end) of each field."""
        at = low
        while at < high:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise _DamagedError(f"it has more than {MAX_FIELDS} fields")
            tag, at = self._varint(at, high)
            wire = tag & 7
            if wire == _VARINT:
                value, at = self._varint(at, high)
                yield tag, value, at
                continue
            if wire == _LEN:
                length, at = self._varint(at, high)
            elif wire in (_I64, _I32):
                length = 8 if wire == _I64 else 4
            else:
                raise _DamagedError(f"byte {at} begins a field of the unknown kind {wire}")
            if tag >> 3 == 0:
                raise _DamagedError(f"byte {at} begins a field without a number")
            if length > high - at:
                raise _DamagedError(
                    f"byte {at} begins a field of {length} bytes, and {high - at} are left"
                )
            yield tag, at, at + length
            at += length

    def _count_node(self) -> None:
        self.nodes_left -= 1
        if self.nodes_left < 0:
            raise _DamagedError(f"it has more than {MAX_NODES} nodes and graphs")

    def _count_part(self) -> None:
        self.parts_left -= 1
        if self.parts_left < 0:
            raise _DamagedError(f"it has more than {MAX_PARTS} attributes and tensors")

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

    def _text(self, low: int, high: int) -> str:
        # Only names; an invalid name just has to stay distinct.
        return self.data[low:high].decode("utf-8", "replace")

    def _read_graph(self, graph: Graph, low: int, high: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _DamagedError(f"graphs are nested more than {MAX_DEPTH} deep")
        self._count_node()
        for tag, start, end in self._fields(low, high):
            if tag == _Field.GRAPH_NODE:
                graph.nodes.append(self._node(start, end, depth))
            elif tag == _Field.GRAPH_INITIALIZER:
                graph.initializers.append(self._read_tensor(Tensor(), start, end))
            elif tag == _Field.GRAPH_INPUT:
                value, has_rank = self._value_info(start, end)
                if has_rank:
                    graph.inputs.append(value)
            elif tag == _Field.GRAPH_OUTPUT:
                graph.outputs.append(self._value_info(start, end)[0])
            elif tag == _Field.GRAPH_SPARSE_INITIALIZER:
                graph.sparse.append(self._sparse(start, end))

    def _opset(self, low: int, high: int) -> tuple[str, int]:
        domain, version = "", 0
        for tag, start, end in self._fields(low, high):
            if tag == _Field.OPSET_DOMAIN:
                domain = self._text(start, end)
            elif tag == _Field.OPSET_VERSION:
                version = _signed(start)
        return domain, version

    def _function(self, low: int, high: int) -> Function:
        self._count_node()
        function = Function()
        for tag, start, end in self._fields(low, high):
            if tag == _Field.FUNCTION_NODE:
                function.nodes.append(self._node(start, end, 1))
            elif tag == _Field.FUNCTION_NAME:
                function.name = self._text(start, end)
            elif tag == _Field.FUNCTION_DOMAIN:
                function.domain = self._text(start, end)
            elif tag == _Field.FUNCTION_OVERLOAD:
                function.overload = self._text(start, end)
        return function

    def _node(self, low: int, high: int, depth: int) -> Node:
        self._count_node()
        node = Node()
        for tag, start, end in self._fields(low, high):
            if tag == _Field.NODE_INPUT:
                node.inputs.append(self._text(start, end))
            elif tag == _Field.NODE_OUTPUT:
                node.outputs.append(self._text(start, end))
            elif tag == _Field.NODE_NAME:
                node.name = self._text(start, end)
            elif tag == _Field.NODE_OP_TYPE:
                node.op_type = self._text(start, end)
            elif tag == _Field.NODE_ATTRIBUTE:
                name, attribute = self._attribute(start, end, depth)
                node.attributes[name] = attribute
                if name in _TYPE_ATTRIBUTES and attribute.number:
                    self._require_type(attribute.number, f"the attribute {name} of a node")
            elif tag == _Field.NODE_DOMAIN:
                node.domain = self._text(start, end)
            elif tag == _Field.NODE_OVERLOAD:
                node.overload = self._text(start, end)
        return node

    def _attribute(self, low: int, high: int, depth: int) -> tuple[str, Attribute]:
        self._count_part()
        name, attribute = "", Attribute()
        tensor: Tensor | None = None
        graph: Graph | None = None
        at = low
        while at < high:
            # A run is skipped at once, and only read if it is short.
            if run := _INTS_RUN.match(self.data, at, high):
                at = run.end()
                if len(attribute.ints) < _MAX_VALUES:
                    attribute.ints += self._ints(run.start(), at)
                continue
            if run := _FLOATS_RUN.match(self.data, at, high):
                at = run.end()
                if len(attribute.floats) < _MAX_VALUES:
                    attribute.floats += self._floats(run.start(), at)
                continue
            tag, start, end = next(self._fields(at, high))
            at = end
            if tag == _Field.ATTRIBUTE_NAME:
                name = self._text(start, end)
            elif tag == _Field.ATTRIBUTE_I:
                attribute.number = _signed(start)
            elif tag == _Field.ATTRIBUTE_T:
                if tensor is None:
                    attribute.tensors.append(tensor := Tensor())
                self._read_tensor(tensor, start, end)
            elif tag == _Field.ATTRIBUTE_G:
                if graph is None:
                    attribute.graphs.append(graph := Graph())
                self._read_graph(graph, start, end, depth + 1)
            elif tag == _Field.ATTRIBUTE_FLOATS and len(attribute.floats) < _MAX_VALUES:
                attribute.floats += self._packed("f", start, end)
            elif tag == _Field.ATTRIBUTE_INTS and len(attribute.ints) < _MAX_VALUES:
                attribute.ints += self._varints(start, end)
            elif tag == _Field.ATTRIBUTE_TENSORS:
                attribute.tensors.append(self._read_tensor(Tensor(), start, end))
            elif tag == _Field.ATTRIBUTE_GRAPHS:
                attribute.graphs.append(inner := Graph())
                self._read_graph(inner, start, end, depth + 1)
            elif tag in _Field.ATTRIBUTE_SPARSE:
                attribute.sparse.append(self._sparse(start, end))
        return name, attribute

    def _ints(self, low: int, high: int) -> tuple[int, ...]:
        if high - low > 11 * _MAX_VALUES:
            return ()
        return tuple(_signed(value) for _, value, _ in self._fields(low, high))

    def _floats(self, low: int, high: int) -> tuple[float, ...]:
        if high - low > 5 * _MAX_VALUES:
            return ()
        spans = ((start, end) for _, start, end in self._fields(low, high))
        return tuple(struct.unpack("<f", self.data[start:end])[0] for start, end in spans)

    def _varints(self, low: int, high: int) -> tuple[int, ...]:
        """Return packed integers; an empty tuple if there are too many."""
        if high - low > 10 * _MAX_VALUES:
            return ()
        values = []
        while low < high:
            value, low = self._varint(low, high)
            values.append(_signed(value))
        return tuple(values)

    def _integers(self, tag: int, start: int, end: int) -> tuple[int, ...]:
        """Return the integers of one field of a repeated one."""
        return (_signed(start),) if tag & 7 == _VARINT else self._varints(start, end)

    def _packed(self, code: str, low: int, high: int) -> tuple[Any, ...]:
        """Return packed numbers of fixed size; an empty tuple if there are too many."""
        count, remainder = divmod(high - low, struct.calcsize(f"<{code}"))
        if remainder or count > _MAX_VALUES:
            return ()
        return struct.unpack(f"<{count}{code}", self.data[low:high])

    def _read_tensor(self, tensor: Tensor, low: int, high: int) -> Tensor:
        self._count_part()
        listed: list[Number] = []
        raw: Span | None = None
        is_external = False
        entries: dict[str, str] = {}
        for tag, start, end in self._fields(low, high):
            if tag in _Field.TENSOR_DIMS:
                tensor.dims += self._integers(tag, start, end)
                if len(tensor.dims) > _MAX_RANK:
                    raise _DamagedError(f"byte {low} begins a tensor of over {_MAX_RANK} dims")
            elif tag == _Field.TENSOR_DATA_TYPE:
                tensor.data_type = start
            elif tag == _Field.TENSOR_NAME:
                tensor.name = self._text(start, end)
            elif tag == _Field.TENSOR_RAW_DATA:
                raw, tensor.raw_bytes = (start, end), end - start
            elif tag in _Field.TENSOR_FLOAT_DATA:
                tensor.typed_elements += (end - start) // 4
                listed += self._packed("f", start, end)
            elif tag in _Field.TENSOR_DOUBLE_DATA:
                tensor.typed_elements += (end - start) // 8
                listed += self._packed("d", start, end)
            elif tag in _Field.TENSOR_INTEGER_DATA:
                # A number takes at least one byte and holds up to four small elements.
                tensor.typed_elements += 4 if tag & 7 == _VARINT else 4 * (end - start)
                listed += self._integers(tag, start, end)
            elif tag == _Field.TENSOR_STRING_DATA:
                tensor.typed_elements += 1
            elif tag == _Field.TENSOR_EXTERNAL_DATA:
                key, value = self._entry(start, end)
                entries[key] = value
            elif tag == _Field.TENSOR_DATA_LOCATION:
                is_external = start == 1
        self._require_type(tensor.data_type, f"the tensor '{tensor.name}'")
        if is_external:
            tensor.external = entries
        code = _STRUCT.get(tensor.data_type, "")
        if code and raw:
            tensor.values = self._packed(code, *raw) or None
        elif code and listed:
            tensor.values = tuple(listed)
        return tensor

    def _require_type(self, number: int, what: str) -> None:
        if number and number not in ELEMENT_TYPES:
            raise _DamagedError(f"{what} has the element type {number}, which ONNX does not define")

    def _entry(self, low: int, high: int) -> tuple[str, str]:
        key = value = ""
        for tag, start, end in self._fields(low, high):
            if tag == _Field.ENTRY_KEY:
                key = self._text(start, end)
            elif tag == _Field.ENTRY_VALUE:
                value = self._text(start, end)
        return key, value

    def _sparse(self, low: int, high: int) -> SparseTensor:
        values, dims = Tensor(), list[int]()
        for tag, start, end in self._fields(low, high):
            if tag == _Field.SPARSE_TENSOR_VALUES:
                self._read_tensor(values, start, end)
            elif tag in _Field.SPARSE_TENSOR_DIMS:
                dims += self._integers(tag, start, end)
                if len(dims) > _MAX_RANK:
                    raise _DamagedError(f"byte {low} begins a tensor of over {_MAX_RANK} dims")
        return SparseTensor(values.name, values.data_type, dims)

    def _value_info(self, low: int, high: int) -> tuple[Tensor, bool]:
        """Return an input or output of a graph, and whether it is a tensor of known rank."""
        tensor = Tensor()
        has_shape = False
        for tag, start, end in self._fields(low, high):
            if tag == _Field.VALUE_INFO_NAME:
                tensor.name = self._text(start, end)
            elif tag == _Field.VALUE_INFO_TYPE:
                for span in self._messages(start, end, _Field.TYPE_TENSOR_TYPE):
                    has_shape |= self._read_tensor_type(tensor, *span)
        self._require_type(tensor.data_type, f"the input or output '{tensor.name}'")
        if len(tensor.dims) > _MAX_RANK:
            tensor.dims, has_shape = [], False
        return tensor, has_shape

    def _read_tensor_type(self, tensor: Tensor, low: int, high: int) -> bool:
        """Read data type and dims of a tensor; return True if it has a shape."""
        has_shape = False
        for tag, start, end in self._fields(low, high):
            if tag == _Field.TENSOR_TYPE_ELEM_TYPE:
                tensor.data_type = start
            elif tag == _Field.TENSOR_TYPE_SHAPE:
                has_shape = True
                tensor.dims += self._shape(start, end)
        return has_shape

    def _messages(self, low: int, high: int, tag: int) -> Iterator[Span]:
        """Yield the spans of the messages in the field with this tag."""
        for field_tag, start, end in self._fields(low, high):
            if field_tag == tag:
                yield start, end

    def _shape(self, low: int, high: int) -> list[int]:
        dims = []
        for span in self._messages(low, high, _Field.SHAPE_DIM):
            size = -1
            for tag, value, _ in self._fields(*span):
                if tag == _Field.DIM_VALUE:
                    size = _signed(value)
            dims.append(size)
        return dims


_FunctionId = tuple[str, str, str]


def _function_id(domain: str, name: str, overload: str) -> _FunctionId:
    return ("" if domain == "ai.onnx" else domain, name, overload)


def _require_few_nodes(model: ModelStructure) -> None:
    """Check how many nodes the graph has after each call of a function is replaced by its body.

    ONNX's checker, ONNX Runtime and TensorRT do that, however many nodes it gives.
    """
    functions: dict[_FunctionId, Function] = {}
    for function in model.functions:
        key = _function_id(function.domain, function.name, function.overload)
        if key in functions:
            raise _DamagedError(f"it has two functions with the name {function.name!r}")
        functions[key] = function
    calls = {key: _calls(function) for key, function in functions.items()}
    order = TopologicalSorter(
        {key: inner.keys() & functions.keys() for key, inner in calls.items()}
    )
    nodes, depths = dict[_FunctionId, int](), dict[_FunctionId, int]()

    def expanded(inner: dict[_FunctionId, int]) -> int:
        return sum(count * (1 + nodes.get(key, 0)) for key, count in inner.items())

    try:
        for key in order.static_order():
            nodes[key] = expanded(calls[key])
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


def _calls(top: Graph) -> dict[_FunctionId, int]:
    """Return how many nodes of a graph and its subgraphs have each operator."""
    counts: dict[_FunctionId, int] = {}
    graphs = [top]
    while graphs:
        for node in graphs.pop().nodes:
            key = _function_id(node.domain, node.op_type, node.overload)
            counts[key] = counts.get(key, 0) + 1
            for attribute in node.attributes.values():
                graphs += attribute.graphs
    return counts


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
