"""Who is at the other end of a connection, and whether it still is.

address_of(transport)                  # "127.0.0.1:50412"
probe = ClientProbe(transport, loop)   # aborts the transport when the client has gone
"""

from __future__ import annotations

import asyncio
import socket

from enginery.serve.http_messages import CONTINUE

_FIRST_SECONDS, _MOST_SECONDS = 0.05, 1.0


class ClientProbe:
    """Finds out whether a client that sends no more has gone, or waits for its answer.

    In TCP both look the same until something is sent: one that has gone answers with a reset. An
    interim answer is what may be sent at that time, RFC 9110 section 15.2.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        transport.write(CONTINUE)
        self._timer = loop.call_later(_FIRST_SECONDS, self._look, _FIRST_SECONDS)

    def _look(self, waited: float) -> None:
        if self._was_reset():
            self._transport.abort()
        else:
            then = min(2 * waited, _MOST_SECONDS)
            self._timer = self._loop.call_later(then, self._look, then)

    def _was_reset(self) -> bool:
        raw = self._transport.get_extra_info("socket")
        return bool(raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def end(self) -> None:
        """Looks no more; ending twice is fine."""
        self._timer.cancel()


def address_of(transport: asyncio.BaseTransport) -> str:
    """Host and port of the client; empty for a Unix socket."""
    address = transport.get_extra_info("peername")
    if not isinstance(address, tuple):
        return ""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
