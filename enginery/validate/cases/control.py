"""The control part of a graph: the nodes that decide, and what computes their inputs.

    control = Control.cut_out(path, record, limits, graph)
    values = control.run(feeds, sizes)
    ways_of(control.decisions[0], values)    # which way each element went

A node that decides (a comparison, a minimum, a quotient, the condition of an If) reads what is
computed from shapes, positions, masks and ids alone, and no weight. So these nodes run without the
weights. The shape of a value that does depend on weights is control as well: it is read at a few
sizes from a run of the whole graph, and continued by the polynomial that fits them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, raise_system_error
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.shapes import canonical_dim, dim_terms, dynamic_dims
from enginery.runtime.onnxruntime.tracing import GraphTracer, open_in_memory
from enginery.runtime.providers.selection import choose_providers

Array = NDArray[Any]

_WEIGHT_ELEMENTS = 256
"""Elements of a float constant from which on it is a weight. Tables of frequencies are smaller."""

_LOGIC = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not"}
)
_CHOICES = frozenset({"Min", "Max", "Clip", "Where", "If", "Abs", "Relu", "Sign"})
STEPS = frozenset({"Div", "Mod", "Floor", "Ceil", "Round", "Cast"})
"""They take a new value again and again while a size grows."""

_SHAPES = ("Shape", "Size")
_TYPE_ONLY = ("CastLike",)
"""Ops that read only the type of their second input."""
_NUMBER = "control number "
"""Prefix of the names of constants that the control part adds."""
COPY = ":copy"
"""Suffix of an input that is fetched as an output."""


@dataclass(frozen=True)
class _Graph:
    """The nodes of a graph without branches, and its constants."""

    proto: Any
    """The `onnx.ModelProto` that they come from."""
    nodes: list[Any]
    initializers: dict[str, Any]


def variants(model: Any) -> list[_Graph]:
    """Return the graph; for one with branches that an input chooses, one graph for each branch."""
    if model.functions:
        import onnx.inliner

        model = onnx.inliner.inline_local_functions(model)
    graph = model.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    inputs = {value.name for value in graph.input}
    chosen = [node for node in graph.node if node.op_type == "If" and node.input[0] in inputs]
    if not chosen:
        return [_Graph(model, list(graph.node), initializers)]
    variants = []
    for branch in ("then_branch", "else_branch"):
        nodes: list[Any] = []
        stored = dict(initializers)
        for node in graph.node:
            if node not in chosen:
                nodes.append(node)
                continue
            inner = next(attribute.g for attribute in node.attribute if attribute.name == branch)
            stored |= {tensor.name: tensor for tensor in inner.initializer}
            nodes += inner.node
            nodes += [
                _node("Identity", [value.name], [output])
                for value, output in zip(inner.output, node.output, strict=True)
                if value.name != output
            ]
        variants.append(_Graph(model, nodes, stored))
    return variants


def _node(op_type: str, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    import onnx

    return onnx.helper.make_node(op_type, list(inputs), list(outputs), name=outputs[0])


def _data_values(graph: _Graph, record: GraphRecord) -> set[str]:
    """Return the values that depend on weights or on float inputs."""
    import onnx

    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    weights = (*floats, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    data = {spec.name for spec in record.inputs if spec.dtype.startswith(("float", "bfloat"))}
    data |= {
        name
        for name, tensor in graph.initializers.items()
        if tensor.data_type in weights and math.prod(tensor.dims) > _WEIGHT_ELEMENTS
    }
    for node in graph.nodes:
        if node.op_type in _SHAPES:
            continue
        read = node.input[:1] if node.op_type in _TYPE_ONLY else node.input
        has_branches = any(attribute.HasField("g") for attribute in node.attribute)
        constant = node.op_type == "Constant" and any(
            attribute.t.data_type in weights and math.prod(attribute.t.dims) > _WEIGHT_ELEMENTS
            for attribute in node.attribute
        )
        random = node.op_type.startswith("Random") or node.op_type == "Bernoulli"
        if has_branches or constant or random or any(name in data for name in read):
            data.update(name for name in node.output if name)
    return data


def _is_decision(node: Any, graph: _Graph, producers: Mapping[str, Any]) -> bool:
    """Return True for a node that decides; a quotient of floats does not."""
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "Cast":  # of floats, which it rounds
        rounds = _dtype(node.input[0], graph, producers) in _float_types()
        return rounds and _dtype(node.output[0], graph, producers) not in _float_types()
    if node.op_type == "Div":
        return _dtype(node.input[0], graph, producers) not in _float_types()
    return node.op_type in _LOGIC | _CHOICES | STEPS


def _float_types() -> tuple[int, ...]:
    from onnx import TensorProto

    return (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def _dtype(name: str, graph: _Graph, producers: Mapping[str, Any]) -> int:
    """Return the type of a value that no weight takes part in, as far as it shows; 0 if unknown."""
    for _ in range(len(producers)):
        if name in graph.initializers:
            return int(graph.initializers[name].data_type)
        node = producers.get(name)
        if node is None or node.op_type in _SHAPES:
            return 0
        if node.op_type == "Cast":
            return next(int(a.i) for a in node.attribute if a.name == "to")
        if node.op_type == "Constant":
            return next((int(a.t.data_type) for a in node.attribute if a.HasField("t")), 0)
        name = node.input[1] if node.op_type in ("Where", "CastLike") else node.input[0]
    return 0


@dataclass
class Control:
    """The control part in ONNX Runtime."""

    session: Any
    inputs: list[str]
    """The graph's inputs that it takes."""
    shapes: dict[str, _Shape]
    """The shapes of computed values that it takes, by the name of the input."""
    decisions: list[Any]
    """The deciding nodes, as `onnx.NodeProto`."""
    tables: list[tuple[str, str]]
    """For each table of embeddings: its name, and the value that it is looked up with."""
    fetched: list[str]
    constants: dict[str, Array]
    """Small constants that decisions read."""
    cut: Callable[[Sequence[Any]], Any]
    """Opens a session on what some decisions need."""

    def of(self, decisions: Sequence[Any]) -> Control | None:
        """Return the control part of some decisions; None if there are none."""
        if not decisions:
            return None
        session = self.cut(decisions)
        inputs = {value.name for value in session.get_inputs()}
        return replace(
            self,
            session=session,
            inputs=[name for name in self.inputs if name in inputs],
            decisions=list(decisions),
            tables=[],
            fetched=[output.name for output in session.get_outputs()],
        )

    @classmethod
    def cut_out(
        cls, path: Path, record: GraphRecord, limits: FeedLimits, graph: _Graph
    ) -> Control | None:
        """Cut out the control part; None if the graph decides nothing.

        Raises:
            ProviderError: ONNX Runtime does not run it.
        """
        data = _data_values(graph, record)
        producers = {name: node for node in graph.nodes for name in node.output if name}
        decisions = [
            node
            for node in graph.nodes
            if _is_decision(node, graph, producers)
            and (node.input[0] not in data if node.op_type == "If" else node.output[0] not in data)
        ]
        tables = [
            (node.input[0], node.input[1])
            for node in graph.nodes
            if node.op_type == "Gather"
            and _origin(node.input[0], producers) in graph.initializers
            and node.output[0] in data
            and node.input[1] in producers.keys() | {spec.name for spec in record.inputs}
            and node.input[1] not in data
        ]
        wanted = [name for node in decisions for name in _read(node)]
        wanted += [index for _, index in tables]
        needed, leaves = _ancestors(wanted, producers, data)
        input_names = {spec.name for spec in record.inputs}
        shapes = _fit_shapes(path, record, limits, graph, leaves & (data - input_names))
        # What depends on a shape that nothing fits is left out.
        unknown = {name for name in leaves - input_names if name not in shapes}
        blocked = _depending(unknown, needed)
        decisions = [node for node in decisions if not blocked & {*_read(node)}]
        tables = [table for table in tables if table[1] not in blocked]
        if not decisions and not tables:
            return None

        def cut(nodes: Sequence[Any], more: Sequence[str] = ()) -> Any:
            wanted = [name for node in nodes for name in _read(node)] + [*more]
            needed, leaves = _ancestors(wanted, producers, data)
            fetched = [name for name in dict.fromkeys(wanted) if name not in graph.initializers]
            return _open(path, graph, needed, leaves, fetched)

        session = cut(decisions, [index for _, index in tables])
        inputs = {value.name for value in session.get_inputs()}
        return cls(
            session,
            [spec.name for spec in record.inputs if spec.name in inputs],
            {_shape_name(name): shape for name, shape in shapes.items()}
            | {_shape_name(name): _Shape.of_input(record, name) for name in leaves & input_names},
            decisions,
            tables,
            [output.name for output in session.get_outputs()],
            _small_constants(graph, [name for node in decisions for name in _read(node)]),
            cut,
        )

    def run(self, feeds: Feeds, sizes: Mapping[str, int]) -> dict[str, Array]:
        """Return the values that decisions and tables read."""
        arrays = {name: feeds[name] for name in self.inputs}
        taken = {value.name for value in self.session.get_inputs()}
        arrays |= {name: shape(sizes) for name, shape in self.shapes.items() if name in taken}
        values = dict(zip(self.fetched, self.session.run(self.fetched, arrays), strict=True))
        return self.constants | values


def _small_constants(graph: _Graph, names: Iterable[str]) -> dict[str, Array]:
    from onnx import numpy_helper

    return {
        name: numpy_helper.to_array(graph.initializers[name])
        for name in names
        if name in graph.initializers
        and math.prod(graph.initializers[name].dims) <= _WEIGHT_ELEMENTS
        and not graph.initializers[name].external_data
    }


@dataclass(frozen=True)
class _Shape:
    """The shape of a value, as polynomials of the sizes of the graph's dims."""

    dims: tuple[str, ...]
    factors: Array
    """float64 (axes, terms)"""

    @classmethod
    def of_input(cls, record: GraphRecord, name: str) -> _Shape:
        """Return the shape of a graph's input."""
        spec = next(spec for spec in record.inputs if spec.name == name)
        dims = tuple(dynamic_dims(record.inputs))
        factors = np.zeros((len(spec.dims), len(_terms(dims, dict.fromkeys(dims, 1)))))
        for axis, dim in enumerate(spec.dims):
            known = dict.fromkeys(dim_terms(dim), 1)
            constant = spec.shape(dict.fromkeys(dims, 0))[axis]
            factors[axis, 0] = constant
            for index, term in enumerate(dims):
                factors[axis, 1 + index] = known.get(term, 0)
        return cls(dims, factors)

    def __call__(self, sizes: Mapping[str, int]) -> Array:
        return np.asarray(np.rint(self.factors @ _terms(self.dims, sizes)), np.int64)


def _terms(dims: Sequence[str], sizes: Mapping[str, int]) -> Array:
    """Return 1, the sizes and their products of two."""
    values = [float(sizes[dim]) for dim in dims]
    pairs = [a * b for a, b in itertools.combinations(values, 2)]
    return np.array([1.0, *values, *pairs])


def _shape_name(value: str) -> str:
    return f"shape of {value}"


def _read(node: Any) -> list[str]:
    """Return the values that tell which way a deciding node goes."""
    if node.op_type in ("If", "Where"):
        return [node.input[0]]
    if node.op_type in ("Min", "Max", "Clip", "Mod", "Abs", "Relu"):
        return [name for name in node.input if name]
    return [node.output[0]]


def _origin(name: str, producers: Mapping[str, Any]) -> str:
    """Return the constant that a table is, before it is dequantized or cast."""
    while (node := producers.get(name)) is not None and node.op_type in (
        "DequantizeLinear",
        "Cast",
        "Identity",
    ):
        name = node.input[0]
    return name


def _ancestors(
    names: Iterable[str], producers: Mapping[str, Any], data: Collection[str]
) -> tuple[list[Any], set[str]]:
    """Return the nodes that compute values, and the data whose shapes they read."""
    needed: dict[int, Any] = {}
    leaves: set[str] = set()
    stack = [name for name in names if name]
    while stack:
        node = producers.get(stack.pop())
        if node is None or id(node) in needed:
            continue
        needed[id(node)] = node
        if node.op_type in _SHAPES and node.input[0] in data:
            leaves.add(node.input[0])
        elif node.op_type in _TYPE_ONLY:
            stack.append(node.input[0])
        else:
            stack += [name for name in node.input if name]
    return list(needed.values()), leaves


def _depending(names: Collection[str], nodes: Sequence[Any]) -> set[str]:
    """Return the values that depend on others."""
    dependent = {*names}
    size = -1
    while size != len(dependent):
        size = len(dependent)
        for node in nodes:
            if dependent & {*node.input}:
                dependent |= {name for name in node.output if name}
    return dependent


def _fit_shapes(
    path: Path,
    record: GraphRecord,
    limits: FeedLimits,
    graph: _Graph,
    names: Collection[str],
) -> dict[str, _Shape]:
    """Return the shapes of computed values as polynomials of the dims; only those that fit."""
    if not names:
        return {}
    dims = tuple(dynamic_dims(record.inputs))
    outputs = {
        node.input[0]: node.output[0]
        for node in graph.proto.graph.node
        if node.op_type == "Shape" and node.input[0] in names and not node.attribute
    }
    if not outputs:
        return {}
    samples = _sample_sizes(dims, limits)
    values: dict[str, list[Array]] = {name: [] for name in outputs}
    try:
        with GraphTracer(path, list(outputs.values()), optimized=True) as trace:
            for sizes in samples:
                feeds = make_feeds(record.inputs, sizes, limits, seed=0)
                traced = trace(feeds)
                for name, output in outputs.items():
                    values[name].append(traced[output])
    except EngineryError as error:
        raise_system_error(error)
        return {}
    terms = np.stack([_terms(dims, sizes) for sizes in samples])
    fitted = {}
    for name, shapes in values.items():
        if len({shape.shape for shape in shapes}) > 1:
            continue
        targets = np.stack(shapes).astype(np.float64)
        solution = np.linalg.lstsq(terms, targets, rcond=None)[0]
        solution = np.where(np.abs(solution) < 1e-6, 0, solution)
        if np.allclose(terms @ solution, targets, atol=1e-3):
            fitted[name] = _Shape(dims, solution.T)
    return fitted


def _sample_sizes(dims: Sequence[str], limits: FeedLimits) -> list[dict[str, int]]:
    """Return enough small sizes to fit the polynomials."""
    generator = np.random.default_rng(0)
    count = len(_terms(dims, dict.fromkeys(dims, 1))) + 2
    longest = max(2, min(9, limits.max_positions // 2))
    return [
        {dim: fixed_size(dim, limits) or int(generator.integers(1, longest)) for dim in dims}
        for _ in range(count)
    ]


def fixed_size(dim: str, limits: FeedLimits) -> int | None:
    """Return the size of a dim that does not vary here, such as the height of an image."""
    return limits.sizes.get(canonical_dim(dim))


def _open(
    path: Path,
    graph: _Graph,
    needed: Sequence[Any],
    leaves: Collection[str],
    fetched: Sequence[str],
) -> Any:
    """Open a session on some nodes of a graph."""
    import onnx

    chosen = {id(node) for node in needed}
    nodes = []
    for node in graph.nodes:
        if id(node) not in chosen:
            continue
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if copy.op_type == "Shape" and copy.input[0] in leaves:
            shape = _shape_name(copy.input[0])
            start = next((a.i for a in copy.attribute if a.name == "start"), 0)
            end = next((a.i for a in copy.attribute if a.name == "end"), None)
            copy = _sliced(shape, copy.output[0], start, end)
        elif copy.op_type == "Size" and copy.input[0] in leaves:
            copy = _node("ReduceProd", [_shape_name(copy.input[0])], copy.output)
            copy.attribute.append(onnx.helper.make_attribute("keepdims", 0))
        elif copy.op_type in _TYPE_ONLY:
            # The type of data is a float's.
            copy = _node("Cast", copy.input[:1], copy.output)
            copy.attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.FLOAT))
        nodes.append(copy)
    used = {name for node in nodes for name in node.input}
    constants = [tensor for name, tensor in graph.initializers.items() if name in used]
    produced = {name for node in nodes for name in node.output}
    inputs = [value for value in graph.proto.graph.input if value.name in used | {*fetched}]
    shapes = [
        onnx.helper.make_tensor_value_info(_shape_name(name), onnx.TensorProto.INT64, [None])
        for name in leaves
    ]
    slices = [
        onnx.numpy_helper.from_array(np.asarray([number], np.int64), f"{_NUMBER}{number}")
        for number in sorted(
            {int(name[len(_NUMBER) :]) for name in used if name.startswith(_NUMBER)}
        )
    ]
    input_names = {value.name for value in inputs}
    copies = [
        _node("Identity", [name], [f"{name}{COPY}"])
        for name in fetched
        if name in input_names and name not in produced
    ]
    outputs = [
        onnx.ValueInfoProto(name=f"{name}{COPY}" if name in input_names else name)
        for name in fetched
        if name in produced or name in input_names
    ]
    part = onnx.helper.make_graph(
        [*nodes, *copies], "control", [*inputs, *shapes], outputs, [*constants, *slices]
    )
    model = onnx.helper.make_model(part)
    del model.opset_import[:]
    model.opset_import.extend(graph.proto.opset_import)
    model.ir_version = graph.proto.ir_version
    return open_in_memory(
        model.SerializeToString(), path.parent, choose_providers("cpu"), optimized=True
    )


def _sliced(shape: str, output: str, start: int, end: int | None) -> Any:
    if not start and end is None:
        return _node("Identity", [shape], [output])
    stop = np.iinfo(np.int64).max if end is None else end
    return _node("Slice", [shape, f"{_NUMBER}{start}", f"{_NUMBER}{stop}"], [output])


def ways_of(node: Any, values: Mapping[str, Array]) -> Array | None:
    """Return the number of the way that each element of a deciding node goes."""

    def value(name: str) -> Array | None:
        return values.get(name, values.get(f"{name}{COPY}"))

    read = [value(name) for name in _read(node)]
    first = read[0] if read else None
    if first is None:
        return None
    op = node.op_type
    if op in _LOGIC or op in ("If", "Where"):
        return np.asarray(first, np.int64)
    if op in ("Min", "Max"):
        others = [array for array in read[1:] if array is not None]
        return np.asarray(first > others[0], np.int64) if others else None
    if op == "Clip":
        low, high = ([*read[1:], None, None])[:2]
        below = 0 if low is None else -(first < low).astype(np.int64)
        return np.asarray(below + (0 if high is None else (first > high).astype(np.int64)))
    if op == "Mod":
        divisor = read[1] if len(read) > 1 else None
        return None if divisor is None else np.floor_divide(first, np.where(divisor, divisor, 1))
    if op in ("Abs", "Relu"):
        return np.sign(first)
    if op in ("Div", "Cast") and first.dtype.kind == "f":
        return None
    return np.asarray(first)
