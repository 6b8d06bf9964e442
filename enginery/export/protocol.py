"""The data that the export stage and its child process exchange, and what exporters return.

The module imports little, because whatever the child holds while it traces adds to peak memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from enginery.core.model.files import ModelConfig
from enginery.export.config import ExportConfig

PHASE = "\x1ephase "
"""The prefix of a line in the child's output that names the current phase."""


@dataclass(frozen=True)
class WorkerRequest:
    """A request to the child process, sent as JSON."""

    kind: str
    path: str
    pickled: bool
    out: str
    config: ExportConfig


@dataclass(frozen=True)
class WorkerResult:
    """The result of the child process, sent as JSON."""

    task: str
    model_type: str
    library: str
    precision: str
    graphs: list[dict[str, Any]]
    notes: list[str]
    peak_rss_bytes: int


@dataclass
class ExportedModel:
    """The graphs that an exporter has written, before they are checked."""

    files: list[str]
    """The ONNX files, relative to the staging directory."""
    task: str
    model_type: str
    library: str
    fixed_dims: dict[str, int] = field(default_factory=dict)
    """Dims that the tracer left dynamic but the weights fix, such as the channels of an image."""
    config: ModelConfig = field(default_factory=ModelConfig)
    """The model's config.json, with the image size of its processor if it has none."""
    notes: list[str] = field(default_factory=list)
