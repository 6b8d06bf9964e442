"""A recording of speech that Whisper transcribes in several windows.

    options = SpeechOptions.read(30, 16000, chunk_length_s=20)
    recording = Recording("audio 0", processor, shape, time_stamps)
    for part in recording.read(blocks, options):
        while not part.done:
            features = part.window()
            part.take(tokens, "stop")    # the next window begins where its last segment ended

Without chunks, a recording has one part, which is transcribed window after window. With chunks,
each is a part, and they run in any order. Windows, chunks and their overlaps are those of
transformers 4.57: `generate` of Whisper, and its pipeline for speech recognition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.runtime.audio.chunks import ChunkLengths, cut, most_chunks, take
from enginery.runtime.audio.processor import AudioProcessor, Waveform, WhisperSpectrogram
from enginery.runtime.audio.transcript import ChunkTokens, Stride
from enginery.runtime.generation.options import short
from enginery.runtime.generation.time_stamps import TimeStamps


@dataclass(frozen=True)
class SpeechOptions:
    """How speech is cut into windows, with the names and defaults of transformers' pipeline."""

    return_timestamps: bool = False
    """The result has the time of each segment."""
    chunks: ChunkLengths | None = None
    """None to go on where the last segment ended."""

    @classmethod
    def read(
        cls, window_seconds: float, rate: int, *, return_timestamps: Any = None, **chunks: Any
    ) -> SpeechOptions:
        """Check the options of a call; None counts as absent.

        Args:
            window_seconds: the longest chunk.
            rate: samples of a second.
            return_timestamps: True for times of segments.
            chunks: `chunk_length_s` and `stride_length_s`, see `ChunkLengths.read`.

        Raises:
            InputError: an option is invalid, or not supported.
        """
        if return_timestamps == "word":
            raise InputError(
                "return_timestamps: times of words are not supported, because the graphs do not "
                "return the cross-attention that they come from.",
                do="Set it to true for the times of segments.",
            )
        if return_timestamps is not None and not isinstance(return_timestamps, bool):
            raise InputError(
                f"return_timestamps: found {short(return_timestamps)}, expected true or false."
            )
        lengths = ChunkLengths.read(window_seconds, rate=rate, **chunks)
        return cls(bool(return_timestamps), lengths)


@dataclass(frozen=True)
class WindowShape:
    """The windows of one model."""

    frames: int
    """Frames of the spectrogram."""
    stride: int
    """Frames of a position of the encoder."""
    seconds: float

    @property
    def positions(self) -> int:
        """Positions of the encoder."""
        return self.frames // self.stride


@dataclass(eq=False)
class Recording:
    """One input, and what was said in it so far."""

    name: str
    """What messages call it, such as `audio 3`."""
    processor: AudioProcessor
    shape: WindowShape
    time_stamps: TimeStamps | None
    """The model's time stamps; None if it has none."""
    has_time_stamps: bool = False
    """The model writes time stamps, as it must to tell where the next window begins."""
    shows_time_stamps: bool = False
    """The result has time stamps."""
    is_bounded: bool = False
    """The number of windows is limited."""
    parts: list[RecordingPart] = field(default_factory=list)
    is_read: bool = False
    """All parts were made."""
    seconds: float = 0.0
    """Duration of what was read."""

    @property
    def done(self) -> bool:
        """True once all parts are transcribed."""
        return self.is_read and all(part.done for part in self.parts)

    @property
    def search_stamps(self) -> TimeStamps | None:
        """The rules for the tokens of a window; None if it is to have no time stamps."""
        return self.time_stamps if self.has_time_stamps else None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of all parts."""
        return tuple(token for part in self.parts for token in part.tokens)

    def read(self, blocks: Iterator[Waveform], options: SpeechOptions) -> Iterator[RecordingPart]:
        """Yield the parts of audio, of which no more than a chunk or the features are held.

        Args:
            blocks: consecutive samples, see `audio_blocks`.
            options: how they are cut.

        Raises:
            InputError: the audio cannot be read, or the model cannot transcribe so much of it.
        """
        self.shows_time_stamps = self.has_time_stamps = options.return_timestamps
        blocks = self._counted(blocks)
        if options.chunks is not None:
            yield from self._chunks(blocks, options.chunks)
            return
        head = take(blocks, self.processor.fixed_samples + 1)
        if len(head) <= self.processor.fixed_samples:
            spectrogram = self.processor.window_spectrogram(head)
        else:
            if self.time_stamps is None:
                raise InputError(
                    f"{self.name} is longer than {self.shape.seconds:g} seconds, and the model "
                    "writes no time stamps, by which it goes on.",
                    do=f"Set chunk_length_s={self.shape.seconds:g}, which cuts it into chunks.",
                )
            self.has_time_stamps = True
            spectrogram = self.processor.spectrogram(chain([head], blocks))
        self.is_read = True
        yield self._part(spectrogram)

    def _chunks(self, blocks: Iterator[Waveform], lengths: ChunkLengths) -> Iterator[RecordingPart]:
        """Yield a part for each chunk."""
        rate = self.processor.sampling_rate
        for samples, chunk in cut(blocks, lengths):
            if self.is_bounded:
                lengths.require_few(self.name, len(self.parts), rate)
            self.is_read = chunk.is_last
            stride = (chunk.length / rate, chunk.left / rate, chunk.right / rate)
            yield self._part(self.processor.window_spectrogram(samples), stride)

    def _part(self, spectrogram: WhisperSpectrogram, stride: Stride | None = None) -> RecordingPart:
        part = RecordingPart(self, spectrogram, spectrogram.frames, stride)
        self.parts.append(part)
        return part

    def _counted(self, blocks: Iterator[Waveform]) -> Iterator[Waveform]:
        for block in blocks:
            self.seconds += len(block) / self.processor.sampling_rate
            yield block

    def chunks(self) -> list[ChunkTokens]:
        """Return the tokens of each part."""
        return [ChunkTokens(part.tokens, part.stride) for part in self.parts]


@dataclass(eq=False)
class RecordingPart:
    """What of a recording is transcribed window after window: all of it, or one chunk."""

    recording: Recording
    spectrogram: WhisperSpectrogram
    frames: int
    """Frames to transcribe."""
    stride: Stride | None = None
    """The overlaps of a chunk; None without chunks."""
    begin: int = 0
    """First frame of the present window."""
    tokens: list[int] = field(default_factory=list)
    """The tokens of the windows before it."""
    finish: str = "stop"
    """`length` if a window's text was cut at the largest length."""
    language: str = ""
    """Code of the language that it was transcribed in; empty if the model has none."""
    windows: int = 0
    """Number of windows so far."""

    @property
    def done(self) -> bool:
        """True once the last window is transcribed."""
        return self.begin >= self.frames

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a window's features."""
        return self.spectrogram.bins, self.recording.shape.frames

    def window(self) -> NDArray[np.float32]:
        """Return the features of the present window: (mel bins, frames)."""
        return self.spectrogram.window(self.begin, self.recording.shape.frames)

    def take(self, tokens: Sequence[int], finish: str) -> None:
        """Add the tokens of the present window, and go on to the next one.

        Args:
            tokens: the generated tokens, without the one that ended them.
            finish: how they ended, see `Hypothesis.finish`.

        Raises:
            InputError: the recording takes too many windows.
        """
        recording, shape = self.recording, self.recording.shape
        window = min(self.frames - self.begin, shape.frames)
        transcribed, step = list(tokens), window
        if recording.time_stamps is not None:
            transcribed, step = recording.time_stamps.split(
                tokens, window=window, stride=shape.stride
            )
        self.tokens += transcribed
        self.begin += step
        self.windows += 1
        if finish == "length":
            self.finish = finish
        if self.done:
            self.spectrogram = WhisperSpectrogram(0)  # frees the features
        elif recording.is_bounded and self.windows > most_chunks(recording.seconds):
            raise InputError(
                f"{recording.name}: after {self.windows} windows, {self.begin} of {self.frames} "
                "frames are transcribed: the model ends each window after a few seconds.",
                do="Set chunk_length_s, which cuts audio into chunks.",
            )
