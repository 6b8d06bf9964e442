"""Model types and tasks that PyTorch's exporters cannot lower yet, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from enginery.core.errors import ExportError

_SHORTENED = "its encoder shortens waves by convolutions of which its config.json says nothing"
_BY_TYPE: Mapping[str, str] = {"moonshine": _SHORTENED, "moonshine_streaming": _SHORTENED}
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
    if reason := _BY_TYPE.get(model_type, _BY_TASK.get(task)):
        raise ExportError(
            f"{model_type} cannot be exported for {task} without Optimum: {reason}.",
            do="Use an environment with enginery[export], which has Optimum.",
        )
