"""Convert texts, images and arrays to the inputs of a graph.

Texts and images go through the artifact's tokenizer or processor:

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
from enginery.core.errors import InputError, ShapeError
from enginery.core.model.feeds import Feeds
from enginery.core.shapes import TensorSpec
from enginery.runtime.engines.padding import dim_sizes
from enginery.runtime.image.processor import ImageProcessor, load_image
from enginery.runtime.text.tokenizer import TextTokenizer, check_texts, fixed_sequence

TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
"""Graph inputs that a tokenizer produces."""

ROWS = 16
"""Texts in a batch: enough to differ in length, few enough for any machine."""
_IMAGES = 4
_CHOICES = 4
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
    """Return True if the graph's only input is pixel_values, or has the shape of images."""
    return _names(record) == {"pixel_values"} or channel_axis(record) is not None


def channel_axis(record: GraphRecord) -> int | None:
    """Return the axis of 1 or 3 channels of a graph whose only input can be images: 1 or 3."""
    dims, dtype = record.inputs[0].dims, record.inputs[0].dtype
    if len(record.inputs) > 1 or len(dims) != 4 or not dtype.startswith(("float", "uint8")):
        return None
    return next((axis for axis in (1, 3) if dims[axis] in _CHANNELS), None)


def takes_sounds(record: GraphRecord) -> bool:
    """Return True if a spectrogram, of fixed length or padded, is the graph's only input."""
    return _names(record) == {"input_features"}


def takes_real_inputs(artifact: Artifact, record: GraphRecord) -> bool:
    """Return True if the artifact has the tokenizer or image processor for the graph's inputs."""
    if takes_images(record):
        return (artifact.path / "preprocessor_config.json").is_file()
    return takes_texts(record) and (artifact.path / "tokenizer.json").is_file()


def has_builtin_inputs(artifact: Artifact, record: GraphRecord) -> bool:
    """Return True if `builtin_batches` has inputs for the graph."""
    if takes_choices(record):
        return (artifact.path / "tokenizer.json").is_file()
    return takes_real_inputs(artifact, record)


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
        return cls(TextTokenizer.open(artifact.path), record.inputs)

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
            for encoding in self._encode(texts[start : start + _TOKENIZED])
        ]

    def __call__(self, texts: Sequence[Text]) -> Feeds:
        """Return the graph's inputs: (len(texts), sequence) each, of the graph's dtypes.

        Raises:
            InputError: see `lengths`; or a text needs padding, but the tokenizer or the graph does
                not support it.
            ArtifactError: the graph has an input that does not come from a tokenizer.
        """
        return self.tokenizer.feeds(self._encode(texts), self.inputs)

    def _encode(self, texts: Sequence[Text]) -> list[Any]:
        pairs = [text for text in texts if isinstance(text, tuple)]
        if len(pairs) == len(texts):
            encodings = self.tokenizer.encode_pairs(pairs)
        else:
            prepare = self.tokenizer.prepare
            encodings = self.tokenizer.encode(
                [prepare(text) if isinstance(text, str) else text for text in texts]
            )
        if self.width:
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
    input_name: str = "pixel_values"
    channels_last: bool = False
    """True for (batch, height, width, channels)."""

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> ImageFeeder:
        """Read the artifact's image processor.

        Raises:
            ArtifactError: preprocessor_config.json is missing or its processor is not supported.
        """
        spec = record.inputs[0]
        processor = ImageProcessor.open(artifact.path)
        return cls(processor, spec.dtype, spec.name, channels_last=channel_axis(record) == 3)

    def by_shape(self, images: Iterable[Any]) -> dict[tuple[int, ...], list[int]]:
        """Group the indices of images by the shape of their pixels, (channels, height, width).

        A processor without a fixed size returns pixels of different shapes, which cannot share a
        batch. Every image is opened for this, so damaged ones are found before anything runs.

        Raises:
            InputError: an image cannot be read; the message has its index.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(images):
            name = f"image {index}"
            pixels = self.processor(load_image(image, name=name), name=name)
            found.setdefault(pixels.shape, []).append(index)
        return found

    def __call__(self, images: Sequence[Any]) -> Feeds:
        """Return the graph's input, (len(images), channels, height, width), of its dtype.

        Raises:
            InputError: an image cannot be read.
        """
        pixels = np.stack([self.processor(load_image(image)) for image in images])
        if self.channels_last:
            pixels = pixels.transpose(0, 2, 3, 1)
        return {self.input_name: pixels.astype(self.dtype, copy=False)}


@dataclass(frozen=True)
class SampleBatch:
    """Consecutive samples that run together."""

    name: str
    """What they are, by their numbers: `sentences 1–16`."""
    samples: slice
    load: Callable[[], Feeds]


def builtin_batches(artifact: Artifact, record: GraphRecord) -> list[SampleBatch]:
    """Return batches of built-in texts or images for a graph.

    Raises:
        ArtifactError: the tokenizer or the image processor is missing or cannot be read.
        InputError: the tokenizer cannot encode the texts.
    """
    if takes_images(record):
        return image_batches(ImageFeeder.open(artifact, record), synthetic_images(), record)
    feeder = TextFeeder.open(artifact, record)
    if takes_choices(record):
        rows = _choices(record)
        return sample_batches("questions", rows, ChoicesFeeder(feeder), record, rows=_IMAGES)
    if artifact.manifest.task == "question-answering":
        return text_batches("questions", feeder, QUESTIONS, record)
    return text_batches("sentences", feeder, SENTENCES, record)


def _choices(record: GraphRecord) -> list[list[Text]]:
    """Return a question with several possible answers in each row."""
    choices = record.inputs[0].dims[1]
    count = choices if isinstance(choices, int) else _CHOICES
    answers = len(SENTENCES)
    return [
        [(QUESTION, SENTENCES[(first + choice) % answers]) for choice in range(count)]
        for first in range(answers)
    ]


def text_batches(
    what: str, feeder: TextFeeder, texts: Sequence[Text], record: GraphRecord
) -> list[SampleBatch]:
    """Return batches of texts.

    Raises:
        InputError: an item is not a text, or the tokenizer cannot encode it.
    """
    feeder.lengths(texts)  # so that errors show at once
    # Without a padding token, one text in each batch.
    return sample_batches(what, texts, feeder, record, rows=ROWS if feeder.can_pad else 1)


def image_batches(
    feeder: ImageFeeder, images: Sequence[Any], record: GraphRecord
) -> list[SampleBatch]:
    """Return batches of images of the same size.

    Raises:
        InputError: an image cannot be read.
    """
    by_shape = feeder.by_shape(images)
    batches = []
    for shape, places in by_shape.items():
        what = "images" if len(by_shape) == 1 else f"images of {shape[1]} × {shape[2]},"
        alike = [images[place] for place in places]
        batches += sample_batches(what, alike, feeder, record, rows=_IMAGES)
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
    for shapes, alike in by_shape.items():
        size = " × ".join(map(str, shapes[0][1:]))
        what = "rows" if len(by_shape) == 1 else f"rows of {size},"
        batches += sample_batches(what, alike, feed, record, rows=batch_rows)
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


def sample_batches(
    what: str,
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
        name = f"{what} {start + 1}–{end}" if len(part) > 1 else f"{what} {end}"
        load = partial(feed, pad_batch(part, record))
        batches.append(SampleBatch(name, slice(start, end), load))
    return batches


def _takes_tokens(record: GraphRecord) -> bool:
    names = _names(record)
    return "input_ids" in names and names <= TEXT_INPUTS


def _names(record: GraphRecord) -> set[str]:
    return {spec.name for spec in record.inputs}


SENTENCES = (
    "The engine starts at the first turn of the key.",
    "At the first turn of the key, the motor comes to life.",
    "Prices fell by 3.7% in March, to $1,204 a tonne.",
    "Yes.",
    "Der Zug nach Hamburg hat heute leider vierzig Minuten Verspätung.",
    "Le musée est fermé le lundi, mais le jardin reste ouvert.",
    "¿Dónde queda la estación de metro más cercana?",
    "今日はとても寒いので、家で本を読みます。",
    "这家餐馆的面条很好吃，价格也不贵。",
    "Завтра утром мы поедем на дачу, если не будет дождя.",
    "القطار يصل إلى المحطة في الساعة التاسعة.",
    "मुझे सुबह की चाय के बिना काम करना अच्छा नहीं लगता।",
    "İstanbul'da yaşayan kuzenim her yaz bizi ziyarete gelir.",
    "def area(r): return 3.14159 * r ** 2  # a circle",
    "She read the letter twice, folded it, put it back into the drawer, and for the rest of the "
    "evening spoke of nothing but the weather, the harvest and the price of coal.",
    "🎉 Congratulations!!! You've won… (terms & conditions apply)",
)

QUESTION = "When is the museum closed?"
CONTEXT = (
    "The museum stands on the north bank of the river. It is closed on Mondays, but its garden "
    "stays open every day until nine in the evening, and entry to both is free for children."
)
QUESTIONS = tuple((QUESTION, context) for context in (CONTEXT, *SENTENCES))
"""Pairs (question, context); only the first context has the answer."""

_EXPOSURES = (1.0, 1.0, 1.0, 1.0, 0.2, 1.7)
"""Brightness of the synthetic images: the fifth is dark, and the sixth is overexposed."""


def synthetic_images(count: int = 6) -> list[NDArray[np.uint8]]:
    """Return RGB images, uint8 (height, width, 3), of different sizes; the same in every call."""
    generator = np.random.default_rng(0)
    images = []
    for index in range(count):
        height, width = 96 + 40 * index, 160 - 12 * index
        y, x = np.mgrid[0:height, 0:width].astype(np.float64)
        waves = np.stack(
            [
                np.sin(x / (5 + index) + channel) + np.cos(y / (9 - index) - channel)
                for channel in range(3)
            ],
            axis=-1,
        )
        disc = ((x - width / 2) ** 2 + (y - height / 2) ** 2 < (20 + 6 * index) ** 2)[..., None]
        noise = generator.normal(0, 12, (height, width, 3))
        pixels = (128 + 50 * waves + 40 * disc + noise) * _EXPOSURES[index % len(_EXPOSURES)]
        images.append(np.clip(pixels, 0, 255).astype(np.uint8))
    return images


def synthetic_sounds(rate: int, count: int = 6) -> list[tuple[NDArray[np.float32], int]]:
    """Return sounds of one to five seconds as samples in [-1, 1] with their rate, in hertz.

    Voices of different pitch, interrupted by pauses, over noise; the same in every call.
    """
    generator = np.random.default_rng(0)
    sounds = []
    for index in range(count):
        times = np.arange((1 + 3 * index % 5) * rate) / rate
        pitch = 90 + 23 * index + 25 * np.sin(2 * np.pi * 0.8 * times + index)
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        voice = sum(np.sin(number * phase) / number for number in range(1, 20))
        spoken = np.sin(2 * np.pi * (1.3 + 0.2 * index) * times) > -0.5
        samples = 0.2 * voice * spoken + 0.01 * generator.standard_normal(len(times))
        sounds.append((samples.clip(-1, 1).astype(np.float32), rate))
    return sounds
