"""The options of the export stage. The module imports little, to keep `enginery --help` fast."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError, nearest

TASKS = (
    "audio-classification",
    "audio-ctc",
    "audio-frame-classification",
    "audio-xvector",
    "automatic-speech-recognition",
    "causal-lm",
    "default",
    "depth-estimation",
    "document-question-answering",
    "feature-extraction",
    "fill-mask",
    "image-classification",
    "image-feature-extraction",
    "image-segmentation",
    "image-text-to-text",
    "image-to-image",
    "image-to-text",
    "inpainting",
    "keypoint-detection",
    "latent-consistency",
    "mask-generation",
    "masked-im",
    "masked-lm",
    "multiple-choice",
    "object-detection",
    "pretraining",
    "question-answering",
    "reinforcement-learning",
    "semantic-segmentation",
    "sentence-similarity",
    "seq2seq-lm",
    "sequence-classification",
    "speech2seq-lm",
    "stable-diffusion",
    "stable-diffusion-xl",
    "summarization",
    "text-classification",
    "text-generation",
    "text-to-audio",
    "text-to-image",
    "text-to-speech",
    "text2text-generation",
    "time-series-forecasting",
    "token-classification",
    "translation",
    "vision2seq-lm",
    "visual-question-answering",
    "zero-shot-classification",
    "zero-shot-image-classification",
    "zero-shot-object-detection",
)
"""Tasks and their synonyms in Optimum 2.1, each also with `-with-past`. Importing its TasksManager
to ask takes seconds; `tests/export/test_config.py` holds the two together."""
_OPSETS = range(7, 24)
"""ONNX_MIN_OPSET to ONNX_MAX_OPSET of torch.onnx, 2.13."""


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


def check_task(task: str) -> None:
    """Raise OptionError for a task that Optimum does not know; `auto` and none are fine."""
    if task not in ("", "auto") and task.removesuffix("-with-past") not in TASKS:
        raise OptionError(
            f"option 'task': unknown task '{task}'{nearest(task, TASKS)}",
            do=f"Known: {', '.join(TASKS)}; or auto.",
            option="task",
        )
