"""What the export stage and its child process say to each other, as JSON.

It imports next to nothing: what the child holds while it traces adds to the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from enginery.export.config import ExportConfig

PHASE = "\x1ephase "
"""Starts a line of the child's output that names what it does now."""


@dataclass(frozen=True)
class WorkerRequest:
    """What the child process is asked for, as JSON."""

    kind: str
    path: str
    pickled: bool
    out: str
    config: ExportConfig


@dataclass(frozen=True)
class WorkerResult:
    """What the child process made, as JSON."""

    task: str
    model_type: str
    library: str
    precision: str
    graphs: list[dict[str, Any]]
    notes: list[str]
    peak_rss_bytes: int
