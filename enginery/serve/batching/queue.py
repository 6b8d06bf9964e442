"""The queue of rows that wait for a worker, with admission control.

No timer delays a batch: a free worker takes the row that is due first, together with rows of
similar length (see `planner`). What is due first depends on the size of a request:

- Short requests, which fit one batch, run in order of arrival.
- Lists take turns row by row (start-time fair queueing): a row's turn comes when as many tokens
  of each other list have run as of its own list were before it.
- If both wait, they share the workers in proportion to the number of their requests, but lists get
  half at most. So however many lists there are, a short request waits for the batches that run, one
  of a list, and the short requests before it.

A request is rejected (HTTP 429) if too many rows or tokens wait, or if its estimated wait is too
long. Lists can fill three quarters of the queue only. The estimate starts from the backlog: the
tokens that run before the request, times the seconds per token of all workers. Requests wait longer
than that, because batches are formed by length, so that later rows overtake earlier ones, and
because a request waits for the last of its rows. The ratio of actual wait to backlog is observed on
past requests, and the estimate is the backlog times this ratio.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from enginery.core.errors import EngineryError
from enginery.serve.batching.planner import MAX_PARTITIONED_ROWS, BatchRules, choose_batch

_LATE_SHARE = 0.02
"""Share of the requests that may wait longer than estimated."""
_LONGER = 1.05
"""Factor of the estimate for a request that has waited longer than estimated."""
_SHORTER = _LONGER ** (-_LATE_SHARE / (1 - _LATE_SHARE))
"""Factor for every other request. The two cancel out at that share."""
_OBSERVED_SHARE = 0.1
"""Share of the maximum wait below which a backlog is not observed: for short waits the batches that
already run, which the backlog does not include, dominate."""
_MAX_STRETCH = 4.0
"""Upper bound of the ratio of wait to backlog."""
LIST_SHARE = 0.75
"""Share of the queue that lists can fill."""


class OverloadedError(EngineryError):
    """Too many requests are waiting."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message, do="Send the request again later.")
        self.retry_after_seconds = retry_after_seconds


class ClosedError(EngineryError):
    """The model is shutting down and accepts no more requests."""


@dataclass(slots=True, eq=False)
class _Part:
    """The rows that were put into the queue together."""

    kind: _Class
    rows: int
    tokens: int
    """Number of rows and tokens that wait."""


@dataclass(slots=True, eq=False)
class _Class:
    """The waiting requests of one kind: the short ones, or the lists."""

    heap: list[tuple[float, int, QueueEntry]] = field(default_factory=list)
    """The rows by their turn; those that have left stay, marked as taken, until they reach the
    top."""
    parts: set[_Part] = field(default_factory=set)
    rows: int = 0
    tokens: int = 0
    served: float = 0.0
    """Tokens that have run, divided by the class' weight; the class with fewer is next."""
    turn: float = 0.0
    """The turn of the row that was taken last."""
    in_turns: bool = False
    """Rows of a request take turns with those of others; else they run one after another."""

    def put(self, entries: Sequence[QueueEntry], tokens: int) -> None:
        """Add the rows of a request."""
        part = _Part(self, len(entries), tokens)
        self.parts.add(part)
        self.rows += len(entries)
        self.tokens += tokens
        turn = self.turn
        for entry in entries:
            entry.part = part
            heapq.heappush(self.heap, (turn, entry.order[1], entry))
            if self.in_turns:
                turn += entry.tokens

    def leave(self, entry: QueueEntry) -> None:
        """Remove a row that was taken or cancelled."""
        part = entry.part
        if part is None:
            raise AssertionError("a row leaves that has not been put")
        part.rows -= 1
        part.tokens -= entry.tokens
        self.rows -= 1
        self.tokens -= entry.tokens
        if not part.rows:
            self.parts.discard(part)

    def first(self) -> QueueEntry:
        """Return the row whose turn it is."""
        while self.heap[0][2].taken:
            heapq.heappop(self.heap)
        return self.heap[0][2]


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One row of a request."""

    request: Any
    """The request that the row belongs to; set by the scheduler."""
    index: int
    """Index of the row in its request."""
    key: Hashable
    """Only rows of equal keys may share a batch."""
    length: int
    """Number of tokens, padded for the engine if there is one; 1 for an image."""
    row: Any
    runner: Any = None
    """The `BatchRunner` for rows of this key."""
    tokens: int = 0
    """Number of tokens without padding."""
    weight: int = 1
    """Number of rows that it takes in a batch: one for each beam of a text to generate."""
    part: _Part | None = None
    """What it was put into the queue with; None before that."""
    taken: bool = False
    """True once the row has left the queue."""
    order: tuple[int, int] = (0, 0)
    """Sort key within its lane: length, then order of arrival."""


_ORDER = attrgetter("order")


class BatchQueue:
    """A bounded queue between the event loop and the workers. Thread-safe.

    Rows of equal keys form a lane, sorted by length for the planner. Two heaps over all lanes have
    the row that is due first of the short requests, and of the lists.
    """

    def __init__(
        self, rules: BatchRules, *, max_rows: int, max_tokens: int, max_wait_seconds: float
    ) -> None:
        """Open the queue.

        Args:
            rules: the limits of a batch.
            max_rows: maximum number of waiting rows.
            max_tokens: maximum number of waiting tokens.
            max_wait_seconds: maximum estimated wait of a request.
        """
        self.rules = rules
        self.seconds_per_token = 0.0
        """Time per token of all workers together; 0 until it has been measured."""
        self.rows = 0
        """Number of waiting rows."""
        self.tokens = 0
        """Number of waiting tokens, without padding."""
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._max_wait_seconds = max_wait_seconds
        # The ratio of wait to backlog that few requests exceed. Rows that arrive later and fill up
        # a batch overtake others, so that some wait twice as long as their backlog takes.
        self._stretch = 1.0
        self._lanes: dict[Hashable, list[QueueEntry]] = {}
        self._short, self._lists = _Class(), _Class(in_turns=True)
        self._weight = 1.0
        """`_short_weight` when the next batch was chosen."""
        self._count = 0
        self._idle = 0
        self._state = "open"
        self._changed = threading.Condition(threading.Lock())

    @property
    def is_closed(self) -> bool:
        """True if no more rows are accepted."""
        return self._state != "open"

    @property
    def estimated_wait_seconds(self) -> float:
        """Wait in seconds that most short requests which arrive now will not exceed."""
        return self.backlog_seconds * self._stretch

    @property
    def backlog_seconds(self) -> float:
        """Time that the workers need for all that runs before a short request, in seconds."""
        return self._tokens_before(None) * self.seconds_per_token

    def observe_wait(self, backlog_seconds: float, waited: float) -> None:
        """Update the estimate with a request that has run.

        Args:
            backlog_seconds: what `put` returned for the request.
            waited: seconds until the last of its batches started.
        """
        if backlog_seconds < self._max_wait_seconds * _OBSERVED_SHARE:
            return
        if waited > backlog_seconds * self._stretch:
            self._stretch = min(self._stretch * _LONGER, _MAX_STRETCH)
        else:
            self._stretch = max(self._stretch * _SHORTER, 1.0)

    def put(self, entries: Sequence[QueueEntry], *, now: float, admitted: bool = False) -> float:  # noqa: ARG002  as other queues
        """Add rows of a request to the queue: all of them or, with an error, none.

        Args:
            entries: rows of one request.
            now: the current `time.perf_counter`.
            admitted: earlier rows of the request were accepted, so these are not rejected.

        Returns:
            The time that the workers need for all that runs before the last of them, in seconds.

        Raises:
            OverloadedError: too many rows or tokens wait, or the request would wait too long.
            ClosedError: the queue is closed.
        """
        tokens = sum(entry.tokens for entry in entries)
        with self._changed:
            if self._state != "open":
                raise ClosedError("the model is shutting down.")
            is_short = not admitted and self._is_short(len(entries), tokens)
            backlog_seconds = (
                self._tokens_before(None if is_short else tokens) * self.seconds_per_token
            )
            if self.rows and not admitted:
                self._admit(len(entries), tokens, backlog_seconds, is_short=is_short)
            own_class = self._short if is_short else self._lists
            if not own_class.rows:  # what it has not asked for meanwhile is gone
                own_class.served = max(self._short.served, self._lists.served)
            for entry in entries:
                self._count += 1
                entry.order = (entry.length, self._count)
                insort(self._lanes.setdefault(entry.key, []), entry, key=_ORDER)
            own_class.put(entries, tokens)
            self.rows += len(entries)
            self.tokens += tokens
            self._changed.notify(len(entries))
            return backlog_seconds

    def _is_short(self, rows: int, tokens: int) -> bool:
        """Return True for a request that fits one batch."""
        return rows == 1 or (rows <= self.rules.max_rows and tokens <= self.rules.max_tokens)

    def _tokens_before(self, list_tokens: int | None) -> float:
        """Return the number of waiting tokens that run before the end of a request.

        Args:
            list_tokens: number of tokens of a list; None for a short request.
        """
        short, lists = self._short, self._lists
        if list_tokens is None:
            return short.tokens + min(lists.tokens, short.tokens / self._short_weight)
        # While one list runs, as many tokens of each other one do.
        return short.tokens + sum(min(part.tokens, list_tokens) for part in lists.parts)

    @property
    def _short_weight(self) -> float:
        """Tokens of short requests that run for each token of a list, if both wait."""
        return max(len(self._short.parts) / max(len(self._lists.parts), 1), 1.0)

    def _admit(self, rows: int, tokens: int, backlog_seconds: float, *, is_short: bool) -> None:
        """Raise OverloadedError if a request of this size must be rejected."""
        share = 1.0 if is_short else LIST_SHARE  # the rest of the queue is for short requests
        max_rows, max_tokens = int(self.max_rows * share), int(self.max_tokens * share)
        waiting = self if is_short else self._lists
        fits = waiting.rows + rows <= max_rows and waiting.tokens + tokens <= max_tokens
        if not is_short and not waiting.rows:
            fits = True  # as large as a part of a request may be
        if not fits or self.rows + rows > self.max_rows or self.tokens + tokens > self.max_tokens:
            raise OverloadedError(
                f"the queue is full: {self.rows} inputs with {self.tokens} tokens wait, expected "
                f"at most {max_rows} and {max_tokens}{'' if is_short else ' for lists'}.",
                retry_after_seconds=self.tokens * self.seconds_per_token * self._stretch,
            )
        wait = backlog_seconds * self._stretch
        if wait > self._max_wait_seconds:
            raise OverloadedError(
                f"the request would wait {wait:.1f} s, expected at most "
                f"{self._max_wait_seconds:g} s: {self.rows} inputs with {self.tokens} tokens wait.",
                retry_after_seconds=wait,
            )

    def take(self) -> list[QueueEntry]:
        """Wait for the next batch and return it; return an empty list once closed and empty."""
        with self._changed:
            self._idle += 1
            try:
                return self._next_batch() if self._has_rows(wait=True) else []
            finally:
                self._idle -= 1

    def take_due(self, rows: int, *, wait: bool) -> list[QueueEntry] | None:
        """Return entries of at most `rows` rows together, in the order in which they are due.

        None overtakes one that does not fit, so that each of them runs at some time.

        Args:
            rows: maximum sum of the entries' weights.
            wait: wait until there is an entry.

        Returns:
            The entries; None once the queue is closed and empty.
        """
        with self._changed:
            if not self._has_rows(wait=wait):
                return None if self.is_closed else []
            batch = []
            while self.rows and (entry := self._first()).weight <= rows:
                rows -= entry.weight
                batch.append(entry)
                self._leave_lane(entry)
                self._count_taken([entry])
            return batch

    def take_similar(self, rows: int, *, wait: bool) -> list[QueueEntry] | None:
        """Return the entry that is due first, with those nearest in length; see `take_due`."""
        with self._changed:
            if not self._has_rows(wait=wait):
                return None if self.is_closed else []
            first = self._first()

            def distance(entry: QueueEntry) -> int:
                return -1 if entry is first else abs(entry.length - first.length)

            batch = []
            for entry in sorted(self._lanes[first.key], key=distance):
                rows -= entry.weight
                if rows < 0:
                    break
                batch.append(entry)
                self._leave_lane(entry)
            self._count_taken(batch)
            return batch

    def cancel(self, entries: Sequence[QueueEntry]) -> int:
        """Remove those of some rows that still wait; return their number."""
        with self._changed:
            waiting = [entry for entry in entries if not entry.taken and entry.order[1]]
            for entry in waiting:
                self._leave_lane(entry)
            return len(waiting)

    def close(self, *, drain: bool) -> list[QueueEntry]:
        """Accept no more rows, and end the workers once the queue is empty.

        Args:
            drain: run the waiting rows first; if False, drop them.

        Returns:
            The dropped rows.
        """
        with self._changed:
            self._state = "closed"
            dropped = []
            if not drain:
                dropped = [entry for lane in self._lanes.values() for entry in lane]
                for entry in dropped:
                    self._mark_taken(entry)
                self._lanes.clear()
            self._changed.notify_all()
            return dropped

    def _has_rows(self, *, wait: bool) -> bool:
        """Return True if a row waits; with `wait`, not before one does or the queue is closed."""
        while wait and not self.rows and self._state == "open":
            self._changed.wait()
        return self.rows > 0

    def _next_batch(self) -> list[QueueEntry]:
        oldest = self._first()
        lane = self._lanes[oldest.key]
        low, high = 0, 1
        if len(lane) > 1:
            position = bisect_left(lane, oldest.order, key=_ORDER)
            # Leave an equal share of the waiting rows to each of the other idle workers.
            max_rows = -(-self.rows // max(self._idle, 1))
            is_short = len(lane) <= MAX_PARTITIONED_ROWS
            lengths = [entry.length for entry in lane] if is_short else _LaneLengths(lane)
            low, high = choose_batch(lengths, oldest=position, max_rows=max_rows, rules=self.rules)
        batch = lane[low:high]
        del lane[low:high]
        for entry in batch:
            self._mark_taken(entry)
        if not lane:
            del self._lanes[oldest.key]
        self._count_taken(batch)
        return batch

    def _leave_lane(self, entry: QueueEntry) -> None:
        """Remove an entry from its lane."""
        lane = self._lanes[entry.key]
        del lane[bisect_left(lane, entry.order, key=_ORDER)]
        self._mark_taken(entry)
        if not lane:
            del self._lanes[entry.key]

    def _first(self) -> QueueEntry:
        """Return the row that is due first."""
        short, lists = self._short, self._lists
        self._weight = self._short_weight
        if not lists.rows or (short.rows and short.served <= lists.served):
            return short.first()
        first = lists.first()
        lists.turn = max(lists.turn, lists.heap[0][0])
        return first

    def _count_taken(self, batch: Sequence[QueueEntry]) -> None:
        """Count the tokens of rows that run for their class."""
        for entry in batch:
            if entry.part is not None:
                kind = entry.part.kind
                kind.served += entry.tokens / (self._weight if kind is self._short else 1.0)

    def _mark_taken(self, entry: QueueEntry) -> None:
        entry.taken = True
        self.rows -= 1
        self.tokens -= entry.tokens
        if entry.part is None:
            raise AssertionError("a row leaves that has not been put")
        kind = entry.part.kind
        kind.leave(entry)
        if not kind.rows:
            kind.heap.clear()


class _LaneLengths(Sequence[int]):
    """A view of the lengths of a lane, for lanes so long that copying them all takes time."""

    __slots__ = ("_lane",)

    def __init__(self, lane: list[QueueEntry]) -> None:
        self._lane = lane

    def __len__(self) -> int:
        return len(self._lane)

    def __getitem__(self, index: Any) -> Any:
        return self._lane[index].length
