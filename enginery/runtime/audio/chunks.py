"""Cut audio into chunks that overlap, as transformers' pipeline for speech recognition does.

lengths = ChunkLengths.read(30, chunk_length_s=20, rate=16000)
for samples, chunk in cut(blocks, lengths):
chunk.length, chunk.left, chunk.right
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError

Waveform = NDArray[np.float32]

_FREE_CHUNKS, _LEAST_SECONDS = 16, 4.0
"""A server takes this number of chunks or windows, and one for so many seconds of audio. People
speak in segments of 2 to 30 seconds."""


@dataclass(frozen=True)
class ChunkLengths:
    """Numbers of samples."""

    length: int
    left: int
    """Samples that overlap with the chunk before."""
    right: int
    """Samples that overlap with the next chunk."""

    @property
    def step(self) -> int:
        """Samples from the start of a chunk to the start of the next one."""
        return self.length - self.left - self.right

    def require_few(self, name: str, count: int, rate: int) -> None:
        """Raise InputError if audio has more chunks so far than a server takes of so much of it."""
        seconds = (count * self.step + self.length) / rate
        if count > most_chunks(seconds):
            raise InputError(
                f"{name}: its first {seconds:.3g} seconds are {count} chunks, expected at most "
                f"{most_chunks(seconds)}.",
                do="Set a larger chunk_length_s, or a smaller stride_length_s.",
            )

    @classmethod
    def read(
        cls,
        longest: float,
        *,
        rate: int,
        chunk_length_s: Any = None,
        stride_length_s: Any = None,
        align: int = 1,
    ) -> ChunkLengths | None:
        """Check the options of a call; None counts as absent.

        Args:
            longest: seconds of the longest chunk.
            rate: samples of a second.
            chunk_length_s: seconds of a chunk; 0 for no chunks.
            stride_length_s: seconds of both overlaps, or a pair; a sixth of a chunk by default.
            align: samples of a frame of the model, of which all lengths are multiples.

        Returns:
            None for no chunks.

        Raises:
            InputError: an option is invalid, or nothing is left between the overlaps.
        """
        length = _seconds("chunk_length_s", chunk_length_s or 0, longest)
        if not length:
            if stride_length_s is not None:
                raise InputError(
                    "stride_length_s is given, but no chunk_length_s.", do="Set both, or neither."
                )
            return None
        strides = length / 6 if stride_length_s is None else stride_length_s
        pair = strides if isinstance(strides, list | tuple) else (strides, strides)
        if len(pair) != 2:
            raise InputError(
                f"stride_length_s: found {reprlib.repr(strides)}, expected seconds, or a pair."
            )
        left, right = (_seconds("stride_length_s", stride, length) for stride in pair)
        samples = [round(seconds * rate / align) * align for seconds in (length, left, right)]
        if samples[1] + samples[2] >= samples[0]:
            raise InputError(
                f"stride_length_s is {left:g} and {right:g} seconds, together not less than "
                f"chunk_length_s, {length:g}."
            )
        return cls(*samples)


def _seconds(name: str, value: Any, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:
        shown = reprlib.repr(value)
        raise InputError(f"{name}: found {shown}, expected seconds from 0 to {most:g}.")
    return float(value)


@dataclass(frozen=True)
class AudioChunk:
    """What of a recording a chunk is, in samples."""

    length: int
    left: int
    """Samples that overlap with the chunk before; 0 for the first chunk."""
    right: int
    """Samples that overlap with the next chunk; 0 for the last one."""
    is_last: bool


def cut(blocks: Iterator[Waveform], lengths: ChunkLengths) -> Iterator[tuple[Waveform, AudioChunk]]:
    """Yield the samples of each chunk of audio, of which no more than one is held.

    Args:
        blocks: consecutive samples, see `audio_blocks`.
        lengths: those of a chunk.
    """
    samples, is_first, is_last = np.empty(0, np.float32), True, False
    while not is_last:
        # One sample more tells that another chunk follows.
        samples = np.concatenate([samples, take(blocks, lengths.length + 1 - len(samples))])
        is_last = len(samples) <= lengths.length
        left, right = 0 if is_first else lengths.left, 0 if is_last else lengths.right
        chunk = samples[: lengths.length]
        yield chunk, AudioChunk(len(chunk), left, right, is_last)
        samples, is_first = samples[lengths.step :], False


def take(blocks: Iterator[Waveform], count: int) -> Waveform:
    """Return the next samples, at least `count` of them unless the audio ends before."""
    taken, size = [np.empty(0, np.float32)], 0
    while size < count and (block := next(blocks, None)) is not None:
        taken.append(block)
        size += len(block)
    return np.concatenate(taken)


def require_short(name: str, seconds: float, most: float) -> None:
    """Raise InputError if the audio of one call, up to this input, is longer than a server holds.

    Args:
        name: the input.
        seconds: duration of all inputs up to it.
        most: the largest duration; 0 for no limit.
    """
    if most and seconds > most:
        raise InputError(
            f"the inputs up to {name} are {seconds:,.1f} seconds long together, expected at most "
            f"{most:,g}.",
            do="Send them in several requests.",
        )


def most_chunks(seconds: float) -> int:
    """Return the largest number of chunks or windows of so much audio that a server takes."""
    return _FREE_CHUNKS + int(seconds / _LEAST_SECONDS)
