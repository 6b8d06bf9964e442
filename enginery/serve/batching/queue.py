"""Rows that wait for a worker, the batches that workers take, and which requests are refused.

No row waits for a timer: a worker that is free takes the row that is due first, with neighbours in
length, see `planner`. A row of a list is due when those before it in the list would be done, so
that a long list does not hold up short requests that come after it. A request is refused when too
many rows or tokens wait, or when it would wait for too long.

Batches of neighbours in length let later rows pass earlier ones, and a request waits for the last
of its rows. It waits for longer than the tokens before it take; how much longer is learned.
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

_DECAY = 0.98
"""What a wait weighs when the next one is learned."""
_OBSERVED_SHARE = 0.1
"""Of the longest wait that is taken. Shorter waits say little: what runs is not in an estimate."""
_MAX_STRETCH = 4.0


class OverloadedError(EngineryError):
    """Too much waits already."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message, do="Send the request again later.")
        self.retry_after_seconds = retry_after_seconds


class ClosedError(EngineryError):
    """The model is being closed, and takes nothing more."""


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One row of a request, until a worker takes it."""

    request: Any
    """All rows of one request are cancelled at once."""
    index: int
    """Among the rows of its request."""
    key: Hashable
    """Rows of one key may share a batch."""
    length: int
    """Tokens, padded to what an engine takes; 1 for an image."""
    row: Any
    runner: Any = None
    """Runs rows of this key."""
    tokens: int = 0
    """Without padding."""
    due: float = 0.0
    """When it is to run, by `time.perf_counter`; earlier ones go first."""
    taken: bool = False
    order: tuple[int, int] = (0, 0)


_ORDER = attrgetter("order")


class BatchQueue:
    """A bounded queue between the event loop and the workers."""

    def __init__(
        self, rules: BatchRules, *, max_rows: int, max_tokens: int, max_wait_seconds: float
    ) -> None:
        """Open the queue.

        Args:
            rules: the bounds of a batch.
            max_rows: that may wait.
            max_tokens: that may wait.
            max_wait_seconds: that a request may have to wait, as far as that can be estimated.
        """
        self.rules = rules
        self.seconds_per_token = 0.0
        """How long the workers together take for a token; 0 until it was measured."""
        self.rows = 0
        """How many wait."""
        self.tokens = 0
        """How many tokens they have."""
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._max_wait_seconds = max_wait_seconds
        # Sums over past requests: what the tokens before them took, and how long they waited. They
        # begin as if one short wait had been just as long as that.
        self._estimated_sum = self._waited_sum = max_wait_seconds * _OBSERVED_SHARE
        self._lanes: dict[Hashable, list[QueueEntry]] = {}
        self._due: list[tuple[float, int, QueueEntry]] = []
        self._count = 0
        self._idle = 0
        self._state = "open"
        self._lock = threading.Lock()
        self._sleeping: list[threading.Lock] = []
        """Locked ones, each of a worker that waits; the last is woken first: what it needs is in
        its core's caches."""

    @property
    def estimated_wait_seconds(self) -> float:
        """Return how long a request that comes now would wait."""
        stretch = self._waited_sum / self._estimated_sum if self._estimated_sum else 1.0
        return self.backlog_seconds * min(max(stretch, 1.0), _MAX_STRETCH)

    @property
    def backlog_seconds(self) -> float:
        """Return how long the workers would take for what waits."""
        return self.tokens * self.seconds_per_token

    def observe_wait(self, backlog_seconds: float, waited: float) -> None:
        """Learn from a request that has run.

        Args:
            backlog_seconds: when it came.
            waited: until the last of its batches began, in seconds.
        """
        if backlog_seconds < self._max_wait_seconds * _OBSERVED_SHARE:
            return
        self._estimated_sum = self._estimated_sum * _DECAY + backlog_seconds
        self._waited_sum = self._waited_sum * _DECAY + waited

    def put(self, entries: Sequence[QueueEntry], *, now: float, admitted: bool = False) -> None:
        """Take all of some rows, or none.

        Args:
            entries: rows of one request.
            now: by `time.perf_counter`.
            admitted: whether earlier rows of the request were taken, and these are no longer
                refused: a request has one part in the queue at a time.

        Raises:
            OverloadedError: too much waits already.
            ClosedError: the queue was closed.
        """
        tokens = sum(entry.tokens for entry in entries)
        with self._lock:
            if self._state != "open":
                raise ClosedError("the model is being closed.")
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
            for _ in range(min(len(entries), len(self._sleeping))):
                self._sleeping.pop().release()

    def _admit(self, rows: int, tokens: int) -> None:
        """Raise OverloadedError where a request of so many rows and tokens is too much."""
        wait = self.estimated_wait_seconds
        if self.rows + rows > self.max_rows or self.tokens + tokens > self.max_tokens:
            raise OverloadedError(
                f"the queue is full: {self.rows} inputs with {self.tokens} tokens wait, expected "
                f"{self.max_rows} and {self.max_tokens} at most.",
                retry_after_seconds=wait,
            )
        if wait > self._max_wait_seconds:
            raise OverloadedError(
                f"a request would wait {wait:.1f} s, expected {self._max_wait_seconds:g} s at "
                f"most: {self.rows} inputs with {self.tokens} tokens wait.",
                retry_after_seconds=wait,
            )

    def take(self) -> list[QueueEntry]:
        """Wait for the next batch; return none when the queue is closed and empty."""
        with self._lock:
            self._idle += 1
            try:
                while not self.rows:
                    if self._state != "open":
                        return []
                    self._sleep()
                return self._next_batch()
            finally:
                self._idle -= 1

    def cancel(self, entries: Sequence[QueueEntry]) -> int:
        """Remove rows that still wait; return how many those were."""
        with self._lock:
            found = [entry for entry in entries if not entry.taken and entry.order[1]]
            for entry in found:
                lane = self._lanes[entry.key]
                del lane[bisect_left(lane, entry.order, key=_ORDER)]
                self._mark_taken(entry)
                if not lane:
                    del self._lanes[entry.key]
            self._pop_taken()
            return len(found)

    def close(self, *, drain: bool) -> list[QueueEntry]:
        """Take nothing more; workers end when nothing waits.

        Returns:
            The rows that will not run; none with `drain`.
        """
        with self._lock:
            self._state = "closed"
            dropped = []
            if not drain:
                dropped = [entry for _, _, entry in self._due if not entry.taken]
                for entry in dropped:
                    self._mark_taken(entry)
                self._lanes.clear()
                self._due.clear()
            while self._sleeping:
                self._sleeping.pop().release()
            return dropped

    def _sleep(self) -> None:
        """Wait until `put` wakes this worker; the queue's lock is released meanwhile."""
        woken = threading.Lock()
        woken.acquire()
        self._sleeping.append(woken)
        self._lock.release()
        try:
            woken.acquire()
        finally:
            self._lock.acquire()

    def _next_batch(self) -> list[QueueEntry]:
        oldest = self._due[0][2]
        lane = self._lanes[oldest.key]
        low, high = 0, 1
        if len(lane) > 1:
            position = bisect_left(lane, oldest.order, key=_ORDER)
            # Workers that are free as well get their share.
            most = -(-self.rows // max(self._idle, 1))
            few = len(lane) <= MAX_PARTITIONED_ROWS
            lengths = [entry.length for entry in lane] if few else _LaneLengths(lane)
            low, high = choose_batch(lengths, oldest=position, max_rows=most, rules=self.rules)
        batch = lane[low:high]
        del lane[low:high]
        for entry in batch:
            self._mark_taken(entry)
        if not lane:
            del self._lanes[oldest.key]
        self._pop_taken()
        return batch

    def _pop_taken(self) -> None:
        """Drop entries that were taken from the front of the due list."""
        while self._due and self._due[0][2].taken:
            heapq.heappop(self._due)

    def _mark_taken(self, entry: QueueEntry) -> None:
        entry.taken = True
        self.rows -= 1
        self.tokens -= entry.tokens


class _LaneLengths(Sequence[int]):
    """The lengths of a lane, read one by one."""

    __slots__ = ("_lane",)

    def __init__(self, lane: list[QueueEntry]) -> None:
        self._lane = lane

    def __len__(self) -> int:
        return len(self._lane)

    def __getitem__(self, index: Any) -> Any:
        return self._lane[index].length
