"""Test cases of real inputs: the user's texts or images, or built-in ones.

They pass through the artifact's own tokenizer or image processor, as in serving. Graphs that take
neither texts nor images (audio, decoders) have no such cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.datasets.images import list_images
from enginery.core.datasets.labels import read_labelled_texts
from enginery.core.datasets.samples import (
    ARRAY_SUFFIXES,
    load_arrays,
    read_arrays,
    read_texts,
)
from enginery.core.errors import ArtifactError, InputError, ShapeError
from enginery.core.model.feeds import Feeds
from enginery.runtime.engines.padding import dim_sizes
from enginery.runtime.sample_inputs import (
    SENTENCES,
    ImageFeeder,
    Text,
    TextFeeder,
    fixed_batch,
    pad_batch,
    synthetic_images,
    takes_images,
    takes_real_inputs,
)
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.config import ValidateConfig

__all__ = ["check_data_usable", "real_cases", "takes_real_inputs"]

_ROWS = 16
"""Texts per case: enough to differ in length, few enough for any machine."""
_IMAGES = 4

QUESTION = "When is the museum closed?"
CONTEXT = (
    "The museum stands on the north bank of the river. It is closed on Mondays, but its garden "
    "stays open every day until nine in the evening, and entry to both is free for children."
)
QUESTIONS = tuple((QUESTION, context) for context in (CONTEXT, *SENTENCES))
"""Pairs (question, context); only the first context has the answer."""


def real_cases(
    artifact: Artifact, record: GraphRecord, config: ValidateConfig
) -> tuple[list[ValidationCase], list[str]]:
    """Return the cases of real inputs for a graph, and notes on what was not compared.

    Raises:
        InputError: the user's data cannot be read or do not fit the graph.
        ArtifactError: the tokenizer or processor for the user's data cannot be loaded.
    """
    if _is_arrays(config):
        return _array_cases(record, config), []
    if not takes_real_inputs(artifact, record):
        return [], []
    make = _image_cases if takes_images(record) else _text_cases
    try:
        return make(artifact, record, config), []
    except (ArtifactError, InputError) as error:
        if config.data:
            raise
        return [], [f"no real inputs were compared: {error.message}"]


def check_data_usable(artifact: Artifact, config: ValidateConfig) -> None:
    """Check that a graph of the artifact takes the given data.

    Raises:
        InputError: none does.
    """
    graphs = artifact.manifest.graphs
    if _is_arrays(config):
        return
    if config.data and not any(takes_real_inputs(artifact, record) for record in graphs):
        names = sorted(spec.name for spec in graphs[0].inputs)
        raise InputError(
            f"data '{config.data}' cannot be used: the artifact takes {', '.join(names)}, and has "
            "no tokenizer or image processor for them.",
            do="Leave the data out, the shape sweep still compares the outputs; or save an array "
            "for each input as .npz.",
        )


def _is_arrays(config: ValidateConfig) -> bool:
    return Path(config.data).suffix.lower() in ARRAY_SUFFIXES


def _array_cases(record: GraphRecord, config: ValidateConfig) -> list[ValidationCase]:
    """Return cases of rows; or, if the first dim of some input is not the batch, one of all."""
    path = Path(config.data).expanduser()
    names = [spec.name for spec in record.inputs]
    batches = {spec.dims[:1] for spec in record.inputs}
    if len(batches) > 1 or () in batches:
        feeds = _fit_arrays(path, record, load_arrays(path, names))
        return [ValidationCase("arrays", "real", lambda: feeds)]

    def feed(part: list[Feeds]) -> Feeds:
        arrays = {name: np.concatenate([row[name] for row in part]) for name in names}
        return _fit_arrays(path, record, arrays)

    cases = _cases("rows", read_arrays(path, names, rows=config.rows), _ROWS, record, feed)
    cases[0].make()  # so that errors show before the reference starts
    return cases


def _fit_arrays(path: Path, record: GraphRecord, arrays: Feeds) -> Feeds:
    """Return arrays in the dtypes of a graph's inputs.

    Raises:
        InputError: an array has another rank or another fixed size than its input, two of them have
            different sizes of one dim, or values would change in the input's dtype.
    """
    feeds = {}
    for spec in record.inputs:
        array = arrays[spec.name]
        if array.ndim != len(spec.dims):
            raise InputError(
                f"data '{path}': {spec.name} has the shape {array.shape}, the graph takes {spec}."
            )
        dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
        fits = array.dtype.kind in "biuf"
        if fits:
            with np.errstate(invalid="ignore", over="ignore"):
                feeds[spec.name] = array.astype(dtype)
            fits = dtype.kind == "f" or np.array_equal(feeds[spec.name], array)
        if not fits:
            raise InputError(
                f"data '{path}': {spec.name} has values of {array.dtype} that {dtype} cannot hold; "
                f"the graph takes {spec}."
            )
    try:
        dim_sizes(record.inputs, feeds)
    except ShapeError as error:
        raise InputError(f"data '{path}': {error.message}") from error
    return feeds


def _text_cases(
    artifact: Artifact, record: GraphRecord, config: ValidateConfig
) -> list[ValidationCase]:
    feeder = TextFeeder.open(artifact, record)
    what, texts, labels = "sentences", list[Text](SENTENCES), list[int]()
    if config.data:
        path, column = Path(config.data).expanduser(), config.column
        what = "rows"
        if config.label_column:
            read, labels = read_labelled_texts(
                artifact, path, column, config.label_column, rows=config.rows
            )
        else:
            read = read_texts(path, column, rows=config.rows)
        texts = list[Text](read)
    elif artifact.manifest.task == "question-answering":
        what, texts = "questions", list[Text](QUESTIONS)
    # Tokenize once here, so that errors show before PyTorch starts.
    feeder.lengths(texts)
    # Without a padding token, one text per case.
    rows = _ROWS if feeder.can_pad else 1
    return _cases(what, texts, rows, record, feeder, labels=labels)


def _image_cases(
    artifact: Artifact, record: GraphRecord, config: ValidateConfig
) -> list[ValidationCase]:
    feeder = ImageFeeder.open(artifact, record)
    images: list[Any] = list(synthetic_images())
    if config.data:
        images = list(list_images(Path(config.data).expanduser(), rows=config.rows))
    by_shape = feeder.by_shape(images)
    cases = []
    for shape, places in by_shape.items():
        what = "images" if len(by_shape) == 1 else f"images of {shape[1]} × {shape[2]},"
        cases += _cases(what, [images[place] for place in places], _IMAGES, record, feeder)
    return cases


def _cases(
    what: str,
    items: Sequence[Any],
    rows: int,
    record: GraphRecord,
    feed: Callable[[list[Any]], Feeds],
    *,
    labels: Sequence[int] = (),
) -> list[ValidationCase]:
    """Return cases of up to `rows` items each, named by item numbers."""
    rows = fixed_batch(record) or rows
    cases = []
    for start in range(0, len(items), rows):
        part = items[start : start + rows]
        name = f"{what} {start + 1}–{start + len(part)}" if len(part) > 1 else f"{what} {start + 1}"
        make = partial(feed, pad_batch(part, record))
        cases.append(ValidationCase(name, "real", make, tuple(labels[start : start + rows])))
    return cases
