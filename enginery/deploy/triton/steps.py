"""What the models in Triton's Python backend do: texts to a graph's inputs, its outputs to results.

Takes arrays of a request and its parameters; needs numpy and tokenizers, no ONNX Runtime.

    >>> step = open_step(Path("minilm-tokenizer/1/artifact"), {"step": "tokenizer", …})
    >>> step({"text": np.array([b"The engine is warm."], object)}, {})["input_ids"].shape
    (1, 16)

Both steps make the same rows of the same texts, so that the second knows which outputs belong to
which text. Inputs, outputs and parameters are those of `enginery serve`'s Open Inference Protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import ArtifactError, CheckFailedError, InputError
from enginery.core.json_file import read_document
from enginery.core.shapes import Profile, choose_profile
from enginery.runtime.engines.profiles import dim_sizes, padded_sizes
from enginery.runtime.tasks import require_task
from enginery.runtime.tasks.task import ModelInputs, Row, TaskOptions
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.text.batching import fill_rows

Arrays = Mapping[str, NDArray[Any]]
Step = Callable[[Arrays, Mapping[str, Any]], dict[str, NDArray[Any]]]

FILES = "artifact"
"""The folder beside model.py with the artifact's manifest, tokenizer and configuration."""


_IGNORED = (
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
    "triton_enable_empty_final_response",
)
"""Parameters that Triton's clients and front ends send for themselves."""
_NOT_FINITE = "Its precision cannot hold this input; `enginery validate` says more."


@dataclass(frozen=True)
class TextSteps:
    """The texts of one model, and the graph that they are for."""

    task: TextTask
    pad_multiple: int
    """Rows are padded up to a multiple of so many tokens, where they can be padded."""
    max_rows: int
    """The most rows that the graph takes in a request; 0 for any number."""
    profiles: tuple[Profile, ...] = ()
    """What the rows have to fit; none where there is no engine."""

    def tokenize(self, inputs: Arrays, parameters: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs: (rows, tokens), of the graph's own types.

        Raises:
            InputError: a text or a parameter cannot be used, or there are too many rows.
            ShapeError: no profile takes the rows.
        """
        work, _ = self._preprocess(inputs, parameters)
        return self._feeds(work.rows)

    def answer(self, inputs: Arrays, parameters: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the task's results, from the inputs of `tokenize` and the graph's outputs.

        Raises:
            InputError: a text or a parameter cannot be used, or the outputs are of other rows.
            CheckFailedError: an output, a score or a vector is NaN or infinite.
        """
        work, options = self._preprocess(inputs, parameters)
        names, count = self.task.outputs_read(self.task.record), len(work.rows)
        outputs = {name: inputs[name][:count] for name in names}
        if any(len(array) < count for array in outputs.values()):
            found = ", ".join(f"{name} {array.shape}" for name, array in outputs.items())
            raise InputError(f"the texts make {count} rows, and the graph's outputs are {found}.")
        # What comes of infinity is an error of its own; padding is left out by `split`.
        with np.errstate(invalid="ignore"):
            parts = self.task.split(work.rows, self._feeds(work.rows), outputs)
        # Before the results: the largest of NaNs is a label, too, and no span of them is no answer.
        _require_finite(parts, names)
        results = self.task.postprocess(work, parts, options)
        for index, result in enumerate(results):
            if not self.task.is_finite(result):
                raise CheckFailedError(f"answer {index} is NaN or infinite.", do=_NOT_FINITE)
        return self.task.tensors(results)

    def _preprocess(
        self, inputs: Arrays, parameters: Mapping[str, Any]
    ) -> tuple[ModelInputs, TaskOptions]:
        columns = {
            field.name: _texts(field.name, inputs[field.name])
            for field in self.task.inputs
            if field.name in inputs or not field.optional
        }
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise InputError(f"inputs differ in length: {listed}.")
        parts = list(columns.values())
        texts: list[Any] = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
        if not texts:
            raise InputError(f"{' and '.join(columns)} is empty, expected a text or more.")
        given = {name: value for name, value in parameters.items() if name not in _IGNORED}
        options = self.task.Options.read(given, where="parameters.")
        return self.task.preprocess(texts, options), options

    def _feeds(self, rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
        inputs, count = self.task.record.inputs, len(rows)
        if self.max_rows and count > self.max_rows:
            raise InputError(
                f"the texts make {count} rows, and the graph takes {self.max_rows} at most in one "
                "request.",
                do="Send fewer texts, or shorter ones, in a request.",
            )
        longest = max(1, *(row.tokens for row in rows))
        width = longest
        if self.task.can_pad:
            multiple = -(-longest // self.pad_multiple) * self.pad_multiple
            width = self._within(max(longest, min(multiple, self.task.tokenizer.limit)), longest)
        if self.profiles:
            sizes = padded_sizes(self.profiles, {"batch": count, "sequence": width})
            # Rows that fill a batch cost what a text costs; Triton's batcher adds real ones.
            width = sizes["sequence"]
        fixed = next((spec.dims[0] for spec in inputs if isinstance(spec.dims[0], int)), 0)
        feeds = fill_rows(self.task.collate(rows, width), fixed)
        if self.profiles:
            choose_profile(self.profiles, dim_sizes(inputs, feeds))
        return feeds

    def _within(self, width: int, longest: int) -> int:
        """Return a width that a profile takes, where one takes the texts as they are.

        Texts that none takes stay as long as they are, for the error that says so.
        """
        if not self.profiles:
            return width
        ends = [p.dims["sequence"].max for p in self.profiles if "sequence" in p.dims]
        fitting = [end for end in ends if end >= longest]
        return min(width, max(fitting)) if fitting else longest


def open_step(directory: Path, options: Mapping[str, str]) -> Step:
    """Return the step that a model of the repository is.

    Args:
        directory: the artifact's files beside model.py.
        options: the model configuration's parameters: `step`, `graph`, `pad_multiple`,
            `max_rows`, `profiles`.

    Raises:
        ArtifactError: a file of the tokenizer is missing, or the task is not one of texts.
    """
    manifest = Manifest.from_bytes(read_document(directory / MANIFEST))
    # Its graphs are not here, so that it is no artifact to open; its files are checked on export.
    artifact = Artifact(directory, manifest)
    graph = artifact.graph(options["graph"])
    profiles = tuple(Profile.parse(text) for text in options["profiles"].split(";") if text.strip())
    steps = TextSteps(
        task=open_text_task(artifact, graph),
        pad_multiple=int(options["pad_multiple"]),
        max_rows=int(options["max_rows"]),
        profiles=profiles,
    )
    known: dict[str, Step] = {"tokenizer": steps.tokenize, "answers": steps.answer}
    return known[options["step"]]


def open_text_task(artifact: Artifact, graph: GraphRecord) -> TextTask:
    """Open the task of an artifact of texts; raise ArtifactError where it is none."""
    task = require_task(artifact.manifest, graph).open(artifact, graph)
    if not isinstance(task, TextTask):
        raise ArtifactError(f"{artifact.path}: {task.verb} takes no texts.")
    return task


def _require_finite(rows: Sequence[Any], outputs: Sequence[str]) -> None:
    """Raise CheckFailedError where what a graph gave for a row is NaN or infinite.

    Padding and rows that fill a batch are no longer there. A score of -inf among others is one,
    too: models give it to what is never the answer.
    """
    for index, row in enumerate(rows):
        arrays = row if isinstance(row, tuple) else (row,)
        for name, array in zip(outputs, arrays, strict=False):
            if not isinstance(array, np.ndarray):
                continue
            never = np.isneginf(array)
            if not np.isfinite(array[~never]).all() or never.all(axis=-1).any():
                raise CheckFailedError(
                    f"the model's output {name} has NaN or infinity in row {index}.", do=_NOT_FINITE
                )


def _texts(name: str, array: NDArray[Any]) -> list[str]:
    """Return the texts of a BYTES tensor (n,)."""
    if array.ndim != 1:
        raise InputError(f"input '{name}' has the shape {list(array.shape)}, expected [n].")
    texts = []
    for index, value in enumerate(array.tolist()):
        if not isinstance(value, str | bytes):
            raise InputError(f"{name} {index} is a {type(value).__name__}, expected a text.")
        try:
            texts.append(value if isinstance(value, str) else value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} {index} is no UTF-8: byte {error.start} of {len(value)}."
            ) from error
    return texts
