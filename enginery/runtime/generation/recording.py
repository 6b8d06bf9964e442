"""A recording of speech that Whisper transcribes in several windows.

    options = SpeechOptions.read(30, chunk_length_s=20)
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
from enginery.runtime.audio.processor import AudioProcessor, Waveform, WhisperSpectrogram
from enginery.runtime.audio.transcript import ChunkTokens, Stride
from enginery.runtime.generation.options import short
from enginery.runtime.generation.time_stamps import TimeStamps

_FREE_WINDOWS, _LEAST_SECONDS = 16, 4.0
"""A server gives up a recording that takes more windows than these, and one for so many seconds.
People speak in segments of 2 to 30 seconds, and a window ends with its last whole one."""


@dataclass(frozen=True)
class SpeechOptions:
    """How speech is cut into windows, with the names and defaults of transformers' pipeline."""

    return_timestamps: bool = False
    """The result has the time of each segment."""
    chunk_length_s: float = 0.0
    """Seconds of the chunks that audio is cut into; 0 to go on where the last segment ended."""
    stride_length_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of a chunk that overlap with the chunk before, and with the next one."""

    @classmethod
    def read(
        cls,
        window_seconds: float,
        *,
        return_timestamps: Any = None,
        chunk_length_s: Any = None,
        stride_length_s: Any = None,
    ) -> SpeechOptions:
        """Check the options of a call; None counts as absent.

        Args:
            window_seconds: the longest chunk.
            return_timestamps: True for times of segments.
            chunk_length_s: seconds; 0 for no chunks.
            stride_length_s: seconds of both overlaps, or a pair; a sixth of a chunk by default.

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
        length = _seconds("chunk_length_s", chunk_length_s or 0, window_seconds)
        if not length:
            if stride_length_s is not None:
                raise InputError(
                    "stride_length_s is given, but no chunk_length_s.", do="Set both, or neither."
                )
            return cls(bool(return_timestamps))
        strides = length / 6 if stride_length_s is None else stride_length_s
        pair = strides if isinstance(strides, list | tuple) else (strides, strides)
        if len(pair) != 2:
            raise InputError(
                f"stride_length_s: found {short(strides)}, expected seconds, or a pair of them."
            )
        left, right = (_seconds("stride_length_s", stride, length) for stride in pair)
        if left + right >= length:
            raise InputError(
                f"stride_length_s is {left:g} and {right:g} seconds, together not less than "
                f"chunk_length_s, {length:g}."
            )
        return cls(bool(return_timestamps), length, (left, right))


def _seconds(name: str, value: Any, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:
        raise InputError(f"{name}: found {short(value)}, expected seconds from 0 to {most:g}.")
    return float(value)


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
        if options.chunk_length_s:
            yield from self._chunks(blocks, options)
            return
        head = _take(blocks, self.processor.fixed_samples + 1)
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

    def _chunks(
        self, blocks: Iterator[Waveform], options: SpeechOptions
    ) -> Iterator[RecordingPart]:
        """Yield a part for each chunk."""
        rate = self.processor.sampling_rate
        length, left, right = (
            round(seconds * rate) for seconds in (options.chunk_length_s, *options.stride_length_s)
        )
        step = max(length - left - right, 1)
        samples, is_first = np.empty(0, np.float32), True
        while not self.is_read:
            samples = np.concatenate([samples, _take(blocks, length + 1 - len(samples))])
            chunk = samples[:length]
            self.is_read = len(samples) <= length
            overlaps = (0 if is_first else left, 0 if self.is_read else right)
            stride = (len(chunk) / rate, overlaps[0] / rate, overlaps[1] / rate)
            if self.is_bounded and len(self.parts) > _most_windows(self.seconds):
                raise InputError(
                    f"{self.name}: the first {self.seconds:g} seconds are {len(self.parts)} "
                    "chunks, which is too many.",
                    do="Set a larger chunk_length_s, or a smaller stride_length_s.",
                )
            yield self._part(self.processor.window_spectrogram(chunk), stride)
            samples, is_first = samples[step:], False

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
        kept, step = list(tokens), window
        if recording.time_stamps is not None:
            kept, step = recording.time_stamps.split(tokens, window=window, stride=shape.stride)
        self.tokens += kept
        self.begin += step
        self.windows += 1
        if finish == "length":
            self.finish = finish
        if self.done:
            self.spectrogram = WhisperSpectrogram(0)  # frees the features
        elif recording.is_bounded and self.windows > _most_windows(recording.seconds):
            raise InputError(
                f"{recording.name}: after {self.windows} windows, {self.begin} of {self.frames} "
                "frames are transcribed: the model ends each window after a few seconds.",
                do="Set chunk_length_s, which cuts audio into chunks.",
            )


def _most_windows(seconds: float) -> int:
    return _FREE_WINDOWS + int(seconds / _LEAST_SECONDS)


def _take(blocks: Iterator[Waveform], count: int) -> Waveform:
    """Return the next samples, at least `count` of them unless the audio ends before."""
    taken, size = [np.empty(0, np.float32)], 0
    while size < count and (block := next(blocks, None)) is not None:
        taken.append(block)
        size += len(block)
    return np.concatenate(taken)
