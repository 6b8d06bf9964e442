"""The open connections of one server: their limits, their deadlines, and how they end.

    connections = Connections(application, config)
    connections.start(loop)
    await loop.create_server(lambda: HttpProtocol(connections), sock=listening)

One timer looks at all connections twice a second, instead of one timer for each request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from typing import TYPE_CHECKING

from enginery.serve.config import ServeConfig
from enginery.serve.http_requests import Bodies
from enginery.serve.messages import Application, Request, Response

if TYPE_CHECKING:
    from enginery.serve.protocol import HttpProtocol

LINGER_SECONDS = 1.0
"""How long a connection stays open after its last answer for the client to close it. Closing at
once would reset it where more bytes are on the way, and the client might lose the answer: RFC 9112
section 9.6."""
QUIET_SECONDS = 0.3
"""A draining server closes a connection that has been idle for so long; before that, a client that
was just answered may be sending its next request."""
LOOK_SECONDS = 0.5
SPARE_FILES = 256
"""Descriptors that are not connections: models, engines, logs, the loop's own."""

log = logging.getLogger("enginery.serve")


class Connections:
    """What all connections share. One event loop; not for threads."""

    def __init__(self, application: Application, config: ServeConfig) -> None:
        self.application = application
        self.bodies = Bodies(
            config.max_body_bytes, max(config.max_held_bytes, config.max_body_bytes)
        )
        self.idle_seconds = config.idle_timeout
        self.request_seconds = config.request_timeout
        self.max_connections = config.max_connections
        self.open: set[HttpProtocol] = set()
        self.draining = False
        self.stamp = _stamp()
        self.loop: asyncio.AbstractEventLoop
        # A timeout is noticed late by a quarter of itself at most.
        self._look_seconds = min(LOOK_SECONDS, config.idle_timeout / 4, config.request_timeout / 4)
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts to look after deadlines and the date."""
        self.loop = loop
        self._timer = loop.call_later(self._look_seconds, self._look)

    def stop(self) -> None:
        """Ends the timer; stopping twice is fine."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = self.loop.call_later(self._look_seconds, self._look)
        self.stamp = _stamp()
        now = time.perf_counter()
        for connection in [c for c in self.open if c.deadline <= now]:
            connection.expire()

    def refusal(self, request: Request, status: int, message: str) -> Response:
        """The application's own shape of an error, or a plain one where that fails."""
        try:
            return self.application.refusal(request, status, message)
        except Exception:
            log.exception("refusal of %r with %d failed", request.path, status)
            return Response.of_json({"error": message}, status=status)

    async def drain(self, until: float) -> None:
        """Ends all connections: idle ones now, the others with their last answer.

        Args:
            until: by `time.perf_counter`; what runs then is left to `give_up`.
        """
        self.draining = True
        while self.open and (now := time.perf_counter()) < until:
            # Sleeping first: what had arrived is read before its connection counts as idle.
            await asyncio.sleep(0.02)
            for connection in list(self.open):
                connection.close_if_quiet(now)

    async def give_up(self, message: str) -> int:
        """Cancels what runs, answers it with 503, and closes every connection.

        Returns:
            How many requests were cancelled.
        """
        self.draining = True
        cancelled = sum(connection.give_up(message) for connection in list(self.open))
        until = time.perf_counter() + LINGER_SECONDS
        while self.open and time.perf_counter() < until:
            await asyncio.sleep(0.02)
        for connection in list(self.open):
            connection.abort()
        await asyncio.sleep(0)  # transports tell their protocols in the next round
        return cancelled


def affordable(config: ServeConfig, say: Callable[[str], object]) -> ServeConfig:
    """The options with as many connections as the process may have files."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return config
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config
    most = max(1, soft - SPARE_FILES)
    say(f"{most} connections at most, and not {config.max_connections}: the limit of open files.")
    return replace(config, max_connections=most)


def _stamp() -> str:
    return f"server: enginery\r\ndate: {formatdate(usegmt=True)}\r\n"
