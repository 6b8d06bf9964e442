"""Built-in texts, images, sounds and series, as inputs of a graph.

    for batch in builtin_batches(artifact, graph):
        batch.load()["input_ids"].shape

They pass through the artifact's own tokenizer and processors, as the user's data do. Documents are
the sentences with a box for each word, on lines of a page; pairs are images and sentences. Images,
sounds and series are synthetic, and the same in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits, Feeds
from enginery.core.model.files import PreprocessorConfig
from enginery.core.shapes import TensorSpec
from enginery.runtime.image.processor import PIXELS, ImageProcessor
from enginery.runtime.sample_inputs import (
    MEDIA,
    ROWS,
    ChoicesFeeder,
    ImageFeeder,
    SampleBatch,
    SoundFeeder,
    Text,
    TextFeeder,
    fixed_batch,
    media_batches,
    pad_batch,
    sample_batches,
    takes_audio,
    takes_choices,
    takes_images,
    takes_real_inputs,
    text_batches,
)
from enginery.runtime.text.tokenizer import TEXT_INPUTS

_CHOICES = 4
_BOXES, _SERIES = "bbox", "past_values"


def has_builtin_inputs(artifact: Artifact, record: GraphRecord) -> bool:
    """Return True if `builtin_batches` has inputs for the graph."""
    if _takes_series(record):
        return True
    extra = _names(record).difference(TEXT_INPUTS)
    if takes_choices(record) or _takes_documents(record):
        pixels = PIXELS not in extra or (artifact.path / PreprocessorConfig.FILE).is_file()
        return pixels and (artifact.path / "tokenizer.json").is_file()
    return takes_real_inputs(artifact, record)


def builtin_batches(artifact: Artifact, record: GraphRecord) -> list[SampleBatch]:
    """Return batches of built-in inputs for a graph.

    Raises:
        ArtifactError: the tokenizer or a processor is missing or cannot be read.
        InputError: the tokenizer cannot encode the texts.
    """
    if takes_images(record):
        feeder = ImageFeeder.open(artifact, record)
        return media_batches("images", feeder, synthetic_images(), record)
    if takes_audio(record):
        sounds = SoundFeeder.open(artifact, record)
        waveforms = synthetic_sounds(sounds.processor.sampling_rate)
        return media_batches("sounds", sounds, waveforms, record)
    if _takes_series(record):
        return _series_batches(artifact, record)
    texts = TextFeeder.open(artifact, record)
    if takes_choices(record):
        rows = _choices(record)
        texts.lengths([text for row in rows for text in row])  # so that errors show at once
        return sample_batches("questions", rows, ChoicesFeeder(texts), record, rows=MEDIA)
    if _takes_documents(record):
        return _document_batches(artifact, record, texts)
    if artifact.manifest.task == "question-answering":
        return text_batches("questions", texts, QUESTIONS, record)
    return text_batches("sentences", texts, SENTENCES, record)


def _names(record: GraphRecord) -> set[str]:
    return {spec.name for spec in record.inputs}


def _choices(record: GraphRecord) -> list[list[Text]]:
    """Return a question with several possible answers in each row."""
    choices = record.inputs[0].dims[1]
    count = choices if isinstance(choices, int) else _CHOICES
    answers = len(SENTENCES)
    return [
        [(QUESTION, SENTENCES[(first + choice) % answers]) for choice in range(count)]
        for first in range(answers)
    ]


def _takes_documents(record: GraphRecord) -> bool:
    """Return True if a graph takes texts with boxes, with images or with both."""
    extra = _names(record).difference(TEXT_INPUTS)
    return "input_ids" in _names(record) and bool(extra) and extra <= {_BOXES, PIXELS}


@dataclass(frozen=True)
class DocumentFeeder:
    """A converter of texts with images to feeds: a box for each word, if the graph takes boxes."""

    texts: TextFeeder
    images: ImageFeeder | None
    """None if the graph takes none."""
    boxes: TensorSpec | None
    """The input of boxes, if the graph has one."""

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> DocumentFeeder:
        """Read the artifact's tokenizer and image processor.

        Raises:
            ArtifactError: one is missing or cannot be read.
        """
        specs = {spec.name: spec for spec in record.inputs}
        images = None
        if PIXELS in specs:
            images = ImageFeeder(ImageProcessor.open(artifact.path), specs[PIXELS].dtype)
        tokens = tuple(spec for spec in record.inputs if spec.name in TEXT_INPUTS)
        texts = TextFeeder.open(artifact, record)
        return cls(TextFeeder(texts.tokenizer, tokens), images, specs.get(_BOXES))

    def __call__(self, texts: Sequence[Text], images: Sequence[Any]) -> Feeds:
        """Return the graph's inputs: tokens and boxes of the texts, pixels of the images.

        Raises:
            InputError: a text cannot be encoded or needs padding that is not supported.
        """
        feeds = self.texts(texts)
        if self.boxes is not None:
            boxes = np.zeros((*feeds["input_ids"].shape, 4), self.boxes.dtype)
            for row, encoding in zip(boxes, self.texts.encode(texts), strict=True):
                placed = word_boxes(encoding)
                row[: len(placed)] = placed[: len(row)]
            feeds[_BOXES] = boxes
        return feeds | (self.images(images) if self.images else {})


_MARGIN, _LINE, _HEIGHT, _LETTER = 60, 40, 28, 14
"""Of a page of 1000 × 1000, as LayoutLM's boxes have it."""


def word_boxes(encoding: Any) -> NDArray[np.int64]:
    """Return the box of the word of each token: (tokens, 4), left, top, right, bottom.

    The words stand on the lines of a page. Special tokens have the box of LayoutLM's: zeros.
    """
    boxes = np.zeros((len(encoding.ids), 4), np.int64)
    spans: dict[tuple[Any, int], list[int]] = {}
    words = list(zip(encoding.sequence_ids, encoding.word_ids, encoding.offsets, strict=True))
    for sequence, word, (start, end) in words:
        if word is not None:
            span = spans.setdefault((sequence, word), [start, end])
            span[:] = min(span[0], start), max(span[1], end)
    word_positions: dict[tuple[Any, int], tuple[int, int, int, int]] = {}
    left, top = _MARGIN, _MARGIN
    for key, (start, end) in spans.items():
        width = min(_LETTER * max(end - start, 1), 1000 - 2 * _MARGIN)
        # LayoutLM's coordinates are from 0 to 1000.
        if left + width > 1000 - _MARGIN:
            left, top = _MARGIN, top + _LINE
        if top + _HEIGHT > 1000 - _MARGIN:
            top = _MARGIN
        word_positions[key] = (left, top, left + width, top + _HEIGHT)
        left += width + _LETTER
    for index, (sequence, word, _) in enumerate(words):
        if word is not None:
            boxes[index] = word_positions[sequence, word]
    return boxes


def _document_batches(
    artifact: Artifact, record: GraphRecord, texts: TextFeeder
) -> list[SampleBatch]:
    """Return batches of sentences with boxes or images; CLIP takes other numbers of both."""
    feed = DocumentFeeder.open(artifact, record)
    texts.lengths(SENTENCES)  # so that errors show at once
    batches = {spec.name: spec.dims[0] for spec in record.inputs}
    images = synthetic_images(MEDIA)
    if feed.images is not None and batches[PIXELS] != batches["input_ids"]:
        # SigLIP's texts have no mask, and are as long as the model takes them or alone.
        load = partial(feed, SENTENCES if texts.can_pad else SENTENCES[:1], images)
        return [SampleBatch("images with sentences", slice(0, MEDIA), load)]

    def load_rows(rows: list[tuple[Text, Any]]) -> Feeds:
        return feed([text for text, _ in rows], [image for _, image in rows])

    rows = [(text, images[index % len(images)]) for index, text in enumerate(SENTENCES)]
    name = "sentences with images" if feed.images else "sentences with boxes"
    max_rows = (MEDIA if feed.images else ROWS) if texts.can_pad else 1
    return sample_batches(name, rows, load_rows, record, rows=max_rows)


def _takes_series(record: GraphRecord) -> bool:
    dims = record.inputs[0].dims
    return _names(record) == {_SERIES} and len(dims) == 3 and isinstance(dims[2], int)


def _series_batches(artifact: Artifact, record: GraphRecord) -> list[SampleBatch]:
    """Return batches of series of the length that the graph was traced with."""
    spec = record.inputs[0]
    sizes = {"sequence": 64, **FeedLimits.from_artifact(artifact).sizes, "batch": 1}
    _, length, channels = spec.shape({**dict.fromkeys(map(str, spec.dims), 64), **sizes})
    series = synthetic_series(length, channels)
    rows = pad_batch(list(series), record)

    def load(part: Sequence[Any]) -> Feeds:
        return {_SERIES: np.stack(part).astype(spec.dtype)}

    return sample_batches("series", rows, load, record, rows=fixed_batch(record) or ROWS)


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


def synthetic_series(length: int, channels: int, count: int = 8) -> NDArray[np.float32]:
    """Return series like hourly loads: a trend, a day's rhythm, noise: (count, length, channels).

    The same in every call.
    """
    generator = np.random.default_rng(0)
    hours = np.arange(length)[None, :, None]
    level, slope, swing, phase = generator.normal(size=(4, count, 1, channels))
    series = 10 * level + 2 * slope * hours / max(length, 1)
    series = series + 3 * swing * np.sin(2 * np.pi * hours / 24 + phase)
    noise = generator.normal(0, 0.3, (count, length, channels))
    return np.asarray(series + noise, np.float32)
