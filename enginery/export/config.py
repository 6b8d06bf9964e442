"""The options of the export stage. The module imports little, to keep `enginery --help` fast."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError

_OPSETS = range(7, 24)
"""ONNX_MIN_OPSET to ONNX_MAX_OPSET of torch.onnx, 2.13."""


@dataclass(frozen=True)
class ExportConfig:
    """The task, precision, exporter and trust of an export."""

    task: str = "auto"
    """The task, as Optimum or transformers' pipelines name it: text-classification, ner, … `auto`
    infers it as Optimum does."""
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


def check_options(config: ExportConfig) -> None:
    """Raise OptionError for a value that no model can be exported with."""
    if config.opset not in _OPSETS:
        raise OptionError(
            f"option 'opset' is {config.opset}, expected {_OPSETS[0]} to {_OPSETS[-1]}.",
            do="Leave it out for 20, which TensorRT and quantizing work with.",
            option="opset",
        )
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", config.device):
        raise OptionError(
            f"option 'device' is '{config.device}', expected cpu, cuda or cuda:N.",
            do="Leave it out for cpu.",
            option="device",
        )
    if (config.dtype, config.device, config.exporter) == ("bf16", "cpu", "optimum"):
        raise OptionError(
            "option 'dtype' is bf16: Optimum runs the graph while it exports, and ONNX Runtime has "
            "no BF16 kernels on the CPU.",
            do="Use --device cuda or --exporter dynamo.",
            option="dtype",
        )
