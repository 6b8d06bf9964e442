"""Cut the text of a sequence into pieces while its tokens are generated.

    stream = TextStream(decode, stops=["###"])
    piece = stream.feed(tokens_so_far)    # empty if nothing can be sent yet
    rest = stream.finish(all_tokens)

The pieces together are the text that all tokens give. A piece ends between characters, and what may
be the beginning of a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "�"
"""What the first bytes of a character decode to."""
_CLEANED_UP = 4
"""Characters of the longest ending before which decoding may remove a space, such as ` n't`."""


class TextStream:
    """The text of one sequence as far as it was sent."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str] = (),
        keep_stop: bool = True,
        clean_up: bool = False,
    ) -> None:
        """Begin a text.

        Args:
            decode: returns the text of tokens.
            stops: the stop strings.
            keep_stop: a stop string that ends the text is part of it.
            clean_up: decoding removes spaces before punctuation, so that a space may vanish once
                the characters after it are known.
        """
        self.sent = ""
        """The pieces so far."""
        self._decode, self._stops = decode, tuple(stops)
        self._keep_stop, self._clean_up = keep_stop, clean_up

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the next piece; empty if nothing more can be sent yet.

        Args:
            tokens: all tokens so far.
        """
        text = self._decode(tokens)
        if any(stop in text for stop in self._stops):  # it has ended, and others go on
            return ""
        ready = text[: len(text) - self._held(text)]
        # What was sent cannot be taken back: wait until the text begins with it again.
        if ready.endswith(_UNFINISHED) or not ready.startswith(self.sent):
            return ""
        piece = ready[len(self.sent) :]
        self.sent = ready
        return piece

    def finish(self, tokens: Sequence[int]) -> str:
        """Return the rest of the text.

        Args:
            tokens: all tokens.
        """
        return self.text(tokens)[len(self.sent) :]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the whole text of all tokens, up to the first stop string."""
        text = self._decode(tokens)
        stops = [stop for stop in self._stops if stop in text]
        if not stops:
            return text
        # Generation ended at the first stop string that was complete.
        end = min(text.index(stop) + len(stop) for stop in stops)
        if self._keep_stop:
            return text[:end]
        # Of several that end at the same place, the longest is left out.
        return text[: min(end - len(stop) for stop in stops if text[:end].endswith(stop))]

    def _held(self, text: str) -> int:
        """Return the number of characters at the end that may still change or be cut off."""
        sizes = [
            size
            for stop in self._stops
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        ]
        if self._clean_up and " " in text[-_CLEANED_UP:]:
            ending = text[-_CLEANED_UP:]
            sizes.append(len(ending) - ending.index(" "))
        return max(sizes, default=0)
