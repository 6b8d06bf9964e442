"""What the export stage and its child process say to each other, as JSON.

It imports next to nothing: what the child holds while it traces adds to the peak.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from enginery.core.model_files import ModelConfig
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


@dataclass
class ExportedModel:
    """Graphs just written, not yet checked."""

    files: list[str]
    """ONNX files relative to the staging directory."""
    task: str
    model_type: str
    library: str
    fixed_dims: dict[str, int] = field(default_factory=dict)
    """Dims that the tracer left dynamic but the weights fix: the channels of an image."""
    config: ModelConfig = field(default_factory=ModelConfig)
    """The model's config.json, with the image size of its processor where it has none itself."""
    notes: list[str] = field(default_factory=list)
