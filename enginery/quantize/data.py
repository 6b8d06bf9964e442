"""Calibration inputs: files, folders or anything Python hands over, as batches for the graph.

    >>> data = read_data(artifact, QuantizeConfig(calibration="reviews.csv"), None)
    >>> calibration, held_out = make_batches(artifact, data)

Texts of equal length share a batch, so that nothing is padded unless the graph's own sequence is
fixed. Images are opened when their batch is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.data import list_images, read_texts, spread
from enginery.core.errors import InputError, OptionError
from enginery.core.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.fingerprint import combined_sha256, sha256_of
from enginery.core.json_file import read_json
from enginery.core.manifest import GraphRecord
from enginery.core.shapes import dynamic_dims
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.labels import read_labelled
from enginery.runtime.batching import plan_batches
from enginery.runtime.images import ImageProcessor, load_image
from enginery.runtime.tokenizer import TextTokenizer, fixed_sequence

_MAX_ROWS = 32
_MAX_TOKENS = 2048
"""Of one batch: every activation of it is in memory at once."""
_IMAGES = 4
_HELD_OUT = 4
"""One row of so many measures."""
_MAX_HELD_OUT = 128
_LEAST_ROWS = 8
_RANDOM_ROWS = 32

Kind = Literal["texts", "images", "feeds", "random"]


@dataclass(frozen=True)
class CalibrationData:
    """Inputs as they were read, not yet tokenized."""

    kind: Kind
    items: tuple[Any, ...]
    """Texts, images or paths of images, or dicts of arrays."""
    labels: tuple[Any, ...]
    """One an item, or none at all."""
    sha256: str
    """Over the items' contents."""
    description: str


@dataclass(frozen=True)
class Batch:
    """Inputs that go through the graph together."""

    rows: tuple[int, ...]
    """Their places among the items."""
    load: Callable[[], Feeds]


def read_data(
    artifact: Artifact, config: QuantizeConfig, given: Iterable[Any] | None
) -> CalibrationData | None:
    """The inputs, or None where ranges are reused and no data are named.

    Args:
        artifact: what is calibrated.
        config: names the file, or allows made-up inputs.
        given: texts, images or dicts of arrays from Python, in place of a file.

    Raises:
        InputError: the file or an item cannot be used, or there are none.
        OptionError: there are no inputs, and made-up ones are not allowed.
    """
    if given is not None:
        if isinstance(given, str | bytes | Mapping):
            raise InputError(
                f"calibration is one {type(given).__name__}, expected an iterable of inputs."
            )
        if config.label_column:
            raise OptionError("option 'label_column' needs a file that has the column.")
        sized = isinstance(given, Sequence)
        items = spread(given, config.rows) if sized else list(islice(given, config.rows))  # type: ignore[arg-type]
        return _given(items)
    if config.calibration:
        return _from_file(artifact, config)
    if config.ranges:
        return None
    if not config.allow_random:
        raise OptionError(
            "there are no calibration inputs. Ranges from random token ids are of no use: they "
            "are not those of texts.",
            do="Name real ones: --calibration reviews.csv --column text",
        )
    return CalibrationData("random", tuple(range(_RANDOM_ROWS)), (), f"seed {config.seed}",
                           f"{_RANDOM_ROWS} made-up inputs")  # fmt: skip


def make_batches(
    artifact: Artifact, record: GraphRecord, data: CalibrationData, *, seed: int
) -> tuple[list[Batch], list[Batch]]:
    """Batches that calibrate, and batches that measure; the same ones where there are few inputs.

    Raises:
        InputError: an input cannot be used, or does not fit the graph.
        ArtifactError: the tokenizer or the image processor cannot be used.
    """
    count = len(data.items)
    rows = list(range(count))
    every = max(_HELD_OUT, -(-count // _MAX_HELD_OUT))
    held_out = rows[every - 1 :: every] if count >= _LEAST_ROWS else rows
    calibrating = sorted(set(rows) - set(held_out)) if count >= _LEAST_ROWS else rows
    make = {"texts": _text_batches, "images": _image_batches, "feeds": _feed_batches}
    if data.kind == "random":
        limits = FeedLimits.from_config(read_json(artifact.path / "config.json"))
        build = partial(_random_batches, record, limits, seed)
    else:
        build = partial(make[data.kind], artifact, record, data.items)
    return build(calibrating), build(held_out)


def _given(items: Sequence[Any]) -> CalibrationData:
    if not items:
        raise InputError("the calibration inputs are empty.")
    kinds = {_kind(item) for item in items}
    if len(kinds) != 1:
        raise InputError(f"calibration inputs are of several kinds: {', '.join(sorted(kinds))}.")
    kind = kinds.pop()
    digest = hashlib.sha256()
    for item in items:
        digest.update(_content(item))
    return CalibrationData(kind, tuple(items), (), digest.hexdigest(), f"{len(items)} {kind}")


def _kind(item: Any) -> Kind:
    if isinstance(item, str):
        return "texts"
    if isinstance(item, Mapping):
        return "feeds"
    return "images"


def _content(item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode() + b"\0"
    if isinstance(item, Mapping):
        return b"".join(f"{n}{np.asarray(a).shape}".encode() + np.ascontiguousarray(a).tobytes()
                        for n, a in sorted(item.items()))  # fmt: skip
    image = load_image(item)
    return json.dumps([image.mode, image.size]).encode() + image.tobytes()


def _from_file(artifact: Artifact, config: QuantizeConfig) -> CalibrationData:
    path = Path(config.calibration).expanduser()
    names = {spec.name for spec in artifact.manifest.graphs[0].inputs}
    if "pixel_values" in names:
        images = list_images(path, rows=config.rows)
        digest = combined_sha256({str(image): sha256_of(image) for image in images})
        return CalibrationData("images", tuple(images), (), digest, f"{path.name}: images")
    if "input_ids" not in names:
        raise InputError(
            f"calibration '{path}' cannot be used: the graph takes {', '.join(sorted(names))}.",
            do="Hand dicts of arrays to quantize_model(…, data=…).",
        )
    labels: list[int] = []
    if config.label_column:
        texts, labels = read_labelled(
            path, config.column, config.label_column, rows=config.rows,
            label2id=read_json(artifact.path / "config.json").get("label2id") or {},
        )  # fmt: skip
    else:
        texts = read_texts(path, config.column, rows=config.rows)
    description = f"{path.name}: {len(texts)} rows of '{config.column}'"
    return CalibrationData("texts", tuple(texts), tuple(labels), sha256_of(path), description)


def _text_batches(
    artifact: Artifact, record: GraphRecord, items: Sequence[str], rows: Sequence[int]
) -> list[Batch]:
    tokenizer = TextTokenizer.open(artifact.path)
    encodings = tokenizer.encode([tokenizer.prepare(items[row]) for row in rows])
    width = fixed_sequence(record.inputs)
    for encoding in encodings:
        if width:
            encoding.truncate(width)
    plans = plan_batches(
        [len(encoding.ids) for encoding in encodings],
        max_rows=_batch_limit(record, _MAX_ROWS), max_tokens=_MAX_TOKENS,
        equal_lengths=width is None,
    )  # fmt: skip
    return [
        Batch(tuple(rows[i] for i in plan),
              partial(tokenizer.feeds, [encodings[i] for i in plan], record.inputs))
        for plan in _filled(record, plans)
    ]  # fmt: skip


def _image_batches(
    artifact: Artifact, record: GraphRecord, items: Sequence[Any], rows: Sequence[int]
) -> list[Batch]:
    processor = ImageProcessor.open(artifact.path)
    dtype = record.inputs[0].dtype
    # A processor without a fixed size gives each image its own, and those cannot share a batch.
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        by_shape.setdefault(processor(load_image(items[row])).shape, []).append(row)
    size = _batch_limit(record, _IMAGES)
    parts = [g[i : i + size] for g in by_shape.values() for i in range(0, len(g), size)]
    return [
        Batch(tuple(part), partial(_image_feeds, processor, [items[row] for row in part], dtype))
        for part in _filled(record, parts)
    ]


def _image_feeds(processor: ImageProcessor, images: Sequence[Any], dtype: str) -> Feeds:
    pixels = np.stack([processor(load_image(image)) for image in images])
    return {"pixel_values": pixels.astype(dtype, copy=False)}


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
    return {spec.name: np.asarray(feeds[spec.name]).astype(spec.dtype) for spec in record.inputs}


def _random_batches(
    record: GraphRecord, limits: FeedLimits, seed: int, rows: Sequence[int]
) -> list[Batch]:
    sizes = {name: limits.sizes.get(name, 16) for name in dynamic_dims(record.inputs)}
    sizes["batch"] = 1
    return [
        Batch((row,), partial(make_feeds, record.inputs, sizes, limits, seed=seed + row))
        for row in rows
    ]


def _batch_limit(record: GraphRecord, most: int) -> int:
    batch = record.inputs[0].dims[0]
    return batch if isinstance(batch, int) else most


def _filled(record: GraphRecord, plans: Sequence[Sequence[int]]) -> list[list[int]]:
    """Plans of exactly as many rows as the graph takes, where its batch is fixed."""
    batch = record.inputs[0].dims[0]
    if not isinstance(batch, int):
        return [list(plan) for plan in plans]
    return [[*plan, *[plan[-1]] * (batch - len(plan))] for plan in plans]
