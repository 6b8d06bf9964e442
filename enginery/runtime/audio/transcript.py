"""Make one transcript of the tokens of a recording's chunks, which overlap, and of its time stamps.

    transcript = TranscriptDecoder(decode, first_stamp=50364, languages={50259: "en"}, specials=…)
    transcript([ChunkTokens([50364, 2425, 50414])])    # [SpeechChunk(" Hello", (0.0, 1.0))]

The rules are those of the pipeline for speech recognition in transformers 4.57: `_decode_asr` of
Whisper's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Stride = tuple[float, float, float]
"""Seconds of a chunk, and of it those that overlap with the chunk before and with the next one."""

_FAVOR_LONG = 10_000.0
"""A longer overlap is worth its length divided by this, beside the share of tokens that agree."""


@dataclass(frozen=True)
class SpeechChunk:
    """A part of what was said."""

    text: str
    timestamp: tuple[float | None, float | None]
    """Start and end in seconds; None where no time stamp says it."""


def describe_chunks(chunks: Sequence[SpeechChunk]) -> str:
    """Return each part that has a text behind its time, for people.

    >>> describe_chunks([SpeechChunk(" Hello.", (0.0, 1.5))])
    '[0.00 → 1.50] Hello.'
    """

    def clock(seconds: float | None) -> str:
        return "?" if seconds is None else f"{seconds:.2f}"

    return " ".join(
        f"[{clock(chunk.timestamp[0])} → {clock(chunk.timestamp[1])}] {chunk.text.strip()}"
        for chunk in chunks
        if chunk.text.strip()
    )


@dataclass(frozen=True)
class ChunkTokens:
    """The tokens of a chunk of a recording."""

    tokens: Sequence[int]
    stride: Stride | None = None
    """None for tokens of the whole recording."""


@dataclass(frozen=True)
class TranscriptDecoder:
    """Decodes the tokens of one model's transcripts."""

    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens."""
    first_stamp: int
    """The token of the time stamp of 0 seconds."""
    languages: Mapping[int, str]
    """Language of each token that names one."""
    specials: Collection[int]
    """The special tokens, which are no text; time stamps are not among them."""
    seconds_per_position: float
    positions: int
    """Number of positions of a window."""

    def __call__(
        self, chunks: Sequence[ChunkTokens], *, has_time_stamps: bool
    ) -> list[SpeechChunk]:
        """Return the parts of the transcript; their texts together are that of the recording.

        Args:
            chunks: the chunks in their order.
            has_time_stamps: the text is cut at time stamps, and not where the language changes.
        """
        merger = _Merger(self, has_time_stamps=has_time_stamps)
        for chunk in chunks:
            merger.add(chunk)
        return merger.finish()


@dataclass
class _Merger:
    """What is known of a transcript after some of its chunks."""

    decoder: TranscriptDecoder
    has_time_stamps: bool
    parts: list[SpeechChunk] = field(default_factory=list)
    """What is finished."""
    start: float | None = None
    """Start of the part that is going on; None if no stamp has said it."""
    pending: list[list[int]] = field(default_factory=list)
    """Its tokens, of each chunk so far."""
    language: str = ""
    offset: float = 0.0
    """Seconds before the chunk."""
    skips_next: bool = False
    """The stamp that is next is the second of a pair that was left out."""

    def add(self, chunk: ChunkTokens) -> None:
        """Add the tokens of a chunk."""
        decoder = self.decoder
        first_counted, first_skipped = self._counted_stamps(chunk)
        if chunk.stride is not None:
            self.offset -= chunk.stride[1]
        clock = _Clock(decoder)
        current: list[int] = []
        for index, token in enumerate(chunk.tokens):
            if token in decoder.specials:
                language = decoder.languages.get(token, "")
                if language and self.language not in ("", language) and not self.has_time_stamps:
                    self._finish_part([*self.pending, current], None)
                    current = []
                self.language = language or self.language
            elif token < decoder.first_stamp:
                current.append(token)
            else:
                seconds = clock.seconds(chunk.tokens, index)
                seconds = round(seconds + self.offset + clock.before, 2)
                if first_skipped and token >= first_skipped:
                    # The chunk that follows has more to say on what is in the overlap.
                    self.skips_next = True
                elif self.skips_next or (self.pending and token < first_counted):
                    self.skips_next = False
                elif self.start is None:
                    self.start = seconds
                elif seconds != self.start:
                    self._finish_part([*self.pending, current], seconds)
                    current = []
        if chunk.stride is not None:
            length, _, right = chunk.stride
            self.offset += length - right
        if current:
            self.pending.append(current)
        elif not any(self.pending):
            self.pending, self.start = [], None

    def finish(self) -> list[SpeechChunk]:
        """Return all parts; the last one may have no end."""
        if self.pending:
            self._finish_part(self.pending, None)
        return self.parts

    def _counted_stamps(self, chunk: ChunkTokens) -> tuple[float, int]:
        """Return the first stamp behind the first overlap, and the first one in the last overlap.

        The latter is 0 if there is none.
        """
        decoder = self.decoder
        first = decoder.first_stamp
        if chunk.stride is None:
            return first, 0
        length, left, right = chunk.stride
        counted = left / decoder.seconds_per_position + first if left else first
        skipped = 0
        if right:
            for token in reversed(chunk.tokens):
                if token < first:
                    continue
                seconds = (token - first) * decoder.seconds_per_position
                # The last one is always left out.
                if skipped and seconds < length - right:
                    break
                skipped = token
        return counted, skipped

    def _finish_part(self, sequences: Sequence[list[int]], end: float | None) -> None:
        text = self.decoder.decode(join_overlapping(sequences))
        self.parts.append(SpeechChunk(text, (self.start, end)))
        self.pending, self.start = [], None


@dataclass
class _Clock:
    """The time of the stamps of several windows that follow one another."""

    decoder: TranscriptDecoder
    before: float = 0.0
    """Seconds of the windows before the present one."""
    last: float = 0.0
    second_last: float = 0.0

    def seconds(self, tokens: Sequence[int], index: int) -> float:
        """Return the time of a stamp since the start of its window, and set `before`."""
        decoder, first = self.decoder, self.decoder.first_stamp
        seconds = (tokens[index] - first) * decoder.seconds_per_position
        if seconds < self.last:  # another window has begun
            is_pair = index < 2 or (tokens[index - 1] >= first and tokens[index - 2] >= first)
            if is_pair:
                # The window ended with the pair, and the next one began at it.
                self.last = self.second_last
                self.before += self.second_last
            else:
                self.before += decoder.seconds_per_position * decoder.positions
        self.second_last, self.last = self.last, seconds
        return seconds


def join_overlapping(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Join token sequences, each of which may begin with what ends the one before.

    Two sequences are shifted against each other to where the largest share of their tokens agrees.
    What is left of the middle of this overlap is taken from the first one, the rest from the other.
    """
    joined: list[int] = []
    left = np.asarray(sequences[0], np.int64)
    for sequence in sequences[1:]:
        right = np.asarray(sequence, np.int64)
        best, left_middle, right_middle = 0.0, len(left), 0
        for shift in range(1, len(left) + len(right)):
            left_start, right_start = max(0, len(left) - shift), max(0, shift - len(left))
            size = min(len(left), len(left) + len(right) - shift) - left_start
            agreeing = np.count_nonzero(
                left[left_start : left_start + size] == right[right_start : right_start + size]
            )
            share = agreeing / shift + shift / _FAVOR_LONG
            if agreeing > 1 and share > best:
                best = share
                left_middle = (2 * left_start + size) // 2
                right_middle = (2 * right_start + size) // 2
        joined += left[:left_middle].tolist()
        left = right[right_middle:]
    joined += left.tolist()
    return joined
