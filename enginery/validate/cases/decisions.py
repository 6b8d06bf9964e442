"""Find the sizes and the token ids at which a graph begins to do something else.

A graph can treat a batch of 17 rows or a text of 65 tokens differently only by a node that decides:
a comparison, a minimum, a quotient, the condition of an If. Such a node reads what is computed from
shapes, positions, masks and ids alone, and no weight. So these nodes, the control part of the
graph, are cut out and run without the weights, which takes microseconds:

- at every length, batch and past up to about 128 and, beyond, at every 32nd size, at the numbers
  that the graph holds and their neighbours, and wherever a decision has changed between two;
- at combinations of the sizes at which decisions change, because one may depend on two dims;
- for every id of the vocabulary.

What is found becomes cases for PyTorch: a size on both sides of every change, each combination of
decisions, and the ids that the graph tells apart. The sizes run in batches against rows alone, too.

The shape of a value that does depend on weights is control as well. It is read at a few sizes from
a run of the whole graph, and continued by the polynomial that fits them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.external_data import load_graph
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError
from enginery.core.model.feeds import FeedLimits, Feeds, is_padding_mask, make_feeds
from enginery.core.shapes import PAST, canonical_dim, dim_terms, dynamic_dims, is_batch
from enginery.runtime.onnxruntime.tracing import GraphTracer, open_in_memory
from enginery.runtime.providers.selection import choose_providers
from enginery.validate.cases.sweep import LONGEST, ValidationCase, sweep_sizes

Array = NDArray[Any]
State = tuple[float, float]
"""The smallest and the largest of the numbers of the ways that a node's elements went."""

_WEIGHT_ELEMENTS = 256
"""Elements of a float constant from which on it is a weight. Tables of frequencies are smaller."""

_LOGIC = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not"}
)
_CHOICES = frozenset({"Min", "Max", "Clip", "Where", "If", "Abs", "Relu", "Sign"})
_STEPS = frozenset({"Div", "Mod", "Floor", "Ceil", "Round", "Cast"})
"""They take a new value again and again while a size grows."""

_SHAPES = ("Shape", "Size")
_TYPE_ONLY = ("CastLike",)
"""Ops that read only the type of their second input."""

_DENSE = 1 << 16
"""Elements of a mask of the largest run whose neighbours all run: that of 4 rows of 128 tokens."""
_STRIDE = 32
"""Distance of the sizes beyond that run whatever the graph holds."""
_LARGEST_BATCH = 1024
_ELEMENTS = 1 << 21
"""Elements of the largest mask of a run: that of 2 rows of 1024 tokens."""
_MOST_FOR_ROWS = 1 << 19
"""The same where only what is decided for rows runs: 32 rows of 128 tokens."""
_MAX_COMBINATIONS = 200
_MAX_CASES = 24
_STEP_CASES = 6
"""Changes of a node that changes again and again which become cases."""
_PATCH = 3 * 16 * 16
"""Numbers of an image that are computed as one position."""
_MAX_TOKENS = 1 << 14
"""Tokens of the largest case that PyTorch runs."""
_STEP_TOKENS = 1 << 11
"""Tokens of the largest case for such a change."""
_MAX_TOGETHER = 1 << 16
"""Tokens of the largest batch that ONNX Runtime runs."""
_QUANTIZED_ROWS = 4
"""Rows of the smallest case of a quantized graph: one of each length of `_ragged_feeds`."""
_TABLE_ROWS = 8
_TABLE_LENGTH = 128
"""Rows and length of the cases that run through a table of embeddings."""
_FEW_IDS = 4096


@dataclass(frozen=True)
class Decisions:
    """What a graph decides from sizes and ids."""

    sizes: list[dict[str, int]] = field(default_factory=list)
    """Sizes of all dims, on both sides of each change."""
    ids: list[int] = field(default_factory=list)
    """Ids that it tells apart from the others."""
    notes: list[str] = field(default_factory=list)
    constants: frozenset[int] = frozenset()
    """Numbers in the graph that may be sizes at which it changes what it does."""

    def cases(
        self, record: GraphRecord, limits: FeedLimits, *, quantized: bool = False, seed: int
    ) -> list[ValidationCase]:
        """Return the cases for the reference.

        Args:
            record: the graph.
            limits: limits on its inputs.
            quantized: the graph computes in INT8, whose error is judged by a cosine: that of a few
                scores in one row means little, so all cases have several.
            seed: random seed for the inputs.
        """
        cases = []
        special = {limits.pad_token_id, limits.image_token_id, *limits.special_ids}
        mixed = [token_id for token_id in self.ids if token_id not in special]
        listed = self.sizes
        if quantized:
            several = [_with_rows(sizes, limits, _QUANTIZED_ROWS) for sizes in listed]
            listed = list({tuple(sizes.items()): sizes for sizes in several}.values())
        for sizes in listed:
            if _tokens(sizes, record) > _MAX_TOKENS:
                continue
            label = ", ".join(f"{dim} {size}" for dim, size in sizes.items())
            make = partial(_ragged_feeds, record, sizes, limits, _Ids(seed, mixed_in=mixed))
            cases.append(ValidationCase(f"decision at {label}", "sweep", make))
        per_case = _TABLE_ROWS * _TABLE_LENGTH
        for start in range(0, len(self.ids), per_case):
            ids = self.ids[start : start + per_case]
            name = f"ids {ids[0]} to {ids[-1]}" if len(ids) > 1 else f"id {ids[0]}"
            make = partial(_feeds_with_ids, record, ids, limits, seed)
            cases.append(ValidationCase(f"{name}, told apart", "sweep", make))
        return cases


def find_decisions(path: Path, record: GraphRecord, limits: FeedLimits) -> Decisions:
    """Find the sizes and ids at which a graph changes what it does.

    Args:
        path: the graph's file.
        record: its interface.
        limits: limits on its inputs.
    """
    from enginery.passes.ir.graph_file import read_graph  # imports onnx, slowly
    from enginery.validate.weights.stored import find_sizes

    constants = find_sizes(read_graph(path), shapes=False)
    sizes: list[dict[str, int]] = []
    ids: set[int] = set()
    notes: list[str] = []
    for nodes in _variants(load_graph(path)):
        try:
            control = _Control.cut_out(path, record, limits, nodes)
        except EngineryError as error:
            notes.append(f"{record.file}: what it decides from sizes is not known: {error.message}")
            continue
        if control is None:
            continue
        search = _Search(control, record, limits, constants)
        sizes += search.sizes()
        special, more = search.ids()
        ids |= special
        notes += more
    unique = list({tuple(item.items()): item for item in sizes}.values())
    unique.sort(key=partial(_tokens, record=record))
    return Decisions(unique, sorted(ids), list(dict.fromkeys(notes)), frozenset(constants))


def _tokens(sizes: Mapping[str, int], record: GraphRecord) -> int:
    """Return the number of positions that a run of such sizes computes; images are patches."""
    rows = math.prod(size for dim, size in sizes.items() if is_batch(dim))
    text = rows * max(1, sum(size for dim, size in sizes.items() if "sequence" in dim))
    images = sum(
        math.prod(spec.shape(sizes)) // _PATCH
        for spec in record.inputs
        if spec.dtype.startswith("float") and not any("sequence" in str(dim) for dim in spec.dims)
    )
    return max(text, images)


def _with_rows(sizes: Mapping[str, int], limits: FeedLimits, least: int) -> dict[str, int]:
    """Return sizes with at least so many rows."""
    rows = max([least, *(size for dim, size in sizes.items() if is_batch(dim))])
    counts = {dim: limits.rows(dim, rows) for dim in sizes}
    return {**sizes, **{dim: count for dim, count in counts.items() if count is not None}}


def _mask_elements(sizes: Mapping[str, int]) -> int:
    """Return the elements of a mask over all pairs of positions."""
    rows = math.prod(size for dim, size in sizes.items() if is_batch(dim))
    return rows * sum(size for dim, size in sizes.items() if "sequence" in dim) ** 2


def _idle_dims(sizes: Mapping[str, int]) -> int:
    """Return the number of dims whose size is so small that it hides differences."""
    return sum(size < 3 for size in sizes.values())


# The control part


@dataclass(frozen=True)
class _Graph:
    """The nodes of a graph without branches, and its constants."""

    proto: Any
    """The `onnx.ModelProto` that they come from."""
    nodes: list[Any]
    initializers: dict[str, Any]


def _variants(model: Any) -> list[_Graph]:
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
    return node.op_type in _LOGIC | _CHOICES | _STEPS


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
class _Control:
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

    def of(self, decisions: Sequence[Any]) -> _Control | None:
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
    ) -> _Control | None:
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
    except EngineryError:
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
        {dim: _fixed_size(dim, limits) or int(generator.integers(1, longest)) for dim in dims}
        for _ in range(count)
    ]


def _fixed_size(dim: str, limits: FeedLimits) -> int | None:
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
        _node("Identity", [name], [f"{name}{_COPY}"])
        for name in fetched
        if name in input_names and name not in produced
    ]
    outputs = [
        onnx.ValueInfoProto(name=f"{name}{_COPY}" if name in input_names else name)
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


_NUMBER = "control number "
_COPY = ":copy"


def _sliced(shape: str, output: str, start: int, end: int | None) -> Any:
    if not start and end is None:
        return _node("Identity", [shape], [output])
    stop = np.iinfo(np.int64).max if end is None else end
    return _node("Slice", [shape, f"{_NUMBER}{start}", f"{_NUMBER}{stop}"], [output])


# Search


class _Search:
    """Runs the control part at many sizes."""

    def __init__(
        self,
        control: _Control,
        record: GraphRecord,
        limits: FeedLimits,
        constants: Collection[int],
    ) -> None:
        self._control, self._record, self._limits = control, record, limits
        self._constants = constants
        self._dims = dynamic_dims(record.inputs)
        # Rows of four lengths, and masked positions between real ones of others.
        shared = any(dim.startswith(PAST) for dim in self._dims)
        self._base = sweep_sizes(self._dims, limits, batch=4, sequence=18 if shared else 9)
        self._largest = {dim: self._largest_size(dim) for dim in self._dims}
        # One id, so that only sizes change what is decided.
        self._usual_id = limits.vocab_size // 2
        self._usual = _Ids(0, fixed=self._usual_id)
        self._states: dict[tuple[int, ...], list[State] | None] = {}
        self._most_elements = _ELEMENTS
        self._steps = [node.op_type in _STEPS for node in control.decisions]

    def sizes(self) -> list[dict[str, int]]:
        """Return sizes on both sides of each change, and for each combination of decisions."""
        varied = [dim for dim in self._dims if self._largest[dim] > 1]
        rows = [dim for dim in varied if self._limits.rows(dim, 1) is not None]
        varied = [dim for dim in varied if dim not in rows[1:]]
        if not varied or not self._control.decisions:
            return []
        base = self._base
        values: dict[str, list[int]] = {}
        cells: list[dict[str, int]] = []
        stepped: list[dict[str, int]] = []
        for dim in varied:
            changes, steps = self._sweep(dim, base)
            values[dim] = sorted({*self._lowest(dim), *changes, base[dim]})
            cells += [self._resized(base, dim, size) for size in changes]
            stepped += [self._resized(base, dim, size) for size in steps]
        # There are many of them.
        self._most_elements = _DENSE
        combined = self._combinations(values, base)
        covering = self._covering([*cells, *combined])
        # Two thresholds that are too large to be tried together run together in any case.
        beyond = {dim: max(sizes) for dim, sizes in values.items()}
        large = base
        for dim, size in beyond.items():
            large = self._resized(large, dim, max(size, base[dim]))
        if self._state(large) is None and self._tokens(large) <= _MAX_TOGETHER:
            covering.append(large)
        return [*covering, *(cell for cell in stepped if self._tokens(cell) <= _STEP_TOKENS)]

    def _tokens(self, sizes: Mapping[str, int]) -> int:
        return _tokens(sizes, self._record)

    def _elements(self, control: _Control, sizes: Mapping[str, int]) -> int:
        """Return the elements of the largest mask, or of the inputs, such as masks of pixels."""
        taken = [spec for spec in self._record.inputs if spec.name in control.inputs]
        inputs = sum(math.prod(spec.shape(sizes)) for spec in taken)
        return max(_mask_elements(sizes), inputs)

    def _lowest(self, dim: str) -> list[int]:
        return [0, 1] if dim.startswith("past_") else [1, 2]

    def _resized(self, base: Mapping[str, int], dim: str, size: int) -> dict[str, int]:
        """Return sizes with another one of a dim; all dims that count rows change together."""
        if self._limits.rows(dim, 1) is None:
            return {**base, dim: size}
        rows = {name: self._limits.rows(name, size) for name in base}
        return {**base, **{name: count for name, count in rows.items() if count is not None}}

    def _largest_size(self, dim: str) -> int:
        if _fixed_size(dim, self._limits) is not None:
            return 1
        if self._limits.rows(dim, 1) is not None:
            return _LARGEST_BATCH
        if "sequence" not in dim or self._limits.min_sequence > 1:
            return 1
        return min(self._limits.max_positions, LONGEST)

    def _sweep(self, dim: str, base: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """Return the sizes of a dim around each change, and some of those of steps."""
        largest = self._largest[dim]
        special = {size + step for size in self._constants for step in (-1, 0, 1, 2)}
        dense = largest
        while (
            dense > _STRIDE
            and self._elements(self._control, self._resized(base, dim, dense)) > _DENSE
        ):
            dense -= _STRIDE
        wanted = {*range(dense + 1), *range(dense, largest, _STRIDE), largest - 1, largest}
        lowest = self._lowest(dim)[0]
        sizes = sorted(size for size in wanted | special if lowest <= size <= largest)
        states = [(size, self._state(self._resized(base, dim, size))) for size in sizes]
        known = [(size, state) for size, state in states if state is not None]
        changes: set[int] = set()
        steps: set[int] = set()
        pairs = list(itertools.pairwise(known))
        # A quotient that changes with every size is only another name of the size.
        counts = [sum(a[i] != b[i] for (_, a), (_, b) in pairs) for i in range(len(self._steps))]
        for (low, before), (high, after) in pairs:
            for index, is_step in enumerate(self._steps):
                if before[index] != after[index] and not (
                    is_step and counts[index] > len(pairs) / 2
                ):
                    below, above = self._bisect(dim, base, low, high, index)
                    (steps if is_step else changes).update((below, above))
        ordered = sorted(steps)
        few = ordered[:2] + ordered[len(ordered) // 2 :][:2] + ordered[-2:]
        return sorted(changes), sorted({*few})[:_STEP_CASES]

    def _bisect(
        self, dim: str, base: Mapping[str, int], low: int, high: int, index: int
    ) -> tuple[int, int]:
        """Return two neighbouring sizes between which a decision changes."""
        first = self._state(self._resized(base, dim, low))
        while high - low > 1 and first is not None:
            middle = (low + high) // 2
            state = self._state(self._resized(base, dim, middle))
            if state is None or state[index] != first[index]:
                high = middle
            else:
                low = middle
        return low, high

    def _combinations(
        self, values: Mapping[str, list[int]], base: Mapping[str, int]
    ) -> list[dict[str, int]]:
        """Return combinations of sizes of all dims."""
        per_dim = max(3, int(_MAX_COMBINATIONS ** (1 / max(1, len(values)))))
        listed = []
        for dim, sizes in values.items():
            # The lowest, the largest, and what lies evenly between.
            grid = {2**k + 1 for k in range(3, 10) if 2**k + 1 <= self._largest[dim]}
            every = sorted({*sizes, *grid, self._largest[dim]})
            indices = np.linspace(0, len(every) - 1, min(per_dim, len(every))).round().astype(int)
            listed.append([every[index] for index in indices])
        cells = []
        for combination in itertools.product(*listed):
            cell = dict(base)
            for dim, size in zip(values, combination, strict=True):
                cell = self._resized(cell, dim, size)
            cells.append(cell)
        return cells

    def _covering(self, cells: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """Return cells of which each shows a state of a decision, or a combination, that is new."""
        # A single token hides what a mask or an order of rows does.
        ordered = sorted(cells, key=lambda cell: (_idle_dims(cell), self._tokens(cell)))
        seen: set[tuple[int, State]] = set()
        combinations: set[frozenset[tuple[int, State]]] = set()
        first: list[dict[str, int]] = []
        second: list[dict[str, int]] = []
        for cell in ordered:
            state = self._state(cell)
            if state is None:
                continue
            named = {
                (i, s)
                for i, (s, step) in enumerate(zip(state, self._steps, strict=True))
                if not step and s != _UNKNOWN
            }
            whole = frozenset(named)
            if not named <= seen:
                first.append(cell)
            # A part of a combination that was seen is nothing new.
            elif not any(whole <= combination for combination in combinations):
                second.append(cell)
            seen |= named
            combinations.add(whole)
        return [self._deeper(cell) for cell in [*first, *second][:_MAX_CASES]]

    def _deeper(self, cell: dict[str, int]) -> dict[str, int]:
        """Return lengths that are a little larger, if all is decided as before.

        Just above a threshold for rows, only those without padding reach it.
        """
        deeper = {
            dim: min(size + 2, self._largest[dim]) if "sequence" in dim and size > 2 else size
            for dim, size in cell.items()
        }
        return deeper if self._state(deeper) == self._state(cell) else cell

    def _state(self, sizes: Mapping[str, int]) -> list[State] | None:
        """Return how each node decides at some sizes; None if the control part fails there."""
        key = tuple(sizes[dim] for dim in self._dims)
        if key not in self._states:
            self._states[key] = self._measure(sizes)
        return self._states[key]

    def _measure(self, sizes: Mapping[str, int]) -> list[State] | None:
        own = [n for dim, n in sizes.items() if "sequence" in dim and not dim.startswith("encoder")]
        if self._limits.min_sequence == 1 and sum(own) > self._limits.max_positions:
            return None
        if self._elements(self._control, sizes) <= self._most_elements:
            return self._run(self._control, sizes)
        # Masks of such a size would take too long; what is decided for rows takes less.
        part = self._without_pairs if _mask_elements(sizes) <= _MOST_FOR_ROWS else None
        if part is None or self._elements(part, sizes) > _MOST_FOR_ROWS:
            return None
        states = self._run(part, sizes)
        if states is None:
            return None
        known = {id(n): s for n, s in zip(part.decisions, states, strict=True)}
        return [known.get(id(node), _UNKNOWN) for node in self._control.decisions]

    @cached_property
    def _without_pairs(self) -> _Control | None:
        """The control part of the decisions that are not made for each pair of positions."""
        rows, length = 3, min(23, *(self._largest[d] for d in self._dims if "sequence" in d), 23)
        sizes = {
            dim: rows if is_batch(dim) else length if "sequence" in dim else self._base[dim]
            for dim in self._dims
        }
        values = self._values(self._control, sizes)
        if values is None:
            return None
        limit = rows * max(1, sum(size for dim, size in sizes.items() if "sequence" in dim))
        few = [n for n in self._control.decisions if _size_of(n, values) <= limit]
        try:
            return self._control.of(few)
        except EngineryError:
            return None

    def _run(self, control: _Control, sizes: Mapping[str, int]) -> list[State] | None:
        values = self._values(control, sizes)
        return None if values is None else [_state(node, values) for node in control.decisions]

    def _values(self, control: _Control, sizes: Mapping[str, int]) -> dict[str, Array] | None:
        try:
            feeds = _ragged_feeds(
                self._record, sizes, self._limits, self._usual, names=control.inputs
            )
            return control.run(feeds, sizes)
        except Exception:  # a size that the graph does not take
            return None

    def ids(self) -> tuple[set[int], list[str]]:
        """Return the ids that the graph tells apart, and notes on inputs that it changes."""
        specs = [
            spec
            for spec in self._record.inputs
            if spec.name.endswith("input_ids")
            and spec.name in self._control.inputs
            and len(spec.dims) == 2
            and all(isinstance(dim, str) for dim in spec.dims)
        ]
        ids: set[int] = set()
        notes = []
        for spec in specs:
            vocabulary = np.arange(self._limits.vocab_size)
            special = self._special_ids(spec.name, vocabulary)
            changed = self._changed_ids(spec.name, vocabulary)
            if changed:
                notes.append(
                    f"{self._record.file}: {spec.name} is changed before its table for "
                    f"{len(changed)} of {self._limits.vocab_size} ids, which were compared"
                )
            ids |= changed
            ids |= special if len(special) <= _FEW_IDS else {*sorted(special)[::_STRIDE]}
        return ids, notes

    def _run_ids(self, name: str, ids: Array) -> dict[str, Array] | None:
        """Run the control part with a row of two tokens for each id, the second always the same."""
        sizes = {
            dim: len(ids) if is_batch(dim) else 2 if "sequence" in dim else self._base[dim]
            for dim in self._dims
        }
        sizes |= {dim: 0 for dim in self._dims if dim.startswith("past_")}
        try:
            feeds = make_feeds(
                [spec for spec in self._record.inputs if spec.name in self._control.inputs],
                sizes,
                self._limits,
                seed=0,
            )
            feeds[name][:, 1] = self._usual_id
            feeds[name][:, 0] = ids
            return self._control.run(feeds, sizes)
        except Exception:  # a batch that the graph does not take
            return None

    def _special_ids(self, name: str, vocabulary: Array) -> set[int]:
        """Return the ids for which a node decides otherwise than for an ordinary one."""
        values = self._run_ids(name, vocabulary)
        usual = self._run_ids(name, np.full_like(vocabulary, self._usual_id))
        if values is None or usual is None:
            return set()
        special: set[int] = set()
        for node, steps in zip(self._control.decisions, self._steps, strict=True):
            if steps:  # what the quotient is used for tells
                continue
            ways, others = _ways(node, values), _ways(node, usual)
            if ways is None or others is None or ways.shape != others.shape:
                continue
            if ways.ndim and len(ways) == len(vocabulary):
                rows = (ways != others).reshape(len(vocabulary), -1).any(axis=1)
                special |= {int(index) for index in np.flatnonzero(rows)}
        return special

    def _changed_ids(self, name: str, vocabulary: Array) -> set[int]:
        """Return the ids that look up another row of the table than their own."""
        if not any(index != name for _, index in self._control.tables):
            return set()
        values = self._run_ids(name, vocabulary)
        if values is None:
            return set()
        changed: set[int] = set()
        for _, index in self._control.tables:
            rows = values.get(index, values.get(f"{index}{_COPY}"))
            if rows is None or rows.shape != (len(vocabulary), 2):
                continue
            own = rows[:, 0]
            # Positions are looked up by others: all alike, or two if padding has its own.
            if len(np.unique(own)) > 2:
                changed |= {int(token_id) for token_id in vocabulary[own != vocabulary]}
        return changed


def _ways(node: Any, values: Mapping[str, Array]) -> Array | None:
    """Return the number of the way that each element of a deciding node goes."""

    def value(name: str) -> Array | None:
        return values.get(name, values.get(f"{name}{_COPY}"))

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


def _size_of(node: Any, values: Mapping[str, Array]) -> int:
    ways = _ways(node, values)
    return 0 if ways is None else ways.size


_UNKNOWN: State = (-1.0, -1.0)


def _state(node: Any, values: Mapping[str, Array]) -> State:
    """Return the smallest and the largest way; NaN if nothing is known."""
    ways = _ways(node, values)
    if ways is None or not ways.size or ways.dtype.kind not in "biuf":
        return _UNKNOWN
    return float(ways.min()), float(ways.max())


# Inputs


@dataclass(frozen=True)
class _Ids:
    """The ids of the tokens of inputs."""

    seed: int
    """Random seed, also of the other inputs."""
    fixed: int | None = None
    """Id of all tokens; None to draw them."""
    mixed_in: Sequence[int] = ()
    """Ids of every second token."""


def _ragged_feeds(
    record: GraphRecord,
    sizes: Mapping[str, int],
    limits: FeedLimits,
    ids: _Ids,
    *,
    names: Collection[str] | None = None,
) -> Feeds:
    """Return inputs whose rows are as long as the batch, a position shorter, half, and one.

    Args:
        record: the graph.
        sizes: sizes of its dims.
        limits: limits on its inputs.
        ids: ids of the tokens.
        names: the inputs; None for all.
    """
    specs = [spec for spec in record.inputs if names is None or spec.name in names]
    # Copies, since some are views of one row.
    feeds = {n: np.array(a) for n, a in make_feeds(specs, sizes, limits, seed=ids.seed).items()}
    for spec in specs:
        if spec.name.endswith("input_ids") and feeds[spec.name].ndim == 2:
            array = feeds[spec.name]
            if ids.fixed is not None:
                array[...] = ids.fixed
            if ids.mixed_in:
                array[:, 1::2] = np.resize(ids.mixed_in, array[:, 1::2].shape)
    decodes = any(
        spec.name == "position_ids" or spec.name.startswith("past_") for spec in record.inputs
    )
    for mask in (spec for spec in specs if is_padding_mask(spec)):
        array = feeds[mask.name]
        rows, width = array.shape
        new = (
            sizes.get("sequence", 1)
            if any(d.startswith("past_") for d in dim_terms(mask.dims[1]))
            else 1
        )
        shortest = min(width, max(1, new if new < width else 1))
        lengths = [width, max(width - 1, shortest), max(width // 2, shortest), shortest]
        real = np.array([lengths[row % len(lengths)] for row in range(rows)])[:, None]
        columns = np.arange(width)[None]
        left = decodes and not mask.name.startswith("encoder_")
        padded = columns < width - real if left else columns >= real
        array[padded] = 0
        for spec in specs:
            values = feeds[spec.name]
            if len(spec.dims) != 2 or values.shape[0] != rows or spec is mask:
                continue
            own = values.shape[1]
            ends = spec.dims[1] in dim_terms(mask.dims[1]) or spec.dims[1] == mask.dims[1]
            if spec.name.endswith("input_ids") and ends:
                values[padded[:, width - own :]] = limits.pad_token_id
            elif spec.name == "position_ids" and ends:
                values[...] = np.maximum(np.cumsum(array, axis=1) - 1, 0)[:, width - own :]
    return feeds


def _feeds_with_ids(
    record: GraphRecord, ids: Sequence[int], limits: FeedLimits, seed: int
) -> Feeds:
    """Return inputs of up to 8 rows that hold some ids, and others beside a few of them."""
    longest = min(_TABLE_LENGTH, limits.max_positions)
    dims = dynamic_dims(record.inputs)
    length = longest
    rows = max(2, -(-len(ids) // max(1, length - 2)))
    sizes = {
        dim: rows
        if is_batch(dim)
        else length
        if "sequence" in dim
        else (_fixed_size(dim, limits) or 1)
        for dim in dims
    }
    sizes |= {dim: 1 for dim in dims if dim.startswith("past_")}
    feeds = make_feeds(record.inputs, sizes, limits, seed=seed)
    for spec in record.inputs:
        if spec.name.endswith("input_ids") and feeds[spec.name].ndim == 2:
            array = feeds[spec.name]
            inner = array[:, 1 : length - 1] if length > 2 else array
            # Other ids beside them, unless they fill the rows.
            flat = inner.reshape(-1).copy()
            step = max(1, flat.size // len(ids) // 2)
            flat[: len(ids) * step : step] = ids
            inner[...] = flat.reshape(inner.shape)
    return feeds
