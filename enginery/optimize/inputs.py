"""Prepare the feeds on which ranges are measured: user data, built-in inputs or generated numbers.

Texts, images and sounds go through the artifact's own tokenizer or processor, so that ranges are
real. Batches are small, because inner tensors of a graph are held in memory for one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.datasets.folders import list_images, list_media
from enginery.core.datasets.samples import holds_arrays, read_texts
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.shapes import canonical_dim, dynamic_dims
from enginery.optimize.config import OptimizeConfig
from enginery.runtime.builtin_inputs import (
    SENTENCES,
    builtin_batches,
    has_builtin_inputs,
    synthetic_images,
    synthetic_sounds,
)
from enginery.runtime.sample_inputs import (
    ImageFeeder,
    SoundFeeder,
    TextFeeder,
    array_batches,
    in_batches,
    media_batches,
    takes_audio,
    takes_images,
    takes_real_inputs,
)

_ROWS = 4


@dataclass(frozen=True)
class RangeFeeds:
    """Feeds of one graph, a batch each, on which its ranges are measured."""

    batches: Sequence[Feeds]
    origin: str
    """Where they come from, such as `built-in sentences`."""


def range_feeds(artifact: Artifact, record: GraphRecord, config: OptimizeConfig) -> RangeFeeds:
    """Return feeds for one graph.

    If `data` is not given, built-in inputs are used, and generated numbers if there are none for
    this graph or its tokenizer or processor cannot be used.

    Raises:
        InputError: `data` cannot be read or does not fit the graph's inputs, or is not arrays and
            the graph takes neither texts nor images nor sounds.
        ArtifactError: the tokenizer or processor for `data` cannot be used.
    """
    path = Path(config.data).expanduser()
    if config.data and holds_arrays(path):
        batches = array_batches(path, record, rows=config.rows, batch_rows=_ROWS)
        return RangeFeeds([batch.load() for batch in batches], f"rows of {path.name}")
    if takes_real_inputs(artifact, record):
        make = _sound_feeds if takes_audio(record) else _text_feeds
        if takes_images(record):
            make = _image_feeds
        try:
            return make(artifact, record, config)
        except (ArtifactError, InputError):
            # Built-in inputs are not required: generated numbers take their place.
            if config.data:
                raise
    elif not config.data and has_builtin_inputs(artifact, record):
        with suppress(ArtifactError, InputError):
            builtin = builtin_batches(artifact, record)
            return RangeFeeds([batch.load() for batch in builtin], "built-in inputs")
    elif config.data and len(artifact.manifest.graphs) == 1:
        names = sorted(spec.name for spec in record.inputs)
        raise InputError(
            f"data '{config.data}' cannot be used: {record.file} takes {', '.join(names)}, but "
            "the artifact has no tokenizer or processor that prepares them.",
            do="Save an array for each of them as .npz, or omit --data: ranges are then measured "
            "on generated inputs.",
        )
    generated = _generated_feeds(artifact, record)
    return RangeFeeds(generated, "generated numbers, which real inputs may exceed")


def _text_feeds(artifact: Artifact, record: GraphRecord, config: OptimizeConfig) -> RangeFeeds:
    feeder = TextFeeder.open(artifact, record)
    # The last text is truncated to the model's maximum length.
    texts, origin = [*SENTENCES, " ".join(SENTENCES) * 4], "built-in sentences"
    if config.data:
        path = Path(config.data).expanduser()
        texts, origin = read_texts(path, config.column, rows=config.rows), f"rows of {path.name}"
    # Sorted by length, so that batches contain some padding but not much.
    lengths = feeder.lengths(texts)
    order = sorted(range(len(texts)), key=lambda index: lengths[index])
    # Without a padding token, texts of different lengths cannot share a batch.
    parts = in_batches([texts[i] for i in order], _ROWS if feeder.can_pad else 1, record)
    return RangeFeeds([feeder(part) for part in parts], origin)


def _image_feeds(artifact: Artifact, record: GraphRecord, config: OptimizeConfig) -> RangeFeeds:
    feeder = ImageFeeder.open(artifact, record)
    images: list[Any] = [*synthetic_images(2), *_extreme_images()]
    origin = "built-in images"
    if config.data:
        path = Path(config.data).expanduser()
        images, origin = list(list_images(path, rows=config.rows)), f"images of {path.name}"
    batches = [
        feeder(part)
        for indices in feeder.by_shape(images).values()
        for part in in_batches([images[index] for index in indices], _ROWS, record)
    ]
    return RangeFeeds(batches, origin)


def _sound_feeds(artifact: Artifact, record: GraphRecord, config: OptimizeConfig) -> RangeFeeds:
    feeder = SoundFeeder.open(artifact, record)
    sounds: list[Any] = synthetic_sounds(feeder.processor.sampling_rate, 2)
    origin = "built-in sounds"
    if config.data:
        path = Path(config.data).expanduser()
        sounds, origin = list_media(path, "audio", rows=config.rows), f"sounds of {path.name}"
    batches = media_batches("sounds", feeder, sounds, record)
    return RangeFeeds([batch.load() for batch in batches], origin)


def _extreme_images() -> list[NDArray[np.uint8]]:
    """Return uint8 images (height, width, 3) of extreme pixels: a checkerboard and black."""
    y, x = np.mgrid[0:160, 0:150]
    board = (((x // 12 + y // 12) % 2) * 255).astype(np.uint8)
    return [np.repeat(board[..., None], 3, axis=-1), np.zeros((96, 96, 3), np.uint8)]


def _generated_feeds(artifact: Artifact, record: GraphRecord) -> list[Feeds]:
    """Return two batches of generated numbers: one with padding, one of a single row."""
    limits = FeedLimits.from_artifact(artifact)
    names = dynamic_dims(record.inputs)
    batches = []
    for batch, tokens, ragged in ((3, 24, True), (1, 8, False)):
        sizes = {}
        for name in names:
            length = min(tokens * limits.min_sequence, limits.max_positions)
            # The past and the new tokens share the positions.
            length = max(1, length // 2) if "past" in "".join(names) else length
            natural = limits.sizes.get(canonical_dim(name))
            rows = limits.rows(name, batch)
            sizes[name] = natural or length if rows is None else rows
        feeds = make_feeds(record.inputs, sizes, limits, seed=batch, ragged=ragged)
        # A merged decoder selects its branch with a bool input, so each branch runs once.
        feeds |= {
            s.name: np.full_like(feeds[s.name], ragged) for s in record.inputs if s.dtype == "bool"
        }
        batches.append(feeds)
    return batches
