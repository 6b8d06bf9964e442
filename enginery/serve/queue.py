"""Inputs that wait for a worker, and the batches that workers take.

    >>> queue = BatchQueue(rules, max_inputs=2048, max_tokens=262_144)
    >>> queue.put(waiting)            # from the event loop
    >>> batch = queue.take()          # in a worker's thread: waits for the first input

Nothing waits for a timer: a worker that is free takes the input that is due first, with neighbours
in length, see `batches`. An input of a list is due when those before it in the list would be done,
so that a long list does not hold up short requests that come after it.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from enginery.serve.batches import CROWD, BatchRules, choose_batch
from enginery.serve.refusals import OverloadedError, UnavailableError


@dataclass(slots=True, eq=False)
class Waiting:
    """One input of a request, until a worker takes it."""

    request: Any
    """Whose it is; all inputs of one request are cancelled at once."""
    place: int
    """Among the inputs of its request."""
    kind: Hashable
    """Inputs of one kind may share a batch."""
    length: int
    """Tokens, padded to what an engine takes; 1 for an image."""
    content: Any
    """An encoding, pixels or tensors."""
    prompt_tokens: int = 0
    tokens: int = 0
    """All of them, as the queue counts."""
    due: float = 0.0
    """When it is to run, by `time.perf_counter`; earlier ones go first."""
    taken: bool = False
    order: tuple[int, int] = (0, 0)


_ORDER = attrgetter("order")


class BatchQueue:
    """A bounded queue between the event loop and the workers."""

    def __init__(self, rules: BatchRules, *, max_inputs: int, max_tokens: int) -> None:
        self.rules = rules
        self.seconds_per_token = 0.0
        """By which inputs of a list are due one after the other; 0 until it was measured."""
        self.inputs = 0
        """How many wait."""
        self.tokens = 0
        """How many tokens they have."""
        self.most_inputs, self.most_tokens = max_inputs, max_tokens
        self._lanes: dict[Hashable, list[Waiting]] = {}
        self._due: list[tuple[float, int, Waiting]] = []
        self._count = 0
        self._idle = 0
        self._state = "open"
        self._lock = threading.Lock()
        self._sleeping: list[threading.Lock] = []
        """Locked ones, each of a worker that waits; the last is woken first: what it needs is in
        its core's caches."""

    def put(self, items: Sequence[Waiting], *, now: float) -> None:
        """Takes all inputs of a request, or none.

        Raises:
            OverloadedError: too much waits already.
            UnavailableError: the queue was closed.
        """
        tokens = sum(item.tokens for item in items)
        with self._lock:
            if self._state != "open":
                raise UnavailableError("the model is being closed.", retry_after_seconds=1)
            inputs = len(items)
            if self.inputs and (
                self.inputs + inputs > self.most_inputs or self.tokens + tokens > self.most_tokens
            ):
                raise OverloadedError(
                    f"the queue is full: {self.inputs} inputs with {self.tokens} tokens wait, "
                    f"at most {self.most_inputs} and {self.most_tokens} may.",
                    do="Send the request again later.",
                    retry_after_seconds=self.tokens * self.seconds_per_token,
                )
            due = now
            for item in items:
                self._count += 1
                item.due, item.order = due, (item.length, self._count)
                due += item.tokens * self.seconds_per_token
                insort(self._lanes.setdefault(item.kind, []), item, key=_ORDER)
                heapq.heappush(self._due, (item.due, self._count, item))
            self.inputs += inputs
            self.tokens += tokens
            for _ in range(min(inputs, len(self._sleeping))):
                self._sleeping.pop().release()

    def take(self) -> list[Waiting]:
        """The next batch; empty when the queue is closed and nothing waits any more."""
        with self._lock:
            self._idle += 1
            try:
                while not self.inputs:
                    if self._state != "open":
                        return []
                    self._sleep()
                return self._next()
            finally:
                self._idle -= 1

    def cancel(self, items: Sequence[Waiting]) -> int:
        """Takes inputs out that still wait; returns how many those were."""
        with self._lock:
            found = [item for item in items if not item.taken and item.order[1]]
            for item in found:
                lane = self._lanes[item.kind]
                del lane[bisect_left(lane, item.order, key=_ORDER)]
                self._forget(item)
                if not lane:
                    del self._lanes[item.kind]
            self._drop_taken()
            return len(found)

    def close(self, *, drain: bool) -> list[Waiting]:
        """Takes nothing more; workers end when nothing waits.

        Returns:
            What waited and will not run; nothing with `drain`.
        """
        with self._lock:
            self._state = "closed"
            dropped = []
            if not drain:
                dropped = [item for _, _, item in self._due if not item.taken]
                for item in dropped:
                    self._forget(item)
                self._lanes.clear()
                self._due.clear()
            while self._sleeping:
                self._sleeping.pop().release()
            return dropped

    def _sleep(self) -> None:
        """Waits until somebody wakes this worker; the queue's lock is open meanwhile."""
        woken = threading.Lock()
        woken.acquire()
        self._sleeping.append(woken)
        self._lock.release()
        try:
            woken.acquire()
        finally:
            self._lock.acquire()

    def _next(self) -> list[Waiting]:
        oldest = self._due[0][2]
        lane = self._lanes[oldest.kind]
        place = bisect_left(lane, oldest.order, key=_ORDER)
        # Workers that are free as well get their share.
        most = -(-self.inputs // max(self._idle, 1))
        lengths = [item.length for item in lane] if len(lane) <= CROWD else _Lengths(lane)
        low, high = choose_batch(lengths, oldest=place, most=most, rules=self.rules)
        batch = lane[low:high]
        del lane[low:high]
        for item in batch:
            self._forget(item)
        if not lane:
            del self._lanes[oldest.kind]
        self._drop_taken()
        return batch

    def _drop_taken(self) -> None:
        """Afterwards the first that is due still waits."""
        while self._due and self._due[0][2].taken:
            heapq.heappop(self._due)

    def _forget(self, item: Waiting) -> None:
        item.taken = True
        self.inputs -= 1
        self.tokens -= item.tokens


class _Lengths(Sequence[int]):
    """The lengths of a lane, looked at where they are asked for."""

    __slots__ = ("_lane",)

    def __init__(self, lane: list[Waiting]) -> None:
        self._lane = lane

    def __len__(self) -> int:
        return len(self._lane)

    def __getitem__(self, place: Any) -> Any:
        return self._lane[place].length
