"""Check the memory that a graph would allocate, before ONNX Runtime loads it.

>>> check_allocations(artifact.model)

ONNX Runtime computes constants while it loads a graph, and a ConstantOfShape node can turn a shape
of eight bytes into gigabytes. So this follows the sizes in the file through stored tensors,
`Constant` nodes and the operators with which exporters compute shapes (`_RULES`). Sizes that depend
on inputs, on other operators or on the arguments of a local function are not checked here; ONNX
Runtime itself limits constant folding to 1 GiB per node.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.trust.onnx_structure import (
    BITS,
    Attribute,
    Graph,
    Node,
    Number,
    SparseTensor,
    Tensor,
    read_structure,
)

MAX_CONSTANT_BYTES = 2**30
"""Largest tensor that a graph computes from constants. Source: ONNX Runtime's limit for constant
folding, kDefaultConstantFoldingMaxOutputSizeInBytes in core/optimizer/constant_folding.cc."""
MAX_CONSTANTS_BYTES = 4 * MAX_CONSTANT_BYTES
"""Largest sum of all such tensors."""
_MAX_ELEMENTS = 2**63 - 1
_MAX_KNOWN = 256
"""Largest number of values that are followed from node to node."""
_FLOAT, _INT64 = 1, 7
_DO = "The export is faulty or malicious: check that node and export the model again."


@dataclass(frozen=True)
class _Known:
    """Properties of a tensor that are known before a run."""

    data_type: int = 0
    dims: tuple[int, ...] | None = None
    """None if a size depends on the inputs."""
    values: tuple[Number, ...] | None = None
    """Values, if they are few and constant."""
    constant: bool = False
    least: int = 0
    """Lower bound on the number of elements, if the dims are unknown."""

    @property
    def elements(self) -> int:
        return math.prod(self.dims) if self.dims is not None else self.least


_UNKNOWN = _Known()


def check_allocations(
    path: Path,
    *,
    record: GraphRecord | None = None,
    error: type[EngineryError] = ArtifactError,
) -> None:
    """Check that a graph has no tensor of an impossible or excessive size.

    A computed constant may have 1 GiB, and all of them 4 GiB. Other tensors of fixed size may be as
    large as the machine's memory. A stored tensor must have the bytes that its shape needs.

    Args:
        path: path of an ONNX file.
        record: record of an artifact's graph, whose data must be in the listed files; None without
            a manifest.
        error: class of the error to raise.

    Raises:
        EngineryError: a tensor is too large, a size is negative, data is missing, the graph has a
            cycle, or the file is damaged; the class is `error`, and the message has the node.
    """
    import psutil

    model = read_structure(path, error=error)
    check = _Check(path, error, psutil.virtual_memory().total)
    if record is not None:
        folder = PurePosixPath(record.file).parent
        check.data_files = {
            inside.relative_to(folder)
            for inside in map(PurePosixPath, record.data_files)
            if inside.is_relative_to(folder)
        }
    # A function's body sees nothing of the graph that calls it (ONNX IR specification), so each
    # starts without outer tensors.
    for graph in (model.graph, *model.functions):
        check.sources = _sources(graph)
        check.graph(graph, ChainMap())


class _Check:
    def __init__(self, path: Path, error: type[EngineryError], memory_bytes: int) -> None:
        self.path, self.error = path, error
        self.memory_bytes = memory_bytes
        self.constants_bytes = 0
        self.data_files: set[PurePosixPath] | None = None
        """Files that may hold external data; None for all."""
        self.sources: dict[int, list[list[int]]] = {}
        """Result of `_sources`."""

    def graph(self, graph: Graph, outer: ChainMap[str, _Known]) -> None:
        """Check a graph; `outer` has the tensors of the graphs around it."""
        known = outer.new_child()
        for value in graph.inputs:
            # -1 stands for a dim with a name.
            if all(dim >= 0 for dim in value.dims):
                dims = self._dims(f"input '{value.name}'", value.dims)
                known[value.name] = _Known(value.data_type, dims)
        for tensor in graph.initializers:
            known[tensor.name] = self._stored(f"initializer '{tensor.name}'", tensor)
        for sparse in graph.sparse:
            known[sparse.name] = self._sparse(f"initializer '{sparse.name}'", sparse)
        # In topological order, what a node reads is known before it. Subgraphs come first, because
        # they read tensors of this graph and their sizes do not depend on the node's own output.
        for node in self._sorted(graph):
            for attribute in node.attributes.values():
                for subgraph in attribute.graphs:
                    self.graph(subgraph, known)
            first_output = self._first_output(node, known)
            # Each operator of `_RULES` has one output. What others return is unknown.
            for name in node.outputs[:1]:
                known[name] = first_output
            for name in node.outputs[1:]:
                known[name] = _UNKNOWN

    def _first_output(self, node: Node, known: ChainMap[str, _Known]) -> _Known:
        """Return the properties of a node's first output, after checking its size."""
        where = _where(node)
        for attribute in node.attributes.values():
            for tensor in attribute.tensors:
                self._stored(where, tensor)
        # Operators of other domains may share a name with ONNX's and mean something else.
        rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if rule is None:
            return _UNKNOWN
        if node.op_type == "Constant":
            return self._constant(where, node)
        inputs = [known.get(name, _UNKNOWN) if name else _UNKNOWN for name in node.inputs]
        try:
            output = rule(node, inputs)
        except (ArithmeticError, IndexError, ValueError, TypeError):
            return _UNKNOWN  # ONNX Runtime rejects such a node, or its sizes are unknown
        if output.dims is not None:
            self._dims(where, output.dims)
        # A node whose output is no larger than its largest input, such as Reshape, is bounded by
        # that one, which has been checked.
        if output.elements > max((value.elements for value in inputs), default=0):
            self._require_fit(where, output, output.elements)
        return output

    def _constant(self, where: str, node: Node) -> _Known:
        attributes = node.attributes
        if tensors := attributes.get("value", Attribute()).tensors:
            return self._stored(where, tensors[0])
        if sparse := attributes.get("sparse_value", Attribute()).sparse:
            return self._sparse(where, sparse[0])
        for name, rank in (("value_int", 0), ("value_ints", 1)):
            if attribute := attributes.get(name):
                values = attribute.ints if rank else (attribute.number or 0,)
                if not values:
                    continue  # too many to be read
                dims = (len(values),) if rank else ()
                return _Known(_INT64, dims, values, constant=True)
        return _UNKNOWN

    def _dims(self, where: str, dims: Sequence[int]) -> tuple[int, ...]:
        shown = f"{where} has the shape {_shown(dims)}"
        if any(dim < 0 for dim in dims):
            raise self.error(f"{self.path}: {shown}, expected sizes of at least 0.", do=_DO)
        if math.prod(dims) > _MAX_ELEMENTS:
            raise self.error(f"{self.path}: {shown}, expected fewer than 2^63 elements.", do=_DO)
        return tuple(dims)

    def _require_fit(self, where: str, tensor: _Known, elements: int) -> None:
        """Raise if a tensor that the graph computes is too large."""
        needed = _bytes(tensor.data_type, elements)
        limit, of_what = self.memory_bytes, "of this machine's memory"
        # A constant is computed while the graph is loaded and counts against the sum; other tensors
        # exist only during a run.
        if tensor.constant:
            limit, of_what = min(MAX_CONSTANT_BYTES, limit), "for a constant"
        if needed > limit:
            size = f"the shape {_shown(tensor.dims)}" if tensor.dims else f"{elements} elements"
            raise self.error(
                f"{self.path}: {where} makes a tensor of {size}, {_gib(needed)}; expected at most "
                f"{_gib(limit)} {of_what}.",
                do=_DO,
            )
        if tensor.constant:
            self.constants_bytes += needed
            if self.constants_bytes > min(MAX_CONSTANTS_BYTES, self.memory_bytes):
                raise self.error(
                    f"{self.path}: with {where} the graph makes {_gib(self.constants_bytes)} of "
                    f"constants; expected at most {_gib(MAX_CONSTANTS_BYTES)} and this machine's "
                    "memory.",
                    do=_DO,
                )

    def _sparse(self, where: str, sparse: SparseTensor) -> _Known:
        tensor = _Known(sparse.data_type, self._dims(where, sparse.dims), constant=True)
        self._require_fit(where, tensor, tensor.elements)
        return tensor

    def _stored(self, where: str, tensor: Tensor) -> _Known:
        """Return the properties of a stored tensor, after checking that all its bytes exist."""
        dims = self._dims(where, tensor.dims)
        elements = math.prod(dims)
        bits = BITS.get(tensor.data_type, 0)
        # Rounded up: two 4-bit numbers share a byte, of which the last one may be half empty.
        needed = -(-elements * bits // 8)
        if tensor.external is not None:
            held = self._external_bytes(where, tensor.external, needed)
        elif tensor.raw_bytes is not None:
            held = tensor.raw_bytes
        else:
            # Typed fields hold one number per element whatever its size (INT8 in `int32_data`), so
            # elements are compared, not bytes.
            held = (
                needed if tensor.typed_elements >= elements else tensor.typed_elements * bits // 8
            )
            if not bits and tensor.typed_elements < elements:
                needed = held + 1  # strings have no fixed size, and one is missing
        if held < needed:
            raise self.error(
                f"{self.path}: {where} has the shape {_shown(dims)}, which needs {needed} bytes; "
                f"found {held}.",
                do=_DO,
            )
        # Only short vectors can be shapes or factors of them; long ones are not followed.
        values = tensor.values
        all_known = values is not None and len(values) == elements <= _MAX_KNOWN
        return _Known(tensor.data_type, dims, values if all_known else None, constant=True)

    def _external_bytes(self, where: str, entries: dict[str, str], needed: int) -> int:
        name = entries.get("location", "")
        # ONNX defines `location` as a relative POSIX path, on every system.
        inside = PurePosixPath(name)
        outside = (
            f"{self.path}: {where} has its data in {name!r}, expected a file beside the graph."
        )
        if not name or inside.is_absolute() or ".." in inside.parts or "\0" in name:
            raise self.error(outside)
        # The manifest has hashes of its files; others are not verified.
        if self.data_files is not None and inside not in self.data_files:
            raise self.error(
                f"{self.path}: {where} has its data in {name!r}, which the manifest does not list.",
                do=_DO,
            )
        try:
            file = (self.path.parent / name).resolve(strict=True)
            size_bytes = file.stat().st_size
            offset = int(entries.get("offset") or 0)
            length = int(entries.get("length") or needed)
        except OSError:
            raise self.error(
                f"{self.path}: the external data '{name}' of {where} is missing.", do=_DO
            ) from None
        except ValueError:
            raise self.error(
                f"{self.path}: {where} has external data at {entries}, expected whole numbers."
            ) from None
        # The name was inside the folder, but a link may lead out of it.
        if not file.is_relative_to(self.path.parent.resolve()) or not file.is_file():
            raise self.error(outside)
        # An offset may point behind the end of the file, which leaves no bytes.
        return max(0, min(length, size_bytes - offset)) if offset >= 0 else 0

    def _sorted(self, graph: Graph) -> list[Node]:
        """Return the nodes in topological order."""
        # Almost every exporter writes nodes in order, so sorting is left to the other files.
        order = dict(enumerate(self.sources[id(graph)]))
        if all(source < index for index, sources in order.items() for source in sources):
            return graph.nodes
        try:
            return [graph.nodes[index] for index in TopologicalSorter(order).static_order()]
        except CycleError as problem:
            circle = " → ".join(_where(graph.nodes[index]) for index in problem.args[1][:5])
            raise self.error(f"{self.path}: the graph has a cycle: {circle}.") from None


def _sources(top: Graph) -> dict[int, list[list[int]]]:
    """Return, for each graph (by id), the indices of the nodes that each node depends on.

    A node also depends on the outer tensors that its subgraphs use. A name refers to the tensor in
    the innermost graph that has it, wherever the node is: Optimum's merged decoders use the same
    name in a branch and for the output of the If. Every name is looked up only once, at any depth.
    """
    sources_of: dict[int, list[list[int]]] = {}
    producers: dict[str, list[tuple[int, int]]] = {}  # depth and node, the innermost last
    enclosing: list[tuple[list[list[int]], int]] = []  # the current node of each graph

    def enter(graph: Graph) -> None:
        sources: list[list[int]] = [[] for _ in graph.nodes]
        sources_of[id(graph)] = sources
        # Tensors that no node computes have the index -1. They still hide an outer tensor of their
        # name.
        own_names = {tensor.name: -1 for tensor in (*graph.initializers, *graph.inputs)}
        own_names |= {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
        # The empty name stands for an optional output that is left out.
        own_names.pop("", None)
        for name, index in own_names.items():
            producers.setdefault(name, []).append((len(enclosing), index))
        for index, node in enumerate(graph.nodes):
            enclosing.append((sources, index))
            for name in node.inputs:
                if stack := producers.get(name):
                    # The innermost graph that has the name. There, the node whose subgraphs contain
                    # this one depends on the producer.
                    depth, producer = stack[-1]
                    if producer >= 0:
                        outer_sources, consumer = enclosing[depth]
                        outer_sources[consumer].append(producer)
            for attribute in node.attributes.values():
                for subgraph in attribute.graphs:
                    enter(subgraph)
            enclosing.pop()
        # Names of this graph are unknown outside it.
        for name in own_names:
            producers[name].pop()

    enter(top)
    return sources_of


def _where(node: Node) -> str:
    name = node.name or next(iter(node.outputs), "")
    return f"node '{name}' ({node.op_type})"


def _shown(dims: Sequence[int] | None) -> str:
    dims = dims or ()
    return f"[{', '.join(map(str, dims[:8]))}{', …' if len(dims) > 8 else ''}]"


def _bytes(data_type: int, elements: int) -> int:
    return -(-elements * BITS.get(data_type, 8) // 8)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes < 2**60 else f"{size_bytes:.0e} bytes"


# Each rule computes the properties of an operator's output from those of its inputs. It raises if
# a size is unknown; the output then counts as unknown.

_Rule = Callable[[Node, list[_Known]], _Known]


def _sizes(value: _Known) -> tuple[int, ...]:
    """Return the values of a shape; raise ValueError if they are unknown."""
    if value.values is None:
        raise ValueError
    return tuple(int(number) for number in value.values)


def _constant_of_shape(node: Node, inputs: list[_Known]) -> _Known:
    dims = _sizes(inputs[0])
    fill = node.attributes.get("value", Attribute()).tensors
    kind = fill[0].data_type if fill else _FLOAT
    output = _Known(kind, dims, constant=True)
    if fill and fill[0].values and all(dim >= 0 for dim in dims) and output.elements <= _MAX_KNOWN:
        return replace(output, values=fill[0].values[:1] * output.elements)
    return output


def _of_size(node: Node, dims: tuple[int, ...], default: int) -> _Known:
    """Return a tensor of this shape, whose type is in an attribute."""
    for name in ("dtype", "output_datatype"):
        default = node.attributes.get(name, Attribute()).number or default
    return _Known(default, dims, constant=True)


def _random(node: Node, _inputs: list[_Known]) -> _Known:
    return _of_size(node, node.attributes["shape"].ints if "shape" in node.attributes else (), 1)


def _window(node: Node, inputs: list[_Known]) -> _Known:
    return _of_size(node, _sizes(inputs[0])[:1], _FLOAT)


def _range(_node: Node, inputs: list[_Known]) -> _Known:
    start, limit, delta = (value.values[0] for value in inputs if value.values)
    # The formula of ONNX's Range: max(ceil((limit - start) / delta), 0).
    count = max(0, math.ceil((limit - start) / delta))
    return _Known(inputs[0].data_type, (count,), constant=True)


def _one_hot(_node: Node, inputs: list[_Known]) -> _Known:
    depth = max(0, _sizes(inputs[1])[0])
    constant = inputs[0].constant
    # Where the indices' sizes are unknown, there is at least one of them.
    least = depth * max(1, inputs[0].elements)
    return _Known(inputs[2].data_type, constant=constant, least=least)


def _grown(source: _Known, factors: Sequence[Number], dims: tuple[int, ...] | None) -> _Known:
    """Return a tensor of these dims, or if unknown, with a lower bound from the factors."""
    least = math.prod(max(1, int(factor)) for factor in factors)
    return _Known(source.data_type, dims, constant=source.constant, least=least)


def _expand(_node: Node, inputs: list[_Known]) -> _Known:
    source = inputs[0]
    # Some exporters write -1 for a size that does not change.
    shape = tuple(1 if size == -1 else size for size in _sizes(inputs[1]))
    dims = _broadcast_dims([source.dims, shape]) if source.dims is not None else None
    # A size of 0 makes the result empty, whatever the other sizes are.
    return _grown(source, shape if 0 not in shape else (), dims)


def _tile(_node: Node, inputs: list[_Known]) -> _Known:
    source, repeats = inputs[0], _sizes(inputs[1])
    dims = source.dims
    if dims is not None:
        dims = tuple(size * n for size, n in zip(dims, repeats, strict=True))
    return _grown(source, repeats if 0 not in repeats else (), dims)


def _pad(node: Node, inputs: list[_Known]) -> _Known:
    source = inputs[0]
    attribute = node.attributes.get("pads")
    pads = attribute.ints if attribute else _sizes(inputs[1])
    # ONNX's order: the padding before each axis, then the padding behind each. With the input
    # `axes` (opset 18) there may be fewer than the rank, and the dims stay unknown.
    half = len(pads) // 2
    grown = [before + after for before, after in zip(pads[:half], pads[half:], strict=True)]
    dims = source.dims
    if dims is not None and len(dims) == half:
        dims = tuple(max(0, size + more) for size, more in zip(dims, grown, strict=True))
    else:
        dims = None
    return _grown(source, grown, dims)


def _resize(node: Node, inputs: list[_Known]) -> _Known:
    source = inputs[0]
    if len(inputs) > 3 and inputs[3].values:
        sizes = _sizes(inputs[3])
        rank_is_known = source.dims is not None and len(source.dims) == len(sizes)
        return _grown(source, sizes, sizes if rank_is_known else None)
    attribute = node.attributes.get("scales")
    # Resize takes X, roi, scales and sizes; Resize of opset 10 and Upsample take X and scales;
    # Upsample of opset 7 has an attribute.
    scales = inputs[2 if len(inputs) > 2 else 1].values if attribute is None else attribute.floats
    if not scales:
        raise ValueError
    dims = source.dims
    if dims is not None and len(dims) == len(scales):
        # ONNX's formula: floor(size * scale). Sizes are positive, so that `int` rounds down.
        dims = tuple(int(size * scale) for size, scale in zip(dims, scales, strict=True))
    else:
        dims = None
    return _grown(source, scales, dims)


def _broadcast_dims(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the broadcast shape, by numpy's rules."""
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(0 if 0 in column else max(column) for column in sizes)[::-1]


def _elementwise(node: Node, inputs: list[_Known]) -> _Known:
    kind, constant = inputs[0].data_type, all(value.constant for value in inputs)
    shapes = [value.dims for value in inputs if value.dims is not None]
    dims = _broadcast_dims(shapes) if len(shapes) == len(inputs) else None
    output = _Known(kind, dims, constant=constant)
    combine = _ARITHMETIC.get(node.op_type)
    if combine is None or len(inputs) != 2 or dims is None:
        return output
    first, second = (value.values for value in inputs)
    if first is None or second is None:
        return output
    count = output.elements
    # Only scalars and operands of the full size are combined, which is what exporters write for
    # shapes. Broadcasting of other kinds leaves the values unknown.
    if any(len(values) not in (1, count) for values in (first, second)) or count > _MAX_KNOWN:
        return output
    pairs = zip(first * (count // len(first)), second * (count // len(second)), strict=True)
    values = tuple(combine(a, b) for a, b in pairs)
    if any(abs(value) > _MAX_ELEMENTS for value in values):
        return output  # a chain of products could grow without limit
    return replace(output, values=values)


def _divide(a: Number, b: Number) -> Number:
    # ONNX divides integers as C does, towards zero; Python's // rounds down.
    return int(a / b) if isinstance(a, float) else abs(a) // abs(int(b)) * (1 if a * b >= 0 else -1)


_ARITHMETIC: dict[str, Callable[[Number, Number], Number]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _divide,
    "Max": max,
    "Min": min,
}


def _same_values(node: Node, inputs: list[_Known]) -> _Known:
    """Return the same values in another shape or type."""
    source = inputs[0]
    kind = node.attributes["to"].number if "to" in node.attributes else source.data_type
    # Reshape, Squeeze and their like keep the number of elements; their dims are not computed.
    dims = source.dims if node.op_type in ("Identity", "Cast") else None
    values = source.values
    # INT32 and INT64: a cast of floats drops their fractions.
    if values is not None and kind in (6, 7):
        values = tuple(int(value) for value in values)
    least = source.elements
    return _Known(kind or 0, dims, values, constant=source.constant, least=least)


def _concat(_node: Node, inputs: list[_Known]) -> _Known:
    # A shape is a vector, put together from vectors; only their values are needed.
    if any(value.values is None or len(value.dims or ()) > 1 for value in inputs):
        return _UNKNOWN
    values = tuple(number for value in inputs for number in value.values or ())
    if len(values) > _MAX_KNOWN:
        return _UNKNOWN
    return _Known(inputs[0].data_type, (len(values),), values, constant=True)


def _shape(node: Node, inputs: list[_Known]) -> _Known:
    dims = inputs[0].dims
    # A Shape of opset 15 may return a slice of the dims.
    if dims is None or {"start", "end"} & set(node.attributes):
        return _UNKNOWN
    return _Known(_INT64, (len(dims),), dims, constant=True)


_RULES: dict[str, _Rule] = {
    "Constant": _same_values,  # handled by `_constant`
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
    "Pad": _pad,
    "Resize": _resize,
    "Upsample": _resize,
    "OneHot": _one_hot,
    "RandomNormal": _random,
    "RandomUniform": _random,
    "HannWindow": _window,
    "HammingWindow": _window,
    "BlackmanWindow": _window,
    "Concat": _concat,
    "Shape": _shape,
    **dict.fromkeys(
        ("Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Flatten"), _same_values
    ),
    **dict.fromkeys(
        (
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Max",
            "Min",
            "Pow",
            "Where",
            "Equal",
            "Greater",
            "Less",
            "And",
            "Or",
            "Xor",
            "Mod",
        ),
        _elementwise,
    ),
}
