"""Token classification: find labelled spans of a text, such as names or parts of speech.

Scores and grouping follow transformers' token-classification pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.runtime.tasks.classify import label_names
from enginery.runtime.tasks.results import Nested, Result
from enginery.runtime.tasks.task import (
    Arrays,
    InputField,
    ModelInputs,
    Row,
)
from enginery.runtime.tasks.text import TextOptions, TextTask, scan_cost, softmax
from enginery.runtime.text.tokenizer import TextTokenizer, check_texts

Aggregation = Literal["none", "simple", "first", "average", "max"]


@dataclass(frozen=True)
class TokenSpan(Result):
    """A span of a text with one label: `text[start:end]`, in Python characters."""

    label: str
    score: float
    start: int
    end: int
    text: str


class TagOptions(TextOptions):
    """Options of `tag`."""

    aggregation: Aggregation = "simple"
    """How tokens are grouped into spans, as in transformers' pipeline: `none` returns tokens,
    `simple` joins adjacent tokens of one label; `first`, `average` and `max` give the tokens of a
    word one label before that."""


@dataclass
class Tag(TextTask):
    """Find labelled spans of texts, with character offsets."""

    verb = "tag"
    purpose = "tags texts"
    tasks = ("token-classification",)
    graph_outputs: ClassVar[Mapping[str, int]] = {"logits": 3}
    result_type = Annotated[list[TokenSpan], Nested("spans", "entities")]
    inputs = (InputField("text", "Ada Lovelace lived in London."),)
    Options = TagOptions

    def preprocess(self, inputs: Sequence[str], options: TagOptions) -> ModelInputs:
        """Tokenize each text into one row, with offsets."""
        check_texts(inputs)
        rows = self.encode(inputs, options, offsets=True)
        return ModelInputs(rows, inputs, postprocess_cost=scan_cost(rows))

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the logits of each row: (tokens, labels)."""
        return self.token_outputs(rows, outputs, "logits")

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: TagOptions
    ) -> list[list[TokenSpan]]:
        """Return a list of `TokenSpan` for each text."""
        names = label_names(self.config, outputs[0].shape[-1]) if outputs else []
        return [
            spans_from_logits(
                text, row.content, logits, names, self.tokenizer, aggregation=options.aggregation
            )
            for text, row, logits in zip(work.context, work.rows, outputs, strict=True)
        ]

    def describe(self, result: Sequence[TokenSpan]) -> str:
        """Describe the spans of a text."""
        spans = [f"{span.text} ({span.label} {span.score:.2f})" for span in result]
        return "; ".join(spans) or "nothing found"


@dataclass(frozen=True)
class _Piece:
    """A token, or the tokens of one word: half-open character range and scores (labels,)."""

    start: int
    end: int
    scores: NDArray[Any]
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
    logits: NDArray[Any],
    names: Sequence[str],
    tokenizer: TextTokenizer,
    *,
    aggregation: Aggregation,
) -> list[TokenSpan]:
    """Return the labelled spans of one text, except those labelled O.

    Args:
        text: the text.
        encoding: the text's `tokenizers.Encoding`.
        logits: (tokens of the encoding, labels).
        names: the names of the labels.
        tokenizer: the tokenizer that made the encoding.
        aggregation: see `TagOptions.aggregation`.
    """
    combine = _COMBINATIONS.get(aggregation)
    pieces = _split_pieces(
        text, encoding, softmax(logits.astype(np.float32, copy=False)), tokenizer
    )
    if combine:
        pieces = [_merge_word(word, combine) for word in _group_words(pieces)]
    tagged = [_tag(piece, names) for piece in pieces]
    groups = [[tag] for tag in tagged] if aggregation == "none" else _group_tags(tagged)
    spans = [_span(text, group, keep_prefix=aggregation == "none") for group in groups]
    return [span for span in spans if span.label != "O"]


def _split_pieces(
    text: str, encoding: Any, scores: NDArray[Any], tokenizer: TextTokenizer
) -> list[_Piece]:
    prefix = getattr(tokenizer.backend.model, "continuing_subword_prefix", None)
    pieces = []
    for index, token in enumerate(encoding.tokens):
        if encoding.special_tokens_mask[index]:
            continue
        start, end = encoding.offsets[index]
        if prefix:
            # A token that continues a word is longer than its text, by its prefix: "##ing".
            continues = len(token) != end - start
        else:
            # transformers' rule for tokenizers without such a prefix: no space before the token or
            # at its start.
            continues = start > 0 and " " not in text[start - 1 : start + 1]
        if encoding.ids[index] == tokenizer.unk_id:
            # As in transformers' pipeline, an unknown token begins a word.
            continues = False
        pieces.append(_Piece(start, end, scores[index], continues))
    return pieces


def _group_words(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    words: list[list[_Piece]] = []
    for piece in pieces:
        if words and piece.continues_word:
            words[-1].append(piece)
        else:
            words.append([piece])
    return words


_COMBINATIONS: dict[str, Callable[[list[_Piece]], NDArray[Any]]] = {
    "first": lambda word: word[0].scores,
    "average": lambda word: np.asarray(np.mean([piece.scores for piece in word], axis=0)),
    "max": lambda word: max(word, key=lambda piece: float(piece.scores.max())).scores,
}


def _merge_word(word: list[_Piece], combine: Callable[[list[_Piece]], NDArray[Any]]) -> _Piece:
    return _Piece(word[0].start, word[-1].end, combine(word), continues_word=False)


def _tag(piece: _Piece, names: Sequence[str]) -> _Tagged:
    best = int(piece.scores.argmax())
    return _Tagged(names[best], float(piece.scores[best]), piece.start, piece.end)


def _group_tags(tagged: Sequence[_Tagged]) -> list[list[_Tagged]]:
    """Join adjacent tokens of one label; `B-` starts a new group."""
    groups: list[list[_Tagged]] = []
    for tag in tagged:
        begins = tag.label.startswith("B-")
        if groups and not begins and _entity_type(tag.label) == _entity_type(groups[-1][-1].label):
            groups[-1].append(tag)
        else:
            groups.append([tag])
    return groups


def _entity_type(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _span(text: str, group: Sequence[_Tagged], *, keep_prefix: bool) -> TokenSpan:
    start, end = group[0].start, group[-1].end
    # The pipeline drops everything before the first hyphen from the label of a group.
    label = group[0].label if keep_prefix else group[0].label.split("-", 1)[-1]
    score = float(np.mean([tag.score for tag in group]))
    return TokenSpan(label, score, start, end, text[start:end])
