"""Audio classification, and transcription of speech by CTC models."""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.audio.chunks import AudioChunk, ChunkLengths, cut, require_short
from enginery.runtime.audio.ctc import CtcDecoder, WordPieceDecoder, open_decoder
from enginery.runtime.audio.files import MAX_SECONDS
from enginery.runtime.audio.processor import AudioProcessor, Waveform, audio_blocks, load_audio
from enginery.runtime.audio.transcript import SpeechChunk, describe_chunks
from enginery.runtime.tasks.classify import LabelOptions, LabelResults
from enginery.runtime.tasks.results import Result
from enginery.runtime.tasks.task import (
    NO_LIMITS,
    Arrays,
    InputField,
    InputLimits,
    MediaTask,
    ModelInputs,
    Row,
    TaskOptions,
    output_rows,
    require_outputs,
    require_shapes,
)

_TOKENS_PER_SECOND = 50
"""Encoders of speech have a position for 20 ms."""
_PROBE_HERTZ = 440
_EXAMPLE_SECONDS = 0.1


@dataclass
class AudioTask(MediaTask):
    """Base of tasks on audio: a graph with its feature extractor and config.json."""

    modality = "audio"
    inputs = (InputField("audio"),)

    processor: AudioProcessor
    config: ModelConfig
    max_seconds: float = field(default=0, kw_only=True)
    """Maximum duration of an input; 0 for the limit of `load_audio`."""
    max_chunked_seconds: float = field(default=0, kw_only=True)
    """The same for audio that is cut into chunks."""

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read preprocessor_config.json and config.json; see `RowTask.open`."""
        require_outputs(artifact.manifest.task, record, cls.graph_outputs)
        processor = AudioProcessor.open(artifact.path)
        names = [spec.name for spec in record.inputs]
        if processor.input_name not in names or set(names) - {
            processor.input_name,
            "attention_mask",
        }:
            inputs = "; ".join(str(spec) for spec in record.inputs)
            raise ArtifactError(
                f"{artifact.path}: the graph takes {inputs}; "
                f"{processor.kind}FeatureExtractor makes {processor.input_name}.",
                do="Export the model with its own feature extractor.",
            )
        length = f"{processor.fixed_samples / processor.sampling_rate:g} seconds"
        notes = (
            f"audio is resampled to {processor.sampling_rate} Hz and preprocessed as by "
            f"{processor.kind}FeatureExtractor",
            *([f"audio is padded or truncated to {length}"] if processor.fixed_samples else []),
        )
        config = ModelConfig.read(artifact.path).merged()
        return cls(
            record=record,
            processor=processor,
            config=config,
            notes=notes,
            max_seconds=limits.max_seconds,
            max_chunked_seconds=limits.max_speech_seconds,
            **cls._read_settings(artifact),
        )

    @classmethod
    def _read_settings(cls, artifact: Artifact) -> dict[str, Any]:
        """Read further settings of a task; return values for the fields of the class."""
        return {}

    def read_row(self, item: Any, index: int = 0) -> Row:
        """Preprocess audio: a path, a file's content, or (array, sampling_rate)."""
        rate = self.processor.sampling_rate
        name = f"audio {index}"
        return self._row(load_audio(item, rate, name=name, max_seconds=self.max_seconds), index)

    def _row(self, samples: Waveform, index: int) -> Row:
        """Return the row of mono samples at the model's sampling rate."""
        rate = self.processor.sampling_rate
        fixed = self.processor.fixed_samples
        # A shorter waveform would leave the encoder's convolutions without a frame.
        least = 1 if fixed else self.config.audio_frame_samples
        if samples.size < least:
            raise InputError(
                f"audio {index} has {samples.size} samples at {rate} Hz, expected at least {least}."
            )
        features = self.processor([samples], first=index)
        arrays = {name: array[0] for name, array in features.items()}
        mask = np.ones(arrays[self.processor.input_name].shape[:1])
        content = {
            spec.name: arrays.get(spec.name, mask).astype(spec.dtype) for spec in self.record.inputs
        }
        require_shapes(
            content,
            self.record,
            f"audio {index}",
            do="Export the model with the feature extractor that it was trained with.",
        )
        tokens = math.ceil(_TOKENS_PER_SECOND * (fixed or samples.size) / rate)
        return Row(content, tokens, truncated=bool(fixed) and samples.size > fixed)

    @property
    def can_pad(self) -> bool:
        """False: padded samples change the features of audio, which few models can mask."""
        return False


@dataclass
class ClassifyAudio(LabelResults, AudioTask):
    """Classify sounds, speakers, spoken words or languages."""

    verb = "classify_audio"
    purpose = "classifies audio"
    tasks = ("audio-classification",)
    Options = LabelOptions


@dataclass(frozen=True)
class Transcription(Result):
    """What was said."""

    text: str
    score: float
    """Mean probability of the most likely token, over the frames of the audio."""


@dataclass(frozen=True)
class TimedTranscription(Transcription):
    """What was said, with the time of its parts."""

    chunks: tuple[SpeechChunk, ...]
    """The letters, or the words."""


class TranscribeOptions(TaskOptions):
    """Options of transcribing, with the names and defaults of transformers' pipeline."""

    return_timestamps: Literal["char", "word"] | None = None
    """Return the time of each letter or word."""
    chunk_length_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] | None = None
    """Seconds of the chunks that audio is cut into; null or 0 for none."""
    stride_length_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] | None = None
    """Seconds of a chunk that overlap with the chunk before, and as many with the next one; null
    for a sixth of a chunk."""


@dataclass
class Transcribe(AudioTask):
    """Transcribe speech with a CTC model, by the most likely token of each frame."""

    verb = "transcribe"
    purpose = "transcribes speech"
    tasks = ("automatic-speech-recognition",)
    graph_outputs: ClassVar[Mapping[str, int]] = {"logits": 3}
    result_type = Transcription
    Options = TranscribeOptions

    decoder: CtcDecoder | WordPieceDecoder

    @classmethod
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True for a single graph: an encoder and a decoder generate text."""
        return len(manifest.graphs) == 1 and super().fits(manifest, record)

    @classmethod
    def _read_settings(cls, artifact: Artifact) -> dict[str, Any]:
        return {"decoder": open_decoder(artifact.path)}

    @classmethod
    def result_type_for(cls, options: TaskOptions) -> Any:
        """Return the type of one result, which has times if they are asked for."""
        timed = isinstance(options, TranscribeOptions) and options.return_timestamps
        return TimedTranscription if timed else cls.result_type

    def read_rows(
        self, inputs: Sequence[Any], options: TranscribeOptions, work: ModelInputs
    ) -> Iterator[Row]:
        """Read inputs one by one; `work.context` has the chunk of each row, see `MediaTask`."""
        work.context = []
        if options.return_timestamps and not isinstance(self.decoder, CtcDecoder):
            raise InputError(
                "return_timestamps is given, but the tokens are pieces of words, which have no "
                "times in transformers either.",
                do="Leave it out.",
            )
        return super().read_rows(inputs, options, work)

    def rows_of(
        self, item: Any, index: int, options: TranscribeOptions, work: ModelInputs
    ) -> Iterator[Row]:
        """Yield a row for each chunk; without chunks one for the audio."""
        rate, align = self.processor.sampling_rate, self.config.audio_stride
        lengths = ChunkLengths.read(
            self.max_seconds or MAX_SECONDS,
            rate=rate,
            chunk_length_s=options.chunk_length_s,
            stride_length_s=options.stride_length_s,
            align=align or 1,
        )
        if lengths is None:
            work.context.append(None)
            yield self.read_row(item, index)
            return
        if not align:
            raise InputError(
                "chunk_length_s is given, but config.json has no conv_stride, which tells the "
                "samples of a frame.",
                do="Leave it out.",
            )
        name = f"audio {index}"
        blocks = audio_blocks(item, rate, name=name, max_seconds=self.max_chunked_seconds)
        for count, (samples, chunk) in enumerate(cut(blocks, lengths)):
            if self.max_chunked_seconds:
                lengths.require_few(name, count, rate)
            row = self._row(samples, index)
            work.context.append(chunk)
            held = sum(c.length - c.left - c.right for c in work.context if c is not None)
            require_short(name, held / rate, self.max_chunked_seconds)
            yield row

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the best token of each frame of a row, and their probabilities."""
        logits = output_rows(outputs, "logits", rows).astype(np.float32, copy=False)
        best = logits.argmax(axis=-1)
        with np.errstate(all="ignore"):  # NaN or infinity, see `is_finite`
            shifted = logits - logits.max(axis=-1, keepdims=True)
            # The best token's exp(0) = 1 is the numerator of its softmax.
            scores = 1 / np.exp(shifted).sum(axis=-1)
        return list(zip(best, scores, strict=True))

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: TaskOptions
    ) -> list[Transcription]:
        """Return a `Transcription` for each input."""
        results: list[Transcription] = []
        frames: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for chunk, (ids, scores) in zip(work.context, outputs, strict=True):
            inner = slice(None) if chunk is None else self._kept_frames(chunk)
            frames.append((ids[inner], scores[inner]))
            if chunk is None or chunk.is_last:
                results.append(self._transcription(frames, options))
                frames = []
        return results

    def _kept_frames(self, chunk: AudioChunk) -> slice:
        """Return the frames of a chunk without its overlaps, as the pipeline rounds them."""
        count = round(chunk.length / self.config.audio_stride)
        left, right = (round(n / chunk.length * count) for n in (chunk.left, chunk.right))
        return slice(left, count - right)

    def _transcription(
        self, frames: Sequence[tuple[NDArray[Any], NDArray[Any]]], options: TaskOptions
    ) -> Transcription:
        ids = np.concatenate([ids for ids, _ in frames])
        score = float(np.concatenate([scores for _, scores in frames]).mean())
        text = self.decoder.decode(ids)
        kind = options.return_timestamps if isinstance(options, TranscribeOptions) else None
        if kind is None or not isinstance(self.decoder, CtcDecoder):
            return Transcription(text, score)
        letters = self.decoder.letters(ids)
        spans = letters if kind == "char" else self.decoder.words(letters)
        stride, rate = self.config.audio_stride, self.processor.sampling_rate
        chunks = (
            SpeechChunk(span.text, (span.start * stride / rate, span.end * stride / rate))
            for span in spans
        )
        return TimedTranscription(text, score, tuple(chunks))

    def describe(self, result: Transcription) -> str:
        """Return the text, with times if they were asked for."""
        if isinstance(result, TimedTranscription):
            return describe_chunks(result.chunks)
        return result.text


def example_wav(sampling_rate: int = 16_000) -> bytes:
    """Return a WAV file of a tenth of a second of a tone."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(sampling_rate)
        # WAV samples of 8 bits are unsigned, with silence at 128.
        samples = 128 + 100 * _tone(_EXAMPLE_SECONDS, sampling_rate)
        file.writeframes(samples.astype(np.uint8).tobytes())
    return content.getvalue()


def _tone(seconds: float, rate: int) -> NDArray[np.float32]:
    times = np.arange(math.ceil(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * _PROBE_HERTZ * times)).astype(np.float32)
