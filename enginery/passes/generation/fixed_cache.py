"""Give a decoder a cache of fixed size, which it writes to in place, and let it choose a token.

A decoder as exported takes the keys and values of the past and returns them with the new ones
behind: each step has other shapes, and copies the whole cache. Here the past is a buffer that is
long enough for later tokens, and the position of each token says where its keys and values are
written and which of them it sees. All shapes of a step are then those of the step before, so that a
GPU can record it once and replay it.

The attention to the buffer is ONNX Runtime's GroupQueryAttention, or ScatterND (which writes) and
MultiHeadAttention (which reads). Masks disappear. Nothing is left that computes shapes: such nodes
run on the CPU, which a recorded step does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.core.model.feeds import FeedLimits
from enginery.passes.generation.attention import Attention, find_attention
from enginery.passes.generation.folding import SizeFolder, cancel_views
from enginery.passes.generation.last_position import (
    data_input,
    keep_last_position,
    path_to_head,
)
from enginery.passes.generation.rms_norms import fuse_norms, fuse_residuals
from enginery.passes.generation.rotary import RotaryTables, find_rotation, read_tables
from enginery.passes.generation.sizes import (
    LONE_STEP,
    RUNS,
    DecoderSizes,
    Sizes,
    UnsuitableGraphError,
)
from enginery.passes.generation.visibility import Visibility, measure_visibility
from enginery.passes.ir.builder import Builder
from enginery.passes.ir.graph_file import read_graph
from enginery.passes.ir.nodes import clear_shapes, constant_numbers, infer_types
from enginery.passes.ir.op_types import MICROSOFT
from enginery.runtime.decoder_graphs import (
    LOGITS,
    NEXT_IDS,
    is_cross_attention,
    is_past,
    present_name,
)

IDS, POSITIONS = "input_ids", "position_ids"
LENGTHS, TOTAL = "seqlens_k", "total_sequence_length"
ROWS, LAST, BUFFER = "rows", "last_token", "buffer_positions"
NEXT_POSITIONS, NEXT_LENGTHS = "next_position_ids", "next_seqlens_k"

GROUPED, SCATTERED = "GroupQueryAttention", "MultiHeadAttention"

# What is added to the score of a position that a query does not see: in FP16's range, and far below
# all scores.
_HIDDEN = -3e4
_PREFIX = "fixed_cache"
_MASK = "encoder_attention_mask"
_INT64, _FLOAT = ir.DataType.INT64, ir.DataType.FLOAT
_HEADS_BEFORE_POSITIONS = (0, 2, 1, 3)


@dataclass(frozen=True)
class DecoderFacts:
    """What is known of a decoder graph before it is rewritten."""

    path: Path
    limits: FeedLimits
    sizes: DecoderSizes
    visibility: dict[str, Visibility]
    """How each attention weighs positions, by the name of its keys."""


def measure_decoder(path: Path, limits: FeedLimits) -> DecoderFacts:
    """Find and measure the attentions of an FP32 decoder that takes its cache.

    Raises:
        UnsuitableGraphError: the decoder is not built as expected.
        InputError: the graph fails on generated inputs.
    """
    model = read_graph(path)
    infer_types(model)
    own, cross = _find_attentions(model)
    if not own:
        raise UnsuitableGraphError("the graph, which takes no cache")
    read = [attention.query.name or "" for attention in (*own.values(), *cross.values())]
    sizes = DecoderSizes(path, limits, [*read, _head(model)[2].name or ""])
    visibility = measure_visibility(own, cross, sizes, position_limit=limits.position_limit)
    return DecoderFacts(path, limits, sizes, visibility)


@dataclass(frozen=True)
class FixedCache:
    """A decoder with a cache of fixed size."""

    model: ir.Model
    attentions: Counter[str]
    """The number of attentions to own positions, by operator."""
    origins: dict[str, frozenset[str]]
    """The names of the decoder's nodes that a new node stands for, by its name."""

    def kept(self, names: Collection[str]) -> frozenset[str]:
        """Return names of the decoder's nodes, with those of the new nodes that stand for them."""
        new = {name for name, origins in self.origins.items() if not origins.isdisjoint(names)}
        return frozenset({*names, *new})


def fix_cache(facts: DecoderFacts, *, grouped: bool, rotary: bool = False) -> FixedCache:
    """Return the decoder with a cache of fixed size, in FP32.

    Its outputs are the logits of each row's last token, (batch, 1, vocabulary), and the buffers;
    `add_choice` adds the others.

    Args:
        facts: the result of `measure_decoder`.
        grouped: use GroupQueryAttention where it fits. Without, an attention with a cap does not.
        rotary: let GroupQueryAttention rotate queries and keys where that looks possible. Whether
            the result is the same has to be compared.

    Raises:
        UnsuitableGraphError: a node is not as expected.
    """
    model = read_graph(facts.path)
    infer_types(model)
    return _Rewriter(model, facts, grouped=grouped, rotary=rotary).run()


def _find_attentions(model: ir.Model) -> tuple[dict[str, Attention], dict[str, Attention]]:
    """Return the attentions to own positions and to the encoder's, by the names of their keys."""
    by_name = {value.name or "": value for value in (*model.graph.inputs, *model.graph.outputs)}
    own, cross = dict[str, Attention](), dict[str, Attention]()
    for value in model.graph.inputs:
        past = value.name or ""
        if not is_past(past) or not past.endswith("key"):
            continue
        is_cross = is_cross_attention(past)
        key = past if is_cross else present_name(past)
        pair = key.removesuffix("key") + "value"
        if key not in by_name or pair not in by_name:
            raise UnsuitableGraphError(f"{past}, whose longer cache is not an output")
        (cross if is_cross else own)[key] = find_attention(by_name[key], by_name[pair])
    return own, cross


def _head(model: ir.Model) -> tuple[ir.Node, ir.Node, ir.Value]:
    """Return the node that cuts off all positions but the last, the head, and what it reads.

    Where a graph cuts the logits, the head is the product before; where it cuts the states, the cut
    is the head. A graph that does not cut gets the node.
    """
    for cut in (False, True):
        if cut:
            keep_last_position(model)
        node = next(value for value in model.graph.outputs if value.name == LOGITS).producer()
        while node is not None and not _is_last_position(node):
            computed = [v for v in node.inputs if v is not None and v.producer() is not None]
            node = computed[0].producer() if computed else None
        if node is not None and node.inputs[0] is not None:
            path, states = path_to_head(node.inputs[0])
            return (node, node, node.inputs[0]) if states is None else (node, path[-1], states)
    raise UnsuitableGraphError("the logits, whose last position was not found")


def _is_last_position(node: ir.Node) -> bool:
    """Return True for a Slice of the last element of axis 1."""
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return False
    starts, _, axes = map(constant_numbers, node.inputs[1:4])
    return starts == [-1] and axes in ([1], [-2])


def _value_of(key: str) -> str:
    return key.removesuffix("key") + "value"


def _appended(present: ir.Value, past: ir.Value) -> ir.Value:
    """Return the new keys or values, which a Concat appends to the past."""
    node = present.producer()
    if node is None or node.op_type != "Concat" or node.inputs[0] is not past:
        raise UnsuitableGraphError(f"{present.name}, which does not append to {past.name}")
    if len(node.inputs) != 2 or node.attributes.get_int("axis", 0) not in (2, -2):
        raise UnsuitableGraphError(f"{node.name}, which does not append positions")
    if node.inputs[1] is None:
        raise UnsuitableGraphError(f"{node.name}, which appends nothing")
    return node.inputs[1]


class _Rewriter:
    """Rewrites one decoder."""

    def __init__(
        self, model: ir.Model, facts: DecoderFacts, *, grouped: bool, rotary: bool
    ) -> None:
        self.model, self.graph, self.facts = model, model.graph, facts
        self.grouped, self.rotary = grouped, rotary
        self.build = Builder(model, _PREFIX)
        self.inputs = {value.name or "": value for value in self.graph.inputs}
        self.counts: Counter[str] = Counter()
        self._cached: dict[Any, ir.Value] = {}
        self._contexts: list[tuple[ir.Value, ir.Shape]] = []
        self._tables: dict[tuple[str | None, str | None], RotaryTables | None] = {}

    def run(self) -> FixedCache:
        """Return the result."""
        head = _head(self.model)
        self.positions = self._input(POSITIONS, _INT64, ["batch", "sequence"])
        own, cross = _find_attentions(self.model)
        for key, attention in own.items():
            self._own_attention(key, attention, self.facts.visibility[key])
        for key, attention in cross.items():
            self._cross_attention(key, attention, self.facts.visibility[key])
        self._take_last_tokens(*head)
        self._clean()
        # After the clean-up: what only masks have looked up is neither ids nor positions.
        self._replace_lookups()
        self._clean()
        SizeFolder(self.model, self.facts.sizes, self.position, self.positions).run()
        self._clean()
        cancel_views(self.model)
        # Only without views between them does a Split feed the attention directly.
        self._pack_queries()
        fuse_norms(self.model, self.build)
        # `fuse_residuals` goes by ranks, which the rewritten graph does not have yet.
        self._infer_shapes()
        fuse_residuals(self.model, self.build)
        self._drop_inputs()
        self._name_dims()
        return FixedCache(self.model, self.counts, self.build.origins)

    def _clean(self) -> None:
        self.graph.sort()
        RemoveUnusedNodesPass()(self.model)

    def _input(self, name: str, dtype: ir.DataType, shape: list[Any]) -> ir.Value:
        """Return the graph's input of a name, which is added if there is none."""
        if name not in self.inputs:
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
            self.graph.inputs.append(value)
            self.inputs[name] = value
        return self.inputs[name]

    def _once(self, key: Any, make: Callable[[], ir.Value]) -> ir.Value:
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    # Attention

    def _own_attention(self, key: str, attention: Attention, visibility: Visibility) -> None:
        pasts = [name.replace("present.", "past_key_values.", 1) for name in (key, _value_of(key))]
        past = [self.inputs[name] for name in pasts]
        presents = [self._output(name) for name in (key, _value_of(key))]
        new = [_appended(present, value) for present, value in zip(presents, past, strict=True)]
        shape = past[0].shape
        if shape is None or not isinstance(shape[1], int) or not isinstance(shape[3], int):
            raise UnsuitableGraphError(f"{pasts[0]}, whose heads are unknown")
        kv_heads, width = shape[1], shape[3]
        heads = self._size(attention.query, 1)
        if heads % kv_heads:
            raise UnsuitableGraphError(f"{attention.scores.name}, {heads} heads on {kv_heads}")
        # GroupQueryAttention rejects heads whose size is no multiple of 8, and gets no bias here.
        fits = self.grouped and width % 8 == 0 and visibility.is_plain
        emit = self._grouped if fits else self._scattered
        self.counts[GROUPED if fits else SCATTERED] += 1
        context, buffers = emit(attention, visibility, past, new, (heads, kv_heads, width))
        # MultiHeadAttention has keys for each head of the queries, so the buffer does, too.
        stored = kv_heads if fits else heads
        for value, buffer, present in zip(past, buffers, presents, strict=True):
            value.shape = ir.Shape(["batch", stored, "buffer", width])
            buffer.shape, buffer.type = value.shape, value.type
            self._replace_output(present, buffer)
        self._replace_context(attention, context, heads, width)

    def _size(self, value: ir.Value, axis: int) -> int:
        """Return a size that is the same in all runs."""
        dims = self.facts.sizes.dims[value.name or ""]
        size = dims[axis] if axis < len(dims) else None
        if size is None or size.of:
            raise UnsuitableGraphError(f"{value.name}, whose dim {axis} is not a number")
        return size.factor

    def _grouped(
        self,
        attention: Attention,
        visibility: Visibility,
        past: Sequence[ir.Value],
        new: Sequence[ir.Value],
        sizes: tuple[int, int, int],
    ) -> tuple[ir.Value, Sequence[ir.Value]]:
        heads, kv_heads, width = sizes
        lengths = self._input(LENGTHS, ir.DataType.INT32, ["batch"])
        total = self._input(TOTAL, ir.DataType.INT32, [1])
        query, (key, value) = attention.query, new
        tables = list[ir.Value]()
        # ONNX Runtime's kernel rotates at the positions that it writes to.
        if self.rotary and (rotated := self._rotary(query, key, width)) is not None:
            query, key, tables = rotated
        # GroupQueryAttention takes the heads of a token side by side: (batch, sequence, hidden).
        counts = (heads, kv_heads, kv_heads)
        rows = [
            self.build.merge_heads(part, count * width)
            for part, count in zip((query, key, value), counts, strict=True)
        ]
        attributes: dict[str, Any] = {
            "num_heads": heads,
            "kv_num_heads": kv_heads,
            "scale": visibility.scale,
        }
        if visibility.window is not None:
            # Either window includes the position of the query itself.
            attributes["local_window_size"] = visibility.window
        if visibility.cap:
            attributes["softcap"] = visibility.cap
        if tables:
            attributes["do_rotary"] = 1
        inputs = [*rows, *past, lengths, total, *tables]
        context, *buffers = self.build.node(
            GROUPED, inputs, attributes, domain=MICROSOFT, outputs=3
        )
        return context, buffers

    def _rotary(
        self, query: ir.Value, key: ir.Value, width: int
    ) -> tuple[ir.Value, ir.Value, list[ir.Value]] | None:
        """Return queries and keys before they are rotated, and the tables for it."""
        query_rotation, key_rotation = find_rotation(query), find_rotation(key)
        if query_rotation is None or key_rotation is None:
            return None
        # The kernel has one pair of tables, for queries and keys.
        if (query_rotation.cosines, query_rotation.sines) != (
            key_rotation.cosines,
            key_rotation.sines,
        ):
            return None
        names = (query_rotation.cosines.name, query_rotation.sines.name)
        if names not in self._tables:
            limit = self.facts.limits.position_limit
            self._tables[names] = read_tables(
                query_rotation, self.facts.sizes, width=width, position_limit=limit
            )
        tables = self._tables[names]
        if tables is None:
            return None
        constants = [self.build.constant(table) for table in (tables.cosines, tables.sines)]
        return query_rotation.source, key_rotation.source, constants

    def _scattered(
        self,
        attention: Attention,
        visibility: Visibility,
        past: Sequence[ir.Value],
        new: Sequence[ir.Value],
        sizes: tuple[int, int, int],
    ) -> tuple[ir.Value, Sequence[ir.Value]]:
        heads, kv_heads, width = sizes
        if visibility.cap:
            raise UnsuitableGraphError(
                f"{attention.scores.name}, whose cap {SCATTERED} does not have"
            )
        build = self.build
        indices = self._once(("indices", heads), lambda: self._indices(heads))
        buffers = []
        for buffer, appended in zip(past, new, strict=True):
            rows = build("Transpose", appended, perm=_HEADS_BEFORE_POSITIONS)
            if kv_heads != heads:
                # Heads share keys and values; MultiHeadAttention reads one for each, so they are
                # repeated.
                unsqueezed = build("Unsqueeze", rows, build.ints(3))
                expanded = build("Expand", unsqueezed, build.ints(1, 1, 1, heads // kv_heads, 1))
                rows = build("Reshape", expanded, build.ints(0, 0, heads, width))
            buffers.append(build("ScatterND", buffer, indices, rows))
        query = build.merge_heads(attention.query, heads * width)
        (context,) = build.node(
            SCATTERED,
            [query, *buffers, None, None, self._own_bias(visibility, heads)],
            {"num_heads": heads, "scale": visibility.scale},
            domain=MICROSOFT,
        )
        return context, buffers

    def _indices(self, heads: int) -> ir.Value:
        """Return where new keys are written: int64 (batch, sequence, heads, 3)."""
        build = self.build
        row = build("Unsqueeze", self._input(ROWS, _INT64, ["batch"]), build.ints(1, 2, 3))
        head = np.arange(heads, dtype=np.int64).reshape(1, 1, heads, 1)
        position = build("Unsqueeze", self.positions, build.ints(2, 3))
        # Broadcast by adding zeros: an Expand would need a shape, which the CPU computes.
        positions = build("Add", position, build.constant(np.zeros_like(head)))
        zero = build("Sub", positions, positions)
        rows, heads_of_rows = (build("Add", x, zero) for x in (row, build.constant(head)))
        # (batch, heads, buffer): the dims of a buffer before head_dim.
        return build("Concat", rows, heads_of_rows, positions, axis=-1)

    def _distance(self) -> ir.Value:
        """Return the positions from a key to a query: int64 (batch, 1, sequence, buffer)."""
        build = self.build
        keys = self._input(BUFFER, _INT64, ["buffer"])
        queries = build("Unsqueeze", self.positions, build.ints(1, 3))
        return build("Sub", queries, keys)

    def _own_bias(self, visibility: Visibility, heads: int) -> ir.Value:
        """Return what is added to the scores: (batch, 1 or heads, sequence, buffer)."""
        tables = [visibility.distance_bias, visibility.slopes]
        key = (visibility.window, *(None if t is None else t.tobytes() for t in tables))
        return self._once(("bias", key), lambda: self._make_bias(visibility, heads))

    def _make_bias(self, visibility: Visibility, heads: int) -> ir.Value:
        build = self.build
        distance = self._once("distance", self._distance)
        zero = build.constant(np.array(0, np.int64))
        # Positions behind the query lie in the future, and may not be written yet.
        visible = build("GreaterOrEqual", distance, zero)
        if visibility.window is not None:
            limit = build.constant(np.array(visibility.window, np.int64))
            visible = build("And", visible, build("Less", distance, limit))
        bias = build.constant(np.zeros((1, 1, 1, 1), np.float32))
        if visibility.distance_bias is not None:
            table = build.constant(np.asarray(visibility.distance_bias, np.float32))
            last = build.constant(np.array(len(visibility.distance_bias) - 1, np.int64))
            # Negative distances are hidden below; as indices, they would count from the end.
            flat = build("Squeeze", distance, build.ints(1))
            # The last row stands for all greater distances.
            index = build("Min", build("Max", flat, zero), last)
            bias = build("Transpose", build("Gather", table, index, axis=0), perm=[0, 3, 1, 2])
        elif visibility.slopes is not None:
            slopes = np.asarray(visibility.slopes, np.float32).reshape(1, heads, 1, 1)
            steps = build("Cast", build("Max", distance, zero), to=_FLOAT)
            bias = build("Mul", steps, build.constant(-slopes))
        return build("Where", visible, bias, build.constant(np.array(_HIDDEN, np.float32)))

    def _cross_attention(self, key: str, attention: Attention, visibility: Visibility) -> None:
        values = self.inputs[_value_of(key)]
        keys = self.inputs[key]
        shape = keys.shape
        if shape is None or not isinstance(shape[1], int) or not isinstance(shape[3], int):
            raise UnsuitableGraphError(f"{key}, whose heads are unknown")
        heads, width = shape[1], shape[3]
        if visibility.cap or self._size(attention.query, 1) != heads:
            raise UnsuitableGraphError(f"{attention.scores.name}, whose heads or cap do not fit")
        bias = self._once("encoder bias", self._encoder_bias) if visibility.masks_encoder else None
        query = self.build.merge_heads(attention.query, heads * width)
        # With four dims, keys and values are read as they are: (batch, heads, positions, head_dim).
        (context,) = self.build.node(
            SCATTERED,
            [query, keys, values, None, None, bias],
            {"num_heads": heads, "scale": visibility.scale},
            domain=MICROSOFT,
        )
        self._replace_context(attention, context, heads, width)

    def _encoder_bias(self) -> ir.Value:
        """Return what hides an encoder's padding: (batch, 1, sequence, encoder positions)."""
        build = self.build
        mask = build("Unsqueeze", self.inputs[_MASK], build.ints(1, 2))
        # MultiHeadAttention takes a bias for every query.
        queries = build("Unsqueeze", self.positions, build.ints(1, 3))
        every = build("Add", mask, build("Sub", queries, queries))
        visible = build("Greater", every, build.constant(np.array(0, np.int64)))
        zero, hidden = (build.constant(np.array(x, np.float32)) for x in (0.0, _HIDDEN))
        return build("Where", visible, zero, hidden)

    def _replace_context(
        self, attention: Attention, context: ir.Value, heads: int, width: int
    ) -> None:
        """Let the rest of the graph read an attention's result, (batch, sequence, hidden)."""
        node = context.producer()
        if node is not None and node.op_type == SCATTERED:
            # GroupQueryAttention sums in FP32 whatever its type; this may keep scores in FP16.
            steps = (step.node.name for step in attention.steps)
            self.build.note_origins(context, [attention.scores.name, *steps])
        context.type = ir.TensorType(_FLOAT)
        context.shape = ir.Shape(["batch", "sequence", heads * width])
        self._contexts.append((context, context.shape))
        by_position = self.build("Reshape", context, self.build.ints(0, 0, heads, width))
        by_head = self.build("Transpose", by_position, perm=_HEADS_BEFORE_POSITIONS)
        attention.context.outputs[0].replace_all_uses_with(by_head)

    def _output(self, name: str) -> ir.Value:
        return next(value for value in self.graph.outputs if value.name == name)

    def _replace_output(self, old: ir.Value, new: ir.Value) -> None:
        name = old.name
        old.name = self.build.names(f"{name}/grown")
        new.name = name
        index = self.graph.outputs.index(old)
        self.graph.outputs[index] = new

    # The last token, positions and token ids

    def _take_last_tokens(self, cut: ir.Node, head: ir.Node, states: ir.Value) -> None:
        """Compute the logits of each row's last token: rows are padded on the right."""
        last = self._input(LAST, _INT64, ["batch"])
        build = self.build
        # Not GatherND: its CUDA kernel copies from the host's memory, which a replay does not have.
        index = build("Unsqueeze", last, build.ints(1, 2))
        index = build("Expand", index, build.ints(1, 1, self._size(states, -1)))
        last_states = build("GatherElements", states, index, axis=1)
        old, new = cut.outputs[0], last_states
        if head is not cut and cut.inputs[0] is not None:
            head.replace_input_with(data_input(head), last_states)
            new = cut.inputs[0]
        if old.is_graph_output():
            new.type, new.shape = old.type, old.shape
            self._replace_output(old, new)
        else:
            old.replace_all_uses_with(new)

    def _replace_lookups(self) -> None:
        """Let tables be read at the token ids and the positions themselves."""
        lookups = [
            node
            for node in self.graph
            if node.op_type == "Gather"
            and node.inputs[0] is not None
            and ir.convenience.get_const_tensor(node.inputs[0]) is not None
            and node.inputs[0].dtype == _FLOAT
            and node.inputs[1] is not None
            and node.inputs[1].producer() is not None
            and node.inputs[1].producer() not in self.build.added
        ]
        names = list(dict.fromkeys(node.inputs[1].name or "" for node in lookups))
        if not names:
            return
        # What an index is follows from its values in several runs, however it is computed.
        runs = (*RUNS, LONE_STEP)
        traces = [self.facts.sizes.evaluate(names, sizes) for sizes in runs]
        for node in lookups:
            name = node.inputs[1].name or ""
            value = self._position_or_ids([trace[name] for trace in traces], runs)
            if value is None:
                raise UnsuitableGraphError(f"{node.name}, which looks up neither ids nor positions")
            node.replace_input_with(1, value)

    def _position_or_ids(
        self, arrays: Sequence[NDArray[Any]], runs: Sequence[Sizes]
    ) -> ir.Value | None:
        ids = [self.facts.sizes.feeds(sizes, names=[IDS])[IDS] for sizes in runs]
        if all(
            np.array_equal(array, expected) for array, expected in zip(arrays, ids, strict=True)
        ):
            return self.inputs[IDS]
        return self.position(arrays, runs)

    def position(self, arrays: Sequence[NDArray[Any]], runs: Sequence[Sizes]) -> ir.Value | None:
        """Return the position of each token plus a constant, if that is what the arrays are."""
        offset = None
        for array, sizes in zip(arrays, runs, strict=True):
            if array.dtype.kind != "i" or not array.size or array.ndim > 2:
                return None
            expected = np.arange(sizes.past, sizes.total)
            by_row = np.broadcast_to(expected, (sizes.batch, sizes.sequence))
            if array.shape == (by_row.size,):  # the rows of all tokens
                expected = by_row.reshape(-1)
            elif array.shape not in (expected.shape, (1, *expected.shape), by_row.shape):
                return None
            difference = array - expected
            offset = int(difference.flat[0]) if offset is None else offset
            if (difference != offset).any():
                return None
        if not offset:
            return self.positions
        build = self.build
        shift = build.constant(np.array(offset, np.int64))
        return self._once(("position", offset), lambda: build("Add", self.positions, shift))

    def _infer_shapes(self) -> None:
        """Infer all shapes anew: those of the graph before may not hold any more."""
        clear_shapes(self.model)
        for context, shape in self._contexts:
            context.shape = shape
        infer_types(self.model)

    def _pack_queries(self) -> None:
        """Let GroupQueryAttention read queries, keys and values that a Split takes apart whole."""
        for node in self.graph:
            if node.op_type != GROUPED:
                continue
            parts = list(node.inputs[:3])
            split = None if parts[0] is None else parts[0].producer()
            if split is None or split.op_type != "Split" or list(split.outputs) != parts:
                continue
            # Another reader of a part would keep the Split alive.
            if split.attributes.get_int("axis", 0) in (2, -1) and all(
                len(part.uses()) == 1 for part in split.outputs
            ):
                # Without keys and values, the operator reads all three from its first input.
                for index, value in enumerate((split.inputs[0], None, None)):
                    node.replace_input_with(index, value)
        RemoveUnusedNodesPass()(self.model)

    def _drop_inputs(self) -> None:
        for value in list(self.graph.inputs):
            # Positions are counted on for the next step, whether or not a table is read at them.
            if not value.uses() and value is not self.positions:
                self.graph.inputs.remove(value)

    def _name_dims(self) -> None:
        for name in (IDS, POSITIONS):
            self.inputs[name].shape = ir.Shape(["batch", "sequence"])
        logits = self._output(LOGITS)
        logits.shape = ir.Shape(["batch", 1, logits.shape[-1] if logits.shape else "vocabulary"])
        # They are those of the graph before. ONNX Runtime infers them anew.
        clear_shapes(self.model)


def add_choice(model: ir.Model) -> None:
    """Let a decoder with a fixed cache choose the most probable token, and prepare the next step.

    Adds the outputs `next_ids` and `next_position_ids`, int64 (batch, 1), and `next_seqlens_k`,
    int32 (batch,), if the graph takes it. The logits become float32 (batch, vocabulary).
    """
    graph = model.graph
    build = Builder(model, f"{_PREFIX}/choice")
    inputs = {value.name: value for value in graph.inputs}
    logits = next(value for value in graph.outputs if value.name == LOGITS)
    vocabulary = None if logits.shape is None else logits.shape[-1]
    logits_index = graph.outputs.index(logits)
    logits.name = build.names("logits_of_position")
    rows = build("Squeeze", logits, build.ints(1))
    # Who reads the logits expects float32, whatever the graph computes in.
    if logits.dtype != _FLOAT:
        rows = build("Cast", rows, to=_FLOAT)
    chosen = build("ArgMax", rows, axis=-1, keepdims=1)
    # A prompt has several positions, of which only the last one has a next.
    last = build("Unsqueeze", inputs[LAST], build.ints(1))
    position = build("GatherElements", inputs[POSITIONS], last, axis=1)
    following = build("Add", position, build.constant(np.array(1, np.int64)))
    outputs = [
        (chosen, NEXT_IDS, _INT64, ["batch", 1]),
        (following, NEXT_POSITIONS, _INT64, ["batch", 1]),
    ]
    if LENGTHS in inputs:
        longer = build("Add", inputs[LENGTHS], build.constant(np.array(1, np.int32)))
        outputs.append((longer, NEXT_LENGTHS, ir.DataType.INT32, ["batch"]))
    graph.outputs[logits_index] = rows
    for value, name, dtype, shape in ((rows, LOGITS, _FLOAT, ["batch", vocabulary]), *outputs):
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        if value is not rows:
            graph.outputs.insert(0, value)
    graph.sort()
