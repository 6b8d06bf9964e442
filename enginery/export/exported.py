"""What an exporter hands to the checks, whichever exporter it was."""

from __future__ import annotations

from dataclasses import dataclass, field

from enginery.core.model_files import ModelConfig


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
    config: ModelConfig = field(default_factory=ModelConfig)
    """The model's config.json, with the image size of its processor where it has none itself."""
    notes: list[str] = field(default_factory=list)
