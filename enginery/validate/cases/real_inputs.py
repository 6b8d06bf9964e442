"""Test cases of real inputs: the user's texts or images, or built-in ones.

They pass through the artifact's own tokenizer or image processor, as in serving. Graphs that take
neither texts nor images (audio, decoders) have no such cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    ROWS,
    ImageFeeder,
    SampleBatch,
    TextFeeder,
    builtin_batches,
    image_batches,
    sample_batches,
    takes_images,
    takes_real_inputs,
    text_batches,
)
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.config import ValidateConfig

__all__ = ["check_data_usable", "real_cases", "takes_real_inputs"]


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
    if config.data:
        make = _image_cases if takes_images(record) else _text_cases
        return make(artifact, record, config), []
    try:
        return _as_cases(builtin_batches(artifact, record)), []
    except (ArtifactError, InputError) as error:
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

    rows = read_arrays(path, names, rows=config.rows)
    cases = _as_cases(sample_batches("rows", rows, feed, record, rows=ROWS))
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
    path, column = Path(config.data).expanduser(), config.column
    labels: Sequence[int] = ()
    if config.label_column:
        texts, labels = read_labelled_texts(
            artifact, path, column, config.label_column, rows=config.rows
        )
    else:
        texts = read_texts(path, column, rows=config.rows)
    return _as_cases(text_batches("rows", feeder, texts, record), labels)


def _image_cases(
    artifact: Artifact, record: GraphRecord, config: ValidateConfig
) -> list[ValidationCase]:
    images = list_images(Path(config.data).expanduser(), rows=config.rows)
    return _as_cases(image_batches(ImageFeeder.open(artifact, record), images, record))


def _as_cases(batches: Sequence[SampleBatch], labels: Sequence[int] = ()) -> list[ValidationCase]:
    return [
        ValidationCase(batch.name, "real", batch.load, tuple(labels[batch.samples]))
        for batch in batches
    ]
