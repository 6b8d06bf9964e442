"""Schedule the rows of requests on the workers of one model, and collect their outputs.

A request with many rows enters the queue in parts, so that others can run beside it. The rows of a
cancelled request are removed from the queue. Call all methods from the event loop's thread, except
those that workers call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from enginery.core.errors import EngineryError
from enginery.serve.batching.queue import BatchQueue, ClosedError, QueueEntry

_log = logging.getLogger(__name__)

_QUEUE_SHARE = 4
"""A request may use 1/4 of the queue at a time; the rest of it follows later."""


@dataclass(slots=True)
class Timings:
    """Timings and token counts of one request; each time is the maximum over its rows."""

    tokenize_seconds: float = 0.0
    """Time to tokenize texts, or to decode and resize images."""
    queue_seconds: float = 0.0
    """Time until the last of its batches started."""
    inference_seconds: float = 0.0
    """Time in a worker: padding, inference, and splitting the outputs by row."""
    tokens: int = 0
    """Number of tokens of all inputs, special tokens included."""
    truncated: int = 0
    """Number of inputs that were truncated."""
    generated: int = 0
    """Number of generated tokens."""
    first_token_at: float = 0.0
    """When the first token was generated, by `time.perf_counter`; 0 if none was."""


@dataclass(frozen=True)
class BatchStatistics:
    """Size and duration of a batch that ran."""

    rows: int
    tokens: int
    """Number of tokens without padding."""
    padded_tokens: int
    """Number of tokens with padding."""
    seconds: float
    """Time of padding, inference, and splitting the outputs by row."""


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


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request with rows that wait or run."""

    future: asyncio.Future[None]
    outputs: list[Any]
    """The output of each row; None until the row has run."""
    arrived: float
    """When the request arrived, by `time.perf_counter`."""
    started: float
    """When the latest of its batches started, by `time.perf_counter`."""
    done: int = 0
    """Number of rows that have run."""
    inference_seconds: float = 0.0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a row has run."""


class RowScheduler:
    """Passes the rows of requests to a queue, and collects the outputs that are delivered."""

    def __init__(
        self,
        queue: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: Callable[[BatchStatistics], None] | None = None,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            queue: a `BatchQueue`, or what stands for the queue of another process.
            loop: the event loop of the requests.
            on_batch: called in the event loop for each batch that ran; None for nothing.
        """
        self.queue = queue
        self._loop, self._on_batch = loop, on_batch
        self._pending: set[_PendingRequest] = set()

    def fail_all(self, error: Exception) -> None:
        """Raise an error in every request that waits or runs."""
        for pending in list(self._pending):
            self._fail(pending, error)

    async def run(self, entries: Sequence[QueueEntry], timings: Timings) -> list[Any]:
        """Run the rows of a request and return the graph's output for each.

        Args:
            entries: the rows of the request.
            timings: timings of the request; `queue_seconds` and `inference_seconds` are set here.

        Raises:
            OverloadedError, ClosedError: the request was rejected.
            EngineryError: a row failed; the first error is raised.
        """
        queue = self.queue
        now, backlog_seconds = time.perf_counter(), 0.0
        pending = _PendingRequest(self._loop.create_future(), [None] * len(entries), now, now)
        for entry in entries:
            entry.request = pending
        sent: list[QueueEntry] = []
        self._pending.add(pending)
        try:
            parts = (
                _split_request(entries, queue.max_rows, queue.max_tokens)
                if entries[1:]
                else [entries]
            )
            for part in parts:
                if sent:
                    backlog_seconds = 0.0  # it waits for its own parts: not to be observed
                    await self._put_next_part(part, pending, len(sent) - len(part) // 2)
                else:
                    backlog_seconds = queue.put(part, now=now)
                sent += part
                if pending.future.done():
                    break
            await pending.future
        except BaseException:
            queue.cancel(sent)
            if pending.future.done() and not pending.future.cancelled():
                pending.future.exception()  # mark as retrieved, else asyncio logs it
            raise
        finally:
            self._pending.discard(pending)
        timings.queue_seconds = pending.started - pending.arrived
        timings.inference_seconds = pending.inference_seconds
        queue.observe_wait(backlog_seconds, timings.queue_seconds)
        return pending.outputs

    async def _put_next_part(
        self, part: Sequence[QueueEntry], pending: _PendingRequest, done: int
    ) -> None:
        """Wait until `done` rows of a request are done, then queue its next part."""
        while pending.done < done and not pending.future.done():
            pending.progress.clear()
            await pending.progress.wait()
        if not pending.future.done():
            self.queue.put(part, now=time.perf_counter(), admitted=True)

    def deliver(self, result: BatchResult) -> None:
        """Pass the outputs of a batch to its requests; call this in the event loop."""
        try:
            for entry, output in zip(result.batch, result.outputs, strict=True):
                pending: _PendingRequest = entry.request
                if pending.future.done():
                    continue
                if isinstance(output, BaseException):
                    self._fail(pending, output)
                    continue
                pending.outputs[entry.index] = output
                pending.done += 1
                pending.progress.set()
                pending.started = max(pending.started, result.started)
                pending.inference_seconds = max(pending.inference_seconds, result.seconds)
                if pending.done == len(pending.outputs):
                    pending.future.set_result(None)
        finally:  # scheduled after the requests that waited for this batch
            if self._on_batch is not None:
                self._loop.call_soon(self._report_batch, result)

    def fail_entry(self, entry: QueueEntry, error: BaseException) -> None:
        """Raise an error in the request of a row."""
        self._fail(entry.request, error)

    def _report_batch(self, result: BatchResult) -> None:
        lengths = [entry.length for entry in result.batch]
        tokens = sum(entry.tokens for entry in result.batch)
        if self._on_batch is not None:
            self._on_batch(
                BatchStatistics(len(lengths), tokens, max(lengths) * len(lengths), result.seconds)
            )

    def _fail(self, pending: _PendingRequest, error: BaseException) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)
            pending.progress.set()


class BatchScheduler(RowScheduler):
    """The scheduler of one model in this process, with its queue and worker threads.

    All workers share one session, so that weights are in memory only once. A batch that fails runs
    again row by row, so that an error affects only the row that causes it.
    """

    def __init__(
        self,
        queue: BatchQueue,
        run: Callable[[Sequence[QueueEntry]], list[Any]],
        loop: asyncio.AbstractEventLoop,
        workers: WorkerOptions,
        *,
        on_batch: Callable[[BatchStatistics], None],
    ) -> None:
        """Start the workers.

        Args:
            queue: the waiting rows; after it is closed, the threads end once it is empty.
            run: runs a batch in a worker's thread; returns an output for each row.
            loop: the event loop of the requests.
            workers: the worker threads.
            on_batch: called in the event loop for each batch that ran.
        """
        super().__init__(queue, loop, on_batch=on_batch)
        self._run_batch = run
        self._prepare, self._preparing = workers.prepare, threading.Lock()
        self._prepared: list[Future[None]] = [Future() for _ in range(workers.count)]
        self._since: list[float] = [0.0] * workers.count
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(index,),
                daemon=True,
                name=f"enginery-{workers.name}-{index}",
            )
            for index in range(workers.count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, *, drain: bool) -> None:
        """Accept no more requests; with `drain` run the waiting ones, else fail them."""
        for entry in self.queue.close(drain=drain):
            self.fail_entry(entry, ClosedError("the model is shutting down."))

    def info(self) -> dict[str, Any]:
        """Return no figures beside those of the queue."""
        return {}

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
        """Wait for the threads after `close`; return True if all have ended."""
        ends = time.perf_counter() + timeout_seconds
        for thread in self._threads:
            thread.join(max(ends - time.perf_counter(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, index: int) -> None:
        if self._prepare is not None:
            try:
                with self._preparing:
                    if not self.queue.is_closed:  # another thread could not be prepared
                        self._prepare()
            except BaseException as error:
                self._prepared[index].set_exception(error)
                return
        self._prepared[index].set_result(None)
        while batch := self.queue.take():
            started = self._since[index] = time.perf_counter()
            outputs = self._outputs(batch)
            self._since[index] = 0.0
            result = BatchResult(batch, outputs, started, time.perf_counter() - started)
            with suppress(RuntimeError):  # the loop is closed, so no request waits any more
                self._loop.call_soon_threadsafe(self.deliver, result)

    def _outputs(self, batch: Sequence[QueueEntry]) -> Sequence[Any]:
        try:
            outputs = self._run_batch(batch)
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


def _split_request(
    entries: Sequence[QueueEntry], max_rows: int, max_tokens: int
) -> Iterator[Sequence[QueueEntry]]:
    """Yield the rows of a request in parts of at most `1 / _QUEUE_SHARE` of the queue."""
    rows = max(max_rows // _QUEUE_SHARE, 1)
    start = tokens = 0
    for index, entry in enumerate(entries):
        full = index - start >= rows or tokens + entry.tokens > max_tokens // _QUEUE_SHARE
        if full and index > start:
            yield entries[start:index]
            start, tokens = index, 0
        tokens += entry.tokens
    if entries:
        yield entries[start:]
