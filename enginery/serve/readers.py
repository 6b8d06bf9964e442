"""Threads that read the inputs of one model: they tokenize texts and decode images.

    >>> readers = Readers(loop, most=2048, name="minilm")
    >>> await readers.read(1, lambda gone: tokenize(text), quick=True)

Every text is tokenized in a thread, a short one too: what a tokenizer does with it is up to the
rules of its tokenizer.json, and some of those never come to an end. The event loop and the other
models go on meanwhile, and `busy_seconds` says how long it has been. What is being read has its
place in the queue, so that no more is taken in than may wait; whoever goes lets it be.
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
from enginery.serve.refusals import OverloadedError, UnavailableError

Made = TypeVar("Made")

_QUICK_THREADS = 8
"""They mostly sleep. It takes as many texts that do not come to an end to hold up short ones."""
_SLOW_THREADS = 2
"""More of them would take the cores from the model."""
_PIECE = 64
"""Texts of a list that one thread tokenizes at a time: milliseconds."""


class _Threads:
    """Daemon threads, started as they are needed.

    The process does not wait for them when it ends, as it does for those of an executor of the
    standard library: one that does not come back would keep it.
    """

    def __init__(self, most: int, name: str) -> None:
        self.places = 0
        """How many of what may wait for them are taken; for the event loop."""
        self._most, self._name = most, name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._since: list[float] = []
        """When each thread began what it does; 0 for one that waits."""
        self._unfinished = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Made]) -> Future[Made]:
        """Runs `work` in a thread as soon as one is free; after `close`, in this one."""
        job: Future[Made] = Future()
        with self._lock:
            if not self._closed:
                self._unfinished += 1
                place = len(self._since)
                if place < min(self._unfinished, self._most):
                    self._since.append(0.0)
                    threading.Thread(
                        target=self._work, args=(place,), daemon=True, name=f"{self._name}-{place}"
                    ).start()
                self._jobs.put((job, work))
                return job
        _run(job, work)
        return job

    def busy_seconds(self) -> float:
        """How long the thread has been at its work that has been at it longest."""
        now = time.perf_counter()
        return max((now - since for since in self._since if since), default=0.0)

    def close(self) -> None:
        """Ends the threads when all that was submitted is done."""
        with self._lock:
            self._closed = True
            for _ in self._since:
                self._jobs.put(None)

    def _work(self, place: int) -> None:
        while (taken := self._jobs.get()) is not None:
            job, work = taken
            if job.set_running_or_notify_cancel():
                self._since[place] = time.perf_counter()
                _run(job, work)
                self._since[place] = 0.0
            with self._lock:
                self._unfinished -= 1
            del taken, job, work  # they may be large, and the next may be long in coming


def _run(job: Future[Made], work: Callable[[], Made]) -> None:
    """What became of `work`, as a future has it: a value or whatever was raised."""
    try:
        job.set_result(work())
    except BaseException as error:
        job.set_exception(error)


class Readers:
    """Reads the inputs of one model in threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, most: int, name: str) -> None:
        """Args: `most` inputs may be read or wait at the same time."""
        self._loop, self._most, self._name = loop, most, name
        self._closed = False
        self._awaited: set[asyncio.Future[Any]] = set()
        self._quick = _Threads(_QUICK_THREADS, f"enginery-read-{name}")
        self._slow = _Threads(_SLOW_THREADS, f"enginery-read-long-{name}")
        self._pieces = _Threads(usable_cores(), f"enginery-read-list-{name}")

    @property
    def inputs(self) -> int:
        """How many are being read, or wait to be; without those of quick requests."""
        return self._slow.places

    async def read(
        self,
        inputs: int,
        read: Callable[[threading.Event], Made],
        *,
        waiting: int = 0,
        quick: bool = False,
    ) -> Made:
        """What `read` makes of inputs.

        Args:
            inputs: how many.
            read: given an event that is set when nobody waits for them any more.
            waiting: inputs in the queue, for the same bound.
            quick: it should take about a millisecond, and does not wait for what takes longer. It
                counts as one, however many inputs it has.

        Raises:
            OverloadedError: too many are being read already.
            UnavailableError: the model was closed.
        """
        if self._closed:
            raise UnavailableError(f"{self._name} is being closed.", retry_after_seconds=1)
        threads, places = (self._quick, 1) if quick else (self._slow, inputs)
        if threads.places and threads.places + places + (0 if quick else waiting) > self._most:
            what = "requests" if quick else "inputs"
            raise OverloadedError(
                f"{threads.places} {what} are being read, {waiting} wait; at most {self._most} "
                "may.",
                do="Send the request again later.",
                retry_after_seconds=1,
            )
        gone = threading.Event()
        made: asyncio.Future[Made] = self._loop.create_future()

        def deliver(job: Future[Made]) -> None:
            threads.places -= places
            if made.done() or job.cancelled():
                return
            error = job.exception()
            if error is None:
                made.set_result(job.result())
            else:
                made.set_exception(error)

        def done(job: Future[Made]) -> None:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(deliver, job)

        threads.places += places
        self._awaited.add(made)
        made.add_done_callback(self._awaited.discard)
        job = threads.submit(lambda: read(gone))
        job.add_done_callback(done)
        try:
            return await made
        except asyncio.CancelledError:
            gone.set()
            job.cancel()
            raise

    def spread(self, encode: Callable[[list[Any]], list[Any]], texts: list[Any]) -> list[Any]:
        """Encodes a list of texts on all cores, in threads of this model alone.

        Those of `tokenizers` are shared by all models: texts that do not come to an end would hold
        up the lists of every one. `service` switches them off.
        """
        if len(texts) < 2 * _PIECE or usable_cores() == 1:
            return encode(texts)
        pieces = [texts[start : start + _PIECE] for start in range(0, len(texts), _PIECE)]
        jobs = [self._pieces.submit(partial(encode, piece)) for piece in pieces]
        return [encoding for job in jobs for encoding in job.result()]

    def busy_seconds(self) -> float:
        """How long the input has been read that has been read longest."""
        return max(self._quick.busy_seconds(), self._slow.busy_seconds())

    def close(self) -> None:
        """Takes nothing more; who still waits for what is being read waits no longer."""
        self._closed = True
        for made in list(self._awaited):
            if not made.done():
                made.set_exception(UnavailableError(f"{self._name} is being closed."))
        for threads in (self._quick, self._slow, self._pieces):
            threads.close()
