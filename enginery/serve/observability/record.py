"""What is known of one request: the middleware begins it, and routes add to it.

    >>> request.state.record.model = "minilm"

Metrics, the access log and traces are made of it once the response is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.serve.batching.scheduler import Timings

Protocol = Literal["oip", "tei", "openai", "plain", "admin"]
"""Whose shapes requests and errors have."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that went before its answer."""

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
    """One request. Times are of `time.perf_counter`, in seconds."""

    request_id: str
    method: str
    path: str
    """Without the query."""
    client: str
    """Host and port; empty where the server does not know them."""
    started: float
    route: str = ""
    """The pattern that matched, `/predict/{model}`, never the path; empty where none did."""
    model: str = ""
    """A served model's name; empty where none was asked for."""
    timings: Timings | None = None
    """Where the time went; None where no model answered."""
    inputs: int = 0
    characters: int = 0
    """Of all texts."""
    compute_type: str = "cpu"
    """`cpu` or `gpu`."""
    status: int = 0
    body_bytes: int = 0
    """Of the request's body, as far as it was read."""
    sent_bytes: int = 0
    """Of the response's body."""
    ended: float = 0.0
    """When the last byte of the response was handed to the server."""

    @property
    def seconds(self) -> float:
        """Return how long the request took."""
        return self.ended - self.started


def refusal_reason(record: RequestRecord) -> str:
    """Return why the request was refused, as metrics count it; empty for one that was not.

    500 is a fault of the server, not a refusal.
    """
    if record.status < 400 or record.status == 500:
        return ""
    return _REASONS.get(record.status, "http")
