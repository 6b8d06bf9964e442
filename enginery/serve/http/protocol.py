"""uvicorn's HTTP protocol with limits on what a client can make the server keep.

They hold before a request is routed or its key is looked at: the bytes and the number of its
headers, the requests that wait on its connection, and the time that it takes to arrive. A request
beyond a limit is answered once those before it on the connection are, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Maximum size of a request line with its headers; also of trailers, or of a chunk's extensions."""
MAX_HEADERS = 100
"""Maximum number of headers of a request, with its trailers."""
MAX_WAITING_REQUESTS = 16
"""Maximum number of requests that wait on a connection behind the one that is being answered."""
ARRIVAL_SECONDS = 30.0
"""Maximum time for the headers of a request to arrive, and then for its body."""
BODY_BYTES_PER_SECOND = 65_536
"""A body has a second more for each of these bytes. Bodies that never arrive would fill
`max_held_bytes`, so that no other would be accepted."""
_LINGER_SECONDS = 10.0
"""Time that the rest of a rejected request is read and discarded. If the connection were closed at
once, the client's system would discard the answer together with it."""

_log = logging.getLogger("uvicorn.error")


class _BeyondLimitError(Exception):
    """Ends the parsing of a request; httptools reports it as an error of its callback."""


class JoiningTransport:
    """A transport that sends what is written in one turn of the event loop in one piece.

    uvicorn writes the head of a response and its body one after the other, each with a system call.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data before the event loop waits for events."""
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)

    def write_eof(self) -> None:
        """Send what was written, and say that nothing follows."""
        self._send()
        self._transport.write_eof()

    def close(self) -> None:
        """Send what was written, and close the connection."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._held:
            held, self._held = self._held, []
            if not self._transport.is_closing():  # the client may have reset the connection
                self._transport.write(b"".join(held))


class LimitedProtocol(HttpToolsProtocol):
    """The protocol of one connection."""

    def __init__(
        self, *args: Any, on_connection: Callable[[], object] = lambda: None, **options: Any
    ) -> None:
        """Create the protocol; see `HttpToolsProtocol`.

        Args:
            *args: see `HttpToolsProtocol`.
            on_connection: called once the connection is established.
            **options: see `HttpToolsProtocol`.
        """
        super().__init__(*args, **options)
        self._on_connection = on_connection
        self._refusal: tuple[int, str] | None = None
        """Status and message for a request that was rejected; nothing is parsed after it."""
        self._head_bytes = self._headers = 0
        self._unparsed_bytes = 0
        """Bytes since the parser last reported anything but headers."""
        self._progress = False
        self._in_head = self._in_body = False
        self._unanswered = 0
        """Number of requests that run or wait."""
        self._arrival_timer: asyncio.TimerHandle | None = None
        self._arrival_began, self._body_bytes = 0.0, 0
        self.idle_since: float | None = None
        """When the connection became idle, by the event loop's time; None while it is not."""

    def connection_made(self, transport: Any) -> None:
        """Wrap the transport of a new connection; close it if nothing arrives."""
        super().connection_made(JoiningTransport(transport, self.loop))  # type: ignore[arg-type]
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self.idle_since = self.loop.time()
        self._on_connection()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_arrival_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, within the limits."""
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self.idle_since = None
        self._progress = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.")
            return
        # httptools keeps an incomplete header, and copies it whenever more of it arrives.
        self._unparsed_bytes = 0 if self._progress else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse(
                431, f"the headers are too large: expected at most {MAX_HEAD_BYTES} bytes."
            )
        elif self._arrival_timer is None and (
            self._in_head or self._in_body or not self._unanswered
        ):  # for most requests there is no timer, because they arrive in one piece
            self._start_arrival_timer()

    # -- callbacks of the parser ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._head_bytes = self._headers = self._body_bytes = 0
        self._progress = self._in_head = True

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes and the headers."""
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._stop_parsing(431, f"there are too many headers: expected at most {MAX_HEADERS}.")
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Run the request, or let it wait for those before it."""
        if len(self.pipeline) >= MAX_WAITING_REQUESTS:
            self._stop_parsing(
                429,
                "too many requests wait on this connection: expected at most "
                f"{MAX_WAITING_REQUESTS} behind the one that is being answered.",
            )
        super().on_headers_complete()
        self._progress, self._in_head, self._in_body = True, False, True
        self._unanswered += 1
        self._stop_arrival_timer()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._progress = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the next bytes belong to another request."""
        self._progress, self._in_body = True, False
        self._stop_arrival_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Run the next request, or answer the one that was rejected."""
        self._unanswered -= 1
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.pipeline or self._refusal is not None:
            self.flow.pause_reading()  # the client gets its answers before it can send more
        if self._refusal is not None and not self._unanswered:
            self._send_refusal()
        elif not self._unanswered:
            self.idle_since = self.loop.time()

    # -- rejecting ------------------------------------------------------------------------------

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop_parsing(
                431, f"the headers are too large: expected at most {MAX_HEAD_BYTES} bytes."
            )

    def _stop_parsing(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise _BeyondLimitError

    def _refuse(self, status: int, message: str) -> None:
        """Answer the request that is being parsed with an error, after those before it."""
        self._stop_arrival_timer()
        self._refusal = status, message = self._refusal or (status, message)
        # One template for each reason, of which `RepeatFilter` lets one a second pass.
        _log.warning(message if status == 400 else f"a request was rejected: {message}")
        if self._in_body:  # its headers were valid, so that it runs or waits
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
                self._unanswered -= 1
            elif self.cycle.response_started:
                self.transport.close()
                return
            else:
                self._send_refusal()
                return
        if self._unanswered:
            self.flow.pause_reading()
        else:
            self._send_refusal()

    def _send_refusal(self) -> None:
        status, message = self._refusal or (400, "")
        body = json.dumps({"error": message}).encode()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b"
            % (status, http.HTTPStatus(status).phrase.encode("ascii"), len(body), body)
        )
        if self.cycle is not None and not self.cycle.response_complete:
            # Its own request must not answer, too.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._unset_keepalive_if_required()
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    # -- time to arrive -------------------------------------------------------------------------

    def _start_arrival_timer(self) -> None:
        self._arrival_began = self.loop.time()
        self._arrival_timer = self.loop.call_later(ARRIVAL_SECONDS, self._time_out)

    def _stop_arrival_timer(self) -> None:
        if self._arrival_timer is not None:
            self._arrival_timer.cancel()
            self._arrival_timer = None

    def _time_out(self) -> None:
        """Reject a request that does not arrive, or end a connection that sends none."""
        self._arrival_timer = None
        if self.transport.is_closing() or self._refusal is not None:
            return
        seconds = ARRIVAL_SECONDS
        if self._in_body:
            if self.flow.read_paused:  # the server does not read it yet
                self._start_arrival_timer()
                return
            seconds += self._body_bytes / BODY_BYTES_PER_SECOND
            remaining = self._arrival_began + seconds - self.loop.time()
            if remaining > 0:
                self._arrival_timer = self.loop.call_later(remaining, self._time_out)
                return
        if self._in_head or (self._in_body and not self.cycle.response_complete):
            part = "body" if self._in_body else "headers"
            self._refuse(408, f"the request's {part} did not arrive in time.")
        elif not self._unanswered:
            self.transport.close()
