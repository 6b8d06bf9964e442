"""Threads that preprocess the inputs of one model: they tokenize texts and decode images.

Every text is tokenized in a thread, a short one too: how long that takes is up to the rules of the
model's tokenizer.json, and some of those never come to an end. The event loop and the other models
go on meanwhile, and `busy_seconds` says how long it has been. Inputs that are being preprocessed
have their places in the queue, so that no more is taken in than may wait. Work that has
not begun when its client goes is dropped.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from enginery.runtime.machine import usable_cores
from enginery.serve.batching.queue import ClosedError, OverloadedError

Result = TypeVar("Result")

_MEDIUM_THREADS = 8
"""They mostly sleep. It takes as many texts that do not come to an end to hold up short ones."""
_HEAVY_THREADS = 2
"""More of them would take the cores from the model."""
_CHUNK_TEXTS = 64
"""Texts of a list that one thread tokenizes at a time: milliseconds."""


class _DaemonThreadPool:
    """Daemon threads, started as they are needed.

    The process does not wait for them when it ends, as it does for those of an executor of the
    standard library: one that does not come back would keep it.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self.slots = 0
        """How many slots are taken of those that may wait; for the event loop."""
        self._max_threads, self._name = max_threads, name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._since: list[float] = []
        """When each thread began what it does; 0 for one that waits."""
        self._unfinished = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` in a thread as soon as one is free; after `close`, in this one."""
        job: Future[Result] = Future()
        with self._lock:
            if not self._closed:
                self._unfinished += 1
                index = len(self._since)
                if index < min(self._unfinished, self._max_threads):
                    self._since.append(0.0)
                    threading.Thread(
                        target=self._work, args=(index,), daemon=True, name=f"{self._name}-{index}"
                    ).start()
                self._jobs.put((job, work))
                return job
        _run(job, work)
        return job

    def busy_seconds(self) -> float:
        """Return how long the longest-running work has been running."""
        now = time.perf_counter()
        return max((now - since for since in self._since if since), default=0.0)

    def close(self) -> None:
        """End the threads when all that was submitted is done."""
        with self._lock:
            self._closed = True
            for _ in self._since:
                self._jobs.put(None)

    def _work(self, index: int) -> None:
        while (taken := self._jobs.get()) is not None:
            job, work = taken
            if job.set_running_or_notify_cancel():
                self._since[index] = time.perf_counter()
                _run(job, work)
                self._since[index] = 0.0
            with self._lock:
                self._unfinished -= 1
            del taken, job, work  # they may be large, and the next may be long in coming


def _run(job: Future[Result], work: Callable[[], Result]) -> None:
    """Run `work` and put its result, or what it raised, into a future."""
    try:
        job.set_result(work())
    except BaseException as error:
        job.set_exception(error)


class PreprocessPool:
    """Preprocesses the inputs of one model in threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, max_inputs: int, name: str) -> None:
        """Start no thread yet; `max_inputs` inputs may be preprocessed or wait at the same time."""
        self._loop, self._max_inputs, self._name = loop, max_inputs, name
        self._closed = False
        self._awaited: set[asyncio.Future[Any]] = set()
        self._medium = _DaemonThreadPool(_MEDIUM_THREADS, f"enginery-preprocess-{name}")
        self._heavy = _DaemonThreadPool(_HEAVY_THREADS, f"enginery-preprocess-long-{name}")
        self._list_threads = _DaemonThreadPool(usable_cores(), f"enginery-preprocess-list-{name}")

    @property
    def is_busy(self) -> bool:
        """Return whether a result is waited for."""
        return bool(self._awaited)

    @property
    def inputs(self) -> int:
        """Return how many are being preprocessed or wait to be, without those of short work."""
        return self._heavy.slots

    async def run(
        self,
        work: Callable[[], Result],
        *,
        inputs: int,
        waiting: int = 0,
        short: bool = False,
    ) -> Result:
        """Run work in a thread.

        Args:
            work: called in the thread, unless nobody waits for the result any more by then.
            inputs: how many it is for.
            waiting: inputs in the queue, for the same bound.
            short: it should take about a millisecond, and does not wait for longer work. It takes
                one place, however many inputs it has.

        Raises:
            OverloadedError: too much is being preprocessed already.
            ClosedError: the model was closed.
        """
        if self._closed:
            raise ClosedError(f"{self._name} is being closed.")
        threads, slots = (self._medium, 1) if short else (self._heavy, inputs)
        if threads.slots and threads.slots + slots + (0 if short else waiting) > self._max_inputs:
            what = "requests" if short else "inputs"
            raise OverloadedError(
                f"{threads.slots} {what} are being preprocessed and {waiting} wait, expected "
                f"{self._max_inputs} at most.",
                retry_after_seconds=1.0,
            )
        made: asyncio.Future[Result] = self._loop.create_future()

        def deliver(job: Future[Result]) -> None:
            threads.slots -= slots
            if made.done() or job.cancelled():
                return
            error = job.exception()
            if error is None:
                made.set_result(job.result())
            else:
                made.set_exception(error)

        def done(job: Future[Result]) -> None:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(deliver, job)

        threads.slots += slots
        self._awaited.add(made)
        made.add_done_callback(self._awaited.discard)
        job = threads.submit(work)
        job.add_done_callback(done)
        try:
            return await made
        except asyncio.CancelledError:
            job.cancel()
            raise

    def encode_in_parallel(
        self, encode: Callable[[list[Any]], list[Any]], texts: list[Any]
    ) -> list[Any]:
        """Encode a list of texts on all cores, in threads of this model alone.

        Those of `tokenizers` are shared by all models: texts that do not come to an end would hold
        up the lists of every one. They are switched off when the server starts.
        """
        if len(texts) < 2 * _CHUNK_TEXTS or usable_cores() == 1:
            return encode(texts)
        pieces = [
            texts[start : start + _CHUNK_TEXTS] for start in range(0, len(texts), _CHUNK_TEXTS)
        ]
        jobs = [self._list_threads.submit(partial(encode, piece)) for piece in pieces]
        return [encoding for job in jobs for encoding in job.result()]

    def busy_seconds(self) -> float:
        """Return how long the longest-running work has been running."""
        return max(self._medium.busy_seconds(), self._heavy.busy_seconds())

    def close(self) -> None:
        """Take nothing more; requests that still wait for a result get an error."""
        self._closed = True
        for made in list(self._awaited):
            if not made.done():
                made.set_exception(ClosedError(f"{self._name} is being closed."))
        for threads in (self._medium, self._heavy, self._list_threads):
            threads.close()
