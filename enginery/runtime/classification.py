"""Logits to labels: of a whole text or image, and of stretches of a text.

    >>> classify_logits(logits, config, "auto", top_k=1)[0].label
    'angry'

Scores and grouping are those of transformers' text-classification and token-classification
pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.core.model_files import ModelConfig
from enginery.runtime.answers import Classification, Label, TokenSpan
from enginery.runtime.tokenizer import TextTokenizer

Activation = Literal["auto", "softmax", "sigmoid", "none"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Scores = NDArray[Any]


def label_names(config: ModelConfig, count: int) -> list[str]:
    """Return the names of `count` labels, as config.json has them; `LABEL_3` where it has none."""
    return [config.id2label.get(index, f"LABEL_{index}") for index in range(count)]


def choose_activation(config: ModelConfig, count: int) -> Activation:
    """What turns `count` logits into scores, as transformers' pipelines choose it."""
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or count == 1:
        return "sigmoid"
    return "softmax"


def softmax(logits: Scores) -> Scores:
    """Over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def classify_logits(
    logits: Scores, config: ModelConfig, activation: Activation, *, top_k: int
) -> list[Classification]:
    """One classification a row, best label first.

    Args:
        logits: (batch, labels).
        config: the model's config.json, which names the labels.
        activation: softmax, sigmoid or none; `auto` for what `config` says.
        top_k: how many labels to keep; 0 for all.
    """
    names = label_names(config, logits.shape[-1])
    if activation == "auto":
        activation = choose_activation(config, len(names))
    logits = logits.astype(np.float32, copy=False)
    if activation == "softmax":
        scores = softmax(logits)
    elif activation == "sigmoid":
        # The same as 1 / (1 + exp(-x)), without its overflow.
        scores = 0.5 * (1 + np.tanh(0.5 * logits))
    else:
        scores = logits
    answers = []
    for row in scores:
        order = np.argsort(-row, kind="stable")[: top_k or None]
        answers.append(Classification(tuple(Label(names[i], float(row[i])) for i in order)))
    return answers


@dataclass(frozen=True)
class _Piece:
    """A token, or the tokens of one word, with the scores of all labels."""

    start: int
    end: int
    scores: Scores
    continues_word: bool


@dataclass(frozen=True)
class _Tagged:
    label: str
    score: float
    start: int
    end: int


def spans_from_logits(
    text: str,
    encoding: Any,
    logits: Scores,
    names: Sequence[str],
    tokenizer: TextTokenizer,
    *,
    aggregation: Aggregation,
) -> list[TokenSpan]:
    """The labelled stretches of one text, without those labelled O.

    Args:
        text: what was encoded.
        encoding: its `tokenizers.Encoding`.
        logits: (tokens of the encoding, labels).
        names: one a label.
        tokenizer: what encoded it.
        aggregation: `none` gives tokens; `simple` joins neighbours of one label; `first`,
            `average` and `max` let the tokens of a word agree before that.

    Raises:
        InputError: `aggregation` is none of these.
    """
    combine = _COMBINATIONS.get(aggregation)
    if aggregation not in ("none", "simple") and combine is None:
        raise InputError(
            f"aggregation '{aggregation}' is not known; "
            f"expected none, simple, {', '.join(_COMBINATIONS)}."
        )
    pieces = _pieces(text, encoding, softmax(logits.astype(np.float32, copy=False)), tokenizer)
    if combine:
        pieces = [_word(word, combine) for word in _words(pieces)]
    tagged = [_tag(piece, names) for piece in pieces]
    groups = [[tag] for tag in tagged] if aggregation == "none" else _groups(tagged)
    spans = [_span(text, group, whole=aggregation == "none") for group in groups]
    return [span for span in spans if span.label != "O"]


def _pieces(text: str, encoding: Any, scores: Scores, tokenizer: TextTokenizer) -> list[_Piece]:
    prefix = getattr(tokenizer.texts.model, "continuing_subword_prefix", None)
    pieces = []
    for index, token in enumerate(encoding.tokens):
        if encoding.special_tokens_mask[index]:
            continue
        start, end = encoding.offsets[index]
        if prefix:
            # A piece inside a word is longer than the text it stands for: "##ing".
            continues = len(token) != end - start
        else:
            continues = start > 0 and " " not in text[start - 1 : start + 1]
        if encoding.ids[index] == tokenizer.unk_id:
            continues = False
        pieces.append(_Piece(start, end, scores[index], continues))
    return pieces


def _words(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    words: list[list[_Piece]] = []
    for piece in pieces:
        if words and piece.continues_word:
            words[-1].append(piece)
        else:
            words.append([piece])
    return words


_COMBINATIONS: dict[str, Callable[[list[_Piece]], Scores]] = {
    "first": lambda word: word[0].scores,
    "average": lambda word: np.asarray(np.mean([piece.scores for piece in word], axis=0)),
    "max": lambda word: max(word, key=lambda piece: float(piece.scores.max())).scores,
}


def _word(word: list[_Piece], combine: Callable[[list[_Piece]], Scores]) -> _Piece:
    return _Piece(word[0].start, word[-1].end, combine(word), continues_word=False)


def _tag(piece: _Piece, names: Sequence[str]) -> _Tagged:
    best = int(piece.scores.argmax())
    return _Tagged(names[best], float(piece.scores[best]), piece.start, piece.end)


def _groups(tagged: Sequence[_Tagged]) -> list[list[_Tagged]]:
    """Neighbours of one label together; `B-` begins a new group."""
    groups: list[list[_Tagged]] = []
    for tag in tagged:
        begins = tag.label.startswith("B-")
        if groups and not begins and _kind(tag.label) == _kind(groups[-1][-1].label):
            groups[-1].append(tag)
        else:
            groups.append([tag])
    return groups


def _kind(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _span(text: str, group: Sequence[_Tagged], *, whole: bool) -> TokenSpan:
    start, end = group[0].start, group[-1].end
    # The pipeline drops whatever stands before the first hyphen of a group's name.
    label = group[0].label if whole else group[0].label.split("-", 1)[-1]
    score = float(np.mean([tag.score for tag in group]))
    return TokenSpan(label, score, start, end, text[start:end])
