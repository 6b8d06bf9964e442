"""Run several searches in one batch; they join and leave it between steps.

    batch = RunningBatch(decoder)
    batch.add([search, other], inputs)
    while batch.searches:
        batch.step()

Searches that all follow the most probable token are advanced together, without a call for each.
A search that is done leaves by itself, and so does one that fails: it has an `error` then. A
decoder alone takes new ones at any time (`decoder.takes_more`); others, once the batch is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from enginery.runtime.generation.decoder import Decoder
from enginery.runtime.generation.inputs import Feeds
from enginery.runtime.generation.search import (
    Candidates,
    Need,
    Search,
    SequentialSearch,
    undefined_logits,
)


@dataclass(frozen=True)
class _Running:
    """A search and its rows in the next step."""

    search: Search
    tokens: list[int]
    parents: list[int]
    """The rows of the batch's state that its tokens continue."""


class _GreedyRows:
    """The rows of searches that all follow the most probable token."""

    def __init__(self, running: Sequence[_Running], sequences: Sequence[SequentialSearch]) -> None:
        """Take searches of one row each, with the sequence that each of them follows."""
        self.searches = [row.search for row in running]
        self.tokens = [row.tokens[0] for row in running]
        """The tokens of the next step."""
        self.parents = [row.parents[0] for row in running]
        """The rows of the decoder's state that they continue."""
        self._rows = list(range(len(sequences)))
        self._appends = [sequence.tokens.append for sequence in sequences]
        self._ends = frozenset(end for s in sequences for end in s.options.eos_token_id)
        self._has_stops = any(sequence.rules.stops is not None for sequence in sequences)
        self._left = min(sequence.longest - len(sequence.tokens) for sequence in sequences)

    def running(self) -> list[_Running]:
        """Return the searches that are not done, with their rows."""
        return [
            _Running(search, [token], [parent])
            for search, token, parent in zip(self.searches, self.tokens, self.parents, strict=True)
            if not search.done
        ]

    def append(self, tokens: list[int]) -> bool:
        """Append a token to each sequence; return True if one of them may have ended."""
        for append, token in zip(self._appends, tokens, strict=True):
            append(token)
        self.tokens, self.parents = tokens, self._rows
        self._left -= 1
        return self._left <= 0 or self._has_stops or not self._ends.isdisjoint(tokens)


class RunningBatch:
    """The searches of a batch, and the decoder's state. It is used by one thread."""

    def __init__(self, decoder: Decoder[Any]) -> None:
        self._decoder = decoder
        self._running: list[_Running] = []
        self._state: Any = None
        self._greedy: _GreedyRows | None = None
        """The running searches if all are greedy; `_running` is not up to date then."""

    @property
    def searches(self) -> list[Search]:
        """The searches that are not done."""
        if self._greedy is not None:
            return self._greedy.searches
        return [running.search for running in self._running]

    @property
    def rows(self) -> int:
        """Number of rows in the next step: each beam is one."""
        if self._greedy is not None:
            return len(self._greedy.tokens)
        return sum(len(running.tokens) for running in self._running)

    def add(self, searches: Sequence[Search], inputs: Feeds | None = None) -> None:
        """Run the prompts of searches, and let them join.

        Args:
            searches: searches that have not begun.
            inputs: their encoder inputs; None without an encoder.

        Raises:
            InputError: the graph fails; the batch is as before.
        """
        self._leave_greedy()
        prompts = [search.prompt for search in searches]
        need, offset = _joined(searches), 0
        state, candidates = self._decoder.begin(prompts, need, inputs)
        # Other needs come with scores, in which the searches see NaN themselves.
        undefined = self._decoder.undefined(state) if need == Need() else []
        if self._running and self._state is not None:
            self._drop_rows()
            # The rows that join follow those that are running.
            offset = self._state.rows
            state = self._decoder.join(self._state, state)
        for row, search in enumerate(searches):
            if row in undefined:
                search.error, search.done = undefined_logits(), True
                continue
            part = _part(candidates, range(row, row + 1))
            self._advance(search, part, range(offset + row, offset + row + 1))
        self._state = state if self._running else None

    def step(self) -> None:
        """Run one token of each row, and advance the searches.

        Raises:
            InputError: the graph fails; the batch is empty then.
        """
        if self._greedy is None:
            self._greedy = self._greedy_rows()
        if self._greedy is not None:
            self._step_greedy(self._greedy)
            return
        running, state = self._running, self._state
        # A step that fails may have changed the decoder's state, which nobody can use any more.
        self._running, self._state = [], None
        if state is None:
            return
        tokens = [token for search in running for token in search.tokens]
        parents = [parent for search in running for parent in search.parents]
        need = _joined([search.search for search in running])
        state, candidates = self._decoder.step(state, tokens, parents, need)
        start = 0
        for search in running:
            search_rows = range(start, start + len(search.tokens))
            start = search_rows.stop
            self._advance(search.search, _part(candidates, search_rows), search_rows)
        self._state = state if self._running else None

    def _drop_rows(self) -> None:
        """Drop the rows of the state that nothing continues."""
        rows = sorted({parent for running in self._running for parent in running.parents})
        self._state = self._decoder.keep(self._state, rows)
        row_of = {parent: row for row, parent in enumerate(rows)}
        self._running = [
            replace(running, parents=[row_of[parent] for parent in running.parents])
            for running in self._running
        ]

    def _greedy_rows(self) -> _GreedyRows | None:
        """Return all searches as greedy rows; None if one of them is something else."""
        sequences = [running.search.greedy for running in self._running]
        greedy = [sequence for sequence in sequences if sequence is not None]
        if not greedy or len(greedy) < len(sequences):
            return None
        return _GreedyRows(self._running, greedy)

    def _leave_greedy(self) -> None:
        """Advance each search by itself again, with its row."""
        if self._greedy is not None:
            self._running, self._greedy = self._greedy.running(), None

    def _step_greedy(self, greedy: _GreedyRows) -> None:
        """Run one token of each row."""
        try:
            self._state, candidates = self._decoder.step(
                self._state, greedy.tokens, greedy.parents, Need()
            )
        except BaseException:
            self._running, self._state, self._greedy = [], None, None
            raise
        # The usual step: no sequence can have ended, so the searches are not asked.
        if not greedy.append(candidates.tokens[:, 0].tolist()):
            return
        for search in greedy.searches:
            try:
                search.settle()
            except Exception as error:  # the other searches go on
                search.error, search.done = error, True
        if any(search.done for search in greedy.searches):
            # Logits that are NaN stay so to the end.
            for row in self._decoder.undefined(self._state):
                search = greedy.searches[row]
                search.error, search.done = search.error or undefined_logits(), True
            self._leave_greedy()
            self._state = self._state if self._running else None

    def remove(self, search: Search) -> None:
        """Remove a search before it is done."""
        self._leave_greedy()
        self._running = [running for running in self._running if running.search is not search]

    def _advance(self, search: Search, candidates: Candidates, rows: range) -> None:
        """Advance a search, and keep it unless it is done; `rows` are its present rows."""
        try:
            move = search.advance(candidates)
        except Exception as error:  # the other searches go on
            search.error, search.done = error, True
        if not search.done:
            parents = [rows[parent] for parent in move.parents]
            self._running.append(_Running(search, move.tokens, parents))


def _joined(searches: Sequence[Search]) -> Need:
    """Return what all searches of a batch need together."""
    needs = [search.need for search in searches]
    return Need(any(need.logits for need in needs), max(need.best for need in needs))


def _part(candidates: Candidates, rows: range) -> Candidates:
    """Return the candidates of one search's rows."""
    part = slice(rows.start, rows.stop)
    return Candidates(
        candidates.tokens[part],
        None if candidates.log_probs is None else candidates.log_probs[part],
        None if candidates.logits is None else candidates.logits[part],
    )
