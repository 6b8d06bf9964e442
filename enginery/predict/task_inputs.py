"""Translate predict's options into a task's input columns and options; check a row's values.

>>> find_input_problem((None,), ("text",))
'text is null'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.datasets.batches import Values, is_valid_text
from enginery.core.errors import ArtifactError, OptionError
from enginery.predict.config import MAX_ROWS, WINDOW_TEXTS, PredictConfig
from enginery.predict.generation import read_generation_options
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.specification import ProviderSpec, parse_providers
from enginery.runtime.tasks import manifest_tasks, supported_tasks
from enginery.runtime.tasks.generate import Generate
from enginery.runtime.tasks.task import Task, TaskOptionError, TaskOptions
from enginery.runtime.tasks.views import VIEWS
from enginery.runtime.tasks.zero_shot import split_labels
from enginery.runtime.text.batching import GPU_MAX_ROWS

MAX_PAIR_CHARACTERS = 1_000_000
"""Maximum length of a text in a pair. Texts of a pair are tokenized whole, before they are
truncated, and an encoding takes kilobytes per token."""

_COLUMNS = {
    "text": "column",
    "image": "column",
    "audio": "column",
    "text_pair": "pair_column",
    "question": "question_column",
    "context": "context_column",
}
"""Input of a task -> option with the name of its column."""
_OTHER_NAMES = {"max_tokens": "max_answer_tokens", "allow_none": "allow_no_answer"}
"""Option of a task -> option of predict, where their names differ."""


def require_task(artifact: Artifact, config: PredictConfig) -> type[Task]:
    """Return the class of the artifact's task.

    Raises:
        ArtifactError: the task is not supported.
        OptionError: an option does not fit the task.
    """
    name = artifact.manifest.task
    tasks = manifest_tasks(artifact.manifest)
    if not tasks:
        raise ArtifactError(
            f"{artifact.path} was exported for {name}, expected one of "
            f"{', '.join(supported_tasks())}.",
            do="For the graph's own outputs, name an .npz file: --out results.npz",
        )
    # A graph for texts and images embeds the images of a folder, and the texts of other inputs.
    wanted = "image" if config.format == "images" else tasks[0].modality
    task = next((task for task in tasks if task.modality == wanted), tasks[0])
    task = choose_view(task, config)
    read_options(task, config)
    return task


def choose_view(task: type[Task], config: PredictConfig) -> type[Task]:
    """Return the view of a task that the options name, or the task itself.

    Raises:
        OptionError: the task has no such view.
    """
    if config.vectors == "dense":
        return task
    view = VIEWS[f"embed_{config.vectors}"]
    if task is not view.of:
        raise OptionError(
            f"option 'vectors' is {config.vectors}, but the model {task.purpose}.",
            do=f"Leave it out; it is for models for {' or '.join(view.of.tasks)}.",
            option="vectors",
        )
    return view


def column_names(task: type[Task], config: PredictConfig) -> tuple[str, ...]:
    """Return the columns that the task's inputs are read from.

    If no option sets the column of an input, it is the one with the input's name.
    """
    columns = []
    for field in task.inputs:
        option = _COLUMNS.get(field.name)
        column = getattr(config, option) if option else field.name
        if column or not field.optional:
            columns.append(column)
    return tuple(columns)


def read_options(task: type[Task], config: PredictConfig) -> TaskOptions:
    """Return the options of a task.

    Raises:
        OptionError: the task does not accept a value, or does not take pairs.
    """
    if issubclass(task, Generate):
        for option in ("return_timestamps", "chunk_length_s"):
            if value := getattr(config, option):
                raise OptionError(
                    f"option '{option}' is '{value}', but the model generates text.",
                    do=f"It is for CTC models. Whisper's is --generation {option}=…",
                    option=option,
                )
        return read_generation_options(config)
    if config.pair_column and "text_pair" not in [field.name for field in task.inputs]:
        raise OptionError(
            f"option 'pair_column' is '{config.pair_column}', but the model does "
            f"{' or '.join(task.tasks)}.",
            do="Leave it out; it is for models that classify pairs of texts.",
            option="pair_column",
        )
    if config.generation:
        raise OptionError(
            f"option 'generation' is given, but the model does {' or '.join(task.tasks)}.",
            do="Leave it out; it is for models that generate texts.",
            option="generation",
        )
    for option, is_given, purpose in (
        ("candidate_labels", bool(config.candidate_labels), "classify texts or images"),
        ("dimensions", bool(config.dimensions), "embed"),
        ("dtype", config.dtype != "float32", "embed"),
        ("return_timestamps", bool(config.return_timestamps), "transcribe with CTC"),
        ("chunk_length_s", bool(config.chunk_length_s), "transcribe with CTC"),
    ):
        if is_given and option not in task.Options.model_fields:
            raise OptionError(
                f"option '{option}' is given, but the model {task.purpose}.",
                do=f"Leave it out; it is for models that {purpose}.",
                option=option,
            )
    values = {
        name: getattr(config, _option_name(name))
        for name in task.Options.model_fields
        if hasattr(config, _option_name(name))  # predict does not have all of them
    }
    # Options of a task have the types of JSON, and null for all dimensions and the model's labels.
    values = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    if len(config.candidate_labels) == 1:
        values["candidate_labels"] = split_labels(config.candidate_labels[0])
    absent = ("dimensions", "candidate_labels", "hypothesis_template", "return_timestamps")
    values |= {name: values.get(name) or None for name in absent}
    if values.get("threshold") == PredictConfig.threshold:
        del values["threshold"]
    try:
        return task.Options.read(values)
    except TaskOptionError as error:
        option = _option_name(error.field)
        message = error.message.replace(error.field, option, 1)
        raise OptionError(message, option=option) from error


def _option_name(name: str) -> str:
    """Return predict's name of an option of a task."""
    return _OTHER_NAMES.get(name, name)


def provider_specs(config: PredictConfig) -> tuple[ProviderSpec, ...]:
    """Return the providers that the options name.

    Raises:
        OptionError: a provider or an option of it is unknown.
    """
    return parse_providers(config.providers, config.provider_option, default="cpu")


def window_rows(task: type[Task], config: PredictConfig) -> int:
    """Return the number of rows of a window.

    Raises:
        OptionError: a provider or an option of it is unknown.
    """
    if config.window:
        return config.window
    if task.modality == "text" and not task.runs_in_steps:
        return WINDOW_TEXTS
    # Sorting gains little here, and a window of these takes long: small ones show sooner how far
    # the run is.
    on_cpu = provider_specs(config)[0].full_name == CPU
    return 2 * max(config.batch_rows, MAX_ROWS if on_cpu or task.runs_in_steps else GPU_MAX_ROWS)


def find_input_problem(values: Values, names: Sequence[str]) -> str:
    """Return why the model cannot take a row; empty if it can.

    Args:
        values: the row's values in the columns of the task's inputs.
        names: names of the columns.
    """
    for name, value in zip(names, values, strict=False):
        if value is None:
            return f"{name} is null"
        if not isinstance(value, str):
            return f"{name} is a {type(value).__name__}, expected text"
        if not value.strip():
            return f"{name} is empty"
        if len(values) > 1 and len(value) > MAX_PAIR_CHARACTERS:
            return (
                f"{name} has {len(value):,} characters, expected at most {MAX_PAIR_CHARACTERS:,} "
                "for a text of a pair"
            )
        if not is_valid_text(value):
            return f"{name} contains a lone surrogate, which is not a character"
    return ""


def are_usable_texts(values: Sequence[Any]) -> bool:
    """Return True if no single text has a problem that `find_input_problem` finds.

    This is faster than to ask for each of them.
    """
    try:
        joined = "".join(values)
    except TypeError:
        return False
    return is_valid_text(joined) and all(map(str.strip, values))


def row_message(task: type[Task], message: str) -> str:
    """Return a task's message about its only input without the input's index.

    `text 0 has no [MASK]` becomes `the text has no [MASK]`.
    """
    for name in (field.name for field in task.inputs):
        if message.startswith(f"{name} 0"):
            return f"the {name}{message.removeprefix(f'{name} 0')}"
    return message
