"""What the model is asked of a row, and whether a row can be asked at all.

>>> find_problem((None,), ("text",))
'text is null'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from enginery.core.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError, OptionError
from enginery.predict.config import PredictConfig
from enginery.predict.rows import Values
from enginery.predict.token_batches import WindowModel
from enginery.runtime.answers import MaskFillings
from enginery.runtime.model import ANSWERED_TASKS
from enginery.runtime.provider_wish import ProviderWish, parse_wishes
from enginery.runtime.tokenizer import check_texts

PAIR_LETTERS = 1_000_000
"""Of a text in a pair; all of it is tokenized, kilobytes for each token."""


def column_names(task: str, config: PredictConfig) -> tuple[str, ...]:
    """The columns that the model is asked."""
    if task == "question-answering":
        return config.question_column, config.context_column
    return (config.column, config.pair_column) if config.pair_column else (config.column,)


def require_task(artifact: Artifact, config: PredictConfig) -> str:
    """The artifact's task.

    Raises:
        ArtifactError: it is one that is not answered.
        OptionError: an option does not fit it.
    """
    task = artifact.manifest.task
    if task not in ANSWERED_TASKS:
        raise ArtifactError(
            f"{artifact.path} was exported for {task}; predict answers {', '.join(ANSWERED_TASKS)}."
        )
    if config.pair_column and task != "text-classification":
        raise OptionError(
            f"pair_column is '{config.pair_column}', but the model does {task}.",
            do="It is for models that classify two texts.",
        )
    if task == "question-answering" and config.top_k < 1:
        raise OptionError("top_k is 0, expected 1 or more answers to a question.")
    return task


def wishes_of(config: PredictConfig) -> tuple[ProviderWish, ...]:
    """The providers that are asked for; raises ProviderError or OptionError as `parse_wishes`."""
    return parse_wishes(config.provider, config.provider_option, default="cpu")


def ask_texts(
    model: WindowModel, task: str, inputs: Sequence[Any], config: PredictConfig
) -> Sequence[Any]:
    """One answer an input, of the kind that the task has; raises what the model raises."""
    if task == "feature-extraction":
        return list(model.embed(inputs, prompt_name=config.prompt_name))
    if task == "text-classification":
        return model.classify(inputs, top_k=config.top_k, activation=config.activation)
    if task == "token-classification":
        return model.tag(inputs, aggregation=config.aggregation)
    if task == "fill-mask":
        return model.fill(inputs, top_k=config.top_k)
    return model.answer(
        inputs, top_k=config.top_k, max_tokens=config.max_answer_tokens,
        allow_none=config.allow_no_answer,
    )  # fmt: skip


def find_problem(values: Values, names: Sequence[str]) -> str:
    """Why a row cannot be asked; empty where it can.

    Args:
        values: what the row has in the columns that are asked.
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


def is_finite(answer: Any) -> bool:
    """Whether a vector, or every score of an answer, is a number."""
    if isinstance(answer, np.ndarray):
        return bool(np.isfinite(answer).all())
    scored = getattr(answer, "labels", answer)
    if isinstance(answer, MaskFillings):
        scored = [filling for mask in answer.masks for filling in mask]
    return all(np.isfinite(found.score) for found in scored)


def own_message(message: str) -> str:
    """A row's own message: `text 0 has no [MASK]` speaks of a list of one."""
    for what in ("text", "image", "question", "context"):
        if message.startswith(f"{what} 0"):
            return f"the {what}{message.removeprefix(f'{what} 0')}"
    return message
