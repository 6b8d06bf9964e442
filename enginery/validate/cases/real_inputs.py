"""Test cases of real inputs: the user's texts, images or sounds, or built-in ones.

They pass through the artifact's own tokenizer or processor, as in serving. Graphs of decoders, and
those whose inputs nothing here makes, have no such cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.datasets.folders import MediaKind, list_media
from enginery.core.datasets.labels import read_labelled_texts
from enginery.core.datasets.samples import holds_arrays, read_texts
from enginery.core.errors import ArtifactError, InputError, raise_system_error
from enginery.runtime.builtin_inputs import builtin_batches, has_builtin_inputs
from enginery.runtime.sample_inputs import (
    ImageFeeder,
    SampleBatch,
    SoundFeeder,
    TextFeeder,
    array_batches,
    media_batches,
    takes_images,
    takes_real_inputs,
    takes_texts,
    text_batches,
)
from enginery.runtime.tasks import is_generating
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
    if not has_builtin_inputs(artifact, record):
        return [], []
    if config.data:
        if not takes_real_inputs(artifact, record):
            return [], []
        make = _text_cases if takes_texts(record) else _media_cases
        return make(artifact, record, config), []
    try:
        return _as_cases(builtin_batches(artifact, record)), []
    except (ArtifactError, InputError) as error:
        raise_system_error(error)
        return [], [f"no real inputs were compared: {error.message}"]


def check_data_usable(artifact: Artifact, config: ValidateConfig) -> None:
    """Check that a graph of the artifact takes the given data, or that it generates from them.

    Raises:
        InputError: none does.
    """
    graphs = artifact.manifest.graphs
    if _is_arrays(config):
        return
    generates = is_generating(artifact.manifest.task)
    if generates and (artifact.path / "tokenizer.json").is_file():
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
    return bool(config.data) and holds_arrays(Path(config.data).expanduser())


def _array_cases(record: GraphRecord, config: ValidateConfig) -> list[ValidationCase]:
    cases = _as_cases(array_batches(Path(config.data).expanduser(), record, rows=config.rows))
    for case in cases:
        case.make()  # so that errors show before the reference starts
    return cases


def _text_cases(
    artifact: Artifact, record: GraphRecord, config: ValidateConfig
) -> list[ValidationCase]:
    feeder = TextFeeder.open(artifact, record)
    path, column = Path(config.data).expanduser(), config.column
    labels: Sequence[int] = ()
    if config.label_column:
        texts, labels = read_labelled_texts(
            artifact,
            path,
            column,
            config.label_column,
            rows=config.rows,
            reading=config.label_values,
        )
    else:
        texts = read_texts(path, column, rows=config.rows)
    return _as_cases(text_batches("rows", feeder, texts, record), labels)


def _media_cases(
    artifact: Artifact, record: GraphRecord, config: ValidateConfig
) -> list[ValidationCase]:
    """Return the cases of a folder of images or sounds."""
    kind: MediaKind = "images" if takes_images(record) else "audio"
    files = list_media(Path(config.data).expanduser(), kind, rows=config.rows)
    feeder = (ImageFeeder if kind == "images" else SoundFeeder).open(artifact, record)
    noun = "images" if kind == "images" else "sounds"
    return _as_cases(media_batches(noun, feeder, files, record))


def _as_cases(batches: Sequence[SampleBatch], labels: Sequence[int] = ()) -> list[ValidationCase]:
    return [
        ValidationCase(batch.name, "real", batch.load, tuple(labels[batch.samples]))
        for batch in batches
    ]
