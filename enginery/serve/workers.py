"""Threads that take batches from a queue and run them.

    >>> workers = Workers(queue, run, deliver, count=2)
    >>> workers.busy_seconds()
    0.0

One session is shared: its weights are in memory once, and each batch stays on the thread that runs
it. A batch that fails is run again input by input, so that one bad input is alone with its error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from enginery.core.errors import EngineryError
from enginery.serve.queue import BatchQueue, Waiting

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Done:
    """A batch that ran: a value or an error for each of its inputs."""

    batch: Sequence[Waiting]
    values: Sequence[Any]
    """What the work gave for each input, or an `EngineryError`."""
    started: float
    """By `time.perf_counter`."""
    seconds: float


class Workers:
    """The threads of one model."""

    def __init__(
        self,
        queue: BatchQueue,
        run: Callable[[Sequence[Waiting]], list[Any]],
        deliver: Callable[[Done], None],
        *,
        count: int,
        name: str = "model",
    ) -> None:
        """Starts the threads.

        Args:
            queue: where batches come from; closing it ends the threads when nothing waits.
            run: what to do with a batch; raises an `EngineryError` for one that cannot be run.
            deliver: told of every batch, in the worker's thread.
            count: how many threads.
            name: of the threads.
        """
        self._queue, self._run, self._deliver = queue, run, deliver
        self._since: list[float] = [0.0] * count
        self._threads = [
            threading.Thread(
                target=self._work, args=(place,), daemon=True, name=f"enginery-{name}-{place}"
            )
            for place in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def busy_seconds(self) -> float:
        """How long the batch has been running that has been running longest."""
        now = time.perf_counter()
        return max((now - since for since in self._since if since), default=0.0)

    @property
    def alive(self) -> bool:
        """Whether every thread is there."""
        return all(thread.is_alive() for thread in self._threads)

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the threads, after the queue was closed; whether all have ended."""
        ends = time.perf_counter() + timeout_seconds
        for thread in self._threads:
            thread.join(max(ends - time.perf_counter(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, place: int) -> None:
        while batch := self._queue.take():
            started = self._since[place] = time.perf_counter()
            values = self._values(batch)
            self._since[place] = 0.0
            try:
                self._deliver(Done(batch, values, started, time.perf_counter() - started))
            except Exception:  # a bug, which must not take the worker along
                _log.exception("a batch of %d inputs could not be delivered", len(batch))

    def _values(self, batch: Sequence[Waiting]) -> Sequence[Any]:
        try:
            values = self._run(batch)
            if len(values) != len(batch):
                raise AssertionError(f"{len(values)} answers to {len(batch)} inputs")
            return values
        except EngineryError as error:
            if len(batch) == 1:
                return [error]
        except Exception as error:  # a bug, which must not take the worker along
            _log.exception("a batch of %d inputs failed", len(batch))
            if len(batch) == 1:
                return [error]
        return [self._values([item])[0] for item in batch]
