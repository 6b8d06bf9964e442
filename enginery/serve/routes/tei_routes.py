"""The routes of text-embeddings-inference, as the OpenAPI document describes them."""

from __future__ import annotations

from collections.abc import Iterator

from enginery.serve.routes import tei, tei_tokens
from enginery.serve.routes.schemas import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    FREE_OBJECT,
    INFERENCE_STATUSES,
    LABEL,
    NUMBER,
    STRING,
    TEXTS,
    TEXTS_OR_IDS,
    TOKEN_IDS,
    VECTORS,
    array,
    either,
    nullable,
    obj,
    word,
)
from enginery.serve.routing import Operation, Route, post

_TRUNCATE = {
    "truncate": nullable(BOOLEAN),
    "truncation_direction": nullable(word("right", "Right", "left", "Left")),
}
_MODEL = {"model": nullable(STRING)}
_EMBED = Operation(
    "Vectors of texts",
    body=obj(
        {"inputs": TEXTS_OR_IDS},
        {
            "normalize": nullable(BOOLEAN), "prompt_name": nullable(STRING),
            "dimensions": nullable({"type": "integer", "minimum": 1}), **_TRUNCATE, **_MODEL,
        },
    ),
    answer=VECTORS,
    statuses=INFERENCE_STATUSES,
)  # fmt: skip
_PAIR = array(STRING, least=1, most=2)
_PREDICT = Operation(
    "Labels of texts, or of pairs of texts",
    body=obj(
        {"inputs": either(STRING, _PAIR, array(_PAIR, least=1))},
        {"raw_scores": nullable(BOOLEAN), **_TRUNCATE, **_MODEL},
    ),
    answer=either(array(LABEL), array(array(LABEL))),
    statuses=INFERENCE_STATUSES,
)
_RERANK = Operation(
    "Texts by how well they answer a query",
    body=obj(
        {"query": STRING, "texts": array(STRING, least=1)},
        {
            "raw_scores": nullable(BOOLEAN), "return_text": nullable(BOOLEAN), **_TRUNCATE,
            **_MODEL,
        },
    ),
    answer=array(obj({"index": COUNT, "score": NUMBER}, {"text": STRING})),
    statuses=INFERENCE_STATUSES,
)  # fmt: skip
_SIMILARITY = Operation(
    "Cosines of one text and others",
    body=obj(
        {"inputs": obj({"source_sentence": STRING, "sentences": array(STRING, least=1)})},
        {"parameters": nullable(obj({}, {"prompt_name": nullable(STRING), **_TRUNCATE})), **_MODEL},
    ),
    answer=array(NUMBER),
    statuses=INFERENCE_STATUSES,
)
_TOKEN = obj(
    {"id": COUNT, "text": STRING, "special": BOOLEAN,
     "start": nullable(COUNT), "stop": nullable(COUNT)}
)  # fmt: skip
_TOKENIZE = Operation(
    "The tokens of texts",
    body=obj(
        {"inputs": TEXTS},
        {"add_special_tokens": nullable(BOOLEAN), "prompt_name": nullable(STRING), **_MODEL},
    ),
    answer=array(array(_TOKEN)),
    statuses=INFERENCE_STATUSES,
)
_DECODE = Operation(
    "Token ids as texts",
    body=obj(
        {"ids": either(TOKEN_IDS, array(TOKEN_IDS, least=1))},
        {"skip_special_tokens": nullable(BOOLEAN), **_MODEL},
    ),
    answer=array(STRING),
    statuses=INFERENCE_STATUSES,
)
_ROOT = Operation(
    "/embed, /predict or /rerank, as the only model answers",
    body=FREE_OBJECT,
    answer=array(ANYTHING),
    statuses=INFERENCE_STATUSES,
)


def tei_routes() -> Iterator[Route]:
    """The routes."""
    routes = (
        ("/embed", tei.embed, _EMBED), ("/predict", tei.predict, _PREDICT),
        ("/rerank", tei.rerank, _RERANK), ("/similarity", tei.similarity, _SIMILARITY),
        ("/tokenize", tei_tokens.tokenize, _TOKENIZE), ("/decode", tei_tokens.decode, _DECODE),
    )  # fmt: skip
    for path, handler, operation in routes:
        yield post("tei", path, handler, operation)
        yield post("tei", f"/models/{{model}}{path}", handler, operation)
    for path in ("/", "/invocations"):
        yield post("tei", path, tei.root, _ROOT)
