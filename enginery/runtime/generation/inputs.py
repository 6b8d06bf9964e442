"""Turn texts and images into a decoder's prompts and its encoder's inputs.

inputs = open_inputs(artifact, graphs, tokenizer, defaults)
rows = inputs.rows(["Where is it?"], options)
feeds = inputs.join(rows)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.decoder_graphs import DecoderGraphs
from enginery.runtime.generation.options import FILE, GenerationOptions
from enginery.runtime.image.files import load_image
from enginery.runtime.image.processor import ImageProcessor
from enginery.runtime.text.tokenizer import TextTokenizer, check_texts

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class GenerationRow:
    """One input."""

    prompt: tuple[int, ...]
    """The decoder's prompt."""
    arrays: Feeds
    """The encoder's inputs without the batch dim; empty without an encoder."""


class GenerationInputs(ABC):
    """How inputs of one kind are prepared."""

    @abstractmethod
    def rows(self, inputs: Sequence[Any]) -> Iterator[GenerationRow]:
        """Prepare inputs one by one.

        Raises:
            InputError: an input is invalid; the message has its index.
        """

    def join(self, rows: Sequence[GenerationRow]) -> Feeds | None:
        """Return the encoder's inputs of rows in one batch; None without an encoder."""
        return {
            name: np.stack([row.arrays[name] for row in rows]) for name in rows[0].arrays
        } or None


class PromptInputs(GenerationInputs):
    """Texts that a decoder continues."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def rows(self, inputs: Sequence[Any]) -> Iterator[GenerationRow]:
        """Encode prompts; see `GenerationInputs.rows`."""
        check_texts(inputs)
        encodings = self._tokenizer.encode_untruncated(inputs, special=True)
        for index, encoding in enumerate(encodings):
            if not encoding.ids:
                raise InputError(
                    f"prompt {index} is empty, and the tokenizer puts no token in front.",
                    do="Start with some text.",
                )
            yield GenerationRow(tuple(encoding.ids), {})


class SourceTexts(GenerationInputs):
    """Texts that an encoder reads, to be translated or summarized."""

    def __init__(self, tokenizer: TextTokenizer, start: int, longest: int) -> None:
        """Take the tokenizer, the decoder's first token, and the encoder's limit; 0 for none."""
        self._tokenizer = tokenizer
        self._start = start
        self._longest = longest

    def rows(self, inputs: Sequence[Any]) -> Iterator[GenerationRow]:
        """Encode texts; see `GenerationInputs.rows`."""
        check_texts(inputs)
        encodings = self._tokenizer.encode_untruncated(inputs, special=True)
        for index, encoding in enumerate(encodings):
            if 0 < self._longest < len(encoding.ids):
                raise InputError(
                    f"text {index} has {len(encoding.ids)} tokens, and the model's limit is "
                    f"{self._longest}.",
                    do="Split it into sentences or paragraphs.",
                )
            ids = np.asarray(encoding.ids, np.int64)
            if not len(ids):
                raise InputError(f"text {index} has no tokens.", do="Give it some text.")
            yield GenerationRow((self._start,), {"input_ids": ids})

    def join(self, rows: Sequence[GenerationRow]) -> Feeds | None:
        """Pad texts on the right."""
        longest = max(len(row.arrays["input_ids"]) for row in rows)
        ids = np.full((len(rows), longest), self._tokenizer.pad_id or 0, np.int64)
        mask = np.zeros_like(ids)
        for place, row in enumerate(rows):
            found = row.arrays["input_ids"]
            ids[place, : len(found)] = found
            mask[place, : len(found)] = 1
        return {"input_ids": ids, "attention_mask": mask}


class SourceImages(GenerationInputs):
    """Images whose text is read or that are described."""

    def __init__(self, processor: ImageProcessor, start: int) -> None:
        """Take the image processor and the decoder's first token."""
        self._processor = processor
        self._start = start

    def rows(self, inputs: Sequence[Any]) -> Iterator[GenerationRow]:
        """Preprocess images; see `GenerationInputs.rows`."""
        if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence):
            raise InputError(
                f"found one {type(inputs).__name__}, expected a list of images.", do="Pass [image]."
            )
        for index, image in enumerate(inputs):
            try:
                pixels = self._processor(load_image(image))
            except InputError as error:
                raise InputError(f"image {index}: {error}") from error
            yield GenerationRow((self._start,), {"pixel_values": pixels})


def open_inputs(
    artifact: Artifact, graphs: DecoderGraphs, tokenizer: TextTokenizer, defaults: GenerationOptions
) -> GenerationInputs:
    """Return how an artifact's inputs are prepared.

    Raises:
        ArtifactError: a file is missing or malformed, or the encoder takes something else.
    """
    if graphs.encoder is None:
        return PromptInputs(tokenizer)
    config = ModelConfig.read(artifact.path)
    start = defaults.decoder_start_token_id
    if start is None:
        start = defaults.bos_token_id
    if start is None:
        raise ArtifactError(
            f"{artifact.path / FILE} has no decoder_start_token_id.",
            do="Add the decoder's first token, as in the model's own file.",
        )
    names = {spec.name for spec in graphs.encoder.inputs}
    if names == {"input_ids", "attention_mask"}:
        return SourceTexts(tokenizer, start, config.merged().positions)
    if names == {"pixel_values"}:
        return SourceImages(ImageProcessor.open(artifact.path), start)
    raise ArtifactError(
        f"{graphs.encoder.file} takes {', '.join(sorted(names))}, which generation cannot prepare.",
        do="Expected texts (input_ids, attention_mask) or images (pixel_values).",
    )
