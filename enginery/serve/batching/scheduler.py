"""Rows of requests through the queue and the workers of one model, and back.

A request of many rows has a share of the queue at a time: others get in beside it. A request that
is cancelled leaves the queue. All methods but those that workers call are for the event loop's
thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginery.serve.batching.planner import BatchRules
from enginery.serve.batching.queue import BatchQueue, ClosedError, QueueEntry
from enginery.serve.batching.workers import BatchResult, Workers

_QUEUE_SHARE = 4
"""A request has at most one part in so many of the queue at once; the rest of it comes after."""


@dataclass(slots=True)
class Timings:
    """Where the time of one request went, in seconds; the longest over its rows."""

    tokenize_seconds: float = 0.0
    """Tokenizing, or decoding and scaling images."""
    queue_seconds: float = 0.0
    """Waiting for a worker."""
    inference_seconds: float = 0.0
    """In a worker: padding, the graph, and its outputs into rows."""
    tokens: int = 0
    """Of all inputs, special tokens included."""
    truncated: int = 0
    """Inputs that were cut to what the model takes."""


@dataclass(frozen=True)
class BatchStatistics:
    """One batch that ran."""

    rows: int
    tokens: int
    """Without padding."""
    padded_tokens: int
    seconds: float
    """Padding, the graph, and its outputs into rows."""


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request whose rows wait or run."""

    future: asyncio.Future[None]
    outputs: list[Any]
    """One for each row; None until it ran."""
    arrived: float
    """By `time.perf_counter`."""
    started: float
    """When the last of its batches began."""
    done: int = 0
    """How many rows ran."""
    inference_seconds: float = 0.0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a row has run."""


class BatchScheduler:
    """Runs the rows of requests in batches."""

    def __init__(
        self,
        run: Callable[[Sequence[QueueEntry]], list[Any]],
        rules: BatchRules,
        loop: asyncio.AbstractEventLoop,
        *,
        workers: int,
        max_rows: int,
        max_tokens: int,
        max_wait_seconds: float,
        on_batch: Callable[[BatchStatistics], None],
        name: str = "model",
    ) -> None:
        """Start the workers.

        Args:
            run: runs a batch in a worker's thread; returns an output for each row.
            rules: the bounds of a batch.
            loop: where requests wait.
            workers: batches at the same time.
            max_rows: that may wait.
            max_tokens: that may wait.
            max_wait_seconds: that a request may have to wait.
            on_batch: called with each batch that ran, in the event loop.
            name: of the threads.
        """
        self._loop, self._on_batch = loop, on_batch
        self._pending: set[_PendingRequest] = set()
        self.queue = BatchQueue(
            rules, max_rows=max_rows, max_tokens=max_tokens, max_wait_seconds=max_wait_seconds
        )
        self.workers = Workers(self.queue, run, self._finished, count=workers, name=name)

    def close(self, *, drain: bool) -> None:
        """Take nothing more; run what waits, or refuse it."""
        for entry in self.queue.close(drain=drain):
            self._fail(entry.request, ClosedError("the model is being closed."))

    def fail_all(self, error: Exception) -> None:
        """Answer every request that waits or runs with an error."""
        for pending in list(self._pending):
            self._fail(pending, error)

    async def run(self, entries: Sequence[QueueEntry], timings: Timings) -> list[Any]:
        """Run rows and return the graph's output for each.

        Args:
            entries: rows of one request.
            timings: of the request; queue and inference are filled in.

        Raises:
            OverloadedError, ClosedError: the rows were not taken.
            EngineryError: the first that a row raised.
        """
        queue = self.queue
        now, backlog_seconds = time.perf_counter(), queue.backlog_seconds
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
                    backlog_seconds = 0.0  # it waits for its own parts, which says nothing
                    await self._put_next_part(part, pending, len(sent) - len(part) // 2)
                else:
                    queue.put(part, now=now)
                sent += part
                if pending.future.done():
                    break
            await pending.future
        except BaseException:
            queue.cancel(sent)
            if pending.future.done() and not pending.future.cancelled():
                pending.future.exception()  # it was looked at
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
        """Put a further part of a request once so many of its rows are done."""
        while pending.done < done and not pending.future.done():
            pending.progress.clear()
            await pending.progress.wait()
        if not pending.future.done():
            self.queue.put(part, now=time.perf_counter(), admitted=True)

    def _finished(self, result: BatchResult) -> None:
        """Hand a batch over to the event loop; called in a worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, result)
        except RuntimeError:  # the loop was closed: nobody waits for an answer any more
            return

    def _deliver(self, result: BatchResult) -> None:
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
        finally:  # behind the requests that have waited for it
            self._loop.call_soon(self._report_batch, result)

    def _report_batch(self, result: BatchResult) -> None:
        lengths = [entry.length for entry in result.batch]
        tokens = sum(entry.tokens for entry in result.batch)
        self._on_batch(
            BatchStatistics(len(lengths), tokens, max(lengths) * len(lengths), result.seconds)
        )

    def _fail(self, pending: _PendingRequest, error: BaseException) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)
            pending.progress.set()


def _split_request(
    entries: Sequence[QueueEntry], max_rows: int, max_tokens: int
) -> Iterator[Sequence[QueueEntry]]:
    """Yield the rows of a request, as many at once as it may have of the queue."""
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
