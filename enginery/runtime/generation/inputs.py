"""Turn texts, images and sounds into a decoder's prompts and its encoder's inputs.

inputs = open_inputs(artifact, graphs, tokenizer, defaults, positions)
rows = inputs.rows(["Where is it?"], options)
feeds = inputs.join(rows)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, read_length_limit
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import TensorSpec
from enginery.runtime.audio.chunks import require_short
from enginery.runtime.audio.processor import AudioProcessor, audio_blocks
from enginery.runtime.audio.transcript import TranscriptDecoder
from enginery.runtime.decoder_graphs import DecoderGraphs
from enginery.runtime.generation.options import FILE, MAX_TOKEN_ID, GenerationOptions
from enginery.runtime.generation.recording import (
    Recording,
    RecordingPart,
    SpeechOptions,
    WindowShape,
)
from enginery.runtime.generation.time_stamps import TimeStamps
from enginery.runtime.generation.whisper import Places, WhisperPrompts
from enginery.runtime.image.files import load_image
from enginery.runtime.image.processor import ImageProcessor
from enginery.runtime.text.tokenizer import TextTokenizer, check_texts

Feeds = Mapping[str, NDArray[Any]]

# The inputs of the encoders that are supported.
_OF_TEXTS = {"input_ids", "attention_mask"}
_OF_IMAGES = {"pixel_values"}
_OF_SOUNDS = {"input_features"}

_PREVIOUS = "<|startofprev|>"
"""Whisper's token in front of what was said before."""


@dataclass(frozen=True)
class GenerationRow:
    """One input."""

    prompt: tuple[int, ...]
    """The decoder's prompt."""
    arrays: Feeds
    """The encoder's inputs without the batch dim; empty without an encoder."""
    rest: tuple[tuple[int, ...], ...] = ()
    """The tokens of each further place of the prompt; the decoder chooses where there are several.
    Rows of one batch may differ in it."""
    part: RecordingPart | None = None
    """What of a recording the row is a window of; None for other inputs."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first new one."""
        return len(self.prompt) + len(self.rest)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what is stacked for the encoder, but not padded as texts are."""
        if self.part is not None:
            return (self.part.shape,)
        return tuple(array.shape for name, array in self.arrays.items() if name != "input_ids")


class GenerationInputs(ABC):
    """How inputs of one kind are prepared."""

    arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments of `generate` that are about the inputs."""
    argument_types: ClassVar[Mapping[str, str]] = {}
    """JSON type of each of them that is no string."""
    hidden: range = range(0)
    """Token ids that are removed from the results, such as time stamps."""
    truncates: bool = False
    """Cut texts that are too long for an encoder, before their last token, in place of an error."""
    max_pixels: int = 0
    """Largest number of pixels of an image file; 0 for Pillow's own limit."""
    max_seconds: float = 0.0
    """Largest duration of speech; 0 for the limit of `audio_blocks`."""

    def implied(self, **_own: Any) -> dict[str, Any]:
        """Return the options of generation that follow from the inputs' own arguments.

        Raises:
            InputError: an argument is invalid.
        """
        return {}

    def fallback(self, _options: GenerationOptions) -> dict[str, Any]:
        """Return values of the arguments that a model needs and that have no default.

        They make its graphs run as in use; which of several languages does not matter then.
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

    def __init__(self, tokenizer: TextTokenizer, positions: int | None) -> None:
        """Take the tokenizer, and the largest number of tokens with new ones; None for no limit."""
        self._tokenizer = tokenizer
        self._positions = positions

    @override
    def rows(
        self, inputs: Sequence[Any], options: GenerationOptions, **own: Any
    ) -> Iterator[GenerationRow]:
        """Encode prompts; see `GenerationInputs.rows`."""
        check_texts(inputs)
        encodings = self._tokenizer.encode_untruncated(inputs, special=True)
        for index, encoding in enumerate(encodings):  # all, before the first is generated
            if not encoding.ids:
                raise InputError(
                    f"prompt {index} is empty, and the tokenizer puts no token in front.",
                    do="Start with some text.",
                )
            options.longest(len(encoding.ids), self._positions)
        yield from (GenerationRow(tuple(encoding.ids), {}) for encoding in encodings)

    @override
    def probe(self) -> GenerationRow:
        """Return a prompt of one token."""
        return GenerationRow((0,), {})


class SourceTexts(GenerationInputs):
    """Texts that an encoder reads, to be translated or summarized."""

    arguments = ("source_language", "target_language")

    def __init__(self, tokenizer: TextTokenizer, positions: int | None) -> None:
        """Take the tokenizer, and the largest number of tokens; None for no limit."""
        self._tokenizer = tokenizer
        self._positions = positions

    @override
    def implied(self, **own: Any) -> dict[str, Any]:
        """Return the tokens that a translation starts with."""
        if (target := own.get("target_language")) is None:
            return {}
        return dict(self._tokenizer.load_languages().first_tokens(target))

    @override
    def fallback(self, options: GenerationOptions) -> dict[str, Any]:
        """Return a language to translate to, if the model needs one and its options have none."""
        languages = self._tokenizer.load_languages()
        try:
            languages.require_target(options.decoder_start_token_id, options.forced_bos_token_id)
        except InputError:
            others = [code for code in languages.tokens if code != languages.source]
            return {"target_language": others[0]} if others else {}
        return {}

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
        encodings = self._tokenizer.encode_source(inputs, **own)
        for index, encoding in enumerate(encodings):  # all, before the first is generated
            too_long = self._positions is not None and len(encoding.ids) > self._positions
            if too_long and not self.truncates:
                raise InputError(
                    f"text {index} has {len(encoding.ids)} tokens, and the model's limit is "
                    f"{self._positions}.",
                    do="Split it into sentences or paragraphs.",
                )
            if not encoding.ids:
                raise InputError(f"text {index} has no tokens.", do="Give it some text.")
        for encoding in encodings:
            ids = np.asarray(encoding.ids, np.int64)
            if self._positions is not None and len(ids) > self._positions:
                # The last token ends the text for the encoder, so it stays.
                ids = np.concatenate([ids[: self._positions - 1], ids[-1:]])
            yield GenerationRow((start,), {"input_ids": ids})

    @override
    def probe(self) -> GenerationRow:
        """Return a text of two tokens."""
        return GenerationRow((0,), {"input_ids": np.zeros(2, np.int64)})

    @override
    def join(self, rows: Sequence[GenerationRow]) -> Feeds | None:
        """Pad texts on the right."""
        longest = max(len(row.arrays["input_ids"]) for row in rows)
        # Any token will do without a padding token: the mask leaves it out.
        ids = np.full((len(rows), longest), self._tokenizer.pad_id or 0, np.int64)
        mask = np.zeros_like(ids)
        for row_index, row in enumerate(rows):
            tokens = row.arrays["input_ids"]
            ids[row_index, : len(tokens)] = tokens
            mask[row_index, : len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask}


class SourceImages(GenerationInputs):
    """Images whose text is read or that are described."""

    arguments = ("prompt",)

    def __init__(
        self, processor: ImageProcessor, tokenizer: TextTokenizer, *, keeps_start: bool
    ) -> None:
        """Take the processor, the tokenizer, and whether a prompt follows the start token.

        Donut's prompts replace it, as in transformers.
        """
        self._processor = processor
        self._tokenizer = tokenizer
        self._keeps_start = keeps_start

    @override
    def rows(
        self, inputs: Sequence[Any], options: GenerationOptions, **own: Any
    ) -> Iterator[GenerationRow]:
        """Preprocess images; see `GenerationInputs.rows`.

        Args:
            inputs: the images, as `load_image` takes them.
            options: the options of generation.
            own: `prompt`, the beginning of each text, which the result leaves out.
        """
        _require_list(inputs, "image")
        first, *others = self._prompt(_start(options), **own)
        rest = tuple((token,) for token in others)
        for index, image in enumerate(inputs):
            try:
                pixels = self._processor(load_image(image, max_pixels=self.max_pixels))
            except InputError as error:
                raise InputError(f"image {index}: {error}") from error
            yield GenerationRow((first,), {"pixel_values": pixels}, rest)

    def _prompt(self, start: int, *, prompt: str | None = None) -> list[int]:
        """Return the decoder's prompt."""
        if prompt is None:
            return [start]
        if not isinstance(prompt, str):
            raise InputError(f"prompt is a {type(prompt).__name__}, expected a text.")
        (encoding,) = self._tokenizer.encode_untruncated([prompt], special=False)
        ids: list[int] = encoding.ids
        if not ids:
            raise InputError("prompt has no tokens.", do="Leave it out, or give it some text.")
        # A prompt may name the start token itself, which must not come twice.
        return [start, *ids] if self._keeps_start and ids[0] != start else ids

    @override
    def probe(self) -> GenerationRow:
        """Return a black image."""
        pixels = self._processor(load_image(np.zeros((64, 64, 3), np.uint8)))
        return GenerationRow((0,), {"pixel_values": pixels})


class SourceSounds(GenerationInputs):
    """Speech that is transcribed or translated by Whisper."""

    arguments = (
        "language",
        "task",
        "prompt",
        "return_timestamps",
        "chunk_length_s",
        "stride_length_s",
    )
    argument_types: ClassVar[Mapping[str, str]] = {
        "return_timestamps": "boolean",
        "chunk_length_s": "number",
        "stride_length_s": "number",
    }

    def __init__(
        self,
        processor: AudioProcessor,
        prompts: WhisperPrompts,
        tokenizer: TextTokenizer,
        shape: WindowShape,
        time_stamps: TimeStamps | None,
    ) -> None:
        """Take the processor, the tokenizer, the model's windows, and its time stamps, if any."""
        self._processor, self._prompts, self._tokenizer = processor, prompts, tokenizer
        self._shape, self._time_stamps = shape, time_stamps
        self.hidden = stamps = prompts.time_stamps
        self.transcripts = TranscriptDecoder(
            decode=partial(tokenizer.decode, skip_special=False),
            first_stamp=stamps.start if stamps else MAX_TOKEN_ID,
            languages=prompts.languages,
            specials=tokenizer.special_ids,
            seconds_per_position=shape.seconds / shape.positions,
            positions=shape.positions,
        )
        """Decodes the tokens of recordings."""
        self.languages = prompts.languages
        """Code of the language of each token that names one."""

    @override
    def rows(
        self, inputs: Sequence[Any], options: GenerationOptions, **own: Any
    ) -> Iterator[GenerationRow]:
        """Compute the features of sounds; see `GenerationInputs.rows`.

        Args:
            inputs: the sounds, as `audio_blocks` takes them.
            options: the options of generation.
            own: `language` and `task`, see `WhisperPrompts.after_start`; `prompt`, what was said
                before; and those of `SpeechOptions`.
        """
        _require_list(inputs, "sound")
        prompt, language, task = (own.pop(name, None) for name in ("prompt", "language", "task"))
        rate = self._processor.sampling_rate
        speech = SpeechOptions.read(self._shape.seconds, rate, **own)
        after_start = partial(self._prompts.after_start, language=language, task=task)
        before = self._previous(prompt, after_start()) if prompt is not None else ()
        start = _start(options)
        if speech.return_timestamps and self._time_stamps is None:
            raise InputError(
                f"return_timestamps is true, but the model has no time stamps: {FILE} has no "
                "no_timestamps_token_id, or no token follows it.",
                do="Leave it out.",
            )
        held_seconds = 0.0
        for index, sound in enumerate(inputs):
            name = f"audio {index}"
            blocks = audio_blocks(sound, rate, name=name, max_seconds=self.max_seconds)
            recording = Recording(
                name,
                self._processor,
                self._shape,
                self._time_stamps,
                is_bounded=self.max_seconds > 0,
            )
            for part in recording.read(blocks, speech):
                places: list[tuple[int, ...]] = [(token,) for token in (*before, start)]
                places += after_start(has_time_stamps=recording.has_time_stamps)
                first, *rest = places
                if recording.has_time_stamps or part.stride is not None:
                    require_short(name, held_seconds + recording.seconds, self.max_seconds)
                    yield GenerationRow(first, {}, tuple(rest), part)
                else:  # a text like others, which may also be one of several
                    arrays = {self._processor.input_name: part.window()}
                    yield GenerationRow(first, arrays, tuple(rest))
                    recording.seconds = 0.0  # it holds one window
            held_seconds += recording.seconds

    def _previous(self, prompt: Any, places: Places) -> list[int]:
        """Return the tokens of what was said before, with the one in front of it."""
        if not isinstance(prompt, str):
            raise InputError(f"prompt is a {type(prompt).__name__}, expected a text.")
        before = self._tokenizer.token_id(_PREVIOUS)
        if before is None:
            raise InputError(
                f"prompt is given, but the tokenizer has no {_PREVIOUS}.", do="Leave it out."
            )
        if any(len(tokens) > 1 for tokens in places):
            raise InputError(
                "prompt is given without language, and the model detects that before any prompt.",
                do="Set language, such as 'en'.",
            )
        # As `get_prompt_ids` of transformers.
        (encoding,) = self._tokenizer.encode_untruncated([f" {prompt.strip()}"], special=False)
        if special := next((i for i in encoding.ids if i in self.transcripts.specials), None):
            raise InputError(f"prompt has the special token {special}, expected text alone.")
        return [before, *encoding.ids]

    @override
    def join(self, rows: Sequence[GenerationRow]) -> Feeds | None:
        """Stack the windows of recordings, which are cut out of their features here, and others."""
        name = self._processor.input_name
        windows = [row.arrays[name] if row.part is None else row.part.window() for row in rows]
        return {name: np.stack(windows)}

    @override
    def probe(self) -> GenerationRow:
        """Return a second of silence."""
        silence = np.zeros(self._processor.sampling_rate, np.float32)
        features = self._processor([silence])
        return GenerationRow((0,), {name: values[0] for name, values in features.items()})


def read_positions(model: Path) -> int | None:
    """Return the largest number of tokens of an artifact's model; None if it has no limit.

    Raises:
        ArtifactError: config.json is missing or malformed.
    """
    limits = FeedLimits.from_config(ModelConfig.read(model))
    return limits.up_to(read_length_limit(model)).position_limit


def open_inputs(
    artifact: Artifact,
    graphs: DecoderGraphs,
    tokenizer: TextTokenizer,
    options: GenerationOptions,
    positions: int | None,
) -> GenerationInputs:
    """Return how an artifact's inputs are prepared.

    Args:
        artifact: the artifact.
        graphs: its graphs.
        tokenizer: its tokenizer.
        options: the model's own options.
        positions: the largest number of tokens; None without a limit.

    Raises:
        ArtifactError: a file is missing or malformed, or the encoder takes something else.
    """
    if graphs.encoder is None:
        return PromptInputs(tokenizer, positions)
    if options.decoder_start_token_id is None and options.bos_token_id is None:
        raise ArtifactError(
            f"{artifact.path / FILE} has no decoder_start_token_id.",
            do="Add the decoder's first token, as in the model's own file.",
        )
    names = require_prepared(graphs.encoder)
    if names == _OF_TEXTS:
        return SourceTexts(tokenizer, positions)
    if names == _OF_IMAGES:
        encoder = ModelConfig.read(artifact.path).encoder
        replaces = encoder is not None and "donut" in encoder.model_type
        processor = ImageProcessor.open(artifact.path)
        return SourceImages(processor, tokenizer, keeps_start=not replaces)
    extractor = AudioProcessor.open(artifact.path)
    _require_features(artifact, graphs.encoder.inputs[0], extractor)
    return _open_speech(artifact, extractor, tokenizer, options)


def _open_speech(
    artifact: Artifact,
    extractor: AudioProcessor,
    tokenizer: TextTokenizer,
    options: GenerationOptions,
) -> SourceSounds:
    """Return how speech is prepared for a Whisper model."""
    (frames,) = extractor([np.zeros(1, np.float32)])[extractor.input_name].shape[2:]
    config = ModelConfig.read(artifact.path).merged()
    positions = config.max_source_positions or frames // 2
    shape = WindowShape(
        frames, max(frames // positions, 1), extractor.fixed_samples / extractor.sampling_rate
    )
    prompts = WhisperPrompts.read(artifact.path)
    first, time_stamps = prompts.time_stamps.start, None
    if prompts.time_stamps and (not config.vocab_size or first < config.vocab_size):
        ends = options.eos_token_id or (options.bos_token_id or 0,)
        time_stamps = TimeStamps(first, ends[0], prompts.max_initial_timestamp_index)
    return SourceSounds(extractor, prompts, tokenizer, shape, time_stamps)


def require_prepared(encoder: GraphRecord) -> set[str]:
    """Return the names of an encoder's inputs, which a class of this module prepares.

    Raises:
        ArtifactError: no class does.
    """
    names = {spec.name for spec in encoder.inputs}
    if names in (_OF_TEXTS, _OF_IMAGES, _OF_SOUNDS):
        return names
    problem = "which generation cannot prepare"
    if "attention_mask" in names and names & {"input_features", "input_values"}:
        # Speech2Text and Moonshine: their convolutions mix padding into the states, in PyTorch too.
        problem = "and how far audio is padded changes what such an encoder gives"
    raise ArtifactError(
        f"{encoder.file} takes {', '.join(sorted(names))}, {problem}.",
        do="Supported: encoders of texts (input_ids, attention_mask), of images (pixel_values) and "
        "Whisper's (input_features).",
    )


def _require_features(artifact: Artifact, spec: TensorSpec, processor: AudioProcessor) -> None:
    """Raise ArtifactError if the feature extractor does not make what the encoder takes."""
    # One sample gives the shape of all, because this extractor pads to a fixed length.
    made_shape: tuple[int, ...] = ()
    if processor.fixed_samples:
        made_shape = processor([np.zeros(1, np.float32)])[processor.input_name].shape[1:]
    if spec.name != processor.input_name or any(
        isinstance(dim, int) and dim != size for dim, size in zip_longest(spec.dims[1:], made_shape)
    ):
        raise ArtifactError(
            f"{artifact.path}: the encoder takes {spec}, and {processor.kind}FeatureExtractor "
            f"makes {processor.input_name} of {made_shape or 'other lengths'}.",
            do="Export the model with its own preprocessor_config.json.",
        )


def _require_list(inputs: Any, noun: str) -> None:
    """Raise InputError unless the inputs are a list."""
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence):
        raise InputError(
            f"found one {type(inputs).__name__}, expected a list of {noun}s.", do=f"Pass [{noun}]."
        )


def _start(options: GenerationOptions) -> int:
    """Return the first token of an encoder-decoder's decoder."""
    start = options.decoder_start_token_id
    return int(options.bos_token_id or 0) if start is None else start
