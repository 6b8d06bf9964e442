"""Keep a decoder's cache and the inputs of its steps in device buffers of fixed size.

    buffers = CacheBuffers(session, record, BufferSizes(rows=8, length=128), device, None)
    buffers.prompt(16).write(ids, lengths)
    session.run_with_iobinding(buffers.prompt(16).run.bound)
    session.run_with_iobinding(buffers.steps[0].bound)    # reads what the prompt chose
    session.run_with_iobinding(buffers.steps[1].bound)    # reads what that step chose
    buffers.turns[0].ids.numpy()

A past and its present are bound to the same memory, in which the graph writes the new keys and
values. Two sets of small buffers take turns: what a step chooses is what the next one reads, and
nothing has to come from the host in between. Each binding is made once, and can be recorded as a
CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.shapes import Dim, TensorSpec, canonical_dim
from enginery.runtime.decoder_graphs import (
    LOGITS,
    NEXT_IDS,
    is_cross_attention,
    is_past,
    of_encoder,
    present_name,
)
from enginery.runtime.generation.operators import (
    BestTokens,
    Operators,
    RowCopy,
    Values,
    ortvalue,
)
from enginery.runtime.onnxruntime.binding import run_options
from enginery.runtime.onnxruntime.device_values import Device, new_buffer

ENCODER_MASK = of_encoder("attention_mask")
_LENGTHS = "seqlens_k"
_TOTAL = "total_sequence_length"
_ROWS, _POSITIONS = "rows", "buffer_positions"
_LAST = "last_token"
_ENCODER = "encoder_"

STEP_INPUTS = ("input_ids", "position_ids", _LENGTHS, _TOTAL, _ROWS, _POSITIONS, _LAST)
"""The inputs besides the cache and what comes from the encoder."""
NO_GRAPH = "-1"
"""ONNX Runtime's `gpu_graph_id` of runs that are not recorded."""

_FEWEST_BEST = 16
_SHORTEST_BUFFER = 64
_SHORTEST_PROMPT = 16


def row_rung(rows: int) -> int:
    """Return the number of rows of the buffers for a number of rows: a power of two.

    >>> row_rung(1), row_rung(5)
    (1, 8)
    """
    return 1 << max(rows - 1, 0).bit_length()


def length_rung(length: int, limit: int | None) -> int:
    """Return the length of the buffers for a number of tokens: 64, 128, 256 … or the limit.

    >>> length_rung(65, None), length_rung(600, 1000)
    (128, 1000)
    """
    rung = max(_SHORTEST_BUFFER, row_rung(length))
    return rung if limit is None else min(rung, limit)


def width_rung(width: int, limit: int | None) -> int:
    """Return the width that prompts or an encoder's inputs are padded to: 16, 24, 32, 48, 64 ….

    >>> width_rung(5, None), width_rung(33, None), width_rung(49, 60)
    (16, 48, 60)
    """
    power = max(_SHORTEST_PROMPT, row_rung(width))
    # Widths half-way between the powers keep padding below a third of a row.
    if power > _SHORTEST_PROMPT and width <= power // 4 * 3:
        power = power // 4 * 3
    return power if limit is None else min(power, limit)


@dataclass(frozen=True)
class BufferSizes:
    """The sizes of the buffers."""

    rows: int
    length: int
    """Number of positions."""
    encoder: int = 0
    """Number of the encoder's positions; 0 without an encoder."""


@dataclass(frozen=True)
class Turn:
    """What one step reads and the one before it writes."""

    ids: Any
    """int64 (rows, 1): the next token of each row."""
    positions: Any
    """int64 (rows, 1): its position."""
    lengths: Any
    """int32 (rows,): the same position, for GroupQueryAttention; None if the graph has no such
    input."""


@dataclass(frozen=True)
class BoundRun:
    """A run whose inputs and outputs are bound."""

    bound: Any
    """The `onnxruntime.IOBinding`."""
    graph_id: str
    """The CUDA graph that it is recorded as, or `NO_GRAPH`."""
    options: Any
    """`onnxruntime.RunOptions`; None for a session that records nothing."""


@dataclass(frozen=True)
class Prompt:
    """The inputs of prompts of one width, padded on the right."""

    run: BoundRun
    """What it chooses goes to the first turn."""
    ids: Any
    lengths: Any
    """int32 (rows,): number of tokens minus 1; None if the graph has no such input."""
    last: Any
    """int64 (rows,): index of each row's last token."""

    def write(self, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Write prompts.

        Args:
            ids: (rows, width).
            lengths: (rows,): number of tokens of each row, at least 1.
        """
        self.ids.update_inplace(ids)
        self.last.update_inplace(lengths - 1)
        if self.lengths is not None:
            self.lengths.update_inplace((lengths - 1).astype(np.int32))


@dataclass
class CacheBuffers:
    """The buffers of one size, and the bindings of a session to them."""

    session: Any
    record: GraphRecord
    sizes: BufferSizes
    device: Device
    graph_ids: tuple[str, str] | None
    """The CUDA graphs of the two steps; None for a session that records nothing."""
    cache: Values = field(init=False)
    """The decoder's own keys and values, by the names of its inputs."""
    encoded: Values = field(init=False)
    """What it reads of the encoder, the mask included."""
    turns: tuple[Turn, Turn] = field(init=False)
    logits: Any = field(init=False)
    """float32 (rows, vocabulary): of the last run."""
    steps: tuple[BoundRun, BoundRun] = field(init=False)
    """The first reads the first turn and writes the second."""
    _prompts: dict[int, Prompt] = field(init=False, default_factory=dict)
    _best: dict[int, BestTokens] = field(init=False, default_factory=dict)
    _copies: dict[bool, RowCopy] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        inputs = self.record.inputs
        self._outputs = {spec.name: spec for spec in self.record.outputs}
        self.cache = self._new(s for s in inputs if is_past(s.name) and not is_encoded(s.name))
        self.encoded = self._new(s for s in inputs if is_encoded(s.name))
        self._names = {spec.name for spec in inputs}
        self.turns = (self._new_turn(), self._new_turn())
        self.logits = self._new([self._outputs[LOGITS]])[LOGITS]
        rows, device = self.sizes.rows, self.device
        # Constants of these sizes, at fixed addresses for recorded runs.
        self._rows = device_value(np.arange(rows), device)
        self._positions = device_value(np.arange(self.sizes.length), device)
        # A step has one token in each row, and that is its last.
        self._first = device_value(np.zeros(rows, np.int64), device)
        first, second = self.turns
        ids = self.graph_ids or (NO_GRAPH, NO_GRAPH)
        self.steps = (
            self._bound_run(self._bind_step(first, second), ids[0]),
            self._bound_run(self._bind_step(second, first), ids[1]),
        )

    @property
    def bytes(self) -> int:
        """Return the size of the cache."""
        return self.sizes.rows * bytes_per_row(self.record, self.sizes)

    def prompt(self, width: int) -> Prompt:
        """Return the inputs of prompts of a width."""
        if width not in self._prompts:
            rows, device = self.sizes.rows, self.device
            has_lengths = _LENGTHS in self._names
            ids = new_buffer("int64", (rows, width), device)
            positions = device_value(np.tile(np.arange(width), (rows, 1)), device)
            lengths = new_buffer("int32", (rows,), device) if has_lengths else None
            last = new_buffer("int64", (rows,), device)
            bound = self._bind(Turn(ids, positions, lengths), self.turns[0], last, width)
            run = self._bound_run(bound, NO_GRAPH)
            self._prompts[width] = Prompt(run, ids, lengths, last)
        return self._prompts[width]

    def write_turn(
        self, index: int, tokens: NDArray[np.int64], positions: NDArray[np.int64] | None
    ) -> None:
        """Write the inputs of the next step.

        Args:
            index: the turn.
            tokens: (rows,).
            positions: (rows,); None if those on the device are right.
        """
        turn = self.turns[index]
        turn.ids.update_inplace(tokens[:, None])
        if positions is not None:
            turn.positions.update_inplace(positions[:, None])
            if turn.lengths is not None:
                turn.lengths.update_inplace(positions.astype(np.int32))

    def copy_within(
        self, operators: Operators, pairs: list[tuple[int, int]], *, encoded: bool
    ) -> None:
        """Copy rows in place.

        Args:
            operators: copies them.
            pairs: the row that is read and the one that is written.
            encoded: also what the rows read of the encoder.
        """
        if encoded not in self._copies:
            values = {**self.cache, **self.encoded} if encoded else self.cache
            self._copies[encoded] = operators.row_copy(values, values, records=True)
        self._copies[encoded].run(pairs)

    def best(
        self, operators: Operators, count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the log-probabilities of the best tokens of the last run, and the tokens.

        Args:
            operators: chooses them.
            count: the number of tokens; there may be more.
        """
        # Rounded up to a few counts, since each is a graph of its own.
        rung = min(max(row_rung(count), _FEWEST_BEST), self.logits.shape()[1])
        if rung not in self._best:
            self._best[rung] = operators.best_tokens(self.logits, rung)
        return self._best[rung].run()

    def undefined(self, operators: Operators) -> NDArray[np.bool_]:
        """Return whether a logit of the last run is NaN, for each row."""
        # Log-probabilities are NaN then, all of a row.
        log_probs, _ = self.best(operators, 1)
        return np.isnan(log_probs[:, 0])

    def _new(self, specs: Iterable[TensorSpec]) -> Values:
        return {
            spec.name: new_buffer(spec.dtype, buffer_shape(spec, self.sizes), self.device)
            for spec in specs
        }

    def _new_turn(self) -> Turn:
        rows, device = self.sizes.rows, self.device
        lengths = new_buffer("int32", (rows,), device) if _LENGTHS in self._names else None
        ids, positions = (new_buffer("int64", (rows, 1), device) for _ in range(2))
        return Turn(ids, positions, lengths)

    def _bound_run(self, bound: Any, graph_id: str) -> BoundRun:
        config = {} if self.graph_ids is None else {"gpu_graph_id": graph_id}
        return BoundRun(bound, graph_id, run_options(config))

    def _bind_step(self, before: Turn, after: Turn) -> Any:
        return self._bind(before, after, self._first, self.sizes.length)

    def _bind(self, before: Turn, after: Turn, last: Any, total: int) -> Any:
        """Return the binding of a run that reads one turn and writes another.

        Args:
            before: the inputs; of prompts, with several columns.
            after: the outputs.
            last: index of each row's last token.
            total: number of positions that the run may read.
        """
        bound = self.session.io_binding()
        inputs = {
            "input_ids": before.ids,
            "position_ids": before.positions,
            _LENGTHS: before.lengths,
            # Read by the host, also in a session on a GPU.
            _TOTAL: ortvalue(np.array([total], np.int32)),
            _ROWS: self._rows,
            _POSITIONS: self._positions,
            _LAST: last,
            **self.cache,
            **self.encoded,
        }
        outputs = {
            NEXT_IDS: after.ids,
            "next_position_ids": after.positions,
            f"next_{_LENGTHS}": after.lengths,
            LOGITS: self.logits,
            # The cache is written in place: each output is bound to the buffer of its input.
            **{present_name(name): value for name, value in self.cache.items()},
        }
        for name in self._names:
            bound.bind_ortvalue_input(name, inputs[name])
        for name in self._outputs:
            bound.bind_ortvalue_output(name, outputs[name])
        return bound


def is_encoded(name: str) -> bool:
    """Return True for an input that holds what the decoder reads of the encoder."""
    return name.startswith(_ENCODER) or is_cross_attention(name)


def buffer_shape(spec: TensorSpec, sizes: BufferSizes) -> tuple[int, ...]:
    """Return the shape of a tensor of a graph with a fixed cache.

    What the decoder reads of the encoder has one dim besides the batch that varies, whatever its
    name.

    Raises:
        ShapeError: a dim has an unknown name.
    """
    dims = _canonical_dims(spec)
    named = {"batch": sizes.rows, "buffer": sizes.length, "sequence": 1}
    if is_encoded(spec.name):
        named = {dim: sizes.encoder for dim in dims if isinstance(dim, str)} | {"batch": sizes.rows}
    return replace(spec, dims=dims).shape(named)


def encoder_axis(spec: TensorSpec) -> int | None:
    """Return the axis of the encoder's positions; None if their number is fixed."""
    dims = enumerate(_canonical_dims(spec))
    return next((axis for axis, dim in dims if isinstance(dim, str) and dim != "batch"), None)


def _canonical_dims(spec: TensorSpec) -> tuple[Dim, ...]:
    return tuple(dim if isinstance(dim, int) else canonical_dim(dim) for dim in spec.dims)


def bytes_per_row(record: GraphRecord, sizes: BufferSizes) -> int:
    """Return the memory that one row of the buffers takes."""
    single_row = BufferSizes(1, sizes.length, sizes.encoder)
    return sum(
        math.prod(buffer_shape(spec, single_row))
        # numpy does not have bfloat16.
        * (2 if spec.dtype == "bfloat16" else np.dtype(spec.dtype).itemsize)
        for spec in record.inputs
        if is_past(spec.name) or is_encoded(spec.name)
    )


def device_value(array: NDArray[Any], device: Device) -> Any:
    """Return an `onnxruntime.OrtValue` on a device with a copy of an array."""
    value = new_buffer(array.dtype.name, array.shape, device)
    value.update_inplace(np.ascontiguousarray(array))
    return value
