"""What travels between the HTTP layer and the application.

    >>> Response.of_json({"error": "no such model"}, status=404).body
    b'{"error":"no such model"}'

The HTTP layer makes a `Request` of bytes and bytes of a `Response`; the application is a coroutine
between the two, and knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

JSON = "application/json"


@dataclass(slots=True)
class Request:
    """One request, whole."""

    method: str
    path: str
    """Without the query, percent-decoded."""
    query: str = ""
    """Behind the question mark, as it came."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case; one that came several times is joined by commas."""
    body: bytes = b""
    client: str = ""
    """Host and port of who asks."""
    started: float = 0.0
    """When its first byte was read, by `time.perf_counter`."""
    known: Any = None
    """What the application has learnt of it so far; the application's own."""


@dataclass(slots=True)
class Response:
    """One answer, whole."""

    status: int = 200
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_json(
        cls, value: Any, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
    ) -> Response:
        """A JSON body. numpy arrays are lists, NaN is null."""
        body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        return cls(status, body, JSON, headers)


class Application(Protocol):
    """What the HTTP layer calls."""

    def admit(self, request: Request) -> None:
        """Asked before a large body is read; `request` has everything but that.

        Raises:
            RefusalError: whoever asks is not let in, whatever the body is.
        """

    async def __call__(self, request: Request) -> Response:
        """The answer to a request.

        It is cancelled when the client has gone, or after `refusal` has answered the request. It
        raises nothing: what goes wrong is a status.
        """

    def refusal(self, request: Request, status: int, message: str) -> Response:
        """The HTTP layer's own answer, in the shape of the protocol of the request's path.

        Args:
            request: as far as it is known; method and path are empty where it could not be read.
                One that runs is no longer the application's to answer.
            status: what the client is told.
            message: why, in words.
        """
