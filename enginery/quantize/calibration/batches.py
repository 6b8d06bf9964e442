"""Group calibration inputs into batches, and hold some of them out to measure accuracy.

Only texts of equal length share a batch, so that nothing is padded unless the graph has a fixed
sequence length. Texts are tokenized and images decoded when their batch runs: memory holds one
batch, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.shapes import dynamic_dims, share_of_positions
from enginery.quantize.calibration.points import PointFeeder
from enginery.quantize.calibration.prompts import PromptFeeder, takes_prompts
from enginery.quantize.calibration.steps import StepFeeder
from enginery.quantize.config import MAX_HELD_OUT
from enginery.runtime.decoder_graphs import find_encoder_decoder
from enginery.runtime.graph_roles import find_segmenter
from enginery.runtime.sample_inputs import (
    MEDIA,
    ImageFeeder,
    SoundFeeder,
    TextFeeder,
    cast_array,
    fixed_batch,
    in_batches,
    pad_batch,
    takes_images,
)
from enginery.runtime.text.batching import plan_batches

_MAX_ROWS = 32
_MAX_TOKENS = 512
"""Tokens of one batch: all its activations are in memory at once. A CPU gains little from batches
of more than a few hundred tokens. Without this limit, memory would grow with the number of rows,
because more of them would have the same length."""
_RANDOM_SIZE = 16
"""Size of dims of random inputs whose usual size is not known."""
_STEPS = (1, 4, 8, 16)
"""Lengths of the cache in a decoder's steps. Each is computed anew for every pass, so they are few
and short."""
_HELD_OUT_STRIDE = 4
"""Every fourth row is held out; fewer where that would exceed the limit."""
_MIN_ROWS_TO_HOLD_OUT = 8

Kind = Literal["texts", "images", "sounds", "feeds", "random"]


@dataclass(frozen=True)
class CalibrationData:
    """Calibration inputs as read, not yet tokenized."""

    kind: Kind
    items: Sequence[Any]
    """Texts, images, sounds or their paths, or dicts of arrays."""
    labels: tuple[Any, ...]
    """One label for each item, or empty."""
    content: str
    """What the items are, and the digest of their content, for the cache key."""
    description: str
    calibrating: int | None = None
    """Number of leading items that calibrate, if the others come from a held-out file."""

    @property
    def has_held_out_rows(self) -> bool:
        """True if there are enough rows to hold some out; otherwise all rows do both jobs."""
        return self.calibrating is not None or len(self.items) >= _MIN_ROWS_TO_HOLD_OUT

    def with_held_out(self, held_out: CalibrationData) -> CalibrationData:
        """Return the data with the rows of another file to measure on.

        Raises:
            InputError: the rows are the same, or of another kind.
        """
        if held_out.content == self.content:
            raise InputError(
                "the held-out rows are those that calibrate, so they would measure nothing.",
                do="Name other rows, or leave out --held-out: a quarter is then held out.",
            )
        if held_out.kind != self.kind:
            raise InputError(
                f"the held-out rows are {held_out.kind}, but those that calibrate are {self.kind}.",
                do="Give both in the same form.",
            )
        return CalibrationData(
            self.kind,
            (*self.items, *held_out.items),
            (*self.labels, *held_out.labels),
            f"{self.content}; held out {held_out.content}",
            f"{self.description}; held out: {held_out.description}",
            len(self.items),
        )

    def split(self, max_held_out: int) -> tuple[list[int], list[int]]:
        """Return the indices of the items to calibrate on, and of those to measure on.

        With fewer than eight items and no held-out file, both are all of them.
        """
        rows = list(range(len(self.items)))
        if self.calibrating is not None:
            return rows[: self.calibrating], rows[self.calibrating :]
        if not self.has_held_out_rows:
            return rows, rows
        # Every fourth row, or fewer where that would exceed the limit.
        every = max(_HELD_OUT_STRIDE, -(-len(rows) // max_held_out))
        held_out = rows[every - 1 :: every]
        return sorted(set(rows) - set(held_out)), held_out


@dataclass(frozen=True)
class Batch:
    """Inputs that run through the graph together."""

    rows: tuple[int, ...]
    """Indices into the items."""
    load: Callable[[], Feeds]


def make_batches(
    artifact: Artifact,
    record: GraphRecord,
    data: CalibrationData,
    *,
    seed: int,
    max_held_out: int = MAX_HELD_OUT,
) -> tuple[list[Batch], list[Batch]]:
    """Return the batches to calibrate on and the held-out batches to measure on.

    Which these are, `CalibrationData.split` says.

    Raises:
        InputError: an input cannot be read or does not fit the graph.
        ArtifactError: the tokenizer or the image processor cannot be loaded.
    """
    segmenter = find_segmenter(artifact.manifest.graphs)
    if segmenter and record == segmenter.prompts:
        feeder = PointFeeder.open(artifact, segmenter)
        images = make_batches(
            artifact, segmenter.images, data, seed=seed, max_held_out=max_held_out
        )
        return _point_batches(feeder, seed, images[0]), _point_batches(feeder, seed, images[1])
    calibrating, held_out = data.split(max_held_out)
    generates = find_encoder_decoder(artifact.manifest.graphs) is not None
    if generates and data.kind == "feeds":
        raise InputError(
            "arrays cannot calibrate an encoder with a decoder: its steps follow from what it "
            "generates.",
            do="Give texts, images or audio files.",
        )
    if generates and data.kind != "random":
        build = partial(_generation_batches, StepFeeder.open(artifact), record, data.items)
    elif data.kind == "random":
        limits = FeedLimits.from_artifact(artifact)
        build = partial(_random_batches, record, limits, seed)
    else:
        media = {"images": _media_batches, "sounds": _media_batches}
        make = {"texts": _text_batches, **media}.get(data.kind, _feed_batches)
        build = partial(make, artifact, record, data.items)
    return build(calibrating), build(held_out)


def _text_batches(
    artifact: Artifact, record: GraphRecord, items: Sequence[str], rows: Sequence[int]
) -> list[Batch]:
    if takes_prompts(record):
        return _prompt_batches(artifact, record, items, rows)
    feeder = TextFeeder.open(artifact, record)
    plans = plan_batches(
        feeder.lengths([items[row] for row in rows]),
        max_rows=fixed_batch(record) or _MAX_ROWS,
        max_tokens=_MAX_TOKENS,
        equal_lengths=feeder.width is None,
    )
    return [_batch(feeder, items, [rows[index] for index in plan], record) for plan in plans]


def _prompt_batches(
    artifact: Artifact, record: GraphRecord, items: Sequence[str], rows: Sequence[int]
) -> list[Batch]:
    """Make two batches of texts of the same length: as prompts, and as steps behind them."""
    feeder = PromptFeeder.open(artifact, record)
    lengths = dict(zip(rows, feeder.lengths([items[row] for row in rows]), strict=True))
    # The last token is the step; what is before it is the prompt.
    long_enough = [row for row in rows if lengths[row] > 1]
    if not long_enough:
        raise InputError(
            "no calibration text has two tokens: a prompt and a step behind it.",
            do="Give longer texts.",
        )
    plans = plan_batches(
        [lengths[row] for row in long_enough],
        max_rows=fixed_batch(record) or _MAX_ROWS,
        max_tokens=_MAX_TOKENS,
        # The rows of a batch share one cache, so their prompts have one length.
        equal_lengths=True,
    )
    batches = []
    for plan in plans:
        batch_rows = tuple(pad_batch([long_enough[index] for index in plan], record))
        texts = [items[row] for row in batch_rows]
        batches += [
            Batch(batch_rows, partial(make, texts)) for make in (feeder.prompt, feeder.step)
        ]
    return batches


def _generation_batches(
    feeder: StepFeeder, record: GraphRecord, items: Sequence[Any], rows: Sequence[int]
) -> list[Batch]:
    """Make batches of items of the same shape for an encoder, or of two steps for its decoder.

    One is the first step. The other has a longer cache, of another length in the next batch.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for row, shape in zip(rows, feeder.shapes([items[row] for row in rows]), strict=True):
        by_shape.setdefault(shape, []).append(row)
    # Steps count from 0, so the last one is one below the number of positions.
    last = (feeder.max_steps or max(_STEPS) + 1) - 1
    batches = []
    for shape, same_shape in by_shape.items():
        # The tokens of texts are limited, and the number of images and sounds.
        largest = MEDIA if len(shape) > 1 else max(1, _MAX_TOKENS // max(shape))
        for part in in_batches(same_shape, min(largest, _MAX_ROWS), record):
            batch_rows, chosen = tuple(part), [items[row] for row in part]
            if record == feeder.encoder_record:
                batches.append(Batch(batch_rows, partial(feeder.encoder, chosen)))
                continue
            # Batches take turns, so that every length of the cache occurs.
            later = _STEPS[len(batches) // 2 % len(_STEPS)]
            batches += [
                Batch(batch_rows, partial(feeder.step, chosen, step))
                for step in (0, min(later, last))
            ]
    return batches


def _point_batches(feeder: PointFeeder, seed: int, images: Sequence[Batch]) -> list[Batch]:
    """Make a batch of points for each batch of images."""
    return [Batch(batch.rows, partial(_add_points, feeder, seed, batch)) for batch in images]


def _add_points(feeder: PointFeeder, seed: int, images: Batch) -> Feeds:
    return feeder(images.load(), seed=seed + images.rows[0])


def _media_batches(
    artifact: Artifact, record: GraphRecord, items: Sequence[Any], rows: Sequence[int]
) -> list[Batch]:
    """Make batches of images or sounds of the same size."""
    feeder = (ImageFeeder if takes_images(record) else SoundFeeder).open(artifact, record)
    by_shape = feeder.by_shape(items[row] for row in rows)
    return [
        _batch(feeder, items, part, record)
        for indices in by_shape.values()
        for part in in_batches([rows[index] for index in indices], MEDIA, record)
    ]


def _batch(
    feeder: TextFeeder | ImageFeeder | SoundFeeder,
    items: Sequence[Any],
    rows: Sequence[int],
    record: GraphRecord,
) -> Batch:
    padded = tuple(pad_batch(rows, record))
    return Batch(padded, lambda: feeder([items[row] for row in padded]))


def _feed_batches(
    _artifact: Artifact, record: GraphRecord, items: Sequence[Any], rows: Sequence[int]
) -> list[Batch]:
    """Make one batch of each dict, as given."""
    return [Batch((row,), partial(_cast_feeds, record, items[row])) for row in rows]


def _cast_feeds(record: GraphRecord, feeds: Mapping[str, NDArray[Any]]) -> Feeds:
    names = [spec.name for spec in record.inputs]
    if set(feeds) != set(names):
        raise InputError(
            f"a calibration input has the arrays {', '.join(sorted(feeds))}, expected the graph's "
            f"inputs {', '.join(names)}."
        )
    try:
        arrays = {
            spec.name: cast_array(np.asarray(feeds[spec.name]), spec) for spec in record.inputs
        }
    except InputError as error:
        raise InputError(f"a calibration input cannot be used: {error.message}") from error
    # ONNX Runtime's own message would not say that the batch dim is missing.
    for spec in record.inputs:
        if arrays[spec.name].ndim != len(spec.dims):
            raise InputError(
                f"a calibration input has {spec.name} of shape {arrays[spec.name].shape}, expected "
                f"({', '.join(map(str, spec.dims))}).",
                do="Add the batch dim to each array.",
            )
    return arrays


def _random_batches(
    record: GraphRecord, limits: FeedLimits, seed: int, rows: Sequence[int]
) -> list[Batch]:
    names = dynamic_dims(record.inputs)
    size = max(_RANDOM_SIZE, limits.min_sequence)
    longest = min(size, limits.position_limit or size)
    sizes = {
        name: limits.sizes.get(name, share_of_positions(name, names, longest)) for name in names
    }
    sizes |= {name: count for name in names if (count := limits.rows(name, 1)) is not None}
    return [
        Batch((row,), partial(make_feeds, record.inputs, sizes, limits, seed=seed + row))
        for row in rows
    ]
