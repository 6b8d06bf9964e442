"""Calibration inputs as batches for the graph.

    >>> calibrating, held_out = make_batches(artifact, graph, data, seed=0)
    >>> held_out[0].load()["input_ids"].shape
    (7, 24)

Texts of equal length share a batch, so that nothing is padded unless the graph's own sequence is
fixed. Texts are tokenized and images opened when their batch is run, so that memory holds one
batch and does not grow with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import InputError
from enginery.core.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.manifest import GraphRecord
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import dynamic_dims
from enginery.runtime.batching import plan_batches
from enginery.runtime.real_inputs import (
    ImageFeeder,
    TextFeeder,
    fixed_batch,
    in_batches,
    pad_batch,
)

_MAX_ROWS = 32
_MAX_TOKENS = 512
"""Of one batch: every activation of it is in memory at once. A CPU gains little beyond some
hundred; with a larger limit more rows would take more memory, as more of them are of one length."""
_IMAGES = 4
_HELD_OUT = 4
"""One row of so many measures."""
MOST_HELD_OUT = 128
_LEAST_ROWS = 8

Kind = Literal["texts", "images", "feeds", "random"]


@dataclass(frozen=True)
class CalibrationData:
    """Inputs as they were read, not yet tokenized."""

    kind: Kind
    items: Sequence[Any]
    """Texts, images or paths of images, or dicts of arrays."""
    labels: tuple[Any, ...]
    """One an item, or none at all."""
    sha256: str
    """Over the items' contents."""
    description: str

    @property
    def holds_out(self) -> bool:
        """Whether there are enough that some only measure; else the same ones calibrate, too."""
        return len(self.items) >= _LEAST_ROWS


@dataclass(frozen=True)
class Batch:
    """Inputs that go through the graph together."""

    rows: tuple[int, ...]
    """Their places among the items."""
    load: Callable[[], Feeds]


def make_batches(
    artifact: Artifact,
    record: GraphRecord,
    data: CalibrationData,
    *,
    seed: int,
    most_held_out: int = MOST_HELD_OUT,
) -> tuple[list[Batch], list[Batch]]:
    """Batches that calibrate, and batches that measure; the same ones where there are few inputs.

    Raises:
        InputError: an input cannot be used, or does not fit the graph.
        ArtifactError: the tokenizer or the image processor cannot be used.
    """
    count = len(data.items)
    rows = list(range(count))
    every = max(_HELD_OUT, -(-count // most_held_out))
    held_out = rows[every - 1 :: every] if data.holds_out else rows
    calibrating = sorted(set(rows) - set(held_out)) if data.holds_out else rows
    make = {"texts": _text_batches, "images": _image_batches, "feeds": _feed_batches}
    if data.kind == "random":
        limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
        build = partial(_random_batches, record, limits, seed)
    else:
        build = partial(make[data.kind], artifact, record, data.items)
    return build(calibrating), build(held_out)


def _text_batches(
    artifact: Artifact, record: GraphRecord, items: Sequence[str], rows: Sequence[int]
) -> list[Batch]:
    feeder = TextFeeder.open(artifact, record)
    plans = plan_batches(
        feeder.lengths([items[row] for row in rows]),
        max_rows=fixed_batch(record) or _MAX_ROWS, max_tokens=_MAX_TOKENS,
        equal_lengths=feeder.width is None,
    )  # fmt: skip
    return [_batch(feeder, items, [rows[place] for place in plan], record) for plan in plans]


def _image_batches(
    artifact: Artifact, record: GraphRecord, items: Sequence[Any], rows: Sequence[int]
) -> list[Batch]:
    feeder = ImageFeeder.open(artifact, record)
    by_shape = feeder.by_shape(items[row] for row in rows)
    return [
        _batch(feeder, items, part, record)
        for places in by_shape.values()
        for part in in_batches([rows[place] for place in places], _IMAGES, record)
    ]


def _batch(
    feeder: TextFeeder | ImageFeeder, items: Sequence[Any], rows: Sequence[int], record: GraphRecord
) -> Batch:
    places = tuple(pad_batch(rows, record))
    return Batch(places, lambda: feeder([items[place] for place in places]))


def _feed_batches(
    _artifact: Artifact, record: GraphRecord, items: Sequence[Any], rows: Sequence[int]
) -> list[Batch]:
    """Each dict is one batch, as it was given."""
    return [Batch((row,), partial(_typed, record, items[row])) for row in rows]


def _typed(record: GraphRecord, feeds: Mapping[str, NDArray[Any]]) -> Feeds:
    names = [spec.name for spec in record.inputs]
    if set(feeds) != set(names):
        raise InputError(
            f"a calibration input has {', '.join(sorted(feeds))}; the graph takes "
            f"{', '.join(names)}."
        )
    arrays = {spec.name: np.asarray(feeds[spec.name]).astype(spec.dtype) for spec in record.inputs}
    for spec in record.inputs:
        if arrays[spec.name].ndim != len(spec.dims):
            raise InputError(
                f"a calibration input has {spec.name} of shape {arrays[spec.name].shape}, expected "
                f"({', '.join(map(str, spec.dims))}).",
                do="Give each array its batch dim.",
            )
    return arrays


def _random_batches(
    record: GraphRecord, limits: FeedLimits, seed: int, rows: Sequence[int]
) -> list[Batch]:
    sizes = {name: limits.sizes.get(name, 16) for name in dynamic_dims(record.inputs)}
    sizes["batch"] = 1
    return [
        Batch((row,), partial(make_feeds, record.inputs, sizes, limits, seed=seed + row))
        for row in rows
    ]
