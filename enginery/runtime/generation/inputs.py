"""Turn texts and images into a decoder's prompts and its encoder's inputs.

inputs = open_inputs(artifact, graphs, tokenizer, defaults)
rows = inputs.rows(["Where is it?"], options)
feeds = inputs.join(rows)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

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

    arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments of `generate` that are about the inputs."""

    def implied(self) -> dict[str, Any]:
        """Return the options of generation that follow from the inputs' own arguments.

        Raises:
            InputError: an argument is invalid.
        """
        return {}

    @abstractmethod
    def rows(
        self, inputs: Sequence[Any], options: GenerationOptions, **own: Any
    ) -> Iterator[GenerationRow]:
        """Prepare inputs one by one.

        Args:
            inputs: the inputs.
            options: the options of generation.
            own: the arguments that are about the inputs.

        Raises:
            InputError: an input or an argument is invalid; the message has the input's index.
        """

    @abstractmethod
    def probe(self) -> GenerationRow:
        """Return a made-up input, to see that the graphs run."""

    def join(self, rows: Sequence[GenerationRow]) -> Feeds | None:
        """Return the encoder's inputs of rows in one batch; None without an encoder."""
        return {
            name: np.stack([row.arrays[name] for row in rows]) for name in rows[0].arrays
        } or None


class PromptInputs(GenerationInputs):
    """Texts that a decoder continues."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    @override
    def rows(
        self, inputs: Sequence[Any], options: GenerationOptions, **own: Any
    ) -> Iterator[GenerationRow]:
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

    @override
    def probe(self) -> GenerationRow:
        """Return a prompt of one token."""
        return GenerationRow((0,), {})


class SourceTexts(GenerationInputs):
    """Texts that an encoder reads, to be translated or summarized."""

    arguments = ("source_language", "target_language")

    def __init__(self, tokenizer: TextTokenizer, longest: int) -> None:
        """Take the tokenizer, and the largest number of tokens; 0 for no limit."""
        self._tokenizer = tokenizer
        self._longest = longest

    @override
    def implied(
        self, *, source_language: str | None = None, target_language: str | None = None
    ) -> dict[str, Any]:
        """Return the tokens that a translation starts with."""
        if target_language is None:
            return {}
        return dict(self._tokenizer.load_languages().first_tokens(target_language))

    @override
    def rows(
        self, inputs: Sequence[Any], options: GenerationOptions, **own: Any
    ) -> Iterator[GenerationRow]:
        """Encode texts; see `GenerationInputs.rows`.

        Args:
            inputs: the texts.
            options: the options of generation.
            own: `source_language` and `target_language`, by the codes of the model's tokenizer.
        """
        start = _start(options)
        self._tokenizer.load_languages().require_target(start, options.forced_bos_token_id)
        for index, encoding in enumerate(self._tokenizer.encode_source(inputs, **own)):
            if 0 < self._longest < len(encoding.ids):
                raise InputError(
                    f"text {index} has {len(encoding.ids)} tokens, and the model's limit is "
                    f"{self._longest}.",
                    do="Split it into sentences or paragraphs.",
                )
            if not encoding.ids:
                raise InputError(f"text {index} has no tokens.", do="Give it some text.")
            yield GenerationRow((start,), {"input_ids": np.asarray(encoding.ids, np.int64)})

    @override
    def probe(self) -> GenerationRow:
        """Return a text of two tokens."""
        return GenerationRow((0,), {"input_ids": np.zeros(2, np.int64)})

    @override
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

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self.max_pixels = 0
        """Largest number of pixels of an image file; 0 for Pillow's own limit."""

    @override
    def rows(
        self, inputs: Sequence[Any], options: GenerationOptions, **own: Any
    ) -> Iterator[GenerationRow]:
        """Preprocess images; see `GenerationInputs.rows`."""
        if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence):
            raise InputError(
                f"found one {type(inputs).__name__}, expected a list of images.", do="Pass [image]."
            )
        start = _start(options)
        for index, image in enumerate(inputs):
            try:
                pixels = self._processor(load_image(image, max_pixels=self.max_pixels))
            except InputError as error:
                raise InputError(f"image {index}: {error}") from error
            yield GenerationRow((start,), {"pixel_values": pixels})

    @override
    def probe(self) -> GenerationRow:
        """Return a black image."""
        pixels = self._processor(load_image(np.zeros((64, 64, 3), np.uint8)))
        return GenerationRow((0,), {"pixel_values": pixels})


def open_inputs(
    artifact: Artifact, graphs: DecoderGraphs, tokenizer: TextTokenizer, options: GenerationOptions
) -> GenerationInputs:
    """Return how an artifact's inputs are prepared.

    Args:
        artifact: the artifact.
        graphs: its graphs.
        tokenizer: its tokenizer.
        options: the model's own options.

    Raises:
        ArtifactError: a file is missing or malformed, or the encoder takes something else.
    """
    if graphs.encoder is None:
        return PromptInputs(tokenizer)
    if options.decoder_start_token_id is None and options.bos_token_id is None:
        raise ArtifactError(
            f"{artifact.path / FILE} has no decoder_start_token_id.",
            do="Add the decoder's first token, as in the model's own file.",
        )
    names = {spec.name for spec in graphs.encoder.inputs}
    if names == {"input_ids", "attention_mask"}:
        return SourceTexts(tokenizer, ModelConfig.read(artifact.path).merged().positions)
    if names == {"pixel_values"}:
        return SourceImages(ImageProcessor.open(artifact.path))
    raise ArtifactError(
        f"{graphs.encoder.file} takes {', '.join(sorted(names))}, which generation cannot prepare.",
        do="Expected texts (input_ids, attention_mask) or images (pixel_values).",
    )


def _start(options: GenerationOptions) -> int:
    """Return the first token of an encoder-decoder's decoder."""
    start = options.decoder_start_token_id
    return int(options.bos_token_id or 0) if start is None else start
