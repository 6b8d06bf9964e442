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
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.json_file import require_regular_file

MAX_FIELDS = 5_000_000
"""Largest number of protobuf fields in one file; a decoder of 10,000 nodes has 200,000."""
MAX_NODES = 1_000_000
"""Largest number of nodes and graphs; two bytes in a file become hundreds in memory."""
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
_STRUCT = {1: "f", 6: "i", 7: "q", 11: "d"}
"""TensorProto.DataType of sizes and scales -> format character of the module struct."""
_FLOATS, _INT32S, _INT64S, _DOUBLES, _UINT64S = 4, 5, 7, 10, 11
"""Field numbers of float_data, int32_data, int64_data, double_data and uint64_data."""

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
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Attribute] = field(default_factory=dict)


@dataclass(slots=True)
class Graph:
    """A graph, or the body of a function."""

    nodes: list[Node] = field(default_factory=list)
    initializers: list[Tensor] = field(default_factory=list)
    sparse: list[SparseTensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    """Tensor inputs with name, type and dims; a dynamic dim is -1."""


@dataclass
class ModelStructure:
    """The graph of a model and its local functions."""

    graph: Graph = field(default_factory=Graph)
    functions: list[Graph] = field(default_factory=list)
    opset: int = 0
    """The version of ONNX's own operators; 0 if the file does not say."""

    def op_types(self) -> Iterator[str]:
        """Yield the op types of ONNX's own domain in the graph, its subgraphs and functions."""
        graphs = [self.graph, *self.functions]
        while graphs:
            for node in graphs.pop().nodes:
                if not node.domain:
                    yield node.op_type
                for attribute in node.attributes.values():
                    graphs += attribute.graphs


RANDOM_OPS = frozenset(
    (
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
    )
)
_RANDOM_INPUT = "enginery.random"


def random_notes(op_types: Iterable[str], name: str) -> list[str]:
    """Return a note if a graph with these op types draws random numbers.

    Args:
        op_types: op types of ONNX's own domain.
        name: what the note calls the file.
    """
    ops = ", ".join(sorted(RANDOM_OPS.intersection(op_types)))
    note = f"{name} draws random numbers ({ops}), so its outputs differ from run to run"
    return [note] if ops else []


def random_input(index: int, distribution: str) -> str:
    """Return the name of a graph's input that takes the place of random numbers.

    Args:
        index: how many were drawn before.
        distribution: `normal` or `uniform`, both the standard one.
    """
    return f"{_RANDOM_INPUT}.{index}.{distribution}"


def is_random_input(name: str) -> bool:
    """Return True for a name that `random_input` returns."""
    return name.startswith(f"{_RANDOM_INPUT}.")


class _DamagedError(Exception):
    """The file is not valid protobuf; the message says where."""


def read_structure(path: Path, *, error: type[EngineryError] = ArtifactError) -> ModelStructure:
    """Read the nodes of a model, and names, types, dims and byte counts of its tensors.

    Raises:
        EngineryError: the file cannot be read, is damaged, or exceeds the limits above; the class
            is `error`.
    """
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            if not file.seek(0, 2):
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
        self.fields_left, self.nodes_left, self.parts_left = MAX_FIELDS, MAX_NODES, MAX_PARTS

    def model(self) -> ModelStructure:
        found = ModelStructure()
        has_graph = False
        for number, wire, low, high in self._fields(0, len(self.data)):
            if number == 7 and wire == 2:
                has_graph = True
                self._read_graph(found.graph, low, high, 1)
            elif number == 25 and wire == 2:
                found.functions.append(self._function(low, high))
            elif number == 8 and wire == 2:
                domain, version = self._opset(low, high)
                if domain in ("", "ai.onnx"):
                    found.opset = version
        if not has_graph:
            raise _DamagedError("it has no graph")
        return found

    def _fields(self, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (number, wire type, value or start, end) of each field."""
        at = low
        while at < high:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise _DamagedError(f"it has more than {MAX_FIELDS} fields")
            tag, at = self._varint(at, high)
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                value, at = self._varint(at, high)
                yield number, wire, value, at
                continue
            if wire == 2:
                length, at = self._varint(at, high)
            elif wire in (1, 5):
                length = 8 if wire == 1 else 4
            else:
                raise _DamagedError(f"byte {at} begins a field of the unknown kind {wire}")
            if number == 0:
                raise _DamagedError(f"byte {at} begins a field without a number")
            if length > high - at:
                raise _DamagedError(
                    f"byte {at} begins a field of {length} bytes, and {high - at} are left"
                )
            yield number, wire, at, at + length
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
        for number, wire, start, end in self._fields(low, high):
            if wire != 2:
                continue
            if number == 1:
                graph.nodes.append(self._node(start, end, depth))
            elif number == 5:
                graph.initializers.append(self._read_tensor(Tensor(), start, end))
            elif number == 11:
                if value := self._value_info(start, end):
                    graph.inputs.append(value)
            elif number == 15:
                graph.sparse.append(self._sparse(start, end))

    def _opset(self, low: int, high: int) -> tuple[str, int]:
        domain, version = "", 0
        for number, wire, start, end in self._fields(low, high):
            if number == 1 and wire == 2:
                domain = self._text(start, end)
            elif number == 2 and wire == 0:
                version = _signed(start)
        return domain, version

    def _function(self, low: int, high: int) -> Graph:
        self._count_node()
        body = Graph()
        for number, wire, start, end in self._fields(low, high):
            if number == 7 and wire == 2:
                body.nodes.append(self._node(start, end, 1))
        return body

    def _node(self, low: int, high: int, depth: int) -> Node:
        self._count_node()
        node = Node()
        for number, wire, start, end in self._fields(low, high):
            if wire != 2:
                continue
            if number == 1:
                node.inputs.append(self._text(start, end))
            elif number == 2:
                node.outputs.append(self._text(start, end))
            elif number == 3:
                node.name = self._text(start, end)
            elif number == 4:
                node.op_type = self._text(start, end)
            elif number == 5:
                name, attribute = self._attribute(start, end, depth)
                node.attributes[name] = attribute
            elif number == 7:
                node.domain = self._text(start, end)
        return node

    def _attribute(self, low: int, high: int, depth: int) -> tuple[str, Attribute]:
        self._count_part()
        name, found = "", Attribute()
        tensor: Tensor | None = None
        graph: Graph | None = None
        at = low
        while at < high:
            # A run is skipped at once, and only read if it is short.
            if run := _INTS_RUN.match(self.data, at, high):
                at = run.end()
                if len(found.ints) < _MAX_VALUES:
                    found.ints += self._ints(run.start(), at)
                continue
            if run := _FLOATS_RUN.match(self.data, at, high):
                at = run.end()
                if len(found.floats) < _MAX_VALUES:
                    found.floats += self._floats(run.start(), at)
                continue
            number, wire, start, end = next(self._fields(at, high))
            at = end
            if number == 1 and wire == 2:
                name = self._text(start, end)
            elif number == 3 and wire == 0:
                found.number = _signed(start)
            elif number == 5 and wire == 2:
                if tensor is None:
                    found.tensors.append(tensor := Tensor())
                self._read_tensor(tensor, start, end)
            elif number == 6 and wire == 2:
                if graph is None:
                    found.graphs.append(graph := Graph())
                self._read_graph(graph, start, end, depth + 1)
            elif number == 7 and wire == 2 and len(found.floats) < _MAX_VALUES:
                found.floats += self._packed("f", start, end)
            elif number == 8 and wire == 2 and len(found.ints) < _MAX_VALUES:
                found.ints += self._varints(start, end)
            elif number == 10 and wire == 2:
                found.tensors.append(self._read_tensor(Tensor(), start, end))
            elif number == 11 and wire == 2:
                found.graphs.append(inner := Graph())
                self._read_graph(inner, start, end, depth + 1)
            elif number in (22, 23) and wire == 2:
                found.sparse.append(self._sparse(start, end))
        return name, found

    def _ints(self, low: int, high: int) -> tuple[int, ...]:
        if high - low > 11 * _MAX_VALUES:
            return ()
        return tuple(_signed(value) for _, _, value, _ in self._fields(low, high))

    def _floats(self, low: int, high: int) -> tuple[float, ...]:
        if high - low > 5 * _MAX_VALUES:
            return ()
        spans = ((start, end) for _, _, start, end in self._fields(low, high))
        return tuple(struct.unpack("<f", self.data[start:end])[0] for start, end in spans)

    def _varints(self, low: int, high: int) -> tuple[int, ...]:
        """Return packed integers; an empty tuple if there are too many."""
        if high - low > 10 * _MAX_VALUES:
            return ()
        found = []
        while low < high:
            value, low = self._varint(low, high)
            found.append(_signed(value))
        return tuple(found)

    def _packed(self, kind: str, low: int, high: int) -> tuple[Any, ...]:
        """Return packed numbers of fixed size; an empty tuple if there are too many."""
        count, rest = divmod(high - low, struct.calcsize(f"<{kind}"))
        if rest or count > _MAX_VALUES:
            return ()
        return struct.unpack(f"<{count}{kind}", self.data[low:high])

    def _read_tensor(self, tensor: Tensor, low: int, high: int) -> Tensor:
        self._count_part()
        listed: list[Number] = []
        raw: Span | None = None
        is_external = False
        entries: dict[str, str] = {}
        for number, wire, start, end in self._fields(low, high):
            if number == 1 and wire in (0, 2):
                tensor.dims += [_signed(start)] if wire == 0 else self._varints(start, end)
                if len(tensor.dims) > _MAX_RANK:
                    raise _DamagedError(f"byte {low} begins a tensor of over {_MAX_RANK} dims")
            elif number == 2 and wire == 0:
                tensor.data_type = start
            elif number == 8 and wire == 2:
                tensor.name = self._text(start, end)
            elif number == 9 and wire == 2:
                raw, tensor.raw_bytes = (start, end), end - start
            elif (number, wire) in ((_FLOATS, 2), (_FLOATS, 5), (_DOUBLES, 2), (_DOUBLES, 1)):
                kind, wide = ("f", 4) if number == _FLOATS else ("d", 8)
                tensor.typed_elements += (end - start) // wide
                listed += self._packed(kind, start, end)
            elif number in (_INT32S, _INT64S, _UINT64S) and wire in (0, 2):
                # A number takes at least one byte and holds up to four small elements.
                tensor.typed_elements += 4 if wire == 0 else 4 * (end - start)
                listed += [_signed(start)] if wire == 0 else self._varints(start, end)
            elif number == 6 and wire == 2:
                tensor.typed_elements += 1
            elif number == 13 and wire == 2:
                key, value = self._entry(start, end)
                entries[key] = value
            elif number == 14 and wire == 0:
                is_external = start == 1
        if is_external:
            tensor.external = entries
        kind = _STRUCT.get(tensor.data_type, "")
        if kind and raw:
            tensor.values = self._packed(kind, *raw) or None
        elif kind and listed:
            tensor.values = tuple(listed)
        return tensor

    def _entry(self, low: int, high: int) -> tuple[str, str]:
        texts = {
            n: self._text(start, end)
            for n, wire, start, end in self._fields(low, high)
            if wire == 2
        }
        return texts.get(1, ""), texts.get(2, "")

    def _sparse(self, low: int, high: int) -> SparseTensor:
        values, dims = Tensor(), list[int]()
        for number, wire, start, end in self._fields(low, high):
            if number == 1 and wire == 2:
                self._read_tensor(values, start, end)
            elif number == 3 and wire in (0, 2):
                dims += [_signed(start)] if wire == 0 else self._varints(start, end)
                if len(dims) > _MAX_RANK:
                    raise _DamagedError(f"byte {low} begins a tensor of over {_MAX_RANK} dims")
        return SparseTensor(values.name, values.data_type, dims)

    def _value_info(self, low: int, high: int) -> Tensor | None:
        """Return a graph's input; None unless it is a tensor of known rank."""
        found = Tensor()
        has_shape = False
        for number, wire, start, end in self._fields(low, high):
            if number == 1 and wire == 2:
                found.name = self._text(start, end)
            elif number == 2 and wire == 2:
                for of_tensor in self._messages(start, end, 1):
                    for inner, kind, value, last in self._fields(*of_tensor):
                        if inner == 1 and kind == 0:
                            found.data_type = value
                        elif inner == 2 and kind == 2:
                            has_shape = True
                            found.dims += self._shape(value, last)
        return found if has_shape and len(found.dims) <= _MAX_RANK else None

    def _messages(self, low: int, high: int, number: int) -> Iterator[Span]:
        """Yield the spans of the messages in the field with this number."""
        for found, wire, start, end in self._fields(low, high):
            if found == number and wire == 2:
                yield start, end

    def _shape(self, low: int, high: int) -> list[int]:
        dims = []
        for number, wire, start, end in self._fields(low, high):
            if number == 1 and wire == 2:
                fixed = [
                    _signed(value)
                    for kind, wire2, value, _ in self._fields(start, end)
                    if kind == 1 and wire2 == 0
                ]
                dims.append(fixed[-1] if fixed else -1)
        return dims


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
