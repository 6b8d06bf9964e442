"""Start and end logits to the part of the context that answers the question.

    >>> best_answers(context, windows, top_k=1, max_tokens=15)[0].text
    'Paris'

As transformers' question-answering pipeline: probabilities over context tokens only, their outer
product, at most `max_tokens` tokens, whole words, the scores of equal answers added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.runtime.answers import ContextAnswer

MAX_ANSWER_TOKENS = 15
_NEVER = -10000.0
"""The pipeline's logit for tokens that cannot be part of an answer."""


@dataclass(frozen=True)
class Window:
    """One encoding of (question, part of the context), with its logits."""

    encoding: Any
    start_logits: NDArray[Any]
    """(tokens of the encoding,)"""
    end_logits: NDArray[Any]
    cls_id: int | None


def best_answers(
    context: str,
    windows: Sequence[Window],
    *,
    top_k: int = 1,
    max_tokens: int = MAX_ANSWER_TOKENS,
    allow_none: bool = False,
) -> list[ContextAnswer]:
    """The best answers over all windows of one context, best first.

    Args:
        context: what the offsets refer to.
        windows: every window of it.
        top_k: how many answers; there may be fewer.
        max_tokens: the most tokens of an answer.
        allow_none: "no answer" competes, as an empty text at 0.
    """
    scores: dict[str, float] = {}
    places: dict[str, tuple[int, int]] = {}
    null_score = 1e6  # the pipeline starts from here and takes the smallest of all windows
    for window in windows:
        start, end, allowed = _probabilities(window)
        null_score = min(null_score, float(start[0] * end[0]))
        # The first token stands for "no answer" and is never the beginning of one.
        start[0] = end[0] = 0.0
        for first, last, score in _candidates(start, end, allowed, 2 * top_k + 10, max_tokens):
            place = _characters(window.encoding, first, last)
            key = context[slice(*place)].lower()
            places.setdefault(key, place)
            scores[key] = scores.get(key, 0.0) + score
    answers = [
        ContextAnswer(context[slice(*place)], scores[key], *place) for key, place in places.items()
    ]
    if allow_none:
        answers.append(ContextAnswer("", null_score, 0, 0))
    answers = answers or [ContextAnswer("", 0.0, 0, 0)]
    return sorted(answers, key=lambda answer: -answer.score)[:top_k]


def _probabilities(
    window: Window,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
    encoding = window.encoding
    ids = np.asarray(encoding.ids)
    in_context = np.asarray([part == 1 for part in encoding.sequence_ids])
    # Models trained with unanswerable questions point at their first token.
    allowed = in_context | (ids == window.cls_id) if window.cls_id is not None else in_context
    return (
        _softmax_where(window.start_logits, allowed),
        _softmax_where(window.end_logits, allowed),
        allowed,
    )


def _softmax_where(logits: NDArray[Any], allowed: NDArray[np.bool_]) -> NDArray[Any]:
    kept = np.where(allowed, logits.astype(np.float32, copy=False), np.float32(_NEVER))
    shifted = np.exp(kept - kept.max())
    return np.asarray(shifted / shifted.sum())


def _candidates(
    start: NDArray[Any], end: NDArray[Any], allowed: NDArray[np.bool_], count: int, longest: int
) -> Iterator[tuple[int, int, float]]:
    """(first token, last token, probability) of the likeliest spans."""
    joint = np.tril(np.triu(np.outer(start, end)), longest - 1).ravel()
    count = min(count, joint.size)
    likeliest = np.argpartition(-joint, count - 1)[:count]
    for flat in likeliest[np.argsort(-joint[likeliest], kind="stable")]:
        first, last = divmod(int(flat), len(start))
        if allowed[first] and allowed[last] and joint[flat] > 0:
            yield first, last, float(joint[flat])


def _characters(encoding: Any, first: int, last: int) -> tuple[int, int]:
    """The characters of whole words from token `first` to token `last` of the context."""
    first_word, last_word = encoding.token_to_word(first), encoding.token_to_word(last)
    if first_word is not None and last_word is not None:
        begin = encoding.word_to_chars(first_word, sequence_index=1)
        finish = encoding.word_to_chars(last_word, sequence_index=1)
        if begin is not None and finish is not None:
            return begin[0], finish[1]
    return encoding.offsets[first][0], encoding.offsets[last][1]
