"""Convert errors to HTTP responses in the format of the request's protocol.

    400  the body is malformed, or has no input
    401  an API key is required
    404  unknown model or route
    405  wrong method
    413  too many bytes, inputs or tokens
    422  a text, a tensor or an option is invalid
    429  too many requests are waiting; see Retry-After
    503  the model is loading, the server is draining, or a worker has failed

Protocols differ in the body:

    oip, plain, admin   {"error": "…"}
    tei                 {"error": "…", "error_type": "Validation"}
    openai              {"error": {"message": "…", "type": "…", "param": null, "code": null}}

Sources of the error types: router/src/lib.rs of text-embeddings-inference and
platform.openai.com/docs/guides/error-codes.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Scope

from enginery.core.errors import EngineryError, InputError, OptionError, ShapeError
from enginery.runtime.tasks.text import TooLongError
from enginery.serve.batching.queue import OverloadedError
from enginery.serve.models.registry import UnknownModelError
from enginery.serve.models.served_model import TooManyInputsError
from enginery.serve.observability.record import Protocol

_log = logging.getLogger("enginery.serve")

_STATUSES: tuple[tuple[type[EngineryError], int], ...] = (
    (UnknownModelError, 404),
    (TooManyInputsError, 413),
    (TooLongError, 413),
    (OverloadedError, 429),
    (InputError, 422),
    (ShapeError, 422),
    (OptionError, 422),
)
"""Errors that clients can fix; all others are errors of the server, with status 503."""
_TEI_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy"}
_OPENAI_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


class HTTPError(EngineryError):
    """An error with an HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        do: str = "",
        field: str = "",
        code: str = "",
        retry_after_seconds: float = 0.0,
    ) -> None:
        """Create an error.

        Args:
            status: HTTP status.
            message: what is wrong.
            do: what the client can do about it.
            field: the invalid field of the body; OpenAI's format includes it.
            code: OpenAI's error code.
            retry_after_seconds: when to retry; 0 if retrying would not help.
        """
        super().__init__(message, do=do)
        self.status, self.field, self.code = status, field, code
        self.retry_after_seconds = retry_after_seconds
        self.headers: dict[str, str] = {}
        """Further headers of the response."""


class EmptyInputError(HTTPError):
    """The input is empty, for which text-embeddings-inference has its own type of error."""


def invalid_body(message: str, *, do: str = "") -> HTTPError:
    """Return the error for a malformed body: 400."""
    return HTTPError(400, message, do=do)


def invalid_field(message: str, *, field: str, do: str = "") -> HTTPError:
    """Return the error for an invalid field: 422."""
    return HTTPError(422, message, do=do, field=field)


def empty_input(field: str, message: str = "") -> HTTPError:
    """Return the error for an empty input: 400."""
    message = message or f"{field} is empty, expected one input or more."
    return EmptyInputError(400, message, field=field)


def to_http_error(error: EngineryError) -> HTTPError:
    """Convert any expected error to an HTTPError."""
    if isinstance(error, HTTPError):
        return error
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 503)
    is_unknown = isinstance(error, UnknownModelError)
    return HTTPError(
        status,
        error.message,
        do=error.do,
        field="model" if is_unknown else getattr(error, "field", ""),
        code="model_not_found" if is_unknown else "",
        retry_after_seconds=getattr(error, "retry_after_seconds", 1.0),
    )


def error_response(protocol: Protocol, error: HTTPError, *, request_id: str = "") -> Response:
    """Build the error response in the format of a protocol."""
    # OpenAI's API has one status for all invalid requests.
    status = 400 if protocol == "openai" and error.status == 422 else error.status
    message = f"{error.message} {error.do}" if error.do else error.message
    headers = dict(error.headers)
    if status == 429 or (status == 503 and error.retry_after_seconds):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    elif status == 401:
        headers["www-authenticate"] = 'Bearer realm="enginery"'
    if request_id:
        message = f"{message} Request id: {request_id}"
    # A path may contain lone surrogates, which UTF-8 cannot encode.
    body = _body(protocol, status, message.encode("utf-8", "replace").decode(), error)
    return Response(orjson.dumps(body), status, headers, "application/json")


def fault_response(scope: Scope, error: Exception) -> Response:
    """Build the response to an unexpected error: 500. Log its traceback with the request's id."""
    request_id = scope["state"]["record"].request_id
    _log.error("request %s: %s %s", request_id, scope["method"], scope["path"], exc_info=error)
    internal_error = HTTPError(500, "internal error.")
    return error_response(scope_protocol(scope), internal_error, request_id=request_id)


def scope_protocol(scope: Scope) -> Protocol:
    """Return the protocol of a request's route or, if no route matched, of its path."""
    protocol: Protocol = getattr(scope.get("endpoint"), "protocol", None) or protocol_of(
        scope["path"]
    )
    return protocol


def protocol_of(path: str) -> Protocol:
    """Return the protocol to use for a path that matches no route."""
    if path.startswith("/v2"):
        return "oip"
    return "openai" if path.startswith("/v1/") else "plain"


def _body(protocol: Protocol, status: int, message: str, error: HTTPError) -> dict[str, Any]:
    if protocol == "tei":
        is_empty = isinstance(error, EmptyInputError)
        kind = "Empty" if is_empty else _TEI_TYPES.get(status, "Validation")
        return {"error": message, "error_type": kind}
    if protocol == "openai":
        fallback = ("server_error" if status >= 500 else "invalid_request_error", None)
        kind, code = _OPENAI_TYPES.get(status, fallback)
        return {
            "error": {
                "message": message,
                "type": kind,
                "param": error.field or None,
                "code": error.code or code,
            }
        }
    return {"error": message}
