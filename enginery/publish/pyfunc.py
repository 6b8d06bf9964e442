"""MLflow's loader of published artifacts: predict texts, images or audio without PyTorch.

    model = mlflow.pyfunc.load_model("models:/minilm/1")
    model.predict(["The engine is warm."]).shape  # (1, 384)

MLflow reads the name of this module from the model's `MLmodel` file and calls `_load_pyfunc`. The
results are those of `load_model`, in plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError, InputError
from enginery.core.options import options_from
from enginery.runtime.model import Model, load_model
from enginery.runtime.tasks.results import to_plain
from enginery.runtime.tasks.task import Task


@dataclass(frozen=True)
class PyfuncConfig:
    """Options of the model, MLflow's `model_config`."""

    providers: str = ""
    """Execution providers in order of preference, `tensorrt,cuda,cpu`; empty for the variable
    `ENGINERY_PROVIDERS`, or the CPU if it is not set."""
    allow_fallback: bool = False
    """Use the next provider if the first one is not available."""
    allow_failed: bool = False
    """Accept an artifact whose validation failed."""
    threads: int = 0
    """Intra-op threads; 0 for ONNX Runtime's choice."""


class PyfuncModel:
    """Python model that MLflow wraps."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Predict each row.

        Args:
            model_input: a pandas DataFrame or a dict with the task's columns; a list of dicts; or a
                list of texts, of images, of audio, or of (question, context).
            params: options of the task: `top_k`, `activation`, …

        Returns:
            Embeddings as float32 (rows, dim). For other tasks a list with one result per row, as
            JSON values: `to_dict` of the results of `load_model`.

        Raises:
            InputError: a column is missing, or the task does not accept a value.
        """
        rows = _rows(model_input, type(self.model.definition))
        return to_plain(self.model(rows, **(params or {})))


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any] | None = None) -> PyfuncModel:
    """Open the artifact for MLflow; see `PyfuncConfig` for `model_config`.

    Raises:
        OptionError: an option of `model_config` is unknown.
        EngineryError: the artifact cannot be opened, or cannot run with these options.
    """
    config = options_from(PyfuncConfig, "mlflow", model_config or {})
    chosen = {field.name: getattr(config, field.name) for field in fields(config)}
    model = load_model(Path(data_path), **chosen)
    if model.definition.runs_in_steps:
        raise ArtifactError(f"MLflow models of the task {model.task} are not supported.")
    return PyfuncModel(model)


def _rows(model_input: Any, task: type[Task]) -> list[Any]:
    """Return the rows as the task takes them."""
    if hasattr(model_input, "columns"):  # a DataFrame or a lookalike
        names = list(model_input.columns)
        values = [model_input.iloc[:, index].tolist() for index in range(len(names))]
        # MLflow turns a dict of lists into one row.
        if all(len(column) == 1 and isinstance(column[0], list) for column in values):
            values = [column[0] for column in values]
        if names == [0]:  # as pandas names the column of a list
            return _column(values[0], task)
        return _from_columns(dict(zip(map(str, names), values, strict=True)), task)
    if isinstance(model_input, Mapping):
        return _from_columns(
            {str(name): _as_list(value) for name, value in model_input.items()}, task
        )
    rows = _as_list(model_input)
    if rows and all(isinstance(row, Mapping) for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        return _from_columns({name: [row.get(name) for row in rows] for name in names}, task)
    if len(task.inputs) > 1:  # JSON has lists for tuples
        rows = [tuple(row) if isinstance(row, list) else row for row in rows]
    return _column(rows, task)


def _from_columns(columns: Mapping[str, Sequence[Any]], task: type[Task]) -> list[Any]:
    required = _required_names(task)
    names = [field.name for field in task.inputs]
    if missing := [name for name in required if name not in columns]:
        do = f"Add {' and '.join(missing)}."
        if len(names) == 1:  # of several columns, MLflow passes on the first alone
            do = f"Name the first column {names[0]}, or pass a list."
        raise InputError(
            f"the input has the columns {', '.join(columns) or 'none'}, "
            f"expected {', '.join(names)}.",
            do=do,
        )
    present = [columns[name] for name in names if name in columns]
    if len(present) == 1:
        return _column(present[0], task)
    if len({len(column) for column in present}) > 1:
        raise InputError("the input's columns differ in length, expected one value per row.")
    # A row without a second text is a single text, not a pair.
    return [
        row[0] if len(required) == 1 and _is_missing(row[1]) else row
        for row in zip(*present, strict=True)
    ]


def _required_names(task: type[Task]) -> list[str]:
    return [field.name for field in task.inputs if not field.optional]


def _column(values: Iterable[Any], task: type[Task]) -> list[Any]:
    # Missing values of pandas are floats.
    rows = list(values)
    for index, value in enumerate(rows):
        if _is_missing(value):
            raise InputError(f"row {index} has no {task.inputs[0].name}: it is {value!r}.")
        if task.modality == "text" and not isinstance(value, str | tuple):
            shown = f"{type(value).__name__} {value!r}"
            raise InputError(f"row {index} is {shown:.80}, expected a text.")
    return rows


def _is_missing(value: Any) -> bool:
    """Return True for None and NaN. NaN is not equal to itself; arrays are never missing."""
    return value is None or (isinstance(value, float) and value != value)  # noqa: PLR0124


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str | bytes):
        return [value]
    return value.tolist() if hasattr(value, "tolist") and value.ndim == 1 else list(value)
