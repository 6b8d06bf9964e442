"""What is served, and how its process ends.

    def make_service(life: Life) -> Service: ...
    run(make_service, sockets, config, restarts=restarts, say=print)

The service is an application and the models behind it; `Life` is what it can do to its process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from enginery.serve.messages import Application
from enginery.serve.supervisor import RESTART, Restarts

Say = Callable[[str], object]
"""Is told what happens, a line each."""


class Service(Protocol):
    """What is served."""

    application: Application

    async def load(self) -> None:
        """Loads the models.

        Raises:
            EngineryError: they cannot be served.
        """

    def drain(self) -> None:
        """Turns readiness off: the server is about to end."""

    async def reload(self) -> Sequence[str]:
        """Takes the models anew from where they came from; what happened, a line each.

        Raises:
            EngineryError: they stay as they were.
        """

    async def close(self) -> None:
        """Frees the models; no request runs any more."""


class Life:
    """The end of the process, in the hands of what is served and of signals."""

    def __init__(self, restarts: Restarts, loop: asyncio.AbstractEventLoop) -> None:
        self.restarts = restarts
        """How often, and why, the process was started anew."""
        self.status = 0
        self.reason = ""
        self.ending = asyncio.Event()
        """Drain and end."""
        self.hurry = asyncio.Event()
        """End without waiting for what runs."""
        self._loop = loop

    def restart(self, reason: str) -> None:
        """Ends the process, for the supervisor to start it anew; from any thread.

        What runs is answered with 503: it waits for something that will not come back.
        """
        self._loop.call_soon_threadsafe(self._restart, reason)

    def _restart(self, reason: str) -> None:
        if not self.ending.is_set():
            self.status, self.reason = RESTART, reason
        self.hurry.set()
        self.ending.set()

    def end(self) -> None:
        """Drains, and ends with status 0."""
        self.ending.set()

    def interrupt(self) -> None:
        """As `end`; the second time without waiting, with the status of an interrupt."""
        if self.ending.is_set():
            self.status, self.reason = 128 + signal.SIGINT, "interrupted."
            self.hurry.set()
        self.ending.set()
