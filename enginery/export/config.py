"""The options of the export stage. The module imports little, to keep `enginery --help` fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExportConfig:
    """The task, precision, exporter and trust of an export."""

    task: str = "auto"
    """The task, by Optimum's name: text-classification, feature-extraction, … `auto` infers it as
    Optimum does."""
    revision: str = "main"
    """The Hub revision: a branch, a tag or a commit."""
    opset: int = 20
    """The ONNX operator set. FP16 graphs with Q/DQ nodes require 19 or later."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """The type in which the model's weights are loaded and exported."""
    exporter: Literal["optimum", "dynamo"] = "optimum"
    """`dynamo` is torch's exporter, for models that Optimum's registry does not have."""
    device: str = "cpu"
    """The device on which PyTorch traces the model: cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only use it for authors you trust."""
    allow_pickle: bool = False
    """Load pickled weights, with PyTorch's restricted unpickler."""
    cache_dir: str = ""
    """The directory for Hub downloads; empty for the default cache of the Hub library."""
    post_process: bool = True
    """Run Optimum's post-processing, which merges decoders into one graph with an If node.
    TensorRT cannot parse such a graph: switch it off for engines."""
