"""What predict's options mean for a model's task, and whether a row can be answered at all.

>>> find_problem((None,), ("text",))
'text is null'
"""

from __future__ import annotations

from collections.abc import Sequence

from enginery.core.artifact.artifact import Artifact
from enginery.core.datasets.batches import Values
from enginery.core.errors import ArtifactError, InputError, OptionError
from enginery.predict.config import PredictConfig
from enginery.runtime.providers.specification import ProviderSpec, parse_providers
from enginery.runtime.tasks import manifest_task, supported_tasks
from enginery.runtime.tasks.task import Task, TaskOptionError, TaskOptions
from enginery.runtime.text.tokenizer import check_texts

PAIR_LETTERS = 1_000_000
"""Of a text in a pair; all of it is tokenized, kilobytes for each token."""

_COLUMNS = {
    "text": "column",
    "image": "column",
    "text_pair": "pair_column",
    "question": "question_column",
    "context": "context_column",
}
"""The option that names the column of an input."""
_TASK_OPTIONS = {
    "top_k": "top_k",
    "activation": "activation",
    "aggregation": "aggregation",
    "prompt_name": "prompt_name",
    "max_tokens": "max_answer_tokens",
    "allow_none": "allow_no_answer",
}
"""The option of predict that is an option of a task."""


def require_task(artifact: Artifact, config: PredictConfig) -> type[Task]:
    """Return how the artifact is answered.

    Raises:
        ArtifactError: its task is not answered.
        OptionError: an option does not fit the task.
    """
    name = artifact.manifest.task
    task = manifest_task(artifact.manifest)
    if task is None:
        raise ArtifactError(
            f"{artifact.path} was exported for {name}; predict answers "
            f"{', '.join(supported_tasks())}."
        )
    read_options(task, config)
    return task


def column_names(task: type[Task], config: PredictConfig) -> tuple[str, ...]:
    """Return the columns that the task's inputs are read from.

    An input that no option names the column of is read from the column of its own name.
    """
    found = []
    for field in task.inputs:
        option = _COLUMNS.get(field.name)
        column = getattr(config, option) if option else field.name
        if column or not field.optional:
            found.append(column)
    return tuple(found)


def read_options(task: type[Task], config: PredictConfig) -> TaskOptions:
    """Return the options of a task.

    Raises:
        OptionError: the task does not take a value, or no pairs.
    """
    if config.pair_column and "text_pair" not in [field.name for field in task.inputs]:
        raise OptionError(
            f"pair_column is '{config.pair_column}', but the model does {' or '.join(task.tasks)}.",
            do="It is for models that classify two texts.",
            option="pair_column",
        )
    values = {
        name: getattr(config, option)
        for name, option in _TASK_OPTIONS.items()
        if name in task.Options.model_fields
    }
    try:
        return task.Options.read(values)
    except TaskOptionError as error:
        option = _TASK_OPTIONS[error.field]
        message = error.message.replace(error.field, option, 1)
        raise OptionError(message, option=option) from error


def providers_of(config: PredictConfig) -> tuple[ProviderSpec, ...]:
    """Return the providers that the options name; raise what `parse_providers` raises."""
    return parse_providers(config.provider, config.provider_option, default="cpu")


def find_problem(values: Values, names: Sequence[str]) -> str:
    """Return why a row cannot be answered; empty where it can.

    Args:
        values: what the row has in the columns of the task's inputs.
        names: the columns; lines and images have one whatever its name.
    """
    for name, value in zip(names, values, strict=False):
        if value is None:
            return f"{name} is null"
        if not isinstance(value, str):
            return f"{name} is a {type(value).__name__}, expected text"
        if not value.strip():
            return f"{name} is empty"
        if len(values) > 1 and len(value) > PAIR_LETTERS:
            return f"{name} has {len(value):,} characters, of a pair at most {PAIR_LETTERS:,}"
        try:
            check_texts([value])
        except InputError:
            return f"{name} holds a lone surrogate, which is no character"
    return ""


def own_message(task: type[Task], message: str) -> str:
    """Return the message of a list of one input as that of a row.

    `text 0 has no [MASK]` becomes `the text has no [MASK]`.
    """
    for name in (field.name for field in task.inputs):
        if message.startswith(f"{name} 0"):
            return f"the {name}{message.removeprefix(f'{name} 0')}"
    return message
