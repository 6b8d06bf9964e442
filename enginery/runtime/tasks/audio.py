"""Audio classification, and transcription of speech by CTC models."""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.audio.ctc import CtcDecoder, WordPieceDecoder, open_decoder
from enginery.runtime.audio.processor import AudioProcessor, load_audio
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
    media_outputs,
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
            **cls._read_settings(artifact),
        )

    @classmethod
    def _read_settings(cls, artifact: Artifact) -> dict[str, Any]:
        """Read further settings of a task; return values for the fields of the class."""
        return {}

    def read_row(self, item: Any, index: int = 0) -> Row:
        """Preprocess audio: a path, a file's content, or (array, sampling_rate)."""
        rate = self.processor.sampling_rate
        samples = load_audio(item, rate, name=f"audio {index}", max_seconds=self.max_seconds)
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


@dataclass
class Transcribe(AudioTask):
    """Transcribe speech with a CTC model, by the most likely token of each frame."""

    verb = "transcribe"
    purpose = "transcribes speech"
    tasks = ("automatic-speech-recognition",)
    graph_outputs: ClassVar[Mapping[str, int]] = {"logits": 3}
    result_type = Transcription

    decoder: CtcDecoder | WordPieceDecoder

    @classmethod
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True for a single graph: an encoder and a decoder generate text."""
        return len(manifest.graphs) == 1 and super().fits(manifest, record)

    @classmethod
    def _read_settings(cls, artifact: Artifact) -> dict[str, Any]:
        return {"decoder": open_decoder(artifact.path)}

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the best token of each frame of a row, and their mean probability."""
        logits = media_outputs(outputs, "logits", rows).astype(np.float32, copy=False)
        best = logits.argmax(axis=-1)
        with np.errstate(all="ignore"):  # NaN or infinity, see `is_finite`
            shifted = logits - logits.max(axis=-1, keepdims=True)
            # The best token's exp(0) = 1 is the numerator of its softmax.
            scores = (1 / np.exp(shifted).sum(axis=-1)).mean(axis=-1)
        return list(zip(best, scores, strict=True))

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: TaskOptions
    ) -> list[Transcription]:
        """Return a `Transcription` for each input."""
        return [Transcription(self.decoder.decode(ids), float(score)) for ids, score in outputs]

    def describe(self, result: Transcription) -> str:
        """Return the text."""
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
