"""Texts and images as the inputs of one graph, through the artifact's own tokenizer or processor.

    >>> feed = TextFeeder.open(artifact, graph)
    >>> parts = in_batches(texts, 16, graph)
    >>> feed(parts[0])["input_ids"].shape
    (16, 31)

Nothing is kept of a text or an image: its tokens are counted, or its size looked at, and it is
tokenized or opened again when its batch runs. So memory follows the largest batch, whatever the
number of inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from enginery.core.artifact import Artifact
from enginery.core.feeds import Feeds
from enginery.core.manifest import GraphRecord
from enginery.core.shapes import TensorSpec
from enginery.runtime.images import ImageProcessor, load_image
from enginery.runtime.tokenizer import TextTokenizer, check_texts, fixed_sequence

TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
"""What is made from texts."""

_TOKENIZED = 256
"""Texts whose encodings, kilobytes each, are in memory at one time."""

Item = TypeVar("Item")
Text = str | tuple[str, str]
"""A text, or a question with its context."""


def takes_texts(record: GraphRecord) -> bool:
    """Whether all of the graph's inputs are made from texts."""
    names = _names(record)
    return "input_ids" in names and names <= TEXT_INPUTS


def takes_images(record: GraphRecord) -> bool:
    """Whether the graph takes pixels alone."""
    return _names(record) == {"pixel_values"}


def takes_real_inputs(artifact: Artifact, record: GraphRecord) -> bool:
    """Whether the graph's inputs are made from texts or images, by files that the artifact has."""
    if takes_images(record):
        return (artifact.path / "preprocessor_config.json").is_file()
    return takes_texts(record) and (artifact.path / "tokenizer.json").is_file()


def fixed_batch(record: GraphRecord) -> int | None:
    """How many rows the graph takes, no more and no less; None where that is free."""
    batch = record.inputs[0].dims[0]
    return batch if isinstance(batch, int) else None


def in_batches(items: Sequence[Item], rows: int, record: GraphRecord) -> list[list[Item]]:
    """Lists of up to `rows` items; of exactly as many as the graph takes, where that is fixed."""
    rows = fixed_batch(record) or rows
    parts = [items[start : start + rows] for start in range(0, len(items), rows)]
    return [filled(part, record) for part in parts]


def filled(items: Sequence[Item], record: GraphRecord) -> list[Item]:
    """The items, with the last one repeated up to the graph's fixed batch if it has one."""
    missing = (fixed_batch(record) or 0) - len(items)
    return [*items, *[items[-1]] * missing]


@dataclass(frozen=True)
class TextFeeder:
    """Makes feeds of texts; longer ones are cut where the graph's sequence is fixed."""

    tokenizer: TextTokenizer
    inputs: tuple[TensorSpec, ...]

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> TextFeeder:
        """Reads the artifact's tokenizer.

        Raises:
            ArtifactError: there is none, or it cannot be read.
        """
        return cls(TextTokenizer.open(artifact.path), record.inputs)

    @property
    def can_pad(self) -> bool:
        """Whether texts of different length can share a batch."""
        return self.tokenizer.can_pad(self.inputs)

    @property
    def width(self) -> int | None:
        """The graph's sequence where it is fixed."""
        return fixed_sequence(self.inputs)

    def lengths(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of each text as it would be fed, special tokens included and padding not.

        Raises:
            InputError: an item is no text, or a question leaves no room for its context.
        """
        check_texts(texts, pairs=True)
        return [
            len(encoding.ids)
            for start in range(0, len(texts), _TOKENIZED)
            for encoding in self._encode(texts[start : start + _TOKENIZED])
        ]

    def __call__(self, texts: Sequence[Text]) -> Feeds:
        """The graph's inputs, each (len(texts), sequence) and of the graph's dtype.

        Raises:
            InputError: as `lengths`, or a text has to be padded and cannot be.
            ArtifactError: the graph wants an input that is not made from texts.
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
class ImageFeeder:
    """Makes feeds of images: paths, Pillow images or uint8 arrays."""

    processor: ImageProcessor
    dtype: str
    """Of the graph's pixels: an FP16 graph may take FP16."""

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> ImageFeeder:
        """Reads the artifact's image processor.

        Raises:
            ArtifactError: there is none, or it is not known.
        """
        return cls(ImageProcessor.open(artifact.path), record.inputs[0].dtype)

    def by_shape(self, images: Iterable[Any]) -> dict[tuple[int, ...], list[int]]:
        """Indices of the images by the shape of their pixels, (channels, height, width).

        A processor without a fixed size gives each image its own, and those cannot share a batch.
        Every image is opened once for it, so that a damaged one is known before anything runs.

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
        """`pixel_values`: (len(images), channels, height, width), of the graph's dtype.

        Raises:
            InputError: an image cannot be read.
        """
        pixels = np.stack([self.processor(load_image(image)) for image in images])
        return {"pixel_values": pixels.astype(self.dtype, copy=False)}


def _names(record: GraphRecord) -> set[str]:
    return {spec.name for spec in record.inputs}
