"""Choose the task of a model from the classes of transformers, and the outputs of its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from enginery.core.errors import ExportError
from enginery.core.model.files import ModelConfig
from enginery.export.tasks import inferred_task
from enginery.runtime.pytorch.classes import tasks_of_class, tasks_of_type

_LOGITS = ("logits",)
_OUTPUTS: Mapping[str, Sequence[str]] = {
    "audio-xvector": ("logits", "embeddings"),
    "depth-estimation": ("predicted_depth",),
    "feature-extraction": ("last_hidden_state",),
    "image-segmentation": ("logits", "pred_masks", "class_queries_logits", "masks_queries_logits"),
    "image-to-image": ("reconstruction",),
    "keypoint-detection": ("heatmaps",),
    "masked-im": ("reconstruction", "logits"),
    "object-detection": ("logits", "pred_boxes"),
    "question-answering": ("start_logits", "end_logits"),
    "time-series-forecasting": ("prediction_outputs",),
    "zero-shot-image-classification": (
        "logits_per_image",
        "logits_per_text",
        "text_embeds",
        "image_embeds",
    ),
    "zero-shot-object-detection": ("logits", "pred_boxes", "text_embeds", "image_embeds"),
}
"""Outputs of tasks that have others than logits, by the names of Optimum's graphs."""
_VECTORS = ("text_embeds", "image_embeds", "audio_embeds")


def choose_outputs(model: Any, task: str, results: Mapping[str, Any]) -> list[str]:
    """Return the outputs that the graph of a model has.

    Args:
        model: the model.
        task: the task.
        results: its outputs for an example.

    Raises:
        ExportError: it has none.
    """
    tensors = [name for name, value in results.items() if isinstance(value, torch.Tensor)]
    if not tensors:
        raise ExportError(f"{type(model).__name__} has no tensor among its outputs.")
    # Every output of an encoder is a feature, and those of two towers are in one space.
    is_encoder = ModelConfig(architectures=(type(model).__name__,)).names_encoder
    if task == "feature-extraction" and (is_encoder or set(_VECTORS) & set(tensors)):
        return tensors
    names = [name for name in _OUTPUTS.get(task, _LOGITS) if name in tensors]
    return names or tensors


def choose_task(
    requested: str, settings: ModelConfig, *, supported: Sequence[str] = (), exporter: str = ""
) -> str:
    """Return the requested task; `auto` infers it from the model's class.

    Args:
        requested: the task, or `auto`.
        settings: the model's config.json.
        supported: the tasks for which an exporter takes the model's type; empty for all that
            transformers has a class for.
        exporter: its name, for messages.

    Raises:
        ExportError: the task cannot be inferred.
    """
    if requested != "auto":
        return requested
    if settings.architecture:  # timm's config.json
        return "image-classification"
    if (task := inferred_task(settings)) != "auto":
        return task
    name = settings.architectures[0] if settings.architectures else ""
    tasks = tasks_of_class(name)
    fitting = [task for task in tasks if not supported or task in supported]
    if fitting:
        return fitting[0]
    if not name:
        problem = "config.json names no class"
    elif not hasattr(transformers, name):
        problem = f"config.json names the class {name}, which transformers does not have"
    elif tasks:
        problem = f"the class {name} is for {tasks[0]}, for which {exporter} does not export it"
    else:
        problem = f"transformers lists no task for the class {name}"
    usual = supported or tasks_of_type(settings.model_type)
    choices = f"--task to one of: {', '.join(usual)}" if usual else "--task"
    raise ExportError(f"the task cannot be inferred: {problem}.", do=f"Set {choices}.")
