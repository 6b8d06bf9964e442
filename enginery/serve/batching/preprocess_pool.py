"""Thread pools that preprocess the inputs of one model: tokenize texts, decode images.

Even short texts are tokenized in a thread: the rules in a model's tokenizer.json determine how long
that takes, and some rules never terminate. A thread that hangs blocks neither the event loop nor
other models, and `busy_seconds` reports it. Inputs in preprocessing count towards the limit of the
queue. If a client disconnects, its work is dropped unless it has started.
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
"""Number of threads for short work. They mostly sleep; it takes this many texts that never finish
to block short ones."""
_HEAVY_THREADS = 2
"""Number of threads for longer work. More would take the cores from the model."""
_CHUNK_TEXTS = 64
"""Number of texts of a list that a thread tokenizes at a time, in milliseconds."""


class _DaemonThreadPool:
    """A pool of daemon threads, which are started on demand.

    At exit the process does not wait for daemon threads. It would wait for those of a
    `ThreadPoolExecutor`, for ever if one of them hangs.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self.slots = 0
        """Number of slots in use; only the event loop changes it."""
        self._max_threads, self._name = max_threads, name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._since: list[float] = []
        """When each thread started its current work; 0 for an idle thread."""
        self._unfinished = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` in the next free thread; after `close`, in the calling thread."""
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
        """Return how long the longest-running work has been running, in seconds."""
        now = time.perf_counter()
        return max((now - since for since in self._since if since), default=0.0)

    def close(self) -> None:
        """End the threads once all submitted work is done."""
        with self._lock:
            self._closed = True
            for _ in self._since:
                self._jobs.put(None)

    def _work(self, index: int) -> None:
        while (item := self._jobs.get()) is not None:
            job, work = item
            if job.set_running_or_notify_cancel():
                self._since[index] = time.perf_counter()
                _run(job, work)
                self._since[index] = 0.0
            with self._lock:
                self._unfinished -= 1
            del item, job, work  # free their memory while this thread waits for the next job


def _run(job: Future[Result], work: Callable[[], Result]) -> None:
    """Run `work` and set its result or exception on a future."""
    try:
        job.set_result(work())
    except BaseException as error:
        job.set_exception(error)


class PreprocessPool:
    """The thread pools that preprocess the inputs of one model."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, max_inputs: int, name: str) -> None:
        """Create the pools without starting a thread.

        Args:
            loop: the event loop of the requests.
            max_inputs: maximum number of inputs in preprocessing and in the queue together.
            name: name of the model, for threads and error messages.
        """
        self._loop, self._max_inputs, self._name = loop, max_inputs, name
        self._closed = False
        self._awaited: set[asyncio.Future[Any]] = set()
        self._medium = _DaemonThreadPool(_MEDIUM_THREADS, f"enginery-preprocess-{name}")
        self._heavy = _DaemonThreadPool(_HEAVY_THREADS, f"enginery-preprocess-long-{name}")
        self._list_threads = _DaemonThreadPool(usable_cores(), f"enginery-preprocess-list-{name}")

    @property
    def is_busy(self) -> bool:
        """True while a request waits for a result."""
        return bool(self._awaited)

    @property
    def inputs(self) -> int:
        """Number of inputs in preprocessing or waiting for it, without those of short work."""
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
            work: called in the thread, unless the request is cancelled before that.
            inputs: number of inputs that the work is for.
            waiting: number of inputs in the queue, which count towards the same limit.
            short: the work takes about a millisecond. It runs in separate threads, so that it does
                not wait for longer work, and counts as one input.

        Raises:
            OverloadedError: too many inputs are in preprocessing or in the queue.
            ClosedError: the model is shutting down.
        """
        if self._closed:
            raise ClosedError(f"model '{self._name}' is shutting down.")
        threads, slots = (self._medium, 1) if short else (self._heavy, inputs)
        if threads.slots and threads.slots + slots + (0 if short else waiting) > self._max_inputs:
            unit = "requests" if short else "inputs"
            raise OverloadedError(
                f"too many {unit}: {threads.slots} in preprocessing and {waiting} in the queue, "
                f"expected at most {self._max_inputs}.",
                retry_after_seconds=1.0,
            )
        future: asyncio.Future[Result] = self._loop.create_future()

        def deliver(job: Future[Result]) -> None:
            threads.slots -= slots
            if future.done() or job.cancelled():
                return
            error = job.exception()
            if error is None:
                future.set_result(job.result())
            else:
                future.set_exception(error)

        def done(job: Future[Result]) -> None:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(deliver, job)

        threads.slots += slots
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        job = threads.submit(work)
        job.add_done_callback(done)
        try:
            return await future
        except asyncio.CancelledError:
            job.cancel()
            raise

    def encode_in_parallel(
        self, encode: Callable[[list[Any]], list[Any]], texts: list[Any]
    ) -> list[Any]:
        """Encode a list of texts on all cores, in threads that only this model uses.

        The threads of `tokenizers` are shared by all models, so texts that never finish would block
        them for every model. The server disables them (TOKENIZERS_PARALLELISM).
        """
        if len(texts) < 2 * _CHUNK_TEXTS or usable_cores() == 1:
            return encode(texts)
        pieces = [
            texts[start : start + _CHUNK_TEXTS] for start in range(0, len(texts), _CHUNK_TEXTS)
        ]
        jobs = [self._list_threads.submit(partial(encode, piece)) for piece in pieces]
        return [encoding for job in jobs for encoding in job.result()]

    def busy_seconds(self) -> float:
        """Return how long the longest-running work has been running, in seconds."""
        return max(self._medium.busy_seconds(), self._heavy.busy_seconds())

    def close(self) -> None:
        """Accept no more work; raise ClosedError in requests that still wait for a result."""
        self._closed = True
        for future in list(self._awaited):
            if not future.done():
                future.set_exception(ClosedError(f"model '{self._name}' is shutting down."))
        for threads in (self._medium, self._heavy, self._list_threads):
            threads.close()
