"""Convert texts, images, sounds and arrays to the inputs of a graph.

Texts, images and sounds go through the artifact's tokenizer or processor:

    feed = TextFeeder.open(artifact, graph)
    batches = in_batches(texts, 16, graph)
    feed(batches[0])["input_ids"].shape    # (16, 31)

Encodings and pixels are not kept: lengths and sizes are computed in a first pass, and each batch is
tokenized or opened again when it runs. So memory depends on the largest batch, not on the number of
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.datasets.samples import array_files, load_arrays, read_arrays
from enginery.core.errors import ArtifactError, InputError, ShapeError
from enginery.core.model.feeds import Feeds
from enginery.core.model.files import PreprocessorConfig
from enginery.core.shapes import TensorSpec
from enginery.runtime.audio.processor import AudioProcessor, load_audio
from enginery.runtime.engines.padding import dim_sizes
from enginery.runtime.image.processor import PIXEL_MASK, PIXELS, ImageProcessor, load_image
from enginery.runtime.text.tokenizer import TEXT_INPUTS, TextTokenizer, check_texts, fixed_sequence

AUDIO_INPUTS = frozenset({"input_values", "input_features"})
"""Graph inputs that a feature extractor of sounds produces."""
MASK = "attention_mask"

ROWS = 16
"""Texts in a batch: enough to differ in length, few enough for any machine."""
MEDIA = 4
"""Images or sounds in a batch."""
_CHANNELS = (1, 3)
_TOKENIZED = 256
"""Number of texts whose encodings, kilobytes each, are in memory at the same time."""

Item = TypeVar("Item")
Text = str | tuple[str, str]
"""A text, or a question with its context."""


def takes_texts(record: GraphRecord) -> bool:
    """Return True if a tokenizer produces all inputs of the graph, (batch, sequence) each."""
    return _takes_tokens(record) and not takes_choices(record)


def takes_choices(record: GraphRecord) -> bool:
    """Return True if a tokenizer produces all inputs, (batch, choices, sequence) each."""
    return _takes_tokens(record) and all(len(spec.dims) == 3 for spec in record.inputs)


def takes_images(record: GraphRecord) -> bool:
    """Return True if the graph's only input is images, besides a mask of their pixels."""
    return _names(record) - {PIXEL_MASK} == {PIXELS} or channel_axis(record) is not None


def channel_axis(record: GraphRecord) -> int | None:
    """Return the axis of 1 or 3 channels of a graph whose only input can be images: 1 or 3."""
    dims, dtype = record.inputs[0].dims, record.inputs[0].dtype
    if len(record.inputs) > 1 or len(dims) != 4 or not dtype.startswith(("float", "uint8")):
        return None
    return next((axis for axis in (1, 3) if dims[axis] in _CHANNELS), None)


def takes_sounds(record: GraphRecord) -> bool:
    """Return True if a spectrogram, of fixed length or padded, is the graph's only input."""
    return _names(record) == {"input_features"}


def takes_audio(record: GraphRecord) -> bool:
    """Return True if a feature extractor of sounds produces all inputs of the graph."""
    return bool(AUDIO_INPUTS & _names(record)) and _names(record) <= AUDIO_INPUTS | {MASK}


def takes_real_inputs(artifact: Artifact, record: GraphRecord) -> bool:
    """Return True if the artifact has the tokenizer or processor for the graph's inputs."""
    if takes_images(record) or takes_audio(record):
        return (artifact.path / PreprocessorConfig.FILE).is_file()
    return takes_texts(record) and (artifact.path / "tokenizer.json").is_file()


def fixed_batch(record: GraphRecord) -> int | None:
    """Return the graph's fixed batch size; None if it is dynamic."""
    batch = record.inputs[0].dims[0]
    return batch if isinstance(batch, int) else None


def in_batches(items: Sequence[Item], rows: int, record: GraphRecord) -> list[list[Item]]:
    """Split items into batches of up to `rows`; if the graph's batch is fixed, of exactly that."""
    rows = fixed_batch(record) or rows
    parts = [items[start : start + rows] for start in range(0, len(items), rows)]
    return [pad_batch(part, record) for part in parts]


def pad_batch(items: Sequence[Item], record: GraphRecord) -> list[Item]:
    """Repeat the last item to fill the graph's fixed batch; without one return items unchanged."""
    missing = (fixed_batch(record) or 0) - len(items)
    return [*items, *[items[-1]] * missing]


@dataclass(frozen=True)
class TextFeeder:
    """A converter of texts to feeds, which truncates texts if the graph's sequence is fixed."""

    tokenizer: TextTokenizer
    inputs: tuple[TensorSpec, ...]

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> TextFeeder:
        """Read the artifact's tokenizer.

        Raises:
            ArtifactError: the tokenizer is missing or cannot be read.
        """
        return cls(TextTokenizer.open(artifact.path).for_graph(record), record.inputs)

    @property
    def can_pad(self) -> bool:
        """True if texts of different lengths can share a batch."""
        return self.tokenizer.can_pad(self.inputs)

    @property
    def width(self) -> int | None:
        """The graph's sequence length if it is fixed, else None."""
        return fixed_sequence(self.inputs)

    def lengths(self, texts: Sequence[Text]) -> list[int]:
        """Return the number of tokens of each text, with special tokens and without padding.

        Raises:
            InputError: an item is not a text, or a question is too long for its context to fit.
        """
        check_texts(texts, pairs=True)
        return [
            len(encoding.ids)
            for start in range(0, len(texts), _TOKENIZED)
            for encoding in self.encode(texts[start : start + _TOKENIZED])
        ]

    def __call__(self, texts: Sequence[Text]) -> Feeds:
        """Return the graph's inputs: (len(texts), sequence) each, of the graph's dtypes.

        Raises:
            InputError: see `lengths`; or a text needs padding, but the tokenizer or the graph does
                not support it.
            ArtifactError: the graph has an input that does not come from a tokenizer.
        """
        return self.tokenizer.feeds(self.encode(texts), self.inputs)

    def encode(self, texts: Sequence[Text]) -> list[Any]:
        """Return the tokenizer's encoding of each text, truncated like the graph's inputs.

        Raises:
            InputError: see `lengths`.
        """
        pairs = [text for text in texts if isinstance(text, tuple)]
        if len(pairs) == len(texts):
            encodings = self.tokenizer.encode_pairs(pairs)
        else:
            prepare = self.tokenizer.prepare
            encodings = self.tokenizer.encode(
                [prepare(text) if isinstance(text, str) else text for text in texts]
            )
        if self.width:
            # The tokenizer truncates to the model's limit, which may be above the graph's fixed
            # length.
            for encoding in encodings:
                encoding.truncate(self.width)
        return encodings


@dataclass(frozen=True)
class ChoicesFeeder:
    """A converter of texts to feeds of a graph that chooses one of several in each row."""

    texts: TextFeeder

    def __call__(self, rows: Sequence[Sequence[Text]]) -> Feeds:
        """Return the graph's inputs: (len(rows), choices, sequence) each, of the graph's dtypes.

        Args:
            rows: as many texts each.

        Raises:
            InputError: see `TextFeeder`.
        """
        flat = self.texts([text for row in rows for text in row])
        return {name: array.reshape(len(rows), -1, array.shape[1]) for name, array in flat.items()}


@dataclass(frozen=True)
class ImageFeeder:
    """A converter of images (paths, Pillow images or uint8 arrays) to feeds."""

    processor: ImageProcessor
    dtype: str
    """The dtype of the graph's input; some FP16 graphs take float16."""
    input_name: str = PIXELS
    channels_last: bool = False
    """True for (batch, height, width, channels)."""
    masked: bool = False
    """True if the graph takes a mask of the pixels, too."""

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> ImageFeeder:
        """Read the artifact's image processor.

        Raises:
            ArtifactError: preprocessor_config.json is missing or its processor is not supported.
        """
        spec = next(spec for spec in record.inputs if spec.name != PIXEL_MASK)
        return cls(
            ImageProcessor.open(artifact.path),
            spec.dtype,
            spec.name,
            channels_last=channel_axis(record) == 3,
            masked=PIXEL_MASK in _names(record),
        )

    def by_shape(self, images: Iterable[Any]) -> dict[tuple[int, ...], list[int]]:
        """Group the indices of images by the shape of their pixels, (channels, height, width).

        A processor without a fixed size returns pixels of different shapes, which cannot share a
        batch. Every image is opened for this, so damaged ones are found before anything runs.

        Raises:
            InputError: an image cannot be read; the message has its index.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(images):
            name = f"image {index}"
            pixels = self.processor(load_image(image, name=name), name=name)
            groups.setdefault(pixels.shape, []).append(index)
        return groups

    def __call__(self, images: Sequence[Any]) -> Feeds:
        """Return the graph's input, (len(images), channels, height, width), of its dtype.

        A mask of the pixels is int64 (len(images), height, width).

        Raises:
            InputError: an image cannot be read.
        """
        opened = [load_image(image) for image in images]
        pixels = np.stack([self.processor(image) for image in opened])
        feeds: Feeds = {}
        if self.masked:
            masks = [self.processor.mask(*pair) for pair in zip(opened, pixels, strict=True)]
            feeds[PIXEL_MASK] = np.stack(masks)
        if self.channels_last:
            pixels = pixels.transpose(0, 2, 3, 1)
        return {self.input_name: pixels.astype(self.dtype, copy=False), **feeds}


@dataclass(frozen=True)
class SoundFeeder:
    """A converter of sounds (paths, files' contents or samples with their rate) to feeds."""

    processor: AudioProcessor
    inputs: tuple[TensorSpec, ...]

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> SoundFeeder:
        """Read the artifact's feature extractor.

        Raises:
            ArtifactError: preprocessor_config.json is missing or its extractor is not supported, or
                it produces other features than the graph takes.
        """
        processor = AudioProcessor.open(artifact.path)
        if processor.input_name not in {spec.name for spec in record.inputs}:
            raise ArtifactError(
                f"{artifact.path}: the graph takes {record.inputs[0]}, but "
                f"{processor.kind}FeatureExtractor produces {processor.input_name}."
            )
        return cls(processor, record.inputs)

    def by_shape(self, sounds: Iterable[Any]) -> dict[tuple[int, ...], list[int]]:
        """Group the indices of sounds by the shape of their features.

        Padding changes the features of a sound, so that only those of one length share a batch.

        Raises:
            InputError: a sound cannot be read; the message has its index.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, sound in enumerate(sounds):
            samples = load_audio(sound, self.processor.sampling_rate, name=f"audio {index}")
            shape = self.processor([samples], first=index)[self.processor.input_name].shape[1:]
            groups.setdefault(shape, []).append(index)
        return groups

    def __call__(self, sounds: Sequence[Any]) -> Feeds:
        """Return the graph's inputs, (len(sounds), …) each, of its dtypes.

        Raises:
            InputError: a sound cannot be read.
        """
        rate = self.processor.sampling_rate
        features = self.processor([load_audio(sound, rate) for sound in sounds])
        # All sounds of a batch have one length (`by_shape`), so nothing is masked.
        mask = np.ones(features[self.processor.input_name].shape[:2])
        return {spec.name: features.get(spec.name, mask).astype(spec.dtype) for spec in self.inputs}


@dataclass(frozen=True)
class SampleBatch:
    """Consecutive samples that run together."""

    name: str
    """What they are, by their numbers: `sentences 1–16`."""
    samples: slice
    load: Callable[[], Feeds]


def text_batches(
    name: str, feeder: TextFeeder, texts: Sequence[Text], record: GraphRecord
) -> list[SampleBatch]:
    """Return batches of texts.

    Raises:
        InputError: an item is not a text, or the tokenizer cannot encode it.
    """
    feeder.lengths(texts)  # so that errors show at once
    # Without a padding token, one text in each batch.
    return sample_batches(name, texts, feeder, record, rows=ROWS if feeder.can_pad else 1)


def media_batches(
    kind: str, feeder: ImageFeeder | SoundFeeder, items: Sequence[Any], record: GraphRecord
) -> list[SampleBatch]:
    """Return batches of images or sounds of the same size.

    Raises:
        InputError: one cannot be read.
    """
    by_shape = feeder.by_shape(items)
    batches = []
    for shape, indices in by_shape.items():
        size = " × ".join(map(str, shape[1:] if len(shape) > 1 else shape))
        name = kind if len(by_shape) == 1 else f"{kind} of {size},"
        same_size = [items[index] for index in indices]
        batches += sample_batches(name, same_size, feeder, record, rows=MEDIA)
    return batches


def array_batches(
    path: Path, record: GraphRecord, *, rows: int, batch_rows: int = ROWS
) -> list[SampleBatch]:
    """Return batches of the rows of a file of arrays, or of a folder of them.

    If the first dim of some input is not the batch, each file is one batch.

    Args:
        path: see `read_arrays`.
        record: the graph.
        rows: largest number of rows, evenly spread.
        batch_rows: largest number of rows in a batch.

    Raises:
        InputError: a file cannot be read, or its arrays do not fit the graph.
    """
    names = [spec.name for spec in record.inputs]
    first = {spec.dims[:1] for spec in record.inputs}
    # Without a batch axis in every input, the rows of files cannot be joined.
    if len(first) > 1 or () in first:
        files = array_files(path)
        return [
            SampleBatch(
                "arrays" if len(files) == 1 else f"arrays of {file.name}",
                slice(index, index + 1),
                partial(fit_arrays, file, record, load_arrays(file, names)),
            )
            for index, file in enumerate(files)
        ]

    def feed(part: Sequence[Feeds]) -> Feeds:
        arrays = {name: np.concatenate([row[name] for row in part]) for name in names}
        return fit_arrays(path, record, arrays)

    by_shape: dict[tuple[tuple[int, ...], ...], list[Feeds]] = {}
    for row in read_arrays(path, names, rows=rows):
        by_shape.setdefault(tuple(row[name].shape for name in names), []).append(row)
    batches = []
    for shapes, same_shape in by_shape.items():
        size = " × ".join(map(str, shapes[0][1:]))
        name = "rows" if len(by_shape) == 1 else f"rows of {size},"
        batches += sample_batches(name, same_shape, feed, record, rows=batch_rows)
    return batches


def fit_arrays(path: Path, record: GraphRecord, arrays: Feeds) -> Feeds:
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
        try:
            feeds[spec.name] = cast_array(array, spec)
        except InputError as error:
            raise InputError(f"data '{path}': {error.message}") from error
    try:
        dim_sizes(record.inputs, feeds)
    except ShapeError as error:
        raise InputError(f"data '{path}': {error.message}") from error
    return feeds


def cast_array(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """Return an array in the dtype of an input of a graph.

    Raises:
        InputError: values would change, other than floats that are rounded.
    """
    dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
    if array.dtype.kind in "biuf":
        # Values that do not fit are found by the comparison; numpy's warning would say less.
        with np.errstate(invalid="ignore", over="ignore"):
            converted = array.astype(dtype)
        if dtype.kind == "f" or np.array_equal(converted, array):
            return converted
    raise InputError(
        f"{spec.name} has values of {array.dtype} that {dtype} cannot hold; the graph takes {spec}."
    )


def sample_batches(
    kind: str,
    items: Sequence[Any],
    feed: Callable[[list[Any]], Feeds],
    record: GraphRecord,
    *,
    rows: int,
) -> list[SampleBatch]:
    """Return batches of up to `rows` items; if the graph's batch is fixed, of exactly that."""
    rows = fixed_batch(record) or rows
    batches = []
    for start in range(0, len(items), rows):
        part = items[start : start + rows]
        end = start + len(part)
        name = f"{kind} {start + 1}–{end}" if len(part) > 1 else f"{kind} {end}"
        load = partial(feed, pad_batch(part, record))
        batches.append(SampleBatch(name, slice(start, end), load))
    return batches


def _takes_tokens(record: GraphRecord) -> bool:
    names = _names(record)
    return "input_ids" in names and names.issubset(TEXT_INPUTS)


def _names(record: GraphRecord) -> set[str]:
    return {spec.name for spec in record.inputs}
