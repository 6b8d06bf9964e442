"""Listen for connections as long as the process may open files for them.

listener = Listener(server, sockets)
await listener.serve()                   # uvicorn accepts connections
listener.close()                         # it accepts no more, and goes on with those it has
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn import Server

_SPARE_FILES = 64
"""Number of open files that are left for other things than connections."""
_PAUSE_SECONDS = 0.1
"""Time until the server accepts connections again after it had as many as it may."""
_CALM_SECONDS = 60.0
"""Time without such a pause after which the next one is logged again."""
_IDLE_SECONDS = 5.0
"""Idle time of a connection after which it is closed if others wait to be accepted."""

_MAX_WAITING = 4096
"""Connections that are accepted at the end at most; Linux lets no more wait by default."""

_log = logging.getLogger("enginery.serve")


class Listener:
    """The listening sockets of a process, from which uvicorn accepts connections.

    At the limit of open files uvloop would close new connections without an answer. Here it stops
    listening before that, so that they wait in the kernel, and idle connections are closed.
    """

    def __init__(self, server: Server, sockets: Sequence[socket.socket]) -> None:
        """Take over the sockets without listening."""
        self._server, self._sockets = server, sockets
        self._max_connections = max_connections()
        self._pausing: asyncio.Task[None] | None = None
        self._paused_at: float | None = None
        self._connecting: asyncio.Future[Any] | None = None

    async def serve(self) -> None:
        """Run the server until it exits."""
        # uvicorn closes what it gets, and a pause needs the sockets again.
        await self._server.serve([sock.dup() for sock in self._sockets])

    def close(self) -> None:
        """Accept the connections that wait, then stop listening for good."""
        if self._pausing is not None:
            self._pausing.cancel()
        for server in self._server.servers:
            server.close()
        loop, connecting = asyncio.get_running_loop(), []
        for sock in self._sockets:
            # uvloop accepts one connection a turn, so that many may wait; they would be reset.
            with suppress(OSError):  # none is left, or no file can be opened
                for _ in range(_MAX_WAITING):
                    accepted, _ = sock.accept()
                    accepted.setblocking(False)
                    connecting.append(
                        loop.connect_accepted_socket(self._new_protocol, sock=accepted)
                    )
            sock.close()
        self._connecting = asyncio.gather(*connecting, return_exceptions=True)

    def pause_if_full(self) -> None:
        """Stop listening for a moment if there are as many connections as files may be opened."""
        is_full = len(self._server.server_state.connections) >= self._max_connections
        if is_full and self._pausing is None and self._server.servers:
            for server in self._server.servers:
                server.close()
            self._pausing = asyncio.get_running_loop().create_task(self._pause())

    async def _pause(self) -> None:
        """Listen again once there are fewer connections; close those that have been idle."""
        loop, connections = asyncio.get_running_loop(), self._server.server_state.connections
        if self._paused_at is None or loop.time() - self._paused_at > _CALM_SECONDS:
            _log.warning(
                "%d connections are open, as many as the limit of open files allows; further ones "
                "wait. Raise the limit with `ulimit -n`.",
                len(connections),
            )
        while len(connections) >= self._max_connections:
            self._paused_at = now = loop.time()
            for protocol in list(connections):
                since = getattr(protocol, "idle_since", None)
                if since is not None and now - since > _IDLE_SECONDS:
                    protocol.transport.close()
            await asyncio.sleep(_PAUSE_SECONDS)
        self._server.servers = [
            await loop.create_server(self._new_protocol, sock=sock.dup()) for sock in self._sockets
        ]
        self._pausing = None

    def _new_protocol(self) -> asyncio.Protocol:
        server = self._server
        make: Callable[..., asyncio.Protocol] = server.config.http_protocol_class
        return make(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )


def max_connections() -> int:
    """Return how many connections the limit of open files allows, beside those open now."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        opened = sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:
        opened = 0
    return max(soft - opened - _SPARE_FILES, 1)
