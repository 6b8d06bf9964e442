"""Extractive question answering: find the answer to a question in its context.

The steps are those of transformers' question-answering pipeline. Start and end logits become
probabilities over the context tokens only. The score of a span is the product of its start and end
probabilities; a span has at most `max_tokens` tokens and is widened to whole words. Scores of equal
answers are added. A long context is split into overlapping windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.errors import InputError
from enginery.runtime.tasks.results import ColumnName, Ranked, Result
from enginery.runtime.tasks.task import (
    MAX_RESULTS,
    Arrays,
    InputField,
    ModelInputs,
    Row,
    TaskOptions,
)
from enginery.runtime.tasks.text import TextTask, TooLongError, scan_cost
from enginery.runtime.text.tokenizer import WINDOW, check_texts, require_list

MAX_ANSWER_TOKENS = 15


@dataclass(frozen=True)
class ContextAnswer(Result):
    """An answer: `context[start:end]`. If there is no answer, `text` is empty and `start` is 0."""

    text: Annotated[str, ColumnName("answer")]
    score: float
    start: int
    end: int


class AnswerOptions(TaskOptions):
    """Options of `answer`."""

    top_k: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 1
    """Maximum number of answers per question, best first."""
    max_tokens: Annotated[int, Field(ge=1, le=512)] = MAX_ANSWER_TOKENS
    """Maximum number of tokens of an answer."""
    allow_none: bool = False
    """Include "no answer", as an empty text, among the candidates."""


@dataclass
class Answer(TextTask):
    """Find answers to (question, context) pairs."""

    verb = "answer"
    purpose = "answers questions"
    tasks = ("question-answering",)
    inputs = (
        InputField("question", "Where did Ada live?"),
        InputField("context", "Ada lived in London."),
    )
    graph_outputs: ClassVar[Mapping[str, int]] = {"start_logits": 2, "end_logits": 2}
    result_type = Annotated[list[ContextAnswer], Ranked("answers")]
    Options = AnswerOptions

    def preprocess(self, inputs: Sequence[Any], options: AnswerOptions) -> ModelInputs:
        """Tokenize (question, context) pairs, or dicts with these two keys.

        A context that is split into windows gets one row per window.
        """
        require_list(inputs, "question")
        pairs = [_pair(item, index) for index, item in enumerate(inputs)]
        for part, role in enumerate(("question", "context")):
            check_texts([pair[part] for pair in pairs], what=role)
            for index, pair in enumerate(pairs):
                if not pair[part].strip():
                    raise InputError(f"{role} {index} is empty.")
        rows, of_pair = [], []
        windows_of = [(e, *e.overflowing) for e in self.tokenizer.encode_pairs(pairs)]
        for index, windows in enumerate(windows_of):
            if len(windows) > 1 and self.tokenizer.refuses_longer and self.tokenizer.limit < WINDOW:
                raise TooLongError(
                    f"question {index} and its context are too long: expected at most "
                    f"{self.tokenizer.limit} tokens: {self.tokenizer.limit_source}.",
                    do="Send a shorter context.",
                )
            rows += [Row(window, len(window)) for window in windows]
            of_pair += [index] * len(windows)
        self.lengths.check(max(map(len, windows)) for windows in windows_of)
        return ModelInputs(rows, (pairs, of_pair), postprocess_cost=scan_cost(rows))

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the start and end logits of each row: (tokens,) each."""
        starts = self.token_outputs(rows, outputs, "start_logits")
        return list(zip(starts, self.token_outputs(rows, outputs, "end_logits"), strict=True))

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: AnswerOptions
    ) -> list[list[ContextAnswer]]:
        """Return a list of `ContextAnswer` for each question, best first."""
        pairs, of_pair = work.context
        windows: list[list[Window]] = [[] for _ in pairs]
        for index, row, (start, end) in zip(of_pair, work.rows, outputs, strict=True):
            tokenizer = self.tokenizer
            windows[index].append(
                Window(row.content, start, end, tokenizer.cls_id, tokenizer.context_first)
            )
        return [
            best_answers(
                context,
                context_windows,
                top_k=options.top_k,
                max_tokens=options.max_tokens,
                allow_none=options.allow_none,
            )
            for (_, context), context_windows in zip(pairs, windows, strict=True)
        ]

    def describe(self, result: Sequence[ContextAnswer]) -> str:
        """Describe the best answer to a question."""
        return f"{result[0].text or 'none'} {result[0].score:.2f}"


def _pair(item: Any, index: int) -> tuple[str, str]:
    if isinstance(item, Mapping) and {"question", "context"} <= set(item):
        return item["question"], item["context"]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise InputError(
        f"question {index} is a {type(item).__name__}, expected (question, context) "
        "or a dict with question and context."
    )


_NEVER = -10000.0
"""The logit that transformers' pipeline gives to tokens outside the context."""


@dataclass(frozen=True)
class Window:
    """The encoding of (question, one window of the context), with its logits."""

    encoding: Any
    start_logits: NDArray[Any]
    """(tokens,)"""
    end_logits: NDArray[Any]
    """(tokens,)"""
    cls_id: int | None
    context_first: bool = False


def best_answers(
    context: str,
    windows: Sequence[Window],
    *,
    top_k: int = 1,
    max_tokens: int = MAX_ANSWER_TOKENS,
    allow_none: bool = False,
) -> list[ContextAnswer]:
    """Return the best answers over all windows of one context, best first.

    Args:
        context: the text that the encodings' offsets refer to.
        windows: all windows of the context.
        top_k: maximum number of answers.
        max_tokens: maximum number of tokens of an answer.
        allow_none: include "no answer", as an empty text at offset 0, among the candidates.
    """
    scores: dict[str, float] = {}
    spans: dict[str, tuple[int, int]] = {}
    # The pipeline starts from 1e6 and takes the minimum over all windows.
    null_score = 1e6
    for window in windows:
        start, end, allowed = _probabilities(window)
        null_score = min(null_score, float(start[0] * end[0]))
        # The first token stands for "no answer", so no span may start or end there.
        start[0] = end[0] = 0.0
        # `top_k * 2 + 10` candidates, as in transformers' pipeline: several may be the same words.
        for first, last, score in _candidates(start, end, allowed, 2 * top_k + 10, max_tokens):
            span = _characters(window, first, last)
            # The pipeline also adds up the scores of answers that differ in case only.
            key = context[slice(*span)].lower()
            spans.setdefault(key, span)
            scores[key] = scores.get(key, 0.0) + score
    answers = [
        ContextAnswer(context[slice(*span)], scores[key], *span) for key, span in spans.items()
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
    # transformers' pipeline searches all tokens, the question's too, where the context is first.
    in_context = np.asarray([window.context_first or part == 1 for part in encoding.sequence_ids])
    # Models trained with unanswerable questions predict the CLS token for "no answer".
    allowed = in_context | (ids == window.cls_id) if window.cls_id is not None else in_context
    return (
        _softmax_where(window.start_logits, allowed),
        _softmax_where(window.end_logits, allowed),
        allowed,
    )


def _softmax_where(logits: NDArray[Any], allowed: NDArray[np.bool_]) -> NDArray[Any]:
    masked = np.where(allowed, logits.astype(np.float32, copy=False), np.float32(_NEVER))
    shifted = np.exp(masked - masked.max())
    return np.asarray(shifted / shifted.sum())


def _candidates(
    start: NDArray[Any], end: NDArray[Any], allowed: NDArray[np.bool_], count: int, longest: int
) -> Iterator[tuple[int, int, float]]:
    """Yield (first token, last token, probability) of the most probable spans.

    The outer product of start and end probabilities has every pair of tokens. `triu` drops spans
    that end before they start, and `tril` drops spans of more than `longest` tokens.
    """
    joint = np.tril(np.triu(np.outer(start, end)), longest - 1).ravel()
    count = min(count, joint.size)
    likeliest = np.argpartition(-joint, count - 1)[:count]
    for flat in likeliest[np.argsort(-joint[likeliest], kind="stable")]:
        first, last = divmod(int(flat), len(start))
        if allowed[first] and allowed[last] and joint[flat] > 0:
            yield first, last, float(joint[flat])


def _characters(window: Window, first: int, last: int) -> tuple[int, int]:
    """Return the half-open character range of the words from token `first` to token `last`."""
    encoding, context = window.encoding, 0 if window.context_first else 1
    first_word, last_word = encoding.token_to_word(first), encoding.token_to_word(last)
    if first_word is not None and last_word is not None:
        begin = encoding.word_to_chars(first_word, sequence_index=context)
        finish = encoding.word_to_chars(last_word, sequence_index=context)
        if begin is not None and finish is not None:
            return begin[0], finish[1]
    return encoding.offsets[first][0], encoding.offsets[last][1]
