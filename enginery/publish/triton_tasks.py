"""What each task takes and answers in Triton: tensors by name, and how they are made.

>>> TASKS["text-classification"].inputs
(('text', False), ('text_pair', True))

task                    inputs              outputs
feature-extraction      text                embedding FP32 (n, dim)
text-classification     text [text_pair]    label BYTES, score FP32 (n, k)
token-classification    text                entities BYTES (n,): JSON
question-answering      question, context   answer BYTES, score FP32, start, end INT64 (n, k)
fill-mask               text                fillings BYTES (n,): JSON

They are those of `enginery serve`, so that a client of one is a client of the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import CheckFailedError
from enginery.core.manifest import GraphRecord
from enginery.publish.triton_parameters import Parameters
from enginery.runtime.classification import Activation, Aggregation
from enginery.runtime.question_answering import MAX_ANSWER_TOKENS
from enginery.runtime.text_rows import SENTENCE_OUTPUT, TOKEN_OUTPUTS, Asked, TextRows

Arrays = dict[str, NDArray[Any]]

NOT_FINITE = "Its precision cannot hold this input; `enginery validate` says more."
"""What to do about NaN and infinity."""


@dataclass(frozen=True)
class TritonTask:
    """One task, from texts to tensors of answers."""

    inputs: tuple[tuple[str, bool], ...]
    """The names of the inputs, and whether each may be left out."""
    outputs: tuple[tuple[str, str, int], ...]
    """Name, data type and rank."""
    graph_outputs: Callable[[GraphRecord], list[str]]
    """The outputs of the graph that answers are made from."""
    ask: Callable[[TextRows, Sequence[Any], Parameters], Asked]
    arrays: Callable[[Sequence[Any]], Arrays]
    """Tensors of answers; raises CheckFailedError where a score in JSON is NaN or infinite."""


def _ask_embed(rows: TextRows, texts: Sequence[Any], given: Parameters) -> Asked:
    return rows.ask_embed(
        texts,
        prompt_name=given.word("prompt_name"),
        normalize=given.flag("normalize", default=None),
    )


def _ask_classify(rows: TextRows, texts: Sequence[Any], given: Parameters) -> Asked:
    top_k = given.whole("top_k", default=0, least=0)
    word = given.word("activation", default="auto", known=get_args(Activation))
    activation: Activation = next(name for name in get_args(Activation) if name == word)
    return rows.ask_classify(texts, top_k=top_k, activation=activation)


def _ask_tag(rows: TextRows, texts: Sequence[Any], given: Parameters) -> Asked:
    word = given.word("aggregation", default="simple", known=get_args(Aggregation))
    aggregation: Aggregation = next(name for name in get_args(Aggregation) if name == word)
    return rows.ask_tag(texts, aggregation=aggregation)


def _ask_answer(rows: TextRows, texts: Sequence[Any], given: Parameters) -> Asked:
    return rows.ask_answer(
        texts,
        top_k=given.whole("top_k", default=1, least=1),
        max_tokens=given.whole("max_tokens", default=MAX_ANSWER_TOKENS, least=1, most=512),
        allow_none=bool(given.flag("allow_none", default=False)),
    )


def _ask_fill(rows: TextRows, texts: Sequence[Any], given: Parameters) -> Asked:
    return rows.ask_fill(texts, top_k=given.whole("top_k", default=5, least=1))


def _embedding(answers: Sequence[Any]) -> Arrays:
    return {"embedding": np.stack(answers).astype(np.float32, copy=False)}


def _labels(answers: Sequence[Any]) -> Arrays:
    return {
        "label": _bytes([[label.label for label in answer.labels] for answer in answers]),
        "score": np.array([[x.score for x in answer.labels] for answer in answers], np.float32),
    }


def _answers(answers: Sequence[Any]) -> Arrays:
    most = max(map(len, answers))
    none = ("", 0.0, 0, 0)
    rows = [
        [*((x.text, x.score, x.start, x.end) for x in found), *[none] * (most - len(found))]
        for found in answers
    ]
    return {
        "answer": _bytes([[row[0] for row in found] for found in rows]),
        "score": np.array([[row[1] for row in found] for found in rows], np.float32),
        "start": np.array([[row[2] for row in found] for found in rows], np.int64),
        "end": np.array([[row[3] for row in found] for found in rows], np.int64),
    }


def _entities(answers: Sequence[Any]) -> Arrays:
    return {"entities": _json([[span.to_dict() for span in spans] for spans in answers])}


def _fillings(answers: Sequence[Any]) -> Arrays:
    return {"fillings": _json([answer.to_dict() for answer in answers])}


def _json(documents: Sequence[Any]) -> NDArray[Any]:
    try:
        texts = [json.dumps(found, ensure_ascii=False, allow_nan=False) for found in documents]
    except ValueError as error:  # JSON has no such numbers
        raise CheckFailedError("a score is NaN or infinite.", do=NOT_FINITE) from error
    return _bytes(texts)


def _bytes(texts: Sequence[Any]) -> NDArray[Any]:
    """Texts, or lists of as many texts each, as UTF-8: Triton's BYTES are objects in numpy."""
    rows = [[text] if isinstance(text, str) else text for text in texts]
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    for index, row in enumerate(rows):
        array[index, :] = [text.encode() for text in row]
    return array[:, 0] if isinstance(texts[0], str) else array


def _vectors(record: GraphRecord) -> list[str]:
    names = [spec.name for spec in record.outputs]
    return [next(name for name in (SENTENCE_OUTPUT, *TOKEN_OUTPUTS) if name in names)]


def _named(*names: str) -> Callable[[GraphRecord], list[str]]:
    return lambda _: list(names)


_TEXT = (("text", False),)
TASKS: dict[str, TritonTask] = {
    "feature-extraction": TritonTask(
        _TEXT, (("embedding", "float32", 2),), _vectors, _ask_embed, _embedding
    ),
    "text-classification": TritonTask(
        (("text", False), ("text_pair", True)),
        (("label", "string", 2), ("score", "float32", 2)),
        _named("logits"), _ask_classify, _labels,
    ),
    "token-classification": TritonTask(
        _TEXT, (("entities", "string", 1),), _named("logits"), _ask_tag, _entities
    ),
    "question-answering": TritonTask(
        (("question", False), ("context", False)),
        (("answer", "string", 2), ("score", "float32", 2), ("start", "int64", 2),
         ("end", "int64", 2)),
        _named("start_logits", "end_logits"), _ask_answer, _answers,
    ),
    "fill-mask": TritonTask(
        _TEXT, (("fillings", "string", 1),), _named("logits"), _ask_fill, _fillings
    ),
}  # fmt: skip
