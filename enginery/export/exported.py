"""What an exporter hands to the checks, whichever exporter it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exported:
    """Graphs just written, not yet checked."""

    files: list[str]
    """ONNX files relative to the staging directory."""
    task: str
    model_type: str
    library: str
    fixed_dims: dict[str, int] = field(default_factory=dict)
    """Dims that the tracer left dynamic but the weights fix: the channels of an image."""
    config: dict[str, Any] = field(default_factory=dict)
    """The model's config.json, with the image size of its processor where it has none itself."""
    notes: list[str] = field(default_factory=list)
