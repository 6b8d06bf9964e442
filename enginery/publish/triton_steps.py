"""What the models in Triton's Python backend do: texts to a graph's inputs, its outputs to answers.

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

from enginery.core.artifact import MANIFEST, Artifact
from enginery.core.errors import CheckFailedError, InputError
from enginery.core.manifest import GraphRecord, Manifest
from enginery.core.profile_choice import choose_profile
from enginery.core.shapes import Profile
from enginery.publish.triton_parameters import Parameters
from enginery.publish.triton_tasks import NOT_FINITE, TASKS
from enginery.runtime.profiles import padded_sizes, sizes_of
from enginery.runtime.text_model import fill_rows
from enginery.runtime.text_rows import Asked, TextRows

Arrays = Mapping[str, NDArray[Any]]
Step = Callable[[Arrays, Mapping[str, Any]], dict[str, NDArray[Any]]]

FILES = "artifact"
"""The folder beside model.py with the artifact's manifest, tokenizer and configuration."""


@dataclass(frozen=True)
class TextSteps:
    """The texts of one model, and the graph that they are for."""

    rows: TextRows
    graph: GraphRecord
    pad_multiple: int
    """Rows are padded up to a multiple of so many tokens, where they can be padded."""
    max_rows: int
    """The most rows that the graph takes in a request; 0 for any number."""
    profiles: tuple[Profile, ...] = ()
    """What the rows have to fit; none where there is no engine."""

    def tokenize(self, inputs: Arrays, parameters: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """The graph's inputs: (rows, tokens), of the graph's own types.

        Raises:
            InputError: a text or a parameter cannot be used, or there are too many rows.
            ShapeError: no profile takes the rows.
        """
        asked = self._ask(inputs, parameters)
        return self._feeds(asked)

    def answer(self, inputs: Arrays, parameters: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """The task's answers, from the inputs of `tokenize` and the graph's outputs beside them.

        Raises:
            InputError: a text or a parameter cannot be used, or the outputs are of other rows.
            CheckFailedError: an output, a score or a vector is NaN or infinite.
        """
        asked = self._ask(inputs, parameters)
        feeds, count = self._feeds(asked), len(asked.encodings)
        names = TASKS[self.rows.task].graph_outputs(self.graph)
        outputs = {name: inputs[name][:count] for name in names}
        if any(len(array) < count for array in outputs.values()):
            found = ", ".join(f"{name} {array.shape}" for name, array in outputs.items())
            raise InputError(f"the texts make {count} rows, and the graph's outputs are {found}.")
        # Padding to fill the batch is behind the rows, and `rows` looks at no more than those.
        kept = {name: array[:count] for name, array in feeds.items()}
        with np.errstate(invalid="ignore"):  # what comes of infinity is an error of its own
            found_rows = self.rows.rows(
                asked.encodings, kept, outputs, prompt_tokens=asked.prompt_tokens
            )
        # Before the answers: the largest of NaNs is a label, too, and no span of them is no answer.
        _require_finite(found_rows, names)
        answers = TASKS[self.rows.task].arrays(asked.finish(found_rows))
        for name, array in answers.items():
            if array.dtype == np.float32 and not np.isfinite(array).all():
                raise CheckFailedError(f"the model's {name} is NaN or infinite.", do=NOT_FINITE)
        return answers

    def _ask(self, inputs: Arrays, parameters: Mapping[str, Any]) -> Asked:
        task = TASKS[self.rows.task]
        columns = {
            name: _texts(name, inputs[name])
            for name, optional in task.inputs
            if name in inputs or not optional
        }
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise InputError(f"inputs differ in length: {listed}.")
        parts = list(columns.values())
        texts: list[Any] = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
        if not texts:
            raise InputError(f"{' and '.join(columns)} is empty, expected a text or more.")
        given = Parameters(parameters)
        truncate = given.flag("truncate", default=True)
        asked = task.ask(self.rows, texts, given)
        given.end()
        cut = [e for e in asked.encodings if e.overflowing]
        if not truncate and cut and self.rows.task != "question-answering":
            raise InputError(
                f"{len(cut)} of {len(texts)} texts have more than {self.rows.tokenizer.limit} "
                "tokens, and truncate is false."
            )
        return asked

    def _feeds(self, asked: Asked) -> dict[str, NDArray[Any]]:
        inputs, count = self.graph.inputs, len(asked.encodings)
        if self.max_rows and count > self.max_rows:
            raise InputError(
                f"the texts make {count} rows, and the graph takes {self.max_rows} at most in one "
                "request.",
                do="Send fewer texts, or shorter ones, in a request.",
            )
        longest = max(1, *map(len, asked.encodings))
        width = longest
        if self.rows.tokenizer.can_pad(inputs):
            multiple = -(-longest // self.pad_multiple) * self.pad_multiple
            width = self._within(max(longest, min(multiple, self.rows.tokenizer.limit)), longest)
        if self.profiles:
            sizes = padded_sizes(self.profiles, {"batch": count, "sequence": width})
            # Rows that fill a batch cost what a text costs; Triton's batcher adds real ones.
            width = sizes["sequence"]
        fixed = next((spec.dims[0] for spec in inputs if isinstance(spec.dims[0], int)), 0)
        feeds = fill_rows(self.rows.tokenizer.feeds(asked.encodings, inputs, width=width), fixed)
        if self.profiles:
            choose_profile(self.profiles, sizes_of(inputs, feeds))
        return feeds

    def _within(self, width: int, longest: int) -> int:
        """Padding must not lead out of the profiles that take the texts as they are.

        Texts that none takes stay as long as they are, for the error that says so.
        """
        if not self.profiles:
            return width
        ends = [p.dims["sequence"].max for p in self.profiles if "sequence" in p.dims]
        fitting = [end for end in ends if end >= longest]
        return min(width, max(fitting)) if fitting else longest


def open_step(directory: Path, options: Mapping[str, str]) -> Step:
    """The step that a model of the repository is.

    Args:
        directory: the artifact's files beside model.py.
        options: the model configuration's parameters: `step`, `graph`, `pad_multiple`,
            `max_rows`, `profiles`.

    Raises:
        ArtifactError: a file of the tokenizer is missing.
    """
    manifest = Manifest.from_bytes((directory / MANIFEST).read_bytes())
    # Its graphs are not here, so that it is no artifact to open; its files are checked on export.
    artifact = Artifact(directory, manifest)
    graph = artifact.graph(options["graph"])
    profiles = tuple(Profile.parse(text) for text in options["profiles"].split(";") if text.strip())
    steps = TextSteps(
        rows=TextRows.read(artifact, graph),
        graph=graph,
        pad_multiple=int(options["pad_multiple"]),
        max_rows=int(options["max_rows"]),
        profiles=profiles,
    )
    known: dict[str, Step] = {"tokenizer": steps.tokenize, "answers": steps.answer}
    return known[options["step"]]


def _require_finite(rows: Sequence[Any], outputs: Sequence[str]) -> None:
    """Raises CheckFailedError where what a graph gave for a row is NaN or infinite.

    Padding and rows that fill a batch are no longer there. A score of -inf among others is one,
    too: models give it to what is never the answer.
    """
    for index, row in enumerate(rows):
        arrays = row if isinstance(row, tuple) else (row,)
        for name, array in zip(outputs, arrays, strict=True):
            never = np.isneginf(array)
            if not np.isfinite(array[~never]).all() or never.all(axis=-1).any():
                raise CheckFailedError(
                    f"the model's output {name} has NaN or infinity in row {index}.", do=NOT_FINITE
                )


def _texts(name: str, array: NDArray[Any]) -> list[str]:
    """The texts of a BYTES tensor (n,)."""
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
