"""Sample predictions with a finished artifact, for the end of a run.

>>> texts = ("The engine is warm.", "The motor is hot.")
>>> [list(sample.row()) for sample in predict_samples(artifact, texts)]
[['input', 'embedding', 'nearest', 'cosine'], ['input', 'embedding', 'nearest', 'cosine']]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import EngineryError, InputError
from enginery.core.progress import SILENT, Progress
from enginery.recipe import Recipe
from enginery.runtime.model import load_model
from enginery.runtime.tasks import TASKS, manifest_task
from enginery.runtime.tasks.examples import inputs_from_sentences
from enginery.runtime.tasks.results import VECTOR, named_values
from enginery.runtime.tasks.task import Task


@dataclass(frozen=True)
class SamplePrediction:
    """One input and the model's prediction for it."""

    input: str
    words: dict[str, str]
    """The prediction in words, by column heading."""
    values: dict[str, Any]
    """The prediction as JSON values."""

    def row(self) -> dict[str, str]:
        """Return the prediction as a row of a table."""
        return {"input": self.input, **self.words}

    def as_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        return {"input": self.input, **self.values}


def builtin_inputs(artifact: Artifact, *, progress: Progress = SILENT) -> tuple[str, ...]:
    """Return the built-in recipe's sentences as inputs of the artifact's task.

    The result is empty if the task takes more than single texts or generates, which is reported as
    progress, and for images and audio, because none are built in.
    """
    task = manifest_task(artifact.manifest)
    if task is not None and task.modality != "text":
        return ()
    if task is None or not _is_single(task):
        progress.say(f"ask: skipped, {artifact.manifest.task} takes more than single texts")
        return ()
    try:
        opened = task.open(artifact, artifact.manifest.graphs[0])
    except EngineryError as error:
        progress.say(f"ask: skipped, {error.message}")
        return ()
    inputs = inputs_from_sentences(opened, Recipe.default().ask)
    if not inputs:
        progress.say(f"ask: skipped, no built-in input is for {artifact.manifest.task}")
    return inputs


def predict_samples(
    artifact: Artifact,
    inputs: Sequence[str],
    *,
    allow_failed: bool = False,
    progress: Progress = SILENT,
) -> list[SamplePrediction]:
    """Return one prediction per input, in their order.

    Raises:
        InputError: the task takes more than single texts or images, or an input cannot be used.
        EngineryError: the artifact cannot run.
    """
    if not inputs:
        return []
    task = manifest_task(artifact.manifest)
    if task is None or not _is_single(task):
        single = (
            name
            for definition in TASKS.values()
            if _is_single(definition)
            for name in definition.tasks
        )
        raise InputError(
            f"inputs were given to ask, but {artifact.manifest.task} takes more than single texts, "
            "images or audio.",
            do=f"Leave them out; they are for {', '.join(dict.fromkeys(single))}.",
        )
    started = time.monotonic()
    with load_model(artifact, allow_failed=allow_failed) as model:
        results = model(list(inputs))
        samples = describe_results(model.definition, inputs, results)
    progress.say(f"ask: {len(samples)} answers in {time.monotonic() - started:.2f} s")
    return samples


def describe_results(task: Task, inputs: Sequence[str], results: Any) -> list[SamplePrediction]:
    """Describe results in words and as values; a vector also by its nearest neighbour."""
    if isinstance(results, np.ndarray):
        return _describe_vectors(task, inputs, results)
    return [
        SamplePrediction(
            text, {"answer": task.describe(result)}, named_values(task.result_type, result)
        )
        for text, result in zip(inputs, results, strict=True)
    ]


def _describe_vectors(
    task: Task, inputs: Sequence[str], vectors: NDArray[np.float32]
) -> list[SamplePrediction]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)  # a text is not its own neighbour
    samples = []
    for text, vector, row in zip(inputs, vectors, cosines, strict=True):
        words = {VECTOR: task.describe(vector)}
        values: dict[str, Any] = {"dims": len(vector)}
        if len(inputs) > 1:
            best = int(row.argmax())
            words |= {"nearest": inputs[best], "cosine": f"{row[best]:.3f}"}
            values |= {"nearest": inputs[best], "cosine": round(float(row[best]), 6)}
        samples.append(SamplePrediction(text, words, values))
    return samples


def _is_single(task: type[Task]) -> bool:
    """Return True if one text, image or audio is an input."""
    return sum(not field.optional for field in task.inputs) == 1
