"""A few inputs answered with a finished artifact, for the end of a run.

>>> found = ask(artifact, ("The engine is warm.", "The motor is hot."), progress=console)
>>> [answer.row() for answer in found]
[{'input': 'The engine is warm.', 'nearest': 'The motor is hot.', 'cosine': '0.800'}, …]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import EngineryError, InputError
from enginery.core.progress import SILENT, Progress
from enginery.recipe import Recipe
from enginery.runtime.model import ANSWERED_TASKS, Model, load_model
from enginery.runtime.tokenizer import TextTokenizer

_SHOWN = 3
"""Labels or fillings of one input; the rest says little."""

_SINGLE = tuple(task for task in ANSWERED_TASKS if task != "question-answering")


@dataclass(frozen=True)
class Answer:
    """One input and what the model says of it."""

    input: str
    words: dict[str, str]
    """For people, by the heading of a column."""
    values: dict[str, Any]
    """For programs: plain JSON values."""

    def row(self) -> dict[str, str]:
        """The answer as a row of a table."""
        return {"input": self.input, **self.words}

    def as_json(self) -> dict[str, Any]:
        """The answer as JSON values."""
        return {"input": self.input, **self.values}


def builtin_inputs(artifact: Artifact, *, progress: Progress = SILENT) -> tuple[str, ...]:
    """The built-in recipe's sentences, as this artifact's task takes them.

    For fill-mask, the model's own mask stands for the last word. Empty, with a line that says why,
    where the task is not answered from single texts; empty for images, of which none are built in.
    """
    task = artifact.manifest.task
    if any(spec.name == "pixel_values" for spec in artifact.manifest.graphs[0].inputs):
        return ()
    if task not in _SINGLE:
        progress.say(f"ask: skipped, {task} is not answered from single texts")
        return ()
    try:
        mask = TextTokenizer.open(artifact.path).mask_token
    except EngineryError as error:
        progress.say(f"ask: skipped, {error.message}")
        return ()
    sentences = Recipe.default().ask
    if task != "fill-mask":
        return sentences
    return tuple(f"{sentence.rpartition(' ')[0]} {mask}." for sentence in sentences)


def ask(
    artifact: Artifact,
    inputs: Sequence[str],
    *,
    allow_failed: bool = False,
    progress: Progress = SILENT,
) -> list[Answer]:
    """One answer an input, in their order.

    Raises:
        InputError: the task is not answered from single texts or images, or an input cannot be
            used.
        EngineryError: the artifact cannot answer.
    """
    task = artifact.manifest.task
    if not inputs:
        return []
    if task not in _SINGLE:
        raise InputError(
            f"inputs were given to ask, but {task} is not answered from single texts or images.",
            do=f"Leave them out; the tasks that are: {', '.join(_SINGLE)}.",
        )
    started = time.monotonic()
    with load_model(artifact, allow_failed=allow_failed) as model:
        answers = _answers(model, list(inputs))
    progress.say(f"ask: {len(answers)} answers in {time.monotonic() - started:.2f} s")
    return answers


def _answers(model: Model, inputs: list[str]) -> list[Answer]:
    found = model(inputs)
    if model.method in ("embed", "embed_images"):
        return _neighbours(inputs, found)
    if model.method == "tag":
        said = ["; ".join(f"{s.text} ({s.label} {s.score:.2f})" for s in spans) for spans in found]
        values = [{"spans": [span.to_dict() for span in spans]} for spans in found]
    elif model.method == "fill":
        said = [
            " | ".join(
                "; ".join(f"{f.token} {f.score:.2f}" for f in fillings[:_SHOWN])
                for fillings in answer.masks
            )
            for answer in found
        ]
        values = [answer.to_dict() for answer in found]
    else:
        said = [
            ", ".join(f"{label.label} {label.score:.2f}" for label in answer.labels[:_SHOWN])
            for answer in found
        ]
        values = [answer.to_dict() for answer in found]
    return [
        Answer(text, {"answer": words or "nothing found"}, value)
        for text, words, value in zip(inputs, said, values, strict=True)
    ]


def _neighbours(inputs: list[str], vectors: NDArray[np.float32]) -> list[Answer]:
    """Each input with its nearest other one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    cosines = units @ units.T
    dims = int(vectors.shape[1])
    answers = []
    for index, text in enumerate(inputs):
        words = {"embedding": f"{dims} dims"}
        values: dict[str, Any] = {"dims": dims}
        others = [other for other in range(len(inputs)) if other != index]
        if others:
            best = max(others, key=lambda other: cosines[index, other])
            cosine = float(cosines[index, best])
            words |= {"nearest": inputs[best], "cosine": f"{cosine:.3f}"}
            values |= {"nearest": inputs[best], "cosine": round(cosine, 6)}
        answers.append(Answer(text, words, values))
    return answers
