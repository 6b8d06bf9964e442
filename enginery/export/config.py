"""The options of the export stage. They import nothing, so that `enginery --help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExportConfig:
    """How a model becomes an ONNX graph."""

    task: str = "auto"
    """What the model is for, as Optimum names it: text-classification, feature-extraction, …
    `auto` infers it as Optimum does."""
    revision: str = "main"
    """The Hub revision: a branch, a tag or a commit."""
    opset: int = 20
    """ONNX operator set. From 19 on, FP16 and Q/DQ graphs for TensorRT are valid."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """The type that the model's weights are loaded and exported in."""
    exporter: Literal["optimum", "dynamo"] = "optimum"
    """`dynamo` is torch's own exporter, for models that Optimum's registry does not know."""
    device: str = "cpu"
    """Where PyTorch traces the model: cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors you trust."""
    allow_pickle: bool = False
    """Load pickled weights, with PyTorch's restricted unpickler."""
    cache_dir: str = ""
    """Where Hub downloads are kept; empty for the Hub library's own cache."""
    post_process: bool = True
    """Optimum's post-processing, which merges decoders into one graph with an If node.
    TensorRT cannot parse that; switch it off for engines."""
