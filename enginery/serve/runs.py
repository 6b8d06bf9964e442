"""Inputs of requests through a model's queue and workers, and back to who waits for them.

    >>> runs = Runs(loaded, loop, options, name="minilm")
    >>> await runs.run(items, timings)
    [array([0.01, …])]

A request of many inputs has a share of the queue at a time: others get in beside it. What is
cancelled leaves the queue. All methods but those of workers are for the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from enginery.core.errors import EngineryError
from enginery.serve.loaded import LoadedModel
from enginery.serve.queue import BatchQueue, Waiting
from enginery.serve.refusals import OverloadedError, UnavailableError
from enginery.serve.replies import Timings
from enginery.serve.workers import Done, Workers

_QUEUE_SHARE = 4
"""A request has at most one part in so many of the queue at once; the rest of it comes after."""
_AGAIN_SECONDS = 0.02
"""Until a further part of a request asks for a place in a full queue again."""
_PROBE_SECONDS = 1.0
"""Failures within it are looked into once."""


class _Pending:
    """A request whose inputs wait or run."""

    __slots__ = (
        "arrived", "done", "future", "inference_seconds", "progress", "started", "values",
    )  # fmt: skip

    def __init__(self, future: asyncio.Future[None], inputs: int, arrived: float) -> None:
        self.future = future
        self.values: list[Any] = [None] * inputs
        self.done = 0
        self.arrived = arrived
        self.started = arrived
        self.inference_seconds = 0.0
        self.progress = asyncio.Event()


class Runs:
    """A loaded model at work."""

    def __init__(
        self,
        loaded: LoadedModel,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str,
        max_inputs: int,
        max_tokens: int,
        on_gone: Callable[[str], None],
        on_batch: Callable[..., None] | None = None,
    ) -> None:
        """Starts the workers.

        Args:
            loaded: the model.
            loop: where requests wait.
            name: of the model.
            max_inputs: that may wait.
            max_tokens: that may wait.
            on_gone: told in words when the provider runs nothing any more, in a worker's thread.
            on_batch: told of each batch: the name, `rows`, `tokens`, `padded_tokens`, `seconds`.
        """
        self.name = name
        self._loaded, self._loop = loaded, loop
        self._on_gone, self._on_batch = on_gone, on_batch
        self._probed = 0.0
        self.queue = BatchQueue(loaded.rules, max_inputs=max_inputs, max_tokens=max_tokens)
        self.workers = Workers(
            self.queue, self._run_batch, self._finished, count=loaded.workers, name=name
        )

    def follow(self) -> None:
        """The queue goes by what is known of the model's cost."""
        self.queue.rules = self._loaded.rules
        each = self._loaded.live.cost().seconds_per_token
        self.queue.seconds_per_token = each / self._loaded.workers

    def close(self, *, drain: bool) -> None:
        """Takes nothing more; what waits is run (with `drain`) or refused."""
        for item in self.queue.close(drain=drain):
            self._fail(item.request, UnavailableError(f"{self.name} is being closed."))

    async def run(self, items: Sequence[Waiting], timings: Timings) -> list[Any]:
        """What the graph says of each input; raises the first error among them."""
        queue = self.queue
        now = time.perf_counter()
        pending = _Pending(self._loop.create_future(), len(items), now)
        for item in items:
            item.request = pending
        sent: list[Waiting] = []
        try:
            for part in _parts(items, queue.most_inputs, queue.most_tokens):
                if sent:
                    await self._put_later(part, pending, len(sent) - len(part) // 2)
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
        timings.queue_seconds = pending.started - pending.arrived
        timings.inference_seconds = pending.inference_seconds
        return pending.values

    async def _put_later(self, part: Sequence[Waiting], pending: _Pending, done: int) -> None:
        """Puts a further part of a request once so many of its inputs are done."""
        while pending.done < done and not pending.future.done():
            pending.progress.clear()
            await pending.progress.wait()
        while not pending.future.done():
            try:
                self.queue.put(part, now=time.perf_counter())
                return
            except OverloadedError:
                await asyncio.sleep(_AGAIN_SECONDS)

    def _run_batch(self, batch: Sequence[Waiting]) -> list[Any]:
        """In a worker's thread: what the graph says of each input of a batch."""
        try:
            return self._loaded.run(batch)
        except EngineryError:
            now = time.perf_counter()
            if len(batch) > 1 or now - self._probed < _PROBE_SECONDS:
                raise  # its inputs will be run one by one; or this was looked into just now
            self._probed = now
            try:
                self._loaded.warm_up()
            except EngineryError as error:
                # Not this input: nothing runs any more. A device that was lost stays lost.
                reason = f"the provider no longer runs the model: {error.message}"
                self._on_gone(reason)
                raise UnavailableError(f"{self.name}: {reason}") from error
            raise

    def _finished(self, done: Done) -> None:
        """In a worker's thread: hands a batch over to the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, done)
        except RuntimeError:  # the loop was closed: nobody waits for an answer any more
            return

    def _deliver(self, done: Done) -> None:
        try:
            for item, value in zip(done.batch, done.values, strict=True):
                self._answer(item, value, done)
        finally:  # behind those who have waited for it
            self._loop.call_soon(self._account, done)

    def _answer(self, item: Waiting, value: Any, done: Done) -> None:
        pending: _Pending = item.request
        if pending.future.done():
            return
        if isinstance(value, BaseException):
            pending.future.set_exception(value)
            pending.progress.set()
            return
        pending.values[item.place] = value
        pending.done += 1
        pending.progress.set()
        pending.started = max(pending.started, done.started)
        pending.inference_seconds = max(pending.inference_seconds, done.seconds)
        if pending.done == len(pending.values):
            pending.future.set_result(None)

    def _account(self, done: Done) -> None:
        """What the batch cost, for the rules and the metrics."""
        lengths = [item.length for item in done.batch]
        padded = max(lengths) * len(lengths)
        if self._loaded.learn(padded, done.seconds):
            self.follow()
        if self._on_batch:
            self._on_batch(
                self.name, rows=len(lengths), tokens=sum(item.tokens for item in done.batch),
                padded_tokens=padded, seconds=done.seconds,
            )  # fmt: skip

    def _fail(self, pending: _Pending, error: EngineryError) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)


def _parts(
    items: Sequence[Waiting], most_inputs: int, most_tokens: int
) -> Iterator[Sequence[Waiting]]:
    """The inputs of a request, as many at once as it may have of the queue."""
    inputs = max(most_inputs // _QUEUE_SHARE, 1)
    start = tokens = 0
    for place, item in enumerate(items):
        full = place - start >= inputs or tokens + item.tokens > most_tokens // _QUEUE_SHARE
        if full and place > start:
            yield items[start:place]
            start, tokens = place, 0
        tokens += item.tokens
    if items:
        yield items[start:]
