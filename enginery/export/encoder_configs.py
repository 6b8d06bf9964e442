"""Describe encoders to Optimum that its registry lacks, or of which it drops the projection.

They are towers of CLIP and its like, DPR's encoders, and T5 without its decoder: one graph, of
texts or images. The outputs are those of the class itself, so that none of its weights is left out.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from optimum.exporters.onnx.config import TextEncoderOnnxConfig, VisionOnnxConfig
from optimum.exporters.tasks import TasksManager
from optimum.utils import NormalizedTextConfig, NormalizedVisionConfig

from enginery.core.model.files import ModelConfig
from enginery.runtime.pytorch.classes import default_class

_TOKENS = {0: "batch_size", 1: "sequence_length"}
_PIXELS = {0: "batch_size", 1: "num_channels", 2: "height", 3: "width"}


def encoder_config(model: Any, float_dtype: str) -> Any | None:
    """Return Optimum's configuration of an encoder's graph; None if its registry has it.

    Args:
        model: the model, in evaluation mode.
        float_dtype: fp32, fp16 or bf16: the type of the inputs that the graph is traced with.
    """
    if not needs_encoder_config(type(model), model.config):
        return None
    takes_pixels = model.main_input_name == "pixel_values"
    base = _ImageEncoder if takes_pixels else _TextEncoder
    config = base(model.config, task="feature-extraction", float_dtype=float_dtype)
    config.inputs_of_model = _inputs(model, takes_pixels=takes_pixels)
    dummies = config.generate_dummy_inputs(framework="pt")
    with torch.no_grad():
        result = model(**{n: t.to(model.device) for n, t in dummies.items()}, return_dict=True)
    # A tuple, of hidden states or attentions, is no output: nothing reads it.
    config.outputs_of_model = {
        name: dict(_TOKENS if value.ndim == 3 else {0: "batch_size"})
        for name, value in result.items()
        if isinstance(value, torch.Tensor)
    }
    return config


def needs_encoder_config(model_class: Any, config: Any) -> bool:
    """Return True for an encoder that the registry lacks, or exports without its projection."""
    if not ModelConfig(architectures=(model_class.__name__,)).names_encoder:
        return False
    if model_class is not default_class(config):
        return True
    known = config.model_type in TasksManager._SUPPORTED_MODEL_TYPE  # noqa: SLF001  no accessor
    # Decoders of images and texts have such names, too, but rotary positions.
    is_tower = config.model_type.endswith(("_text_model", "_vision_model"))
    is_encoder = config.model_type == "dpr" or (is_tower and not hasattr(config, "rope_theta"))
    return is_encoder and not known


def _inputs(model: Any, *, takes_pixels: bool) -> dict[str, dict[int, str]]:
    if takes_pixels:
        return {"pixel_values": dict(_PIXELS)}
    accepted = inspect.signature(model.forward).parameters
    names = ["input_ids", "attention_mask"]
    if "siglip" in model.config.model_type:
        names.remove("attention_mask")  # its tokenizer makes none: padding is attended to
    if getattr(model.config, "type_vocab_size", 0):
        names.append("token_type_ids")
    return {name: dict(_TOKENS) for name in names if name in accepted}


class _OwnNames:
    """Gives a configuration the inputs and outputs that it was made with."""

    inputs_of_model: dict[str, dict[int, str]]
    outputs_of_model: dict[str, dict[int, str]]

    @property
    def inputs(self) -> dict[str, dict[int, str]]:
        return self.inputs_of_model

    @property
    def outputs(self) -> dict[str, dict[int, str]]:
        return self.outputs_of_model


class _TextEncoder(_OwnNames, TextEncoderOnnxConfig):  # type: ignore[misc]  # not type-checked
    NORMALIZED_CONFIG_CLASS = NormalizedTextConfig


class _ImageEncoder(_OwnNames, VisionOnnxConfig):  # type: ignore[misc]  # not type-checked
    NORMALIZED_CONFIG_CLASS = NormalizedVisionConfig
