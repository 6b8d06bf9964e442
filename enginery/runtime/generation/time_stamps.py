"""The rules of Whisper's time stamps: which may follow, and where a window's transcript ends.

    rules = TimeStamps(first=50364, end=50257, max_initial=50)
    scores = rules(tokens, scores, begin=4)
    transcribed, frames = rules.split(generated, window=3000, stride=2)

A time stamp is a token; `first` is that of 0 seconds, and each further one stands for a position of
the encoder, 20 ms. The rules are those of transformers 4.57, `WhisperTimeStampLogitsProcessor` and
`_retrieve_segment`, and of section 3.8 of arXiv:2212.04356.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginery.runtime.generation.processors import Scores, Tokens

_NEVER = np.float32(-np.inf)


@dataclass(frozen=True)
class TimeStamps:
    """The tokens of time stamps of one model."""

    first: int
    """The token of 0 seconds; the one before it, which is for texts without time stamps, is not
    generated."""
    end: int
    """The token that ends a text."""
    max_initial: int | None = None
    """The largest position of the first time stamp; None for no limit."""

    def __call__(self, tokens: Tokens, scores: Scores, *, begin: int) -> Scores:
        """Return scores with minus infinity for what must not follow.

        Args:
            tokens: the sequence with its prompt.
            scores: logits or log-probabilities, float32 (vocabulary,).
            begin: number of tokens of the prompt.
        """
        first, generated = self.first, tokens[begin:]
        scores = scores.copy()
        scores[first - 1] = _NEVER
        stamps = [token for token in generated if token >= first]
        ends_with_stamp = bool(generated) and generated[-1] >= first
        # At the start of a text, the stamp before counts as given.
        is_pair = len(generated) < 2 or generated[-2] >= first
        if ends_with_stamp and is_pair:  # text follows the start of a segment
            scores[first:] = _NEVER
        elif ends_with_stamp:  # the start of the next segment follows the end of one, or nothing
            scores[: self.end] = _NEVER
        if stamps:
            # Time does not go back; only the start of a segment may equal the end before it.
            earliest = stamps[-1] + (not ends_with_stamp or is_pair)
            scores[first:earliest] = _NEVER
        if not generated:
            scores[:first] = _NEVER
            if self.max_initial is not None:
                scores[first + self.max_initial + 1 :] = _NEVER
        # A stamp comes as soon as all stamps together are more probable than any other token.
        peak = scores.max()
        with np.errstate(divide="ignore", invalid="ignore"):  # no stamp is left, or NaN
            all_stamps = np.log(np.exp(scores[first:] - peak).sum())
        if all_stamps > scores[:first].max() - peak:
            scores[:first] = _NEVER
        return scores

    def split(self, tokens: Sequence[int], *, window: int, stride: int) -> tuple[list[int], int]:
        """Return the tokens of a window that are final, and the frames after which the next begins.

        What follows the last pair of stamps was cut off by the end of the window, and is
        transcribed again in the next one.

        Args:
            tokens: the generated tokens, without the one that ended them.
            window: number of frames that the window has.
            stride: number of frames of a position.
        """
        is_stamp = [token >= self.first for token in tokens]
        pairs = [i for i in range(len(tokens) - 1) if is_stamp[i] and is_stamp[i + 1]]
        # A single stamp at the end says that nothing is spoken behind it.
        if not pairs or is_stamp[-2:] == [False, True]:
            return list(tokens), window
        last = pairs[-1]
        return list(tokens[: last + 2]), (tokens[last] - self.first) * stride
