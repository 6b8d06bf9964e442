"""Model types that PyTorch's exporters cannot lower yet, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from enginery.core.errors import ExportError

_PATCHES = "its images are patches of any number with their shapes, which no processor here makes"
_SAMPLED = "each step of its forecast is drawn at random, and is an input of the next"
_BY_TYPE: Mapping[str, str] = {
    "clap": "inputs of texts and sounds together are not described yet",
    "mamba": "its scan is a loop in Python, of which an exporter writes the steps of the example",
    "informer": _SAMPLED,
    "siglip2": _PATCHES,
    "siglip2_vision_model": _PATCHES,
    "time_series_transformer": _SAMPLED,
}
_BY_TASK: Mapping[str, str] = {
    "image-text-to-text": "a model of images and texts has to be exported in parts",
    "text-to-audio": "a model that speaks has to be exported in parts",
}


def require_supported(model_type: str, task: str) -> None:
    """Raise ExportError for a model type or a task that cannot be exported yet.

    Args:
        model_type: the model's type.
        task: its task.
    """
    if reason := _BY_TYPE.get(model_type):
        raise ExportError(f"{model_type} cannot be exported by PyTorch's exporters: {reason}.")
    if reason := _BY_TASK.get(task):
        raise ExportError(
            f"{model_type} cannot be exported for {task} without Optimum: {reason}.",
            do="Use an environment with enginery[export], which has Optimum.",
        )
