r"""An error in the shape of the protocol that the request came by.

    >>> error_response("openai", NotFoundError("no model 'x'.")).body
    b'{"error":{"message":"no model \'x\'.","type":"invalid_request_error",…}}'

    oip, plain, admin   {"error": "…"}
    tei                 {"error": "…", "error_type": "Validation"}
    openai              {"error": {"message": "…", "type": "…", "param": null, "code": null}}

text-embeddings-inference's types are of router/src/lib.rs there, OpenAI's of
platform.openai.com/docs/guides/error-codes.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from enginery.serve.messages import Response
from enginery.serve.refusals import RefusalError

Family = Literal["oip", "tei", "openai", "plain", "admin"]

_TEI_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy"}
_OPENAI_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def error_response(family: Family, error: RefusalError, *, request_id: str = "") -> Response:
    """The answer that says why there is none."""
    # Its clients know one status for a request that is wrong.
    status = 400 if family == "openai" and error.status == 422 else error.status
    message = f"{error.message} {error.do}" if error.do else error.message
    headers: tuple[tuple[str, str], ...] = ()
    if status in (429, 503):
        headers = (("retry-after", str(max(1, math.ceil(error.retry_after_seconds)))),)
    elif status == 401:
        headers = (("www-authenticate", 'Bearer realm="enginery"'),)
    if allowed := getattr(error, "allowed", ()):
        headers = (("allow", ", ".join(allowed)),)
    if request_id:
        message = f"{message} Request id: {request_id}"
    body = _body(family, status, _sendable(message), error)
    return Response.of_json(body, status=status, headers=headers)


def _body(family: Family, status: int, message: str, error: RefusalError) -> dict[str, Any]:
    if family == "tei":
        kind = getattr(error, "tei_type", "") or _TEI_TYPES.get(status, "Validation")
        return {"error": message, "error_type": kind}
    if family == "openai":
        fallback = ("server_error" if status >= 500 else "invalid_request_error", None)
        kind, code = _OPENAI_TYPES.get(status, fallback)
        param = getattr(error, "field", "") or None
        code = getattr(error, "code", "") or code
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return {"error": message}


def _sendable(message: str) -> str:
    """Without what UTF-8 cannot hold: a path may have lone surrogates."""
    return message.encode("utf-8", "replace").decode()
