"""Find the sizes and the token ids at which a graph begins to do something else.

A graph can treat a batch of 17 rows or a text of 65 tokens differently only by a node that decides:
a comparison, a minimum, a quotient, the condition of an If. Such a node reads what is computed from
shapes, positions, masks and ids alone, and no weight. So these nodes, the control part of the
graph (`control`), are cut out and run without the weights, which takes microseconds:

- at every length, batch and past up to about 128 and, beyond, at every 32nd size, at the numbers
  that the graph holds and their neighbours, and wherever a decision has changed between two;
- at combinations of the sizes at which decisions change, because one may depend on two dims;
- for every id of the vocabulary.

What is found becomes cases for PyTorch: a size on both sides of every change, each combination of
decisions, and the ids that the graph tells apart. The sizes run in batches against rows alone, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.artifact.external_data import load_graph
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, raise_system_error
from enginery.core.model.feeds import FeedLimits, Feeds, is_padding_mask, make_feeds
from enginery.core.shapes import PAST, dim_terms, dynamic_dims, is_batch
from enginery.validate.cases.control import (
    COPY,
    STEPS,
    Array,
    Control,
    fixed_size,
    variants,
    ways_of,
)
from enginery.validate.cases.sweep import LONGEST, ValidationCase, sweep_sizes

State = tuple[float, float]
"""The smallest and the largest of the numbers of the ways that a node's elements went."""

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
_DECISION, _TOLD_APART = "decision at ", ", told apart"
"""Beginning and end of the names of cases."""
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

    @property
    def lengths(self) -> set[int]:
        """Lengths at which the graph begins to do something else."""
        return {size for sizes in self.sizes for dim, size in sizes.items() if "sequence" in dim}

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
            cases.append(ValidationCase(f"{_DECISION}{label}", "sweep", make))
        per_case = _TABLE_ROWS * _TABLE_LENGTH
        for start in range(0, len(self.ids), per_case):
            ids = self.ids[start : start + per_case]
            name = f"ids {ids[0]} to {ids[-1]}" if len(ids) > 1 else f"id {ids[0]}"
            make = partial(_feeds_with_ids, record, ids, limits, seed)
            cases.append(ValidationCase(f"{name}{_TOLD_APART}", "sweep", make))
        return cases


def is_of_decision(name: str) -> bool:
    """Return True for the name of a case from `Decisions.cases`."""
    return name.startswith(_DECISION) or name.endswith(_TOLD_APART)


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
    for nodes in variants(load_graph(path)):
        try:
            control = Control.cut_out(path, record, limits, nodes)
        except EngineryError as error:
            raise_system_error(error)
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


# Search


class _Search:
    """Runs the control part at many sizes."""

    def __init__(
        self,
        control: Control,
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
        self._steps = [node.op_type in STEPS for node in control.decisions]

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

    def _elements(self, control: Control, sizes: Mapping[str, int]) -> int:
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
        if fixed_size(dim, self._limits) is not None:
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
    def _without_pairs(self) -> Control | None:
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
        except EngineryError as error:
            raise_system_error(error)
            return None

    def _run(self, control: Control, sizes: Mapping[str, int]) -> list[State] | None:
        values = self._values(control, sizes)
        return None if values is None else [_state(node, values) for node in control.decisions]

    def _values(self, control: Control, sizes: Mapping[str, int]) -> dict[str, Array] | None:
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
            ways, usual_ways = ways_of(node, values), ways_of(node, usual)
            if ways is None or usual_ways is None or ways.shape != usual_ways.shape:
                continue
            if ways.ndim and len(ways) == len(vocabulary):
                rows = (ways != usual_ways).reshape(len(vocabulary), -1).any(axis=1)
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
            rows = values.get(index, values.get(f"{index}{COPY}"))
            if rows is None or rows.shape != (len(vocabulary), 2):
                continue
            own = rows[:, 0]
            # Positions are looked up by others: all alike, or two if padding has its own.
            if len(np.unique(own)) > 2:
                changed |= {int(token_id) for token_id in vocabulary[own != vocabulary]}
        return changed


def _size_of(node: Any, values: Mapping[str, Array]) -> int:
    ways = ways_of(node, values)
    return 0 if ways is None else ways.size


_UNKNOWN: State = (-1.0, -1.0)


def _state(node: Any, values: Mapping[str, Array]) -> State:
    """Return the smallest and the largest way; NaN if nothing is known."""
    ways = ways_of(node, values)
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
    dims = dynamic_dims(record.inputs)
    # Past and present share the positions, and the past gets one.
    cached = 1 if any(dim.startswith(PAST) for dim in dims) else 0
    length = max(1, min(_TABLE_LENGTH, limits.max_positions - cached))
    rows = max(2, -(-len(ids) // max(1, length - 2)))
    sizes = {
        dim: rows
        if is_batch(dim)
        else length
        if "sequence" in dim
        else (fixed_size(dim, limits) or 1)
        for dim in dims
    }
    sizes |= {dim: cached for dim in dims if dim.startswith(PAST)}
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
