"""The record of one request: created by the middleware, completed by the routes.

Metrics, the access log and traces are written from it once the response has been sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.serve.batching.scheduler import Timings

Protocol = Literal["oip", "tei", "openai", "plain", "admin"]
"""The protocol that determines the format of requests, responses and errors."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before the response."""

_REASONS = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method",
    413: "too_large",
    422: "invalid",
    429: "overloaded",
    503: "unavailable",
    CLIENT_CLOSED_REQUEST: "cancelled",
}


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are from `time.perf_counter`, in seconds."""

    request_id: str
    method: str
    path: str
    """Path without the query string."""
    client: str
    """Host and port of the client; empty if unknown."""
    started: float
    route: str = ""
    """Pattern of the matched route, such as `/predict/{model}`; empty if no route matched."""
    model: str = ""
    """Name of the served model; empty if the request is not for a model."""
    timings: Timings | None = None
    """Timings of the inference; None without one."""
    inputs: int = 0
    """Number of inputs."""
    characters: int = 0
    """Number of characters of all texts."""
    generated: int = 0
    """Number of generated tokens."""
    first_token_at: float = 0.0
    """When the first token was generated; 0 if none was."""
    compute_type: str = "cpu"
    """`cpu` or `gpu`."""
    status: int = 0
    """HTTP status of the response; 0 before it is known."""
    body_bytes: int = 0
    """Size of the request's body, as far as it was read."""
    sent_bytes: int = 0
    """Size of the response's body."""
    ended: float = 0.0
    """When the last part of the response was passed to the server."""

    @property
    def seconds(self) -> float:
        """Duration of the request."""
        return self.ended - self.started


def refusal_reason(record: RequestRecord) -> str:
    """Return the metrics label for why a request was rejected; empty if it was not.

    Status 500 is an error of the server, not a rejection.
    """
    if record.status < 400 or record.status == 500:
        return ""
    return _REASONS.get(record.status, "http")
