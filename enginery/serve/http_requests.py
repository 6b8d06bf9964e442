r"""Bytes of a connection to `Request`s, or to the reason why they are none.

    reader = RequestReader(take, admit, Bodies(8_388_608, 268_435_456), client="127.0.0.1:50412")
    reader.feed(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")    # take(request, "")

httptools (llhttp) parses; `http_messages` says what a sound request may be. Memory for a request
that is not whole is bounded: target, headers, body, and the bytes around them. So are the bodies of
all connections together, from their first byte until they are answered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

import httptools

from enginery.serve import http_messages as http
from enginery.serve.http_messages import CLOSE, KEEP_ALIVE, RefusedMessageError
from enginery.serve.messages import Request
from enginery.serve.refusals import RefusalError

SLICE_BYTES = 8192
"""The most that is fed at once, so that a large read cannot bring thousands of small requests."""
_OVERHEAD_BYTES = 8_388_608
"""The most bytes of a chunked body that are not its own: sizes, extensions, trailers; besides seven
for each of its own, which chunks of one byte need."""


class Bodies:
    """What bodies may take: each, and all that are read and not answered."""

    def __init__(self, largest: int, all_together: int) -> None:
        self.largest = largest
        self.all_together = all_together
        self.held = 0
        """Bytes, of all connections."""


class RequestReader:
    """The parser of a connection, and the request that is arriving."""

    def __init__(
        self,
        take: Callable[[Request, str], None],
        admit: Callable[[Request], None],
        bodies: Bodies,
        *,
        client: str,
    ) -> None:
        """Nothing is read yet.

        Args:
            take: gets each whole request, with what its answer says of the connection.
            admit: is asked before a large body is read; raises RefusalError to refuse it.
            bodies: what this connection shares with the others.
            client: host and port.
        """
        self.receiving = False
        """A request has begun and is not whole."""
        self.owes_continue = False
        """Its client waits for `100 Continue` before it sends the body."""
        self.last = False
        """Nothing more is read: the client or an error has ended the connection's requests."""
        self.started = 0.0
        """When the request began, by `time.perf_counter`."""
        self.path = self.method = self.version = ""
        """Of the request that is arriving or was the last; empty as long as they are not known."""
        self._take = take
        self._admit = admit
        self._bodies = bodies
        self._held = 0  # bytes of bodies, of this connection
        self._client = client
        self._parser: Any = httptools.HttpRequestParser(self)
        # Of the request before: clients of a connection ask for the same again and again.
        self._last_host = ""
        self._last_target: tuple[bytes, str, str] = (b"", "", "")
        self._replayed: tuple[dict[str, str], float] | None = None
        self._fresh()

    def _fresh(self) -> None:
        self._in_body = self._upgrading = False
        self._bytes = self._header_count = self._header_bytes = self._body_bytes = 0
        self._target = b""
        self._query = ""
        self._headers: dict[str, str] = {}
        self._body: bytes | bytearray = b""

    def answered(self, request: Request) -> None:
        """The request's body is not needed any more."""
        self._release(len(request.body))

    def _release(self, count: int) -> None:
        self._held -= count
        self._bodies.held -= count

    def close(self) -> None:
        """Frees the parser, which refers back to this, and what was read."""
        self.last = True
        self._parser = None
        self._body = b""
        self._release(self._held)

    def arriving(self) -> Request:
        """The request that has begun, as far as it is known; an empty one where none has."""
        if not self.receiving:
            return Request("", "", client=self._client, started=perf_counter())
        if self._header_count and not self._in_body:  # the request line is whole
            self.method = self._parser.get_method().decode("ascii")
            with suppress(RefusedMessageError):
                self.path, self._query = http.read_target(self._target)
        return Request(
            self.method, self.path, self._query, self._headers, b"", self._client, self.started
        )

    def feed(self, data: bytes | memoryview) -> None:
        """Reads on; `SLICE_BYTES` at most. Gives whole requests to `take`, in order.

        Raises:
            RefusedMessageError: what came is no request that is taken. Nothing more is read.
        """
        upgraded = -1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # What is raised below must not have this as its context, which callbacks speak by.
            upgraded = upgrade.args[0]
        except httptools.HttpParserError as error:
            if self.last:
                return  # bytes behind the last request
            refused = error.__context__
            if not isinstance(refused, RefusedMessageError):
                if refused:
                    raise refused from None  # a bug in `take`, or here
                refused, path = http.of_parser_error(str(error), bytes(data))
                self.path = self.path or path
            self._refuse(refused)
        if upgraded >= 0:
            self._read_without_upgrade(bytes(data[upgraded:]))
        elif self.receiving:
            # What never ends is not told piece by piece: a header, a chunk's size or extension.
            self._bytes += len(data)
            if not self._in_body and self._bytes > _HEAD_BYTES:
                self._refuse(_headers_too_large())
            if self._bytes > _OVERHEAD_BYTES + 8 * self._bodies.largest:
                self._refuse(RefusedMessageError(413, "the body's chunks hold next to nothing."))

    def _refuse(self, refused: RefusedMessageError) -> None:
        self.last = True
        self.owes_continue = False
        raise refused from None

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Reads the request once more, without its wish for another protocol.

        llhttp takes what follows such a head for the other protocol; this server speaks none.
        """
        self._replayed = self._headers, self.started
        head = http.head_without_upgrade(self.method, self._target, self.version, self._headers)
        self._parser = httptools.HttpRequestParser(self)
        self.feed(head)
        for at in range(0, len(rest), SLICE_BYTES):
            self.feed(rest[at : at + SLICE_BYTES])

    # The parser calls these.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._fresh()
        self.path = self.method = ""
        self.receiving = True
        self.started = perf_counter()

    def on_url(self, part: bytes) -> None:
        """A part of the request's target."""
        self._target += part
        if len(self._target) > http.MAX_TARGET_BYTES:
            raise RefusedMessageError(
                414, f"the request target has more than {http.MAX_TARGET_BYTES:,} bytes."
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind a chunked body, which is counted and dropped."""
        self._header_count += 1
        self._header_bytes += len(name) + len(value)
        if self._header_count > http.MAX_HEADERS:
            raise RefusedMessageError(431, f"there are more than {http.MAX_HEADERS} headers.")
        if self._header_bytes > http.MAX_HEADER_BYTES:
            raise _headers_too_large()
        if self._in_body:
            return
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1").strip(" \t")
        if key in self._headers:
            if key == "host":
                raise RefusedMessageError(400, "header Host is there twice.")
            text = f"{self._headers[key]}, {text}"
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        """Everything but the body: whether that will be taken is decided here."""
        parser, headers = self._parser, self._headers
        self._in_body = True
        self.method = parser.get_method().decode("ascii")
        self.version = parser.get_http_version()
        if self.method == "CONNECT":
            raise RefusedMessageError(501, "CONNECT is for proxies, and this is none.")
        if self._target != self._last_target[0]:
            self._last_target = (self._target, *http.read_target(self._target))
        _, self.path, self._query = self._last_target
        http.check_framing(headers, self.version, self._bodies.largest)
        host = headers.get("host", "")
        if host != self._last_host:
            http.check_host(host)
            self._last_host = host
        self._upgrading = "upgrade" in headers and parser.should_upgrade()
        if self._replayed:
            (self._headers, self.started), self._replayed = self._replayed, None
        if "transfer-encoding" in headers or int(headers.get("content-length", 0)) > SLICE_BYTES:
            try:
                self._admit(self.arriving())
            except RefusalError as error:
                raise RefusedMessageError(error.status, f"{error.message} {error.do}") from None
        # One without a body has nothing to wait with; HTTP/1.0 has no interim answers.
        self.owes_continue = (
            "expect" in headers
            and self.version == "1.1"
            and ("transfer-encoding" in headers or headers.get("content-length", "0") != "0")
        )

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        self.owes_continue = False  # the client did not wait for it
        bodies, size = self._bodies, len(part)
        self._body_bytes += size
        if self._body_bytes > bodies.largest:
            raise http.body_too_large(bodies.largest)
        if bodies.held + size > bodies.all_together:
            raise RefusedMessageError(
                503,
                f"the requests that wait hold {bodies.all_together:,} bytes, the server's most.",
            )
        self._held += size
        bodies.held += size
        if not self._body:
            self._body = part
            return
        if type(self._body) is bytes:
            self._body = bytearray(self._body)
        self._body += part

    def on_message_complete(self) -> None:
        """A whole request."""
        if self._upgrading:
            return  # its body is not read yet, see _read_without_upgrade
        self.receiving = self.owes_continue = False
        if not self._parser.should_keep_alive():
            self.last = True
            connection = CLOSE
        else:
            connection = "" if self.version == "1.1" else KEEP_ALIVE
        body, self._body = bytes(self._body), b""
        self._take(
            Request(
                self.method, self.path, self._query, self._headers, body, self._client, self.started
            ),
            connection,
        )


_HEAD_BYTES = http.MAX_HEADER_BYTES + http.MAX_TARGET_BYTES + 4 * http.MAX_HEADERS + SLICE_BYTES


def _headers_too_large() -> RefusedMessageError:
    return RefusedMessageError(431, f"the headers have more than {http.MAX_HEADER_BYTES:,} bytes.")
