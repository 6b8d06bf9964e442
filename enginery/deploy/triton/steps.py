"""Steps of the models in Triton's Python backend: texts to graph inputs, graph outputs to results.

They need numpy and tokenizers, but not ONNX Runtime.

>>> options = {"graph": "model.onnx", "pad_multiple": "16", "max_rows": "0", "profiles": ""}
>>> step = open_step(artifact.path, {"step": "tokenizer", **options})
>>> step({"text": np.array([b"warm"], object)}, {})["input_ids"].shape
(1, 16)

Both steps tokenize the texts, so that the second knows which rows of the outputs belong to which
text. Inputs, outputs and parameters are those of the Open Inference Protocol of `enginery serve`.
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
from enginery.runtime.engines.padding import dim_sizes, padded_sizes
from enginery.runtime.tasks import require_task
from enginery.runtime.tasks.results import is_finite, result_tensors
from enginery.runtime.tasks.task import ModelInputs, Row, Task, TaskOptions
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.text.batching import fill_rows

Arrays = Mapping[str, NDArray[Any]]
Step = Callable[[Arrays, Mapping[str, Any]], dict[str, NDArray[Any]]]

FILES = "artifact"
"""Folder beside model.py with the artifact's manifest, tokenizer and configuration."""

_IGNORED = (
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
    "triton_enable_empty_final_response",
)
"""Parameters that Triton's clients and front ends add to requests."""
_NOT_FINITE = "The model's precision is too low for this input; check with `enginery validate`."


@dataclass(frozen=True)
class TextSteps:
    """Preprocessing and postprocessing of a text task."""

    task: TextTask
    pad_multiple: int
    """Rows are padded to a multiple of this number of tokens, if the task can pad."""
    max_rows: int
    """Maximum number of rows per request; 0 for no limit."""
    profiles: tuple[Profile, ...] = ()
    """Profiles of the engine; empty if there is no engine."""

    def tokenize(self, inputs: Arrays, parameters: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs (rows, tokens), in the graph's data types.

        Raises:
            InputError: a text or a parameter cannot be used, or there are too many rows.
            ShapeError: the rows fit into no profile.
        """
        work, _ = self._preprocess(inputs, parameters)
        return self._feeds(work.rows)

    def answer(self, inputs: Arrays, parameters: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the task's results.

        Args:
            inputs: the inputs of `tokenize` and the graph's outputs.
            parameters: options of the task.

        Raises:
            InputError: a text or a parameter cannot be used, or the outputs have too few rows.
            CheckFailedError: an output or a result is NaN or infinite.
        """
        work, options = self._preprocess(inputs, parameters)
        names, count = graph_outputs(self.task), len(work.rows)
        if not set(self.task.outputs_read()) <= set(names):
            for row in work.rows:
                row.reads_raw = True
        outputs = {name: inputs[name][:count] for name in names}
        if any(len(array) < count for array in outputs.values()):
            shapes = ", ".join(f"{name} {array.shape}" for name, array in outputs.items())
            raise InputError(f"the texts have {count} rows, but the graph's outputs are {shapes}.")
        # NaN and infinity are checked below, without padding, which `split` removes.
        with np.errstate(invalid="ignore"):
            parts = self.task.split(work.rows, self._feeds(work.rows), outputs)
        # Checked before the results, because the argmax of NaNs is a valid label as well.
        _require_finite(parts, names)
        results = self.task.postprocess(work, parts, options)
        for index, result in enumerate(results):
            if not is_finite(result):
                raise CheckFailedError(f"result {index} is NaN or infinite.", do=_NOT_FINITE)
        return result_tensors(self.task.result_type, results)

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
            raise InputError(f"{' and '.join(columns)} is empty, expected at least one text.")
        task_parameters = {
            name: value for name, value in parameters.items() if name not in _IGNORED
        }
        options = self.task.Options.read(task_parameters, where="parameters.")
        return self.task.preprocess(texts, options), options

    def _feeds(self, rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
        inputs, count = self.task.record.inputs, len(rows)
        if self.max_rows and count > self.max_rows:
            raise InputError(
                f"the texts have {count} rows, expected at most {self.max_rows} in one request.",
                do="Send fewer or shorter texts.",
            )
        longest = max(1, *(row.tokens for row in rows))
        width = longest
        if self.task.can_pad:
            multiple = -(-longest // self.pad_multiple) * self.pad_multiple
            width = self._fit_width(max(longest, min(multiple, self.task.tokenizer.limit)), longest)
        if self.profiles:
            sizes = padded_sizes(self.profiles, {"batch": count, "sequence": width})
            # The batch is not padded: Triton's batcher fills it with rows of other requests.
            width = sizes["sequence"]
        fixed = next((spec.dims[0] for spec in inputs if isinstance(spec.dims[0], int)), 0)
        feeds = fill_rows(self.task.collate(rows, width), fixed)
        if self.profiles:
            choose_profile(self.profiles, dim_sizes(inputs, feeds))
        return feeds

    def _fit_width(self, width: int, longest: int) -> int:
        """Return the padded length, reduced to the maximum of the profiles.

        If the longest text fits into no profile, it is not padded; `choose_profile` reports it.
        """
        if not self.profiles:
            return width
        ends = [p.dims["sequence"].max for p in self.profiles if "sequence" in p.dims]
        fitting = [end for end in ends if end >= longest]
        return min(width, max(fitting)) if fitting else longest


def open_step(directory: Path, options: Mapping[str, str]) -> Step:
    """Return the step of a model in the repository.

    Args:
        directory: folder beside model.py with the artifact's files.
        options: parameters in the model's configuration: `step`, `graph`, `pad_multiple`,
            `max_rows`, `profiles`.

    Raises:
        ArtifactError: a file of the tokenizer is missing, or the task does not take texts.
    """
    manifest = Manifest.from_bytes(read_document(directory / MANIFEST))
    # Not `Artifact.open`, because the graphs are not in this folder.
    artifact = Artifact(directory, manifest)
    graph = artifact.graph(options["graph"])
    profiles = tuple(Profile.parse(text) for text in options["profiles"].split(";") if text.strip())
    steps = TextSteps(
        task=open_text_task(artifact, graph),
        pad_multiple=int(options["pad_multiple"]),
        max_rows=int(options["max_rows"]),
        profiles=profiles,
    )
    steps_by_name: dict[str, Step] = {"tokenizer": steps.tokenize, "answers": steps.answer}
    return steps_by_name[options["step"]]


def open_text_task(artifact: Artifact, graph: GraphRecord) -> TextTask:
    """Open the artifact's task; raise ArtifactError if it does not take texts."""
    task = require_task(artifact.manifest, graph).open(artifact, graph)
    if not isinstance(task, TextTask):
        raise ArtifactError(f"{artifact.path}: the task {task.verb} does not take texts.")
    return task


def graph_outputs(task: Task) -> tuple[str, ...]:
    """Return the names of the graph outputs that results with any options are computed from."""
    return tuple(task.graph_outputs) or task.outputs_read()


def _require_finite(rows: Sequence[Any], outputs: Sequence[str]) -> None:
    """Raise CheckFailedError if an output of a row has NaN or infinity.

    A score of -inf beside finite ones is valid: models use it to exclude labels or tokens.
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
                f"{name} {index} is not UTF-8: byte {error.start} of {len(value)}."
            ) from error
    return texts
