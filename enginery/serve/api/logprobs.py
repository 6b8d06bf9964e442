"""The log-probabilities of the tokens of a text, in OpenAI's two shapes.

A token belongs to the piece of the text in which it begins. Special tokens, such as the one that
ends a text, and what follows a stop string are no part of it, and have none.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from enginery.runtime.generation.search import TokenLogprob
from enginery.runtime.tasks.generate import Generate
from enginery.serve.api.requests import Schema

_LEAST = -9999.0
"""What OpenAI has for a probability of 0, whose logarithm JSON cannot hold."""

Placed = tuple[TokenLogprob, int]
"""A token, and the offset of its first character in the text."""


class TopLogprob(Schema):
    """One of the most probable tokens of a place."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Schema):
    """The tokens of an answer."""

    content: list[ContentLogprob]
    refusal: None


class CompletionLogprobs(Schema):
    """The tokens of a text; `top_logprobs` has each token that was generated, too."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextLogprobs:
    """Gives out the tokens of one text as its pieces are sent."""

    def __init__(self, task: Generate, *, has_stops: bool) -> None:
        """Begin a text; with `has_stops`, a stop string may cut it."""
        self._task, self._has_stops = task, has_stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = self._offset = self._taken = 0
        self._begins_with_space = False

    def take(self, piece: str, logprobs: Sequence[TokenLogprob], *, is_last: bool) -> list[Placed]:
        """Return the tokens that begin in the text so far and were not returned before.

        Args:
            piece: the next piece of the text.
            logprobs: those of all tokens so far.
            is_last: the text ends with this piece.
        """
        if not self._length:
            self._begins_with_space = piece.startswith(" ")
        self._length += len(piece)
        placed: list[Placed] = []
        for entry in logprobs[self._taken :]:
            if self._task.shows(entry.token):
                # Without stop strings a text has all tokens, also if decoding removed spaces.
                if self._offset >= self._length and (self._has_stops or not is_last):
                    break
                placed.append((entry, min(self._offset, self._length)))
                self._offset += self._size(entry.token)
            self._taken += 1
        return placed

    def _size(self, token: int) -> int:
        """Return the number of characters that a token completes."""
        text = self._decoder.decode(self._task.token_bytes(token))
        # Decoding a whole text drops the space of its first word.
        is_dropped = not self._offset and text.startswith(" ") and not self._begins_with_space
        return len(text) - is_dropped


def chat_logprobs(task: Generate, placed: Iterable[Placed]) -> dict[str, Any]:
    """Return tokens as `ChatLogprobs`."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        content = task.token_bytes(token)
        return {
            "token": content.decode(errors="replace"),
            "logprob": max(logprob, _LEAST),
            "bytes": list(content),
        }

    content = [
        {
            **described(entry.token, entry.logprob),
            "top_logprobs": [described(token, logprob) for token, logprob in entry.top],
        }
        for entry, _ in placed
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(task: Generate, placed: Sequence[Placed]) -> dict[str, Any]:
    """Return tokens as `CompletionLogprobs`."""

    def text(token: int) -> str:
        return task.token_bytes(token).decode(errors="replace")

    tops: list[dict[str, float]] = []
    for entry, _ in placed:
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            # Of two tokens with one text, parts of characters, the more probable one stays.
            top.setdefault(text(token), max(logprob, _LEAST))
        tops.append(top)
    return {
        "tokens": [text(entry.token) for entry, _ in placed],
        "token_logprobs": [max(entry.logprob, _LEAST) for entry, _ in placed],
        "top_logprobs": tops,
        "text_offset": [offset for _, offset in placed],
    }
