"""Check the memory that a graph would allocate, before ONNX Runtime loads it.

>>> check_allocations(artifact.model)

ONNX Runtime computes constants while it loads a graph, and a ConstantOfShape node can turn a shape
of eight bytes into gigabytes. A child process has a limit of memory for that; a server or a program
that imports enginery has none. So this computes the sizes of the operators that make large tensors
of small ones (`_RULES`), and for them the arithmetic on shapes. Sizes that depend on the inputs of
a run, on other operators or on the arguments of a local function are not known; ONNX Runtime itself
limits constant folding to 1 GiB per node.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.paths import resolve_inside
from enginery.core.trust.onnx_structure import (
    BITS,
    MAX_VALUES,
    Attribute,
    AttributeType,
    Graph,
    Node,
    Raw,
    SparseTensor,
    Tensor,
    numpy_type,
    read_structure,
)

MAX_CONSTANT_BYTES = 2**30
"""Largest tensor that a graph computes from constants. Source: ONNX Runtime's limit for constant
folding, kDefaultConstantFoldingMaxOutputSizeInBytes in core/optimizer/constant_folding.cc."""
MAX_CONSTANTS_BYTES = 4 * MAX_CONSTANT_BYTES
"""Largest sum of all such tensors."""
_FLOAT, _INT64 = 1, 7
_DO = "The export is faulty or malicious: check that node and export the model again."


@dataclass(frozen=True)
class _Known:
    """Properties of a tensor that are known before a run."""

    data_type: int = 0
    elements: int = 0
    """Number of elements, or a lower bound."""
    dims: tuple[int, ...] | None = None
    """None if a size is unknown."""
    values: NDArray[Any] | None = None
    """Values in one row, if they are few and constant."""
    is_constant: bool = False


_UNKNOWN = _Known()


def _sized(
    data_type: int,
    dims: tuple[int, ...],
    values: NDArray[Any] | None = None,
    *,
    is_constant: bool = True,
) -> _Known:
    return _Known(data_type, math.prod(dims), dims, values, is_constant)


def check_allocations(
    path: Path,
    *,
    data_files: Collection[str] | None = None,
    error: type[EngineryError] = ArtifactError,
) -> None:
    """Check that a graph has no tensor of an impossible or excessive size.

    A computed constant may have 1 GiB, and all of them 4 GiB. Other tensors of fixed size may be as
    large as the machine's memory. A stored tensor must have the bytes that its shape needs.

    Args:
        path: path of an ONNX file.
        data_files: names of the files that may have external data, relative to the file's folder;
            None for any.
        error: class of the error to raise.

    Raises:
        EngineryError: a tensor is too large, a size is negative, data is missing, the nodes are not
            sorted, or the file is damaged; the class is `error`, and the message has the node.
    """
    import psutil

    model = read_structure(path, error=error)
    check = _Check(path, data_files, error, psutil.virtual_memory().total)
    # A function's body sees nothing of the graph that calls it (ONNX IR specification).
    with np.errstate(all="ignore"):
        for graph in model.graphs:
            check.graph(graph, ChainMap())


@dataclass
class _Check:
    path: Path
    data_files: Collection[str] | None
    error: type[EngineryError]
    memory_bytes: int
    constants_bytes: int = 0

    def graph(self, graph: Graph, outer: ChainMap[str, _Known]) -> set[str]:
        """Check a graph; return the names that it reads from the graphs around it.

        Args:
            graph: the graph.
            outer: the tensors of the graphs around it.
        """
        known = outer.new_child()
        for value in graph.inputs:
            known[value.name] = _UNKNOWN
            if value.has_rank and all(dim >= 0 for dim in value.dims):
                dims = self._dims(f"input '{value.name}'", value.dims)
                known[value.name] = _sized(value.data_type, dims, is_constant=False)
        for tensor in graph.initializers:
            known[tensor.name] = self._stored(f"initializer '{tensor.name}'", tensor)
        for sparse in graph.sparse:
            name = sparse.stored.name
            known[name] = self._sparse(f"initializer '{name}'", sparse)
        read = set[str]()
        for node in graph.nodes:
            read.update(node.inputs)
            for subgraph in node.subgraphs:
                read |= self.graph(subgraph, known)
            # ONNX requires this order. ONNX Runtime sorts the nodes itself, so that a size could be
            # computed behind the node that it is for.
            if late := read.intersection(filter(None, node.outputs)):
                raise self.error(
                    f"{self.path}: {_where(node)} computes '{min(late)}' behind a node that reads "
                    "it, or the graph has a cycle; ONNX requires nodes in the order of a run.",
                    do="Sort the nodes, or export the model again.",
                )
            # Each operator of `_RULES` has one output. What others return is unknown.
            known.update(dict.fromkeys(node.outputs, _UNKNOWN))
            if node.outputs:
                known[node.outputs[0]] = self._first_output(node, known)
        return read.difference(known.maps[0])

    def _first_output(self, node: Node, known: ChainMap[str, _Known]) -> _Known:
        """Return the properties of a node's first output, after checking its size."""
        where = _where(node)
        for attribute in node.listed:
            for tensor in attribute.tensors:
                self._stored(where, tensor)
        # Operators of other domains may share a name with ONNX's and mean something else.
        if node.domain not in ("", "ai.onnx"):
            return _UNKNOWN
        if node.op_type == "Constant":
            return self._constant(where, node)
        inputs = [known.get(name, _UNKNOWN) if name else _UNKNOWN for name in node.inputs]
        try:
            output = _RULES[node.op_type](node, inputs)
        except (ArithmeticError, LookupError, ValueError, TypeError):
            return _UNKNOWN  # ONNX Runtime rejects such a node, or its sizes are unknown
        if output.dims is not None:
            self._dims(where, output.dims)
        # A node whose output is no larger than its largest input, such as Reshape, is bounded by
        # that one, which has been checked.
        if output.elements > max((value.elements for value in inputs), default=0):
            self._require_fit(where, output)
        return output

    def _constant(self, where: str, node: Node) -> _Known:
        match node.listed:
            case [Attribute(type=AttributeType.TENSOR, tensor=Tensor() as tensor)]:
                return self._stored(where, tensor)
            case [Attribute(type=AttributeType.SPARSE_TENSOR, sparse=SparseTensor() as sparse)]:
                return self._sparse(where, sparse)
            case [Attribute(type=AttributeType.INT, number=number)]:
                return _sized(_INT64, (), np.array([number or 0], np.int64))
            case [Attribute(type=AttributeType.INTS, ints=ints)] if ints and ints.is_whole:
                return _sized(_INT64, (len(ints),), np.array(ints, np.int64))
        return _UNKNOWN

    def _dims(self, where: str, dims: Sequence[int]) -> tuple[int, ...]:
        shown = f"{self.path}: {where} has the shape {_shown(dims)}, expected"
        if any(dim < 0 for dim in dims):
            raise self.error(f"{shown} sizes of at least 0.", do=_DO)
        if math.prod(dims) >= 2**63:
            raise self.error(f"{shown} fewer than 2^63 elements.", do=_DO)
        return tuple(dims)

    def _require_fit(self, where: str, tensor: _Known) -> None:
        """Raise if a tensor that the graph computes is too large."""
        needed = -(-tensor.elements * BITS.get(tensor.data_type, 8) // 8)
        limit, purpose = self.memory_bytes, "of this machine's memory"
        # A constant is computed while the graph is loaded and counts against the sum; other tensors
        # exist only during a run.
        if tensor.is_constant:
            limit, purpose = min(MAX_CONSTANT_BYTES, limit), "for a constant"
            self.constants_bytes += needed
        if needed > limit:
            elements = f"{tensor.elements} elements"
            size = f"the shape {_shown(tensor.dims)}" if tensor.dims else elements
            raise self.error(
                f"{self.path}: {where} makes a tensor of {size}, {_gib(needed)}; expected at most "
                f"{_gib(limit)} {purpose}.",
                do=_DO,
            )
        if self.constants_bytes > min(MAX_CONSTANTS_BYTES, self.memory_bytes):
            raise self.error(
                f"{self.path}: with {where} the graph makes {_gib(self.constants_bytes)} of "
                f"constants; expected at most {_gib(MAX_CONSTANTS_BYTES)} and this machine's "
                "memory.",
                do=_DO,
            )

    def _sparse(self, where: str, sparse: SparseTensor) -> _Known:
        tensor = _sized(sparse.stored.data_type, self._dims(where, sparse.dims))
        self._require_fit(where, tensor)
        return tensor

    def _stored(self, where: str, tensor: Tensor) -> _Known:
        """Return the properties of a stored tensor, after checking that all its bytes exist."""
        dims = self._dims(where, tensor.dims)
        elements = math.prod(dims)
        bits = BITS.get(tensor.data_type, 0)
        # Rounded up: two 4-bit numbers share a byte, of which the last one may be half empty.
        needed = -(-elements * bits // 8)
        if tensor.external is not None:
            tensor = replace(tensor, raw=self._external(where, tensor.external, needed), location=0)
        if tensor.raw is not None:
            stored = tensor.raw.length
        else:
            # Lists have a number per element whatever its size (INT8 in `int32_data`), and strings
            # have no fixed size, so elements are compared, not bytes.
            listed = tensor.listed.written if tensor.listed is not None else 0
            stored = needed if listed >= elements else listed * bits // 8
            needed = max(needed, stored + (listed < elements))
        if stored < needed:
            raise self.error(
                f"{self.path}: {where} has the shape {_shown(dims)}, which needs {needed} bytes; "
                f"found {stored}.",
                do=_DO,
            )
        # Only short vectors can be shapes or factors of them; long ones are not followed.
        values = tensor.values if elements <= MAX_VALUES else None
        if values is not None and len(values) != elements:
            raise self.error(
                f"{self.path}: {where} has the shape {_shown(dims)} and {len(values)} values.",
                do=_DO,
            )
        return _sized(tensor.data_type, dims, values)

    def _external(self, where: str, entries: dict[str, str], needed: int) -> Raw:
        """Return how many of the needed bytes a file has, and the bytes if they are few."""
        name = entries.get("location", "")
        data = f"{self.path}: {where} has its data in {name!r}"
        try:
            file = resolve_inside(self.path.parent, name, what="the folder of the graph")
            # The manifest has hashes of its files; others are not verified.
            if self.data_files is not None and name not in self.data_files:
                raise self.error(f"{data}, which the manifest does not list.", do=_DO)
            if not file.is_file():
                raise self.error(f"{data}, which is missing.", do=_DO)
            offset = int(entries.get("offset") or 0)
            length = int(entries.get("length") or needed)
        except ArtifactError as problem:
            raise self.error(f"{data}: {problem.message}", do=problem.do) from None
        except ValueError:
            raise self.error(f"{data} at {entries}, expected whole numbers.") from None
        # An offset may point behind the end of the file, which leaves no bytes.
        stored = max(0, min(length, file.stat().st_size - offset)) if offset >= 0 else 0
        if not 0 < stored <= 8 * MAX_VALUES:
            return Raw(stored, None)
        with file.open("rb") as stream:
            stream.seek(offset)
            return Raw(stored, stream.read(min(stored, needed)))


def _where(node: Node) -> str:
    name = node.name or next(iter(node.outputs), "")
    return f"node '{name}' ({node.op_type})"


def _shown(dims: Sequence[int]) -> str:
    return f"[{', '.join(map(str, dims[:8]))}{', …' if len(dims) > 8 else ''}]"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes < 2**60 else f"{size_bytes:.0e} bytes"


# Each rule computes the properties of an operator's output from those of its inputs. It raises if
# a size is unknown; the output then counts as unknown.


def _numbers(value: _Known) -> list[Any]:
    """Return the values of a tensor; raise ValueError if they are unknown."""
    if value.values is None:
        raise ValueError
    return list(value.values.tolist())


def _sizes(value: _Known) -> tuple[int, ...]:
    """Return the values of a shape; raise ValueError if they are unknown."""
    return tuple(map(int, _numbers(value)))


def _constant_of_shape(node: Node, inputs: list[_Known]) -> _Known:
    dims = _sizes(inputs[0])
    fill = node.attributes.get("value", Attribute()).tensor
    output = _sized(fill.data_type if fill else _FLOAT, dims)
    is_small = all(dim >= 0 for dim in dims) and output.elements <= MAX_VALUES
    if is_small and fill and fill.values is not None:
        return _sized(fill.data_type, dims, np.repeat(fill.values[:1], output.elements))
    return output


def _of_size(node: Node, inputs: list[_Known]) -> _Known:
    """Return a tensor whose type is in an attribute, and its shape there or in the input."""
    attributes = node.attributes
    dims = tuple(attributes["shape"].ints or ()) if "shape" in attributes else _sizes(inputs[0])
    kinds = (attributes.get(name, Attribute()).number for name in ("dtype", "output_datatype"))
    return _sized(next(filter(None, kinds), _FLOAT), dims)


def _range(_node: Node, inputs: list[_Known]) -> _Known:
    start, limit, delta = (_numbers(value)[0] for value in inputs)
    # The formula of ONNX's Range: max(ceil((limit - start) / delta), 0).
    count = max(0, math.ceil((limit - start) / delta))
    return _sized(inputs[0].data_type, (count,))


def _one_hot(_node: Node, inputs: list[_Known]) -> _Known:
    indices, depth, values = inputs
    # Where the indices' sizes are unknown, there is at least one of them.
    elements = _sizes(depth)[0] * max(1, indices.elements)
    return _Known(values.data_type, elements, is_constant=indices.is_constant)


def _grown(source: _Known, factors: Sequence[Any], grow: Callable[[int, Any], Any]) -> _Known:
    """Return a tensor whose sizes grow by a factor or a number each.

    Of unknown dims, each is at least 1.
    """
    if source.dims is not None and len(source.dims) == len(factors):
        dims = tuple(max(0, int(grow(*pair))) for pair in zip(source.dims, factors, strict=True))
        return _sized(source.data_type, dims, is_constant=source.is_constant)
    least = math.prod(max(1, int(grow(1, factor))) for factor in factors)
    elements = max(least, source.elements)
    return _Known(source.data_type, elements, is_constant=source.is_constant)


def _tile(_node: Node, inputs: list[_Known]) -> _Known:
    return _grown(inputs[0], _sizes(inputs[1]), lambda size, repeats: size * repeats)


def _pad(node: Node, inputs: list[_Known]) -> _Known:
    attribute = node.attributes.get("pads")
    pads = attribute.ints or () if attribute else _sizes(inputs[1])
    # ONNX's order: the padding before each axis, then the padding behind each. With the input
    # `axes` (opset 18) there may be fewer than the rank.
    half = len(pads) // 2
    sums = [before + behind for before, behind in zip(pads[:half], pads[half:], strict=True)]
    return _grown(inputs[0], sums, lambda size, more: size + more)


def _resize(node: Node, inputs: list[_Known]) -> _Known:
    if len(inputs) > 3 and inputs[3].values is not None:
        return _grown(inputs[0], _sizes(inputs[3]), lambda _, size: size)
    # Resize takes X, roi, scales and sizes; Resize of opset 10 and Upsample take X and scales;
    # Upsample of opset 7 has an attribute.
    if "scales" in node.attributes:
        scales = list(node.attributes["scales"].floats or ())
    else:
        scales = _numbers(inputs[2 if len(inputs) > 2 else 1])
    return _grown(inputs[0], scales, lambda size, scale: size * scale)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the broadcast shape, by numpy's rules."""
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(0 if 0 in column else max(column) for column in sizes)[::-1]


def _expand(_node: Node, inputs: list[_Known]) -> _Known:
    source = inputs[0]
    # Some exporters write -1 for a size that does not change.
    shape = tuple(1 if size == -1 else size for size in _sizes(inputs[1]))
    if source.dims is not None:
        dims = _broadcast([source.dims, shape])
        return _sized(source.data_type, dims, is_constant=source.is_constant)
    elements = max(math.prod(shape), source.elements)
    return _Known(source.data_type, elements, is_constant=source.is_constant)


def _divide(a: NDArray[Any], b: NDArray[Any]) -> Any:
    # ONNX divides integers as C does, towards zero; numpy's // rounds down.
    return a / b if a.dtype.kind == "f" else (a - np.fmod(a, b)) // b


_ARITHMETIC: dict[str, Callable[[NDArray[Any], NDArray[Any]], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _divide,
    "Max": np.maximum,
    "Min": np.minimum,
}


def _elementwise(node: Node, inputs: list[_Known]) -> _Known:
    kind, is_constant = inputs[0].data_type, all(value.is_constant for value in inputs)
    shapes = [value.dims for value in inputs if value.dims is not None]
    if len(shapes) < len(inputs):
        elements = max(value.elements for value in inputs)
        return _Known(kind, elements, is_constant=is_constant)
    dims = _broadcast(shapes)
    operands = [value.values for value in inputs if value.values is not None]
    # Only scalars and operands of the full size are combined, which is what exporters write for
    # shapes. Broadcasting of other kinds leaves the values unknown.
    values = None
    if (
        node.op_type in _ARITHMETIC
        and len(operands) == len(inputs) == 2
        and all(len(operand) in (1, math.prod(dims)) for operand in operands)
    ):
        values = _ARITHMETIC[node.op_type](*operands)
    return _sized(kind, dims, values, is_constant=is_constant)


def _same_values(node: Node, inputs: list[_Known]) -> _Known:
    """Return the same values in another shape or type."""
    source = inputs[0]
    kind = node.attributes["to"].number if "to" in node.attributes else source.data_type
    dtype = numpy_type(kind or 0)
    values = source.values.astype(dtype) if source.values is not None and dtype else None
    # Reshape, Squeeze and their like keep the number of elements; their dims are not computed.
    dims = source.dims if node.op_type in ("Identity", "Cast") else None
    return _Known(kind or 0, source.elements, dims, values, source.is_constant)


def _concat(_node: Node, inputs: list[_Known]) -> _Known:
    kind, elements = inputs[0].data_type, sum(value.elements for value in inputs)
    # A shape is a vector, put together from vectors.
    parts = [value.values for value in inputs if len(value.dims or ()) < 2]
    values = [part for part in parts if part is not None]
    if len(values) == len(inputs) and elements <= MAX_VALUES:
        return _sized(kind, (elements,), np.concatenate(values))
    return _Known(kind, elements)  # weights may be concatenated, so it counts as no constant


def _shape(node: Node, inputs: list[_Known]) -> _Known:
    dims = inputs[0].dims
    # A Shape of opset 15 may return a slice of the dims.
    if dims is None or {"start", "end"} & set(node.attributes):
        raise ValueError
    return _sized(_INT64, (len(dims),), np.array(dims, np.int64))


_RULES: dict[str, Callable[[Node, list[_Known]], _Known]] = {
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
    "Pad": _pad,
    "OneHot": _one_hot,
    "Concat": _concat,
    "Shape": _shape,
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    **dict.fromkeys(("RandomNormal", "RandomUniform"), _of_size),
    **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow"), _of_size),
    **dict.fromkeys(
        ("Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Flatten"), _same_values
    ),
    **dict.fromkeys((*_ARITHMETIC, "Pow", "Where", "Equal", "Greater", "Less"), _elementwise),
    **dict.fromkeys(("And", "Or", "Xor", "Mod"), _elementwise),
}
