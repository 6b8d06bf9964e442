"""Inputs that take a while to read, in threads: long texts, large lists, images.

    >>> readers = Readers(loop, most=2048, name="minilm")
    >>> await readers.read(1, lambda gone: tokenize(text))

They have their places in the queue meanwhile, so that no more are taken in than may wait; whoever
goes lets them be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import TypeVar

from enginery.serve.refusals import OverloadedError

Made = TypeVar("Made")

_THREADS = 2


class Readers:
    """Threads that read inputs of one model."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, most: int, name: str) -> None:
        """Args: `most` inputs may be read or wait at the same time."""
        self.inputs = 0
        """How many are being read, or wait to be."""
        self._loop, self._most = loop, most
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"enginery-read-{name}")

    async def read(self, inputs: int, read: Callable[[Event], Made], *, waiting: int = 0) -> Made:
        """What `read` makes of inputs.

        Args:
            inputs: how many.
            read: given an event that is set when nobody waits for them any more.
            waiting: inputs in the queue, for the same bound.

        Raises:
            OverloadedError: too many are being read already.
        """
        if self.inputs and self.inputs + inputs + waiting > self._most:
            raise OverloadedError(
                f"{self.inputs} inputs are being read, {waiting} wait; at most {self._most} may.",
                do="Send the request again later.",
                retry_after_seconds=1,
            )
        gone = Event()
        self.inputs += inputs
        job = self._threads.submit(read, gone)

        def leave() -> None:
            self.inputs -= inputs

        def left(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(leave)

        job.add_done_callback(left)
        try:
            return await asyncio.wrap_future(job, loop=self._loop)
        except asyncio.CancelledError:
            gone.set()
            raise

    def close(self) -> None:
        """Takes nothing more; what is being read is read to its end."""
        self._threads.shutdown(wait=False)
