"""Model types and tasks that PyTorch's exporters cannot lower yet, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from enginery.core.errors import ExportError
from enginery.core.versions import TRANSFORMERS5, transformers_family

_SAMPLED = "each step of its forecast is drawn at random, and is an input of the next"
_SHORTENED = "its encoder shortens waves by convolutions of which its config.json says nothing"
_LOOP = "its scan is a loop in Python, of which an exporter writes the steps of the example"
_BEFORE_5: Mapping[str, str] = {"mamba": _LOOP}
"""Types that transformers 4.57 has in a form that no exporter lowers."""
_BY_TYPE: Mapping[str, str] = {
    "informer": _SAMPLED,
    "time_series_transformer": _SAMPLED,
}
"""Types that no exporter lowers."""
_WITHOUT_OPTIMUM: Mapping[str, str] = {"moonshine_streaming": _SHORTENED}
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
    if transformers_family() != TRANSFORMERS5 and (reason := _BEFORE_5.get(model_type)):
        raise ExportError(
            f"{model_type} cannot be exported with this version of transformers: {reason}.",
            do="Use an environment with enginery[transformers5].",
        )
    if reason := _WITHOUT_OPTIMUM.get(model_type, _BY_TASK.get(task)):
        raise ExportError(
            f"{model_type} cannot be exported for {task} without Optimum: {reason}.",
            do="Use an environment with enginery[export], which has Optimum.",
        )
