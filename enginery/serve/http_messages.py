"""Bytes of HTTP/1.1 messages: a request's target into path and query, a `Response` into its head.

    >>> read_target(b"/v2/models/a%20b?x=1")
    ('/v2/models/a b', 'x=1')

The request's grammar is llhttp's (httptools); here is what it leaves to its callers. Rules are RFC
9110 (semantics) and RFC 9112 (HTTP/1.1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPMethod, HTTPStatus
from urllib.parse import unquote_to_bytes

from enginery.serve.messages import Response

MAX_TARGET_BYTES = 8192
"""The longest request target, path and query; RFC 9112 section 3 asks for 8,000 at least."""
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32_768
"""The most bytes of all headers of a request, names and values."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = "close"
KEEP_ALIVE = "keep-alive"

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in HTTPStatus}
_BODILESS = frozenset({204, 304})
_NAME = r"[\w.~!$&'()*+;=%-]*"
_ADDRESS = r"\[[0-9A-Fa-f:.]+(?:%25[\w.~-]+)?\]"
_HOST = re.compile(rf"(?:{_NAME}|{_ADDRESS})(?::\d{{0,5}})?", re.ASCII)
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_REQUEST_LINE = re.compile(rb"[\r\n]*([!#$%&'*+.^_`|~0-9A-Za-z-]+) (\S+) HTTP/1\.[01]\r\n")
_METHODS = frozenset(method.encode() for method in HTTPMethod)


class RefusedMessageError(Exception):
    """A request that the HTTP layer itself answers, with a status and a reason in words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def read_target(target: bytes) -> tuple[str, str]:
    """The path, percent-decoded, and the query, as it came.

    Origin form (`/path?query`), absolute form (`http://host/path`) and `*` are read; the authority
    form belongs to CONNECT, which this server has not.

    Raises:
        RefusedMessageError: 400, the target is of another form or is not UTF-8.
    """
    text = target.decode("ascii")  # llhttp has refused every other byte
    if "#" in text:
        raise RefusedMessageError(400, "the request target holds a fragment, '#…'.")
    if not text.startswith("/") and text != "*":
        scheme, separator, rest = text.partition("://")
        authority, slash, path = rest.partition("/")
        if not separator or scheme.lower() not in {"http", "https"} or not authority:
            raise RefusedMessageError(400, f"the request target is {text[:80]!r}, expected a path.")
        if "?" in authority:  # http://host?query
            slash, path = "/", "?" + rest.partition("?")[2]
        text = slash + path if slash else "/"
    path, _, query = text.partition("?")
    return (percent_decoded(path.encode("ascii")) if "%" in path else path), query


def percent_decoded(path: bytes) -> str:
    """A path without its `%` escapes.

    Raises:
        RefusedMessageError: 400, an escape is incomplete, or the bytes are not UTF-8.
    """
    if _BAD_ESCAPE.search(path):
        raise RefusedMessageError(400, "the path holds a '%' without two hexadecimal digits.")
    try:
        return unquote_to_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedMessageError(
            400, "the path is not UTF-8 once it is percent-decoded."
        ) from None


def check_host(host: str) -> None:
    """Raises RefusedMessageError (400) where the Host header is no host, with or without a port."""
    if not _HOST.fullmatch(host):
        raise RefusedMessageError(400, f"header Host is {host[:80]!r}, expected a host.")


def check_framing(headers: Mapping[str, str], version: str, max_body_bytes: int) -> None:
    """What has to hold of a request's headers before its body is read.

    llhttp has refused two lengths, a length beside a transfer coding, and a length that is no
    number: with these, a proxy and this server could see different requests in the same bytes.

    Raises:
        RefusedMessageError: 400, 413, 417, 501 or 505.
    """
    coding = headers.get("transfer-encoding")
    if version == "1.1":
        if "host" not in headers:
            raise RefusedMessageError(400, "header Host is missing.")
        expectation = headers.get("expect")
        if expectation is not None and expectation.lower() != "100-continue":
            raise RefusedMessageError(
                417, f"header Expect is {expectation[:80]!r}, expected '100-continue'."
            )
    elif version != "1.0":
        raise RefusedMessageError(505, f"HTTP/{version} was asked for, expected HTTP/1.1.")
    elif coding is not None:
        raise RefusedMessageError(400, "HTTP/1.0 has no header Transfer-Encoding.")
    if coding is not None and coding.lower() != "chunked":
        raise RefusedMessageError(
            501, f"header Transfer-Encoding is {coding[:80]!r}, expected 'chunked'."
        )
    if "content-length" in headers:
        check_length(headers["content-length"], max_body_bytes)


def check_length(length: str, max_body_bytes: int) -> None:
    """Raises RefusedMessageError (413) where a Content-Length is more than the server takes."""
    if not length.isdecimal():  # llhttp has refused it, another ASGI server may have not
        raise RefusedMessageError(400, f"header Content-Length is {length[:80]!r}.")
    if int(length) > max_body_bytes:
        raise body_too_large(max_body_bytes, found=f"{int(length):,} bytes")


def body_too_large(max_body_bytes: int, *, found: str = "more") -> RefusedMessageError:
    """The refusal of a body that is larger than the server takes."""
    return RefusedMessageError(
        413, f"the body has {found}, and at most {max_body_bytes:,} bytes are taken."
    )


def of_parser_error(words: str, data: bytes) -> tuple[RefusedMessageError, str]:
    """What an error of llhttp is for the client, and the path where the bytes at hand show it.

    Args:
        words: llhttp's own.
        data: the bytes in which it was found.
    """
    line = _REQUEST_LINE.match(data)
    # One with a method that is known is not the one that failed, but came before it.
    if words == "Invalid method encountered" and line and line[1] not in _METHODS:
        try:
            path = read_target(line[2])[0]
        except (RefusedMessageError, UnicodeDecodeError):
            path = ""
        return RefusedMessageError(501, "the request's method is not known."), path
    if words in {"Invalid HTTP version", "Pause on PRI/Upgrade"}:
        return RefusedMessageError(505, "expected HTTP/1.1 or HTTP/1.0."), ""
    return RefusedMessageError(400, f"this is not HTTP/1.1: {words}."), ""


def head_of(response: Response, stamp: str, connection: str) -> bytes:
    """The status line and the headers.

    Args:
        response: whose body follows, or does not for HEAD; its length is told all the same.
        stamp: the headers that are the same for every answer of a second, Server and Date.
        connection: `close`, `keep-alive`, or nothing where HTTP/1.1's own default holds.

    Raises:
        ValueError: a header cannot be written: it holds a line break, or is not Latin-1.
    """
    status = response.status
    own = "" if status in _BODILESS else f"content-type: {response.content_type}\r\n"
    for name, value in response.headers:
        own += f"{name}: {value}\r\n"
    lines = len(response.headers) + (status not in _BODILESS)
    if own.count("\n") != lines or own.count("\r") != lines or "\0" in own:
        raise ValueError(f"a header of the answer holds a line break: {own!r}")
    if status not in _BODILESS:
        own += f"content-length: {len(response.body)}\r\n"
    if connection:
        own += f"connection: {connection}\r\n"
    first = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{first}{stamp}{own}\r\n".encode("latin-1")


def may_have_body(status: int) -> bool:
    """Whether an answer of this status has a body, and so a length: 204 and 304 have none."""
    return status not in _BODILESS


def has_body(method: str, status: int) -> bool:
    """Whether the body is sent: for HEAD, its length alone is told."""
    return method != "HEAD" and status not in _BODILESS


def head_without_upgrade(
    method: str, target: bytes, version: str, headers: Mapping[str, str]
) -> bytes:
    """A request's head without its wish for another protocol, which a server may ignore.

    RFC 9110 section 7.8. Only the headers are there that say where the body ends and what becomes
    of the connection.
    """
    framing = ("host", "content-length", "transfer-encoding", "expect")
    kept = {name: headers[name] for name in framing if name in headers}
    words = [word.strip() for word in headers.get("connection", "").split(",")]
    kept["connection"] = ", ".join(word for word in words if word.lower() in {CLOSE, KEEP_ALIVE})
    lines = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
    first = method.encode("ascii") + b" " + target + f" HTTP/{version}\r\n".encode("ascii")
    return first + f"{lines}\r\n".encode("latin-1")
