"""The queue of rows that wait for a worker, with admission control.

No timer delays a batch: a free worker takes the row that is due first, together with rows of
similar length (see `planner`). The first row of a request is due when the request arrives; each
further row is due when the rows before it in the request would be done. So a long request does not
block short ones that arrive after it.

A request is rejected (HTTP 429) if too many rows or tokens wait, or if its estimated wait is too
long. The estimate starts from the backlog: the tokens in the queue times the seconds per token of
all workers. Requests wait longer than that, because batches are formed by length, so that later
rows overtake earlier ones, and because a request waits for the last of its rows. The ratio of
actual wait to backlog is observed on past requests, as the quotient of two exponentially decaying
sums, and the estimate is the backlog times this ratio.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
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


class OverloadedError(EngineryError):
    """Too many requests are waiting."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message, do="Send the request again later.")
        self.retry_after_seconds = retry_after_seconds


class ClosedError(EngineryError):
    """The model is shutting down and accepts no more requests."""


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
    due: float = 0.0
    """When the row should run, by `time.perf_counter`; the row that is due first runs first."""
    taken: bool = False
    """True once the row has left the queue."""
    order: tuple[int, int] = (0, 0)
    """Sort key within its lane: length, then order of arrival."""


_ORDER = attrgetter("order")


class BatchQueue:
    """A bounded queue between the event loop and the workers. Thread-safe.

    Rows of equal keys form a lane, sorted by length for the planner. A heap over all lanes has the
    row that is due first; rows that left their lane stay in the heap, marked as taken, until they
    reach its top.
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
        self._due: list[tuple[float, int, QueueEntry]] = []
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
        """Wait in seconds that most requests which arrive now will not exceed."""
        return self.backlog_seconds * self._stretch

    @property
    def backlog_seconds(self) -> float:
        """Time that the workers need for all waiting rows, in seconds."""
        return self.tokens * self.seconds_per_token

    def observe_wait(self, backlog_seconds: float, waited: float) -> None:
        """Update the estimate with a request that has run.

        Args:
            backlog_seconds: the backlog when the request arrived.
            waited: seconds until the last of its batches started.
        """
        if backlog_seconds < self._max_wait_seconds * _OBSERVED_SHARE:
            return
        if waited > backlog_seconds * self._stretch:
            self._stretch = min(self._stretch * _LONGER, _MAX_STRETCH)
        else:
            self._stretch = max(self._stretch * _SHORTER, 1.0)

    def put(self, entries: Sequence[QueueEntry], *, now: float, admitted: bool = False) -> None:
        """Add rows of a request to the queue: all of them or, with an error, none.

        Args:
            entries: rows of one request.
            now: the current `time.perf_counter`.
            admitted: earlier rows of the request were accepted, so these are not rejected.

        Raises:
            OverloadedError: too many rows or tokens wait, or the request would wait too long.
            ClosedError: the queue is closed.
        """
        tokens = sum(entry.tokens for entry in entries)
        with self._changed:
            if self._state != "open":
                raise ClosedError("the model is shutting down.")
            if self.rows and not admitted:
                self._admit(len(entries), tokens)
            due = now
            for entry in entries:
                self._count += 1
                entry.due, entry.order = due, (entry.length, self._count)
                due += entry.tokens * self.seconds_per_token
                insort(self._lanes.setdefault(entry.key, []), entry, key=_ORDER)
                heapq.heappush(self._due, (entry.due, self._count, entry))
            self.rows += len(entries)
            self.tokens += tokens
            self._changed.notify(len(entries))

    def _admit(self, rows: int, tokens: int) -> None:
        """Raise OverloadedError if a request of this size must be rejected."""
        wait = self.estimated_wait_seconds
        if self.rows + rows > self.max_rows or self.tokens + tokens > self.max_tokens:
            raise OverloadedError(
                f"the queue is full: {self.rows} inputs with {self.tokens} tokens wait, expected "
                f"at most {self.max_rows} and {self.max_tokens}.",
                retry_after_seconds=wait,
            )
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
            while self._due and self._due[0][2].weight <= rows:
                entry = self._due[0][2]
                rows -= entry.weight
                batch.append(entry)
                self._leave_lane(entry)
                self._pop_taken()
            return batch

    def take_similar(self, rows: int, *, wait: bool) -> list[QueueEntry] | None:
        """Return the entry that is due first, with those nearest in length; see `take_due`."""
        with self._changed:
            if not self._has_rows(wait=wait):
                return None if self.is_closed else []
            first = self._due[0][2]

            def distance(entry: QueueEntry) -> int:
                return -1 if entry is first else abs(entry.length - first.length)

            batch = []
            for entry in sorted(self._lanes[first.key], key=distance):
                rows -= entry.weight
                if rows < 0:
                    break
                batch.append(entry)
                self._leave_lane(entry)
            self._pop_taken()
            return batch

    def cancel(self, entries: Sequence[QueueEntry]) -> int:
        """Remove those of some rows that still wait; return their number."""
        with self._changed:
            waiting = [entry for entry in entries if not entry.taken and entry.order[1]]
            for entry in waiting:
                self._leave_lane(entry)
            self._pop_taken()
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
                dropped = [entry for _, _, entry in self._due if not entry.taken]
                for entry in dropped:
                    self._mark_taken(entry)
                self._lanes.clear()
                self._due.clear()
            self._changed.notify_all()
            return dropped

    def _has_rows(self, *, wait: bool) -> bool:
        """Return True if a row waits; with `wait`, not before one does or the queue is closed."""
        while wait and not self.rows and self._state == "open":
            self._changed.wait()
        return self.rows > 0

    def _next_batch(self) -> list[QueueEntry]:
        oldest = self._due[0][2]
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
        self._pop_taken()
        return batch

    def _leave_lane(self, entry: QueueEntry) -> None:
        """Remove an entry from its lane."""
        lane = self._lanes[entry.key]
        del lane[bisect_left(lane, entry.order, key=_ORDER)]
        self._mark_taken(entry)
        if not lane:
            del self._lanes[entry.key]

    def _pop_taken(self) -> None:
        """Remove taken entries from the top of the heap."""
        while self._due and self._due[0][2].taken:
            heapq.heappop(self._due)

    def _mark_taken(self, entry: QueueEntry) -> None:
        entry.taken = True
        self.rows -= 1
        self.tokens -= entry.tokens


class _LaneLengths(Sequence[int]):
    """A view of the lengths of a lane, for lanes so long that copying them all takes time."""

    __slots__ = ("_lane",)

    def __init__(self, lane: list[QueueEntry]) -> None:
        self._lane = lane

    def __len__(self) -> int:
        return len(self._lane)

    def __getitem__(self, index: Any) -> Any:
        return self._lane[index].length
