"""Run a decoder whose cache is a buffer of fixed size and whose graph chooses the next tokens.

    decoder = FixedCacheDecoder(graphs, runners, limit=1024)
    state, candidates = decoder.begin([[5, 6, 7], [8]], Need())
    state, candidates = decoder.step(state, tokens, parents, Need())

It has the interface of `CachedDecoder`. Each row of a batch has a slot of the buffers and its own
position there, so that rows of different lengths need no padding and join and leave at any time.
Numbers of rows and positions are rounded up, so that there are few sizes of buffers. On a GPU the
steps of each are recorded as CUDA graphs, by the thread that runs them; prompts are plain runs.

A step writes the tokens that it chooses where the next one reads them. As long as the caller
follows that choice, nothing is copied to the device, and only the tokens are copied to the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, InputError, ShapeError
from enginery.runtime.decoder_graphs import (
    LOGITS,
    NEXT_IDS,
    DecoderGraphs,
    is_past,
    present_name,
)
from enginery.runtime.generation.cache_buffers import (
    ENCODER_MASK,
    NO_GRAPH,
    STEP_INPUTS,
    BoundRun,
    BufferSizes,
    CacheBuffers,
    buffer_shape,
    bytes_per_row,
    device_value,
    encoder_axis,
    is_encoded,
    length_rung,
    row_rung,
    width_rung,
)
from enginery.runtime.generation.decoder import Feeds, encoded_inputs
from enginery.runtime.generation.operators import Operators, RecordedGraphs, Values
from enginery.runtime.generation.search import Candidates, Need
from enginery.runtime.onnxruntime.capture_lock import CAPTURE_LOCK
from enginery.runtime.onnxruntime.runner import OrtRunner

_ROOM = 64
"""Positions behind a prompt that its buffers have at first."""
_FEWER = 4
"""Factor by which the buffers must have too many rows before rows move to smaller ones."""
_SHORTEST_ENCODER = 64
"""Smallest number of an encoder's positions in the buffers, where a mask leaves some out."""
_USUAL_LENGTHS = (128, 256)
"""Lengths whose steps are recorded before the first request."""
_IDLE_BYTES = 2 << 30
"""Memory of buffers that are kept although no batch uses them, with their CUDA graphs."""


@dataclass(eq=False)
class FixedCacheState:
    """The rows of a batch between two steps. A step changes it."""

    buffers: CacheBuffers
    slots: list[int]
    """The row of the buffers for each row of the batch."""
    positions: NDArray[np.int64]
    """For each slot, where its next token was to be written `steps` steps ago."""
    turn: int = 0
    """The turn that the next step reads."""
    steps: int = 0
    """Number of steps since `positions`; each moves all slots by one, those without a row too."""
    chosen: list[int] | None = None
    """The tokens of the next step that are on the device; None if they are not known."""
    moved: bool = False
    """Whether the positions on the device are others."""
    sources: list[int] = field(init=False)
    """The encoder's input that each row is about."""
    top: int = field(init=False, default=0)
    """The largest of `positions`."""
    index: slice | NDArray[np.intp] = field(init=False)
    """The slots, as numpy takes them."""
    identity: list[int] = field(init=False)
    """The parents of a step in which every row goes on."""
    lease: list[CacheBuffers] = field(init=False)
    """The buffers, which go back to the decoder with the last reference to the state."""

    def __post_init__(self) -> None:
        self.lease = [self.buffers]
        self.sources = list(self.slots)
        self.place(self.slots)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.slots)

    def place(self, slots: list[int]) -> None:
        """Assign slots to the rows."""
        self.slots, self.top = slots, int(self.positions.max())
        self.identity = list(range(len(slots)))
        in_order = slots == self.identity
        self.index = slice(0, len(slots)) if in_order else np.array(slots, np.intp)

    def settle(self) -> None:
        """Count positions from now on; slots without a row begin anew."""
        positions = np.zeros_like(self.positions)
        positions[self.index] = self.positions[self.index] + self.steps
        self.positions, self.steps, self.moved = positions, 0, True
        self.place(self.slots)


class FixedCacheDecoder:
    """A decoder as one graph with a fixed cache, and its encoder if it has one."""

    def __init__(
        self,
        graphs: DecoderGraphs,
        runners: Mapping[str, OrtRunner],
        *,
        pad_id: int = 0,
        limit: int | None = None,
    ) -> None:
        """Read the names and shapes of the graphs.

        Args:
            graphs: the graphs, with a fixed one.
            runners: the fixed graph and the encoder in ONNX Runtime, by their files; the caller
                closes them.
            pad_id: token of padding.
            limit: the decoder's largest number of positions; None if it has none.

        Raises:
            ArtifactError: the model has no such graph, or the graph has an input that nothing
                computes or a dim of unknown size.
            MissingPackageError: the package onnx is not installed.
        """
        if graphs.fixed is None:
            raise ArtifactError(
                f"{graphs.later.file} has no graph with a fixed cache beside it.",
                do="Run: enginery optimize ARTIFACT --target cuda",
            )
        self._record = record = graphs.fixed
        self._specs = {spec.name: spec for spec in record.inputs}
        self._encoded = encoded_inputs(graphs, record)
        _check_record(graphs, record, self._encoded)
        self._runner = runners[record.file]
        self._encoder = None if graphs.encoder is None else runners[graphs.encoder.file]
        self._pad_id, self._limit = pad_id, limit
        self._masks_encoder = ENCODER_MASK in self._specs
        self.takes_more = self._encoder is None or self._masks_encoder
        """Whether rows may join those that have begun."""
        self._operators = Operators(self._runner.device)
        self._on_gpu = self._runner.device.kind != "cpu"
        self._captures = self._runner.records_steps
        self._graphs = 0
        self._recorded = RecordedGraphs(NO_GRAPH)
        self._idle: list[CacheBuffers] = []
        self._lock, self._running = threading.Lock(), threading.Lock()
        self._closed = False

    @property
    def sizes(self) -> list[BufferSizes]:
        """The sizes of the buffers that no batch uses at present, last used last."""
        return [buffers.sizes for buffers in self._idle]

    def begin(
        self, prompts: Sequence[Sequence[int]], need: Need, inputs: Feeds | None = None
    ) -> tuple[FixedCacheState, Candidates]:
        """Run prompts, each in a row.

        Args:
            prompts: one or more tokens each.
            need: what to return of the last position.
            inputs: the encoder's inputs; None without one.

        Raises:
            InputError: the graph fails.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        longest, rows = int(lengths.max()), row_rung(len(prompts))
        encoded = self._encode(self._encoder, inputs or {}) if self._encoder else {}
        encoder_length = self._encoder_length(encoded)
        # The mask leaves out the positions that are added. Without one, attention would read them,
        # so the encoder's length stays as it is.
        if self._masks_encoder:
            encoder_length = max(row_rung(encoder_length), _SHORTEST_ENCODER)
        sizes = BufferSizes(rows, length_rung(longest + _ROOM, self._limit), encoder_length)
        buffers = self._take(sizes)
        # Each row of the batch has the slot of the same number at first.
        state = FixedCacheState(buffers, list(range(len(prompts))), np.zeros(rows, np.int64))
        # A caller may drop a batch before its end; its buffers are used again then.
        # At the exit of the process nobody needs the buffers any more.
        weakref.finalize(state, self._reclaim, state.lease).atexit = False
        if encoded:
            self._copy(encoded, buffers.encoded, [(row, row) for row in range(rows)])
        if longest == 1:  # a step like any other, and perhaps recorded
            state.moved = True
            return self.step(state, [prompt[0] for prompt in prompts], state.identity, need)
        width = width_rung(longest, sizes.length)
        ids = np.full((rows, width), self._pad_id, np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        # Slots without a row run with the others, as prompts of one token of padding.
        state.positions[:] = 1
        state.positions[: len(prompts)] = lengths
        state.place(state.slots)
        with self._device_work():
            inputs_of_width = buffers.prompt(width)
            inputs_of_width.write(ids, state.positions)
        return state, self._run(inputs_of_width.run, state, need)

    def step(
        self,
        state: FixedCacheState,
        tokens: list[int],
        parents: list[int],
        need: Need,
    ) -> tuple[FixedCacheState, Candidates]:
        """Run one token in each row.

        Args:
            state: the state after the last step, which is changed.
            tokens: the token of each row.
            parents: for each row, the one of `state` that it continues.
            need: what to return.

        Raises:
            InputError: the graph fails.
        """
        # Beams change places, and rows that ended are gone.
        if parents != state.identity:
            self._select(state, parents)
        # Without another position, the next token would be written behind the end of the buffers.
        if state.top + state.steps >= state.buffers.sizes.length:
            self._make_room(state)
        # The step before has left its choice where this one reads it; only other tokens are
        # written.
        if state.moved or tokens != state.chosen:
            ids = np.full(len(state.positions), self._pad_id, np.int64)
            ids[state.index] = tokens
            if state.moved:
                state.settle()
            with self._device_work():
                state.buffers.write_turn(state.turn, ids, state.positions if state.moved else None)
            state.moved = False
        # The turns alternate: what this step writes is what the next one reads.
        run = state.buffers.steps[state.turn]
        state.turn = 1 - state.turn
        state.steps += 1
        return state, self._run(run, state, need)

    def join(self, above: FixedCacheState, below: FixedCacheState) -> FixedCacheState:
        """Return the rows of two states as one, which is the first of them; see `takes_more`.

        Raises:
            InputError: copying fails, for lack of memory.
        """
        mine, theirs = above.buffers.sizes, below.buffers.sizes
        sizes = BufferSizes(
            max(mine.rows, row_rung(len(above.slots) + len(below.slots))),
            max(mine.length, theirs.length),
            max(mine.encoder, theirs.encoder),
        )
        if sizes != mine:
            self._resize(above, sizes)
        # The states have made different numbers of steps. `settle` adds them to the positions of
        # `above`, so that both count from now on.
        above.settle()
        used_slots = set(above.slots)
        # Rows that leave do not move the others, so that free slots may lie between used ones.
        free = [slot for slot in range(sizes.rows) if slot not in used_slots][: len(below.slots)]
        source = {**below.buffers.cache, **below.buffers.encoded}
        target = {**above.buffers.cache, **above.buffers.encoded}
        pairs = list(zip(below.slots, free, strict=True))
        self._copy(source, target, pairs)
        above.positions[free] = below.positions[below.index] + below.steps
        # The inputs of `below` are numbered behind those of `above`.
        first = max(above.sources) + 1
        above.sources += [first + row for row in below.sources]
        # The tokens of the rows that join are not on the device.
        above.chosen = None
        above.place([*above.slots, *free])
        return above

    def keep(self, state: FixedCacheState, rows: list[int]) -> FixedCacheState:
        """Return the state with some of its rows, in ascending order."""
        self._select(state, rows)
        return state

    def undefined(self, state: FixedCacheState) -> list[int]:
        """Return the rows whose logits of the last run are NaN.

        Raises:
            InputError: they cannot be computed.
        """
        with _copy_errors():
            is_undefined = state.buffers.undefined(self._operators)[state.index]
        return [int(row) for row in np.flatnonzero(is_undefined)]

    def warm_up(self, rows: int) -> None:
        """Record the steps of the usual buffers, for up to this many rows, in the present thread.

        Those that do not fit into the memory that is kept are left out.

        Raises:
            InputError: the graph fails.
        """
        if not self._captures:
            return
        encoder = _SHORTEST_ENCODER if self._masks_encoder else 0
        if self._encoder is not None and not encoder:
            return  # the size of its outputs is known after a run
        # The largest buffers come last, so that those that small batches use are recorded first.
        free_bytes = _IDLE_BYTES
        for length in sorted({length_rung(length, self._limit) for length in _USUAL_LENGTHS}):
            count = 1
            # The number of rows is a power of two; the last one holds `rows` or more.
            while count < 2 * rows:
                sizes = BufferSizes(count, length, encoder)
                free_bytes -= count * bytes_per_row(self._record, sizes)
                if free_bytes < 0:
                    return
                self._record_steps(sizes)
                count *= 2
        if self._encoder is None:
            # Two prompts that join open the sessions of what copies and clears.
            first, _ = self.begin([[self._pad_id] * 2], Need())
            other, _ = self.begin([[self._pad_id] * 2], Need())
            self.step(self.join(first, other), [self._pad_id] * 2, [0, 1], Need())

    def _record_steps(self, sizes: BufferSizes) -> None:
        buffers = self._take(sizes)
        try:
            zeros = np.zeros(sizes.rows, np.int64)
            # Each turn has addresses of its own, so there is a CUDA graph for each.
            for turn, step in enumerate(buffers.steps):
                with self._device_work():
                    buffers.write_turn(turn, zeros, zeros)
                self._launch(step)
        finally:
            self._give_back(buffers)

    def _run(self, run: BoundRun, state: FixedCacheState, need: Need) -> Candidates:
        """Run the graph, and return what a search needs of it.

        Raises:
            InputError: the graph fails.
        """
        # Choosing the best tokens is a run of its own, which waits for captures itself.
        if need.logits or need.best == 1:
            candidates: Candidates = self._launch(run, lambda: self._read(state, need))
            return candidates
        self._launch(run)
        return self._read(state, need)

    def _launch(self, run: BoundRun, read: Callable[[], Any] | None = None) -> Any:
        """Run the graph, and read what it wrote; the first run of a step in a thread is recorded.

        Raises:
            InputError: the graph fails.
        """
        try:
            if not self._on_gpu:
                self._runner.session.run_with_iobinding(run.bound)
                return None if read is None else read()
            # One run at a time: what it wrote is read before the next one starts. The second lock
            # keeps other CUDA work of this process out of a recording.
            with self._running, self._recorded.lock(run.graph_id):
                self._runner.session.run_with_iobinding(run.bound, run.options)
                self._recorded.add(run.graph_id)
                return None if read is None else read()
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise InputError(f"the graph fails: {error}") from error

    def _read(self, state: FixedCacheState, need: Need) -> Candidates:
        """Return what a search needs of the last run."""
        buffers, index = state.buffers, state.index
        state.chosen = None
        if need.logits:
            logits = buffers.logits.numpy()[index]
            # On the host this is the buffer, which the next step overwrites.
            return Candidates(np.empty((len(logits), 0), np.int64), logits=np.array(logits))
        if need.best == 1:
            ids = buffers.turns[state.turn].ids.numpy()[index]
            state.chosen = ids[:, 0].tolist()
            return Candidates(ids if self._on_gpu else ids.copy())
        log_probs, tokens = buffers.best(self._operators, need.best)
        return Candidates(tokens[index, : need.best], log_probs[index, : need.best])

    def _select(self, state: FixedCacheState, parents: Sequence[int]) -> None:
        """Reorder the rows so that each continues its parent; copy a parent of several rows."""
        # Of several rows that continue the same parent, the first keeps its slot, and its cache is
        # copied to free slots for the others. A slot is free if no row continues its beam.
        slots, pairs = [state.slots[parent] for parent in parents], []
        first_of: dict[int, int] = {}
        repeated = []
        for row, slot in enumerate(slots):
            if first_of.setdefault(slot, row) != row:
                repeated.append(row)
        # More rows than slots: the move to larger buffers copies each row from its parent's slot,
        # which reorders them as well.
        if len(slots) > state.buffers.sizes.rows:
            self._resize(state, replace(state.buffers.sizes, rows=row_rung(len(slots))), slots)
            state.sources = [state.sources[parent] for parent in parents]
            return
        sources = [state.sources[parent] for parent in parents]
        old = dict(zip(state.slots, state.sources, strict=True))
        free = [slot for slot in range(state.buffers.sizes.rows) if slot not in first_of]
        reads_another = False
        for row in repeated:
            # A slot that reads the same of the encoder spares copying that.
            slot = next((slot for slot in free if old.get(slot) == sources[row]), free[0])
            free.remove(slot)
            reads_another = reads_another or old.get(slot) != sources[row]
            pairs.append((slots[row], slot))
            # A slot that was free has positions of another row, or none. Equal ones are on the
            # device already.
            if state.positions[slot] != state.positions[slots[row]]:
                state.positions[slot] = state.positions[slots[row]]
                state.moved = True
            slots[row] = slot
        if pairs:
            with _copy_errors():
                state.buffers.copy_within(self._operators, pairs, encoded=reads_another)
        state.sources = sources
        # A copied row's token is in the ids of its parent's slot, not in its own.
        if pairs or state.chosen is None:
            state.chosen = None
        else:
            state.chosen = [state.chosen[parent] for parent in parents]
        state.place(slots)
        rows = row_rung(len(slots))
        # Not as soon as half of the slots are free: a batch whose size changes between two steps
        # would copy its cache each time.
        if rows * _FEWER <= state.buffers.sizes.rows:
            self._resize(state, replace(state.buffers.sizes, rows=rows))

    def _make_room(self, state: FixedCacheState) -> None:
        """Move to longer buffers if the longest row has used all positions."""
        state.settle()
        if state.top >= state.buffers.sizes.length:
            length = length_rung(state.top + 1, self._limit)
            if length <= state.top:
                raise InputError(
                    f"a sequence has {state.top} tokens, and the model's limit is {self._limit}.",
                    do="Set a smaller max_new_tokens.",
                )
            self._resize(state, replace(state.buffers.sizes, length=length))

    def _resize(
        self, state: FixedCacheState, sizes: BufferSizes, slots: Sequence[int] | None = None
    ) -> None:
        """Move the rows to other buffers.

        Args:
            state: the rows.
            sizes: the sizes of the other buffers, of which only the rows may be fewer.
            slots: for each row, the slot that it continues; None for its own.
        """
        old, slots = state.buffers, state.slots if slots is None else slots
        new = self._take(sizes)
        try:
            self._copy(
                {**old.cache, **old.encoded},
                {**new.cache, **new.encoded},
                [(slot, row) for row, slot in enumerate(slots)],
            )
        # The new buffers are not in the state yet, so nobody else would give them back.
        except BaseException:
            self._give_back(new)
            raise
        # Slots without a row begin at 0, like those of buffers that nobody has used.
        positions = np.zeros(sizes.rows, np.int64)
        positions[: len(slots)] = state.positions[np.array(slots)] + state.steps
        state.buffers, state.positions, state.steps = new, positions, 0
        # The finalizer of the state gives back what the lease holds when the state is dropped.
        state.lease[0] = new
        state.turn, state.chosen, state.moved = 0, None, True
        state.place(list(range(len(slots))))
        self._give_back(old)

    def _copy(self, source: Values, target: Values, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows of buffers to others; raise InputError if that fails."""
        with _copy_errors():
            self._operators.row_copy(source, target).run(pairs)

    def _encode(self, encoder: OrtRunner, inputs: Feeds) -> Values:
        """Run the encoder on rows and lengths that are rounded up.

        Returns:
            What the decoder reads of it, by the names of its inputs, for the rounded number of
            rows.
        """
        count = len(next(iter(inputs.values())))
        extra = row_rung(count) - count
        feeds = {
            # The added rows repeat the last one: any input that the encoder takes will do, nobody
            # reads their outputs.
            name: np.concatenate([array, np.repeat(array[-1:], extra, axis=0)])
            for name, array in inputs.items()
        }
        if "attention_mask" in feeds:
            length = feeds["attention_mask"].shape[1]
            # An input may be longer than the decoder's limit; it is padded to its own length then.
            limit = None if self._limit is None else max(length, self._limit)
            padding = ((0, 0), (0, width_rung(length, limit) - length))
            feeds = {
                name: np.pad(array, padding, constant_values=self._pad_id * (name == "input_ids"))
                for name, array in feeds.items()
            }
        # What the decoder reads of the encoder's own inputs, such as its mask, is not an output.
        computed = {name: output for name, output in self._encoded.items() if output not in feeds}
        outputs = encoder.run_values(feeds, list(dict.fromkeys(computed.values())))
        encoded = {name: outputs[output] for name, output in computed.items()}
        arrays = {name: feeds[output] for name, output in self._encoded.items() if output in feeds}
        # An encoder without a mask, such as one of images, has no padding.
        if self._masks_encoder and ENCODER_MASK not in self._encoded:
            shape = (count + extra, self._encoder_length(encoded))
            arrays[ENCODER_MASK] = np.ones(shape, np.int64)
        for name, array in arrays.items():
            typed = array.astype(self._specs[name].dtype, copy=False)
            with self._device_work():
                encoded[name] = device_value(typed, self._runner.device)
        return encoded

    def _encoder_length(self, encoded: Values) -> int:
        """Return the number of positions of an encoder's outputs; 0 without an encoder."""
        for name, value in encoded.items():
            axis = encoder_axis(self._specs[name])
            if axis is not None:
                return int(value.shape()[axis])
        return 0

    def _take(self, sizes: BufferSizes) -> CacheBuffers:
        """Return cleared buffers of these sizes that no batch uses.

        Attention masks the positions behind the end of a row, but its kernels multiply them by 0:
        NaN, which memory that is new or of another batch may hold, would stay NaN.

        Raises:
            InputError: there is not enough memory.
        """
        buffers = self._find_buffers(sizes)
        with _copy_errors():
            self._operators.clear({**buffers.cache, **buffers.encoded})
            if self._masks_encoder:  # rows without an input attend to something, too
                mask = buffers.encoded[ENCODER_MASK]
                array = np.zeros(mask.shape(), self._specs[ENCODER_MASK].dtype)
                array[:, 0] = 1
                with self._device_work():
                    mask.update_inplace(array)
        return buffers

    def _find_buffers(self, sizes: BufferSizes) -> CacheBuffers:
        with self._lock:
            for index in reversed(range(len(self._idle))):
                if self._idle[index].sizes == sizes:
                    # From the back: those in front have not been used for the longest time and are
                    # freed first.
                    return self._idle.pop(index)
            # Two numbers of CUDA graphs, one for each turn. Buffers that are used again keep
            # theirs, with the recordings.
            first = self._graphs = self._graphs + 2
        try:
            return self._new_buffers(sizes, first)
        except Exception:
            # Buffers that no batch uses may take the memory that is missing.
            self._idle.clear()
        try:
            return self._new_buffers(sizes, first)
        except Exception as error:
            needed = sizes.rows * bytes_per_row(self._record, sizes) / 2**20
            raise InputError(
                f"the cache of {sizes.rows} rows of {sizes.length} tokens, {needed:.0f} MiB, does "
                f"not fit into memory: {error}",
                do="Set a smaller batch or a smaller max_new_tokens.",
            ) from error

    def _new_buffers(self, sizes: BufferSizes, first: int) -> CacheBuffers:
        with self._device_work():
            return CacheBuffers(
                self._runner.session,
                self._record,
                sizes,
                self._runner.device,
                (str(first), str(first + 1)) if self._captures else None,
            )

    def _reclaim(self, lease: list[CacheBuffers]) -> None:
        self._give_back(lease[0])

    def _give_back(self, buffers: CacheBuffers) -> None:
        """Keep buffers for the next batch; those that were not used for the longest time go."""
        with self._lock:
            if self._closed:
                return
            self._idle.append(buffers)
            # At least one stays, even if it alone is too large: the next batch will likely want the
            # same size.
            while len(self._idle) > 1 and sum(idle.bytes for idle in self._idle) > _IDLE_BYTES:
                del self._idle[0]

    def _device_work(self) -> AbstractContextManager[None]:
        """Hold back captures of CUDA graphs, during which no thread may copy or allocate."""
        return CAPTURE_LOCK.running() if self._on_gpu else nullcontext()

    def close(self) -> None:
        """Free the buffers that no batch uses."""
        with self._lock:
            self._closed = True
            self._idle.clear()


@contextmanager
def _copy_errors() -> Iterator[None]:
    """Turn the errors of ONNX Runtime, which are of many unrelated types, into InputErrors."""
    try:
        yield
    except Exception as error:
        raise InputError(f"the cache cannot be copied: {error}") from error


def _check_record(graphs: DecoderGraphs, record: GraphRecord, encoded: Collection[str]) -> None:
    """Raise ArtifactError unless a graph has the inputs and outputs that a decoder needs."""
    inputs = {spec.name for spec in record.inputs}
    outputs = {spec.name for spec in record.outputs}
    own = [name for name in inputs if is_past(name) and not is_encoded(name)]
    unknown = sorted(inputs - {*STEP_INPUTS, *encoded, *own})
    if graphs.encoder is not None and ENCODER_MASK in unknown:
        unknown.remove(ENCODER_MASK)
    needed = [LOGITS, NEXT_IDS, *map(present_name, own)]
    lacking = [name for name in needed if name not in outputs]
    problem = ""
    if unknown:
        problem = f"it has the input {unknown[0]}"
    elif not own or lacking:
        problem = f"it has no output {lacking[0]}" if lacking else "it has no cache"
    else:
        try:
            for spec in (*record.inputs, *record.outputs):
                # Any sizes do: this raises for a dim of unknown size.
                buffer_shape(spec, BufferSizes(1, 64, 16))
        except ShapeError as error:
            problem = str(error)
    if problem:
        raise ArtifactError(
            f"{record.file} does not generate: {problem}.",
            do="Make the artifact again: enginery optimize ARTIFACT --target cuda",
        )
