"""Run several searches in one batch; they join and leave it between steps.

    batch = RunningBatch(decoder)
    batch.add([search, other], inputs)
    while batch.searches:
        batch.step()

A search that is done leaves by itself, and so does one that fails: it has an `error` then. A
decoder alone takes new ones at any time (`decoder.takes_more`); others, once the batch is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from enginery.runtime.generation.decoder import Decoder
from enginery.runtime.generation.inputs import Feeds
from enginery.runtime.generation.search import Candidates, Need, Search


@dataclass(frozen=True)
class _Running:
    """A search and its rows in the next step."""

    search: Search
    tokens: list[int]
    parents: list[int]
    """The rows of the batch's state that its tokens continue."""


class RunningBatch:
    """The searches of a batch, and the decoder's state. It is used by one thread."""

    def __init__(self, decoder: Decoder[Any]) -> None:
        self._decoder = decoder
        self._running: list[_Running] = []
        self._state: Any = None

    @property
    def searches(self) -> list[Search]:
        """The searches that are not done."""
        return [each.search for each in self._running]

    @property
    def rows(self) -> int:
        """Number of rows in the next step: each beam is one."""
        return sum(len(each.tokens) for each in self._running)

    def add(self, searches: Sequence[Search], inputs: Feeds | None = None) -> None:
        """Run the prompts of searches, and let them join.

        Args:
            searches: searches that have not begun.
            inputs: their encoder inputs; None without an encoder.

        Raises:
            InputError: the graph fails; the batch is as before.
        """
        prompts = [search.prompt for search in searches]
        state, found = self._decoder.begin(prompts, _joined(searches), inputs)
        offset = 0
        if self._running and self._state is not None:
            offset = self._state.rows
            state = self._decoder.join(self._state, state)
        for row, search in enumerate(searches):
            part = _part(found, range(row, row + 1))
            self._advance(search, part, range(offset + row, offset + row + 1))
        self._state = state if self._running else None

    def step(self) -> None:
        """Run one token of each row, and advance the searches.

        Raises:
            InputError: the graph fails; the batch is empty then.
        """
        running, state = self._running, self._state
        self._running, self._state = [], None
        if state is None:
            return
        tokens = [token for each in running for token in each.tokens]
        parents = [parent for each in running for parent in each.parents]
        need = _joined([each.search for each in running])
        state, found = self._decoder.step(state, tokens, parents, need)
        start = 0
        for each in running:
            place = range(start, start + len(each.tokens))
            start = place.stop
            self._advance(each.search, _part(found, place), place)
        self._state = state if self._running else None

    def remove(self, search: Search) -> None:
        """Let a search leave before it is done."""
        self._running = [each for each in self._running if each.search is not search]

    def _advance(self, search: Search, found: Candidates, place: range) -> None:
        """Advance a search, and keep it unless it is done; `place` has its present rows."""
        try:
            move = search.advance(found)
        except Exception as error:  # the other searches go on
            search.error, search.done = error, True
        if not search.done:
            parents = [place[parent] for parent in move.parents]
            self._running.append(_Running(search, move.tokens, parents))


def _joined(searches: Sequence[Search]) -> Need:
    """Return what all searches of a batch need together."""
    needs = [search.need for search in searches]
    return Need(any(need.logits for need in needs), max(need.best for need in needs))


def _part(found: Candidates, rows: range) -> Candidates:
    """Return the candidates of one search's rows."""
    place = slice(rows.start, rows.stop)
    return Candidates(
        found.tokens[place],
        None if found.log_probs is None else found.log_probs[place],
        None if found.logits is None else found.logits[place],
    )
