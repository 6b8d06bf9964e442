from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any
@dataclass(slots=True)
class RequestRecord:
    request_id: str = ""
    method: str = ""
    path: str = ""
    client: str = ""
    started: float = 0.0
    route: str = ""
    protocol: Any = ""
    model: str = ""
    timings: Any = None
    inputs: int = 0
    characters: int = 0
    refused: str = ""
    compute_type: str = ""
    status: int = 0
    body_bytes: int = 0
    sent_bytes: int = 0
    ended: float = 0.0
@dataclass
class Activity:
    in_flight: int = 0
    last_request_at: float = 0.0
    draining: bool = False
