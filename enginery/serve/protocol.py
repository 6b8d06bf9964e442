"""One connection: its requests to the application, the answers back, in order.

    server = await loop.create_server(lambda: HttpProtocol(connections), "127.0.0.1", 8000)

A request is one task. Those that a client sends ahead wait for their turn, and beyond
`MAX_PIPELINED` the connection is not read. `http_requests` reads, `http_messages` writes,
`http_connections` looks after deadlines.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from time import perf_counter
from typing import Any

from enginery.serve import http_messages as http
from enginery.serve.http_client import ClientProbe, address_of
from enginery.serve.http_connections import LINGER_SECONDS, QUIET_SECONDS, Connections, log
from enginery.serve.http_messages import CLOSE, RefusedMessageError
from enginery.serve.http_requests import SLICE_BYTES, RequestReader
from enginery.serve.messages import Request, Response

MAX_PIPELINED = 32
"""The most whole requests of a connection that wait; one slice may bring more."""
LARGE_BODY_BYTES = 65_536
"""From here on a body is not copied behind its head."""
DISCARDED_BYTES = 33_554_432
"""The most that is read and thrown away after the last answer: a client that sends some times too
much reads why once it has sent it all."""


class HttpProtocol(asyncio.Protocol):
    """A connection of HTTP/1.1 or 1.0."""

    def __init__(self, connections: Connections) -> None:
        self.deadline = math.inf
        """When `expire` is due, by `time.perf_counter`."""
        self._connections = connections
        self._application = connections.application
        self._create_task = connections.loop.create_task
        self._reader: RequestReader
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None
        self._running: Request | None = None
        self._waiting: deque[tuple[Request, str, Response | None]] = deque()
        self._unread = b""  # read from the socket, not parsed yet
        self._held = False  # reading is paused
        self._full = False  # writing is paused
        self._closing = False  # the last answer is written
        self._ended = False  # the client sends no more
        self._probe: ClientProbe | None = None
        self._discarded = 0

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection; one too many is told so."""
        self._transport = transport
        shared = self._connections
        shared.open.add(self)
        self._reader = RequestReader(
            self._take, self._application.admit, shared.bodies, client=address_of(transport)
        )
        self.deadline = perf_counter() + shared.idle_seconds
        excess = len(shared.open) - shared.max_connections
        if excess > 8 + shared.max_connections // 8:  # saying so has to have an end, too
            self._transport.abort()
        elif excess > 0:
            most = f"{shared.max_connections:,}"
            self._refuse(RefusedMessageError(503, f"the server has {most} connections, its most."))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the interface
        """The client has gone: what runs for it is cancelled, what waits is dropped."""
        self._connections.open.discard(self)
        self._transport = None
        self._reader.close()
        self._closing = True
        self._waiting.clear()
        self._unread = b""
        if self._probe:
            self._probe.end()
        if self._task:
            self._task.cancel()
            self._task = self._running = None

    def data_received(self, data: bytes) -> None:
        """Reads what came, up to the most requests that may wait."""
        reader = self._reader
        if self._held:
            self._unread += data  # a loop may deliver what it had read before it was paused
        elif reader.last:
            self._discarded += len(data)
            if self._discarded > DISCARDED_BYTES:
                self.abort()
        elif len(data) <= SLICE_BYTES:
            self._feed(data)
        else:
            view = memoryview(data)
            for at in range(0, len(data), SLICE_BYTES):
                if not self._feed(view[at : at + SLICE_BYTES]):
                    self._unread = bytes(view[at + SLICE_BYTES :]) if self._held else b""
                    break
        if reader.receiving and not self._task and not self._waiting and not self._full:
            self.deadline = reader.started + self._connections.request_seconds
            if reader.owes_continue:
                self._continue()

    def _feed(self, data: bytes | memoryview) -> bool:
        """Reads at most `SLICE_BYTES`; whether more may follow now."""
        try:
            self._reader.feed(data)
        except RefusedMessageError as refused:
            self._refuse(refused)
        if len(self._waiting) >= MAX_PIPELINED and not self._reader.last:
            self._held = True
            self._transport.pause_reading()
        return not (self._held or self._reader.last)

    def eof_received(self) -> bool:
        """The client sends no more. It may still read, and gets the answers that it waits for."""
        self._ended = True
        if self._reader.receiving:
            self._refuse(RefusedMessageError(400, "the connection ended within the request."))
        if self._task or self._waiting:
            if self._reader.version != "1.0":  # which has no interim answers
                self._probe = ClientProbe(self._transport, self._connections.loop)
            return True
        self._closing = True
        self.deadline = perf_counter() + self._connections.request_seconds
        return False  # the transport closes when everything is written

    def pause_writing(self) -> None:
        """The client does not read: no further request of it is begun."""
        self._full = True
        self.deadline = perf_counter() + self._connections.request_seconds

    def resume_writing(self) -> None:
        """The client reads again."""
        self._full = False
        if not self._task:
            self._next()

    # From a request to its answer.

    def _take(self, request: Request, connection: str) -> None:
        if self._task or self._waiting or self._full:
            self._waiting.append((request, connection, None))
        else:
            self._begin(request, connection)

    def _begin(self, request: Request, connection: str) -> None:
        self.deadline = math.inf
        self._running = request
        self._task = self._create_task(self._answer(request, connection))

    async def _answer(self, request: Request, connection: str) -> None:
        try:
            response = await self._application(request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            log.exception("%s %s was cancelled from within", request.method, request.path)
            response = self._connections.refusal(request, 500, "internal error")
        except Exception:
            log.exception("%s %s", request.method, request.path)
            response = self._connections.refusal(request, 500, "internal error")
        if self._closing:
            return  # given up, and the application did not mind being cancelled
        self._task = self._running = None
        self._reader.answered(request)
        self._write(request, response, connection)
        self._next()

    def _write(self, request: Request, response: Response, connection: str) -> None:
        """Writes an answer. `close`, or an end from either side, makes it the last."""
        if (self._ended or self._connections.draining) and not (
            self._waiting or self._unread or self._reader.receiving
        ):
            connection = CLOSE
        try:
            head = http.head_of(response, self._connections.stamp, connection)
        except ValueError:
            log.exception("the answer to %s %s cannot be written", request.method, request.path)
            response = self._connections.refusal(request, 500, "internal error")
            head = http.head_of(response, self._connections.stamp, connection)
        if not http.has_body(request.method, response.status):
            self._transport.write(head)
        elif len(response.body) < LARGE_BODY_BYTES:
            self._transport.write(head + response.body)
        else:
            self._transport.writelines((head, response.body))
        if connection == CLOSE:
            self._finish()

    def _next(self) -> None:
        """After an answer: the next request, or waiting for one."""
        if self._closing or self._full:
            return
        reader, shared = self._reader, self._connections
        if self._waiting:
            first, connection, refusal = self._waiting.popleft()
            if refusal:
                self._write(first, refusal, CLOSE)
                return
            self._begin(first, connection)
        elif reader.receiving:
            self.deadline = reader.started + shared.request_seconds
            if reader.owes_continue:
                self._continue()
        else:
            self.deadline = perf_counter() + shared.idle_seconds
        if self._held and len(self._waiting) < MAX_PIPELINED // 2:
            self._held = False
            unread, self._unread = self._unread, b""
            reader.started = perf_counter()  # the time before was not the client's
            self.data_received(unread)
            if not self._held:
                self._transport.resume_reading()

    def _continue(self) -> None:
        self._reader.owes_continue = False
        self._transport.write(http.CONTINUE)

    # The end.

    def _refuse(self, refused: RefusedMessageError) -> None:
        """Answers with an error, after what came before it, and ends the connection."""
        reader = self._reader
        request = reader.arriving()
        reader.last = True
        reader.receiving = False
        response = self._connections.refusal(request, refused.status, refused.message)
        if self._task or self._waiting or self._full:
            self._waiting.append((request, CLOSE, response))
        else:
            self._write(request, response, CLOSE)

    def _finish(self) -> None:
        """Nothing more is written; the client is given time to read, and to end its side."""
        self._closing = self._reader.last = True
        if self._probe:
            self._probe.end()
        self._waiting.clear()
        self.deadline = perf_counter() + LINGER_SECONDS
        if self._held:
            self._held = False
            self._transport.resume_reading()
        if self._ended or not self._transport.can_write_eof():
            self._transport.close()
        else:
            try:
                self._transport.write_eof()
            except OSError:  # asyncio's own loop says so at once where the client has reset it
                self._transport.abort()

    # The connections call these.

    def expire(self) -> None:
        """The deadline has come: of a slow request, of silence, of an answer that is not read."""
        if self._closing or self._full or self._transport.get_write_buffer_size():
            self.abort()
        elif self._reader.receiving:
            seconds = f"{self._connections.request_seconds:g}"
            self._refuse(
                RefusedMessageError(408, f"the request did not arrive within {seconds} seconds.")
            )
        else:
            self._finish()

    def close_if_quiet(self, now: float) -> None:
        """Closes a connection on which nothing runs, waits or arrives."""
        busy = self._task or self._waiting or self._reader.receiving or self._full
        if not (busy or self._closing):
            idle = now - (self.deadline - self._connections.idle_seconds)
            if idle >= QUIET_SECONDS:
                self._finish()

    def give_up(self, message: str) -> int:
        """Cancels what runs and says so; how many whole requests are left unanswered."""
        if self._closing:
            return 0
        reader, task, running = self._reader, self._task, self._running
        unanswered = (task is not None) + len(self._waiting)
        first, response = running, None
        if first is None:
            first, _, response = (
                self._waiting[0] if self._waiting else (reader.arriving(), "", None)
            )
        partial, reader.receiving = reader.receiving, False
        self._task = self._running = None
        self._waiting.clear()
        self._unread = b""
        if unanswered or partial:
            # Before it is cancelled: the application is to know that it was not the client.
            response = response or self._connections.refusal(first, 503, message)
        if task:
            task.cancel()
        if response:
            self._write(first, response, CLOSE)
        else:
            self._finish()
        return unanswered

    def abort(self) -> None:
        """Drops the connection at once."""
        if self._transport:
            self._transport.abort()
