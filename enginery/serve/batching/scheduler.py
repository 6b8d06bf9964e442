"""Schedule the rows of requests on the workers of one model, and collect their outputs.

A request with many rows enters the queue in parts, so that others can run beside it. The rows of a
cancelled request are removed from the queue. Call all methods from the event loop's thread, except
those that workers call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginery.serve.batching.queue import BatchQueue, ClosedError, QueueEntry
from enginery.serve.batching.workers import BatchResult, WorkerOptions, Workers

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
    """The scheduler of one model in this process, with its queue and workers."""

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
            queue: the waiting rows.
            run: runs a batch in a worker's thread; returns an output for each row.
            loop: the event loop of the requests.
            workers: the worker threads.
            on_batch: called in the event loop for each batch that ran.
        """
        super().__init__(queue, loop, on_batch=on_batch)
        self.workers = Workers(queue, run, self._finished, workers)

    def close(self, *, drain: bool) -> None:
        """Accept no more requests; with `drain` run the waiting ones, else fail them."""
        for entry in self.queue.close(drain=drain):
            self.fail_entry(entry, ClosedError("the model is shutting down."))

    @property
    def alive(self) -> bool:
        """True if every worker is alive."""
        return self.workers.alive

    def busy_seconds(self) -> float:
        """Return how long the longest-running batch has been running, in seconds."""
        return self.workers.busy_seconds()

    def info(self) -> dict[str, Any]:
        """Return no figures beside those of the queue."""
        return {}

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the workers after `close`; return True if all have ended."""
        return self.workers.join(timeout_seconds)

    def _finished(self, result: BatchResult) -> None:
        """Pass a batch's result to the event loop; called in a worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self.deliver, result)
        except RuntimeError:  # the loop is closed, so no request waits any more
            return


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
