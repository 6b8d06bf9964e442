"""Generate the texts of all requests of one model in one batch, in a thread of its own.

A decoder alone takes waiting inputs between two steps, up to a number of rows; a model with an
encoder and a cache that grows takes them in groups of similar length, each once the one before is
done. Inputs whose request was cancelled leave before the next step. What steps gave is passed to
the event loop, where `run` yields it. Call all methods from the event loop's thread, except those
that the thread calls.

A step of a GPU takes less time than the event loop needs to send its tokens to many clients, and
both need Python's lock. So if there are many, only first tokens and finished texts are passed on at
once, and other pieces only so often that sending them takes a quarter of the time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from enginery.core.errors import EngineryError
from enginery.runtime.generation.batch import RunningBatch
from enginery.runtime.generation.search import TokenLogprob
from enginery.runtime.tasks.generate import Generation, TextSearch
from enginery.runtime.tasks.task import Row
from enginery.runtime.tasks.text_generator import TextGenerator
from enginery.serve.batching.planner import BatchRules
from enginery.serve.batching.queue import (
    BatchQueue,
    ClosedError,
    OverloadedError,
    QueueEntry,
)
from enginery.serve.batching.scheduler import BatchStatistics, Timings
from enginery.serve.config import ServeConfig

_log = logging.getLogger(__name__)

_FEW = 4
"""Number of inputs up to which each step is passed on at once."""
_PAUSE = 3.0
"""Time between two deliveries of pieces, in terms of the time that the event loop took for one."""
_HOPS = 3
"""Turns of the event loop until a delivery has reached the clients' sockets."""
_HELD_RECORDINGS = 8
"""Recordings of the largest duration whose features are held at the same time: 460 MB of the
default's, with 80 mel bins."""
_RETRY_SECONDS = 10.0
"""Time after which some of them may be done."""
_DECAY = 0.98
"""Factor for the weights of earlier inputs in the estimate of the time per token."""


@dataclass(frozen=True)
class Progress:
    """What has become of one input since the last step."""

    index: int
    """The input's place in its request."""
    tokens: int
    """Number of tokens generated so far, of all its texts."""
    pieces: tuple[tuple[int, str], ...] = ()
    """New text: the place of the text among those of the input, and the piece."""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """The log-probabilities of each of its texts so far; empty unless they are asked for."""
    results: tuple[Generation, ...] = ()
    """The finished texts; empty as long as the input is not done. Here, recordings stand for those
    of speech, which `Generate.postprocess` decodes in another thread."""
    done: bool = False
    """The input is done. Of the chunks of a recording only the last has results."""


@dataclass(eq=False)
class _Request:
    """A request whose inputs wait or run."""

    entries: list[QueueEntry]
    """Its inputs, or the windows of recordings that they have become."""
    events: asyncio.Queue[Progress | BaseException] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    started: float = 0.0
    """When the latest of its inputs left the queue, by `time.perf_counter`."""
    first: float = 0.0
    """When the first of its inputs left the queue."""


class GenerationScheduler:
    """The queue, the batch and the thread of one model."""

    def __init__(
        self,
        generator: TextGenerator,
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        explain: Callable[[EngineryError, bool], EngineryError],
        on_batch: Callable[[BatchStatistics], None],
        name: str = "model",
    ) -> None:
        """Start the thread, and wait until it has warmed the decoder up.

        Args:
            generator: the model.
            config: the options of the server, with the bounds of queue and batch.
            loop: the event loop of the requests.
            explain: called in the thread with the error of a failed step, and whether all of its
                inputs are those of one request; returns what the requests get.
            on_batch: called in the event loop for each step.
            name: name of the model, for the thread.

        Raises:
            EngineryError: the decoder does not run.
        """
        self._generator, self._loop = generator, loop
        self._max_rows = config.generation_rows
        self._explain, self._on_batch = explain, on_batch
        self.queue = BatchQueue(
            BatchRules(max_tokens=config.queue_tokens, max_rows=self._max_rows, max_padding=1.0),
            max_rows=config.queue_inputs,
            max_tokens=config.queue_tokens,
            max_wait_seconds=config.max_wait,
        )
        self._max_held = _HELD_RECORDINGS * config.max_speech_seconds
        self._held_seconds = 0.0
        """Duration of the recordings of all requests."""
        self._requests: set[_Request] = set()
        self._batch = RunningBatch(generator.decoder)
        self._running: list[QueueEntry] = []
        self._alone: list[QueueEntry] = []
        """Inputs whose prompts failed together, to be run one by one."""
        self.rows = 0
        """Number of rows of the step that runs or comes next."""
        self._busy_seconds, self._done_tokens = 0.0, 0.0
        self._since = 0.0
        self._steps: list[BatchStatistics] = []
        """Those that were not passed on yet."""
        self._is_sent, self._next_delivery = True, 0.0
        """Whether the event loop has sent the last delivery, and when the next one is due."""
        warm: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(warm,), daemon=True, name=f"enginery-generate-{name}"
        )
        self._thread.start()
        warm.result()

    @property
    def waiting(self) -> int:
        """Number of requests of which no input has left the queue."""
        return sum(not request.first for request in self._requests)

    def info(self) -> dict[str, Any]:
        """Return what runs and waits, and the limits of a text, as JSON."""
        return {
            "running": {"rows": self.rows, "waiting": self.waiting},
            "generation": {
                "max_rows": self._max_rows,
                "max_new_tokens": self._generator.task.limits.max_new_tokens,
            },
        }

    @property
    def alive(self) -> bool:
        """True if the thread is alive."""
        return self._thread.is_alive()

    def busy_seconds(self) -> float:
        """Return how long the present step has been running, in seconds."""
        since = self._since
        return time.perf_counter() - since if since else 0.0

    async def run(self, entries: Sequence[QueueEntry], timings: Timings) -> list[Any]:
        """Run the rows of a request and return the texts of each; see `steps`."""
        results: list[Any] = [None] * len(entries)
        async with aclosing(self.steps(entries, timings)) as steps:
            async for step in steps:
                if step.done:
                    results[step.index] = list(step.results)
        return results

    async def steps(
        self, entries: Sequence[QueueEntry], timings: Timings
    ) -> AsyncGenerator[Progress]:
        """Run the rows of a request; yield the progress of each step. Close it, to end early.

        Args:
            entries: the rows, of the task `Generate`.
            timings: timings and token counts of the request, which are set here.

        Raises:
            OverloadedError, ClosedError: the request was rejected.
            EngineryError: an input failed; the first error is raised.
        """
        queue, request = self.queue, _Request(list(entries))
        arrived = time.perf_counter()
        for entry in entries:
            search: TextSearch = entry.row.content
            entry.request, entry.weight = request, search.rows
            entry.tokens = search.prompt_tokens + search.new_tokens
        tokens = [0] * len(entries)
        remaining = len(entries)
        seconds = self._admit_recordings(entries)
        self._requests.add(request)
        self._held_seconds += seconds
        try:
            backlog_seconds = queue.put(entries, now=arrived)
            while remaining:
                event = await request.events.get()
                if isinstance(event, BaseException):
                    raise event
                timings.queue_seconds = request.started - arrived
                timings.inference_seconds = time.perf_counter() - request.first
                timings.first_token_at = timings.first_token_at or time.perf_counter()
                timings.generated += event.tokens - tokens[event.index]
                tokens[event.index] = event.tokens
                remaining -= event.done
                if not remaining:
                    queue.observe_wait(backlog_seconds, timings.queue_seconds)
                yield event
        finally:
            request.cancelled = True
            queue.cancel(request.entries)
            self._requests.discard(request)
            self._held_seconds -= seconds

    def _admit_recordings(self, entries: Sequence[QueueEntry]) -> float:
        """Return the seconds of a request's recordings, whose features stay until they are done.

        Raises:
            OverloadedError: too many are held for other requests.
        """
        parts = (entry.row.content.part for entry in entries)
        recordings = {part.recording for part in parts if part is not None}
        seconds = float(sum(recording.seconds for recording in recordings))
        if recordings and self._held_seconds and self._held_seconds + seconds > self._max_held:
            raise OverloadedError(
                f"recordings of {self._held_seconds:.0f} seconds are being transcribed, expected "
                f"at most {self._max_held:g} with this one of {seconds:.0f}.",
                retry_after_seconds=_RETRY_SECONDS,
            )
        return seconds

    def fail_all(self, error: Exception) -> None:
        """Raise an error in every request that waits or runs."""
        for request in list(self._requests):
            request.cancelled = True
            request.events.put_nowait(error)

    def close(self, *, drain: bool) -> None:
        """Accept no more requests; with `drain` run those that wait, else fail all."""
        self.queue.close(drain=drain)
        if not drain:
            self.fail_all(ClosedError("the model is shutting down."))

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread after `close`; return True if it has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # -- in the thread ------------------------------------------------------------------------

    def _work(self, warm: Future[None]) -> None:
        try:  # in this thread, because CUDA graphs belong to the one that recorded them
            self._generator.decoder.warm_up(self._max_rows)
        except BaseException as error:
            warm.set_exception(error)
            return
        warm.set_result(None)
        while True:
            for entry in [candidate for candidate in self._running if candidate.request.cancelled]:
                self._leave([entry])
            entries = self._take()
            if entries is None and not self._running:
                return
            if entries:
                self._run(entries)
            if self._running:
                self._run([])

    def _take(self) -> list[QueueEntry] | None:
        """Return the inputs that join now; None if none is left and none will come."""
        more = self._generator.decoder.takes_more
        if self._running and not more:
            return []
        if self._alone:
            return [self._alone.pop()]
        free = self._max_rows - sum(entry.weight for entry in self._running)
        alike = not more or self._generator.task.has_encoder
        take = self.queue.take_similar if alike else self.queue.take_due
        entries = take(free, wait=not self._running)
        now = time.perf_counter()
        for entry in entries or ():
            entry.request.started = now
            entry.request.first = entry.request.first or now
        return entries

    def _run(self, joining: Sequence[QueueEntry]) -> None:
        """Run the prompts of inputs that join or, without any, the next step."""
        joining = [entry for entry in joining if not entry.request.cancelled]
        entries = joining or self._running
        if not entries:
            return
        started = self._since = time.perf_counter()
        rows, tokens = len(joining) or self._batch.rows, 0
        events: list[tuple[QueueEntry, Progress | BaseException]] = []
        is_due = len(self._running) <= _FEW or (self._is_sent and started >= self._next_delivery)
        try:
            if joining:
                tokens = sum(entry.length for entry in joining)
                longest = max(entry.length for entry in joining)
                self._running = [*self._running, *joining]
                self._begin(joining)
            else:
                tokens, longest = rows, 1
                self._batch.step()
            reported = [
                entry
                for entry in entries
                if is_due or entry.row.content.search.done or not entry.row.content.started
            ]
            events = [event for entry in reported if (event := self._progress(entry))]
        except EngineryError as error:
            self._leave(entries)
            if len(joining) > 1:  # find the input that fails
                self._alone += joining
            else:
                same_request = len({entry.request for entry in entries}) == 1
                shown = self._explain(error, same_request)
                events = [(entry, shown) for entry in entries]
        except Exception as error:  # a bug, which must not end the thread
            _log.exception("generating %d texts failed", len(entries))
            entries = self._running
            self._batch, self._running = RunningBatch(self._generator.decoder), []
            events = [(entry, error) for entry in entries]
        seconds, self._since = time.perf_counter() - started, 0.0
        self.rows = self._batch.rows
        self._measure(seconds, events)
        self._steps.append(BatchStatistics(rows, tokens, max(rows * longest, tokens), seconds))
        if is_due or events or not self._running:
            self._pass_on(events)

    def _pass_on(self, events: Sequence[tuple[QueueEntry, Progress | BaseException]]) -> None:
        """Let the event loop send what was generated."""
        steps, self._steps, self._is_sent = self._steps, [], False
        try:
            self._loop.call_soon_threadsafe(self._deliver, events, steps)
        except RuntimeError:  # the loop is closed, so no request waits any more
            self._is_sent = True

    def _begin(self, joining: Sequence[QueueEntry]) -> None:
        rows = [entry.row for entry in joining]
        feeds = self._generator.task.collate(rows, 0)
        self._batch.add([row.content.search for row in rows], feeds or None)

    def _progress(self, entry: QueueEntry) -> tuple[QueueEntry, Progress | BaseException] | None:
        """Return what is to be reported of an input, which leaves if it is done."""
        event: Progress | BaseException | None
        try:
            content: TextSearch = entry.row.content
            following = None
            if content.search.done and content.search.error is None:
                following = self._generator.task.following(entry.row)
            event = _progress(content, entry.index, goes_on=following is not None)
            if following is not None:
                self._queue_following(entry, following)
        except EngineryError as error:
            event = error
        except Exception as error:  # a bug, which must not affect other requests
            _log.exception("a text could not be generated")
            event = error
        if isinstance(event, BaseException) or entry.row.content.search.done:
            self._leave([entry])
        return None if event is None else (entry, event)

    def _queue_following(self, entry: QueueEntry, row: Row) -> None:
        """Queue the next window of a recording, behind the inputs that wait."""
        following = QueueEntry(
            entry.request, entry.index, entry.key, entry.length, row, tokens=entry.tokens
        )
        following.weight = entry.weight
        self._count_done(entry)
        entry.request.entries[entry.index] = following
        try:
            self.queue.put([following], now=time.perf_counter(), admitted=True)
        except ClosedError:  # what has begun is finished before the model closes
            self._alone.append(following)

    def _leave(self, entries: Sequence[QueueEntry]) -> None:
        self._running = [entry for entry in self._running if entry not in entries]
        for entry in entries:
            self._batch.remove(entry.row.content.search)
        self.rows = self._batch.rows

    def _measure(self, seconds: float, events: Sequence[tuple[QueueEntry, Any]]) -> None:
        """Update the estimate of the time per waiting token, of which most are not generated."""
        self._busy_seconds += seconds
        for entry, event in events:
            if isinstance(event, Progress) and event.done:
                self._count_done(entry)
        if self._done_tokens:
            self.queue.seconds_per_token = self._busy_seconds / self._done_tokens

    def _count_done(self, entry: QueueEntry) -> None:
        self._done_tokens = self._done_tokens * _DECAY + entry.tokens
        self._busy_seconds *= _DECAY

    def _deliver(
        self,
        events: Sequence[tuple[QueueEntry, Progress | BaseException]],
        steps: Sequence[BatchStatistics],
    ) -> None:
        started = time.perf_counter()
        for entry, progress in events:
            entry.request.events.put_nowait(progress)
        try:
            for statistics in steps:
                self._on_batch(statistics)
        finally:  # else nothing more would be passed on
            self._loop.call_soon(self._note_sent, started, _HOPS)

    def _note_sent(self, started: float, hops: int) -> None:
        """Wait until the tasks of the requests have run, and set when the next delivery is due."""
        if hops:
            self._loop.call_soon(self._note_sent, started, hops - 1)
            return
        now = time.perf_counter()
        self._next_delivery = now + _PAUSE * (now - started)
        self._is_sent = True


def _progress(search: TextSearch, index: int, *, goes_on: bool) -> Progress | None:
    """Return what is to be reported of an input after a step; None for nothing.

    Args:
        search: the input.
        index: its place in its request.
        goes_on: another window of a recording follows.

    Raises:
        InputError: the search has failed, or the tokens cannot be decoded.
    """
    if search.search.error is not None:
        raise search.search.error
    is_first, search.started = not search.started, True
    done = search.search.done
    if not done and not (search.streams and search.has_pieces):
        return Progress(index, 1) if is_first else None
    sequences = search.search.results()
    tokens = search.earlier_tokens + sum(len(sequence.tokens) for sequence in sequences)
    pieces = search.pieces(sequences) if search.streams or search.part is None else []
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    if search.options.top_logprobs is not None:
        logprobs = tuple(sequence.logprobs for sequence in sequences)
    if done and not goes_on:
        results = tuple(search.generations(sequences))
        return Progress(index, tokens, tuple(pieces), logprobs, results, done=True)
    written = tuple((place, piece) for place, piece in pieces if piece)
    return Progress(index, tokens, written, logprobs) if written or is_first else None
