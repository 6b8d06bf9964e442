"""A few inputs answered with a finished artifact, for the end of a run.

    >>> ask(artifact, ("The engine is warm.", "The motor is hot."), progress=console)
    [{'input': 'The engine is warm.', 'nearest': 'The motor is hot.', 'cosine': '0.8'}, …]
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.progress import Progress
from enginery.runtime.model import ANSWERED_TASKS, Model, load_model

Row = dict[str, str]

_SHOWN = 3
"""Labels or fillings of one input; the rest says little."""


def ask(
    artifact: Artifact, inputs: Sequence[str], *, allow_failed: bool, progress: Progress
) -> list[Row]:
    """One row an input; none where the task is not answered from single texts or images.

    Raises:
        EngineryError: the artifact cannot answer these inputs.
    """
    task = artifact.manifest.task
    if not inputs:
        return []
    if task not in ANSWERED_TASKS or task == "question-answering":
        progress.say(f"ask: {task} is not answered from single inputs, skipped")
        return []
    started = time.monotonic()
    with load_model(artifact, allow_failed=allow_failed) as model:
        rows = _rows(model, list(inputs))
    progress.say(f"ask: {len(rows)} answers in {time.monotonic() - started:.2f} s")
    return rows


def _rows(model: Model, inputs: list[str]) -> list[Row]:
    found = model(inputs)
    if model.method in ("embed", "embed_images"):
        return _neighbours(inputs, found)
    if model.method == "tag":
        said = ["; ".join(f"{s.text} ({s.label} {s.score:.2f})" for s in spans) for spans in found]
    elif model.method == "fill":
        said = [
            "; ".join(f"{f.token} {f.score:.2f}" for f in fillings[:_SHOWN])
            for fillings in (answer.masks[0] for answer in found)
        ]
    else:
        said = [
            ", ".join(f"{label.label} {label.score:.2f}" for label in answer.labels[:_SHOWN])
            for answer in found
        ]
    return [{"input": text, "answer": words} for text, words in zip(inputs, said, strict=True)]


def _neighbours(inputs: list[str], vectors: NDArray[np.float32]) -> list[Row]:
    """Each input with its nearest other one."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = (vectors / norms) @ (vectors / norms).T
    rows = []
    for index, text in enumerate(inputs):
        row: Row = {"input": text, "embedding": f"{vectors.shape[1]} dims"}
        others = [other for other in range(len(inputs)) if other != index]
        if others:
            best = max(others, key=lambda other: similarity[index, other])
            row |= {"nearest": inputs[best], "cosine": f"{similarity[index, best]:.3f}"}
        rows.append(row)
    return rows
