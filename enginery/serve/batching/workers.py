"""Worker threads that take batches from a queue and run them.

All workers share one session, so that weights are in memory only once. A batch that fails runs
again row by row, so that an error affects only the row that causes it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from enginery.core.errors import EngineryError
from enginery.serve.batching.queue import BatchQueue, QueueEntry

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchResult:
    """The result of a batch: an output or an exception for each row."""

    batch: Sequence[QueueEntry]
    outputs: Sequence[Any]
    """The graph's output for each row, or the exception that the row raised."""
    started: float
    """When the batch started, by `time.perf_counter`."""
    seconds: float


@dataclass(frozen=True)
class WorkerOptions:
    """How many threads run batches, and what each does first."""

    count: int
    """Number of threads."""
    prepare: Callable[[], object] | None = None
    """Called in every thread, one after another, before it takes a batch; a CUDA graph has to be
    recorded in the thread that replays it."""
    name: str = "model"
    """Name of the model, for the threads."""


class Workers:
    """The worker threads of one model."""

    def __init__(
        self,
        queue: BatchQueue,
        run: Callable[[Sequence[QueueEntry]], list[Any]],
        deliver: Callable[[BatchResult], None],
        options: WorkerOptions,
    ) -> None:
        """Start the threads.

        Args:
            queue: source of batches; after it is closed, the threads end once it is empty.
            run: returns an output for each row of a batch; raises EngineryError if it fails.
            deliver: called with every result, in the worker's thread.
            options: the number of threads, and what each does first.
        """
        self._queue, self._run, self._deliver = queue, run, deliver
        count, name = options.count, options.name
        self._prepare, self._preparing = options.prepare, threading.Lock()
        self._prepared: list[Future[None]] = [Future() for _ in range(count)]
        self._since: list[float] = [0.0] * count
        self._threads = [
            threading.Thread(
                target=self._work, args=(index,), daemon=True, name=f"enginery-{name}-{index}"
            )
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def wait_prepared(self) -> None:
        """Wait until every thread is prepared; raise the error of one that could not be."""
        for prepared in self._prepared:
            prepared.result()

    def busy_seconds(self) -> float:
        """Return how long the longest-running batch has been running, in seconds."""
        now = time.perf_counter()
        return max((now - since for since in self._since if since), default=0.0)

    @property
    def alive(self) -> bool:
        """True if every thread is alive."""
        return all(thread.is_alive() for thread in self._threads)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the threads after the queue was closed; return True if all have ended."""
        ends = time.perf_counter() + timeout_seconds
        for thread in self._threads:
            thread.join(max(ends - time.perf_counter(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, index: int) -> None:
        if self._prepare is not None:
            try:
                with self._preparing:
                    if not self._queue.is_closed:  # another thread could not be prepared
                        self._prepare()
            except BaseException as error:
                self._prepared[index].set_exception(error)
                return
        self._prepared[index].set_result(None)
        while batch := self._queue.take():
            started = self._since[index] = time.perf_counter()
            outputs = self._outputs(batch)
            self._since[index] = 0.0
            try:
                self._deliver(BatchResult(batch, outputs, started, time.perf_counter() - started))
            except Exception:  # a bug, which must not end the worker
                _log.exception("a batch of %d rows could not be delivered", len(batch))

    def _outputs(self, batch: Sequence[QueueEntry]) -> Sequence[Any]:
        try:
            outputs = self._run(batch)
            if len(outputs) != len(batch):
                raise AssertionError(f"{len(outputs)} outputs for {len(batch)} rows")
            return outputs
        except EngineryError as error:
            if len(batch) == 1:
                return [error]
        except Exception as error:  # a bug, which must not end the worker
            _log.exception("a batch of %d rows failed", len(batch))
            if len(batch) == 1:
                return [error]
        return [self._outputs([item])[0] for item in batch]
