"""Routes compatible with Hugging Face's text-embeddings-inference (TEI).

    $ curl -d '{"inputs": "The engine is warm."}' localhost:8000/embed
    [[0.0123,…]]

Source: docs/openapi.json and router/src/http of text-embeddings-inference 1.9. If the server has
several models, the body's `model` or the path, `/models/{model}/embed`, names one; without a name,
the only model that supports the route is used. Differences: truncating texts on the left is not
supported, and a model of another task is an error with status 422 instead of 424.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from enginery.core.errors import InputError
from enginery.runtime.tasks.classify import Label
from enginery.runtime.tasks.task import ProcessingCost
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.tasks.views import SparseVector, View
from enginery.runtime.text.vector_dtypes import VectorDtype
from enginery.serve.api.endpoints import (
    INFERENCE_STATUSES,
    Routes,
    config_of,
    json_response,
    parsed,
    run_inference,
    select_model,
    select_view,
)
from enginery.serve.api.errors import invalid_field
from enginery.serve.api.requests import (
    Dimensions,
    ListOfTexts,
    RequestBody,
    Schema,
    Texts,
    TextsOrIds,
    TokenIds,
    json_object,
    listed,
    parse,
)
from enginery.serve.api.rerank import (
    DocumentsRequest,
    DocumentsResponse,
    best_first,
    has_one_label,
    rerank_documents,
    score,
)
from enginery.serve.models.served_model import ServedModel, too_many_inputs

routes = Routes("tei")

_SHORT_CHARACTERS = 2048
"""Number of characters or token ids that take about a millisecond."""
_FEW_NUMBERS = 20_000
"""Number of numbers that become JSON in about a millisecond."""
_CHARACTERS_PER_TOKEN = 4
"""Number of characters that /tokenize takes for each token that it may return."""
_TOKENS_TOGETHER = 4096
"""Number of tokens that become JSON at a time."""


class Truncation(RequestBody):
    """Base of bodies with TEI's options for truncation."""

    truncate: bool | None = None
    truncation_direction: Literal["right", "Right", "left", "Left"] | None = None

    def to_option(self) -> bool | None:
        """Return the task's option `truncate`; None for the server's default."""
        if (self.truncation_direction or "right").lower() == "left":
            raise invalid_field(
                "truncation_direction: found left, expected right.",
                field="truncation_direction",
                do="Truncate the text on the left before sending it.",
            )
        return self.truncate


class EmbedAllRequest(Truncation):
    """Body of /embed_all and /embed_sparse."""

    inputs: TextsOrIds
    prompt_name: str | None = None
    model: str | None = None


class EmbedRequest(EmbedAllRequest):
    """Body of /embed."""

    normalize: bool | None = None
    dimensions: Dimensions | None = None
    dtype: VectorDtype | None = None
    """Not in TEI; see `VectorOptions`."""


Pair = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]
"""A text, or a text and its pair."""


class PredictRequest(Truncation):
    """Body of /predict."""

    inputs: str | Pair | Annotated[list[Pair], Field(min_length=1, fail_fast=True)]
    """One input, or a list of them."""
    raw_scores: bool | None = None
    model: str | None = None


class RerankRequest(Truncation):
    """Body of /rerank."""

    query: str
    texts: ListOfTexts
    instruction: str | None = None
    """Not in TEI: what a reranker that is a language model has to judge."""
    raw_scores: bool | None = None
    return_text: bool | None = None
    model: str | None = None


class Sentences(RequestBody):
    """A text, and the sentences to compare it with."""

    source_sentence: str
    sentences: ListOfTexts


class SimilarityParameters(Truncation):
    """Options of /similarity."""

    prompt_name: str | None = None


class SimilarityRequest(RequestBody):
    """Body of /similarity."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None
    model: str | None = None


class TokenizeRequest(RequestBody):
    """Body of /tokenize."""

    inputs: Texts
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    model: str | None = None


class DecodeRequest(RequestBody):
    """Body of /decode."""

    ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    skip_special_tokens: bool | None = None
    model: str | None = None


class SparseValue(Schema):
    """The weight of one token of the vocabulary."""

    index: int
    value: float


class Rank(Schema):
    """A text's index and score."""

    index: int
    score: float
    text: str | None = None


class Token(Schema):
    """A token; `start` and `stop` are offsets in bytes of UTF-8."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class RootRequest(RequestBody):
    """Body of /, whose other fields depend on the model's task."""

    model: str | None = None


@routes.post(
    "/embed",
    "/models/{model}/embed",
    summary="Embed texts",
    body=EmbedRequest,
    response=list[list[float]],
    runs_model=True,
)
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Answer POST /embed: embed texts or token ids."""
    model, task = select_model(request, body.model, "embed")
    options = {
        "normalize": True if body.normalize is None else body.normalize,
        "dimensions": body.dimensions,
        "dtype": body.dtype,
        "prompt_name": body.prompt_name,
        "truncate": body.to_option(),
    }
    return json_response(await run_inference(request, model, task, listed(body.inputs), options))


@routes.post(
    "/embed_all",
    "/models/{model}/embed_all",
    summary="Embed each token of texts",
    body=EmbedAllRequest,
    response=list[list[list[float]]],
    runs_model=True,
)
async def embed_all(request: Request, body: EmbedAllRequest) -> Response:
    """Answer POST /embed_all: the vectors of the tokens of each text, without pooling."""
    model, task = select_view(request, body.model, "embed", "embed_tokens")
    return await _embed_with(request, body, model, task, _vectors_json)


@routes.post(
    "/embed_sparse",
    "/models/{model}/embed_sparse",
    summary="Embed texts as sparse vectors over the vocabulary",
    body=EmbedAllRequest,
    response=list[list[SparseValue]],
    runs_model=True,
)
async def embed_sparse(request: Request, body: EmbedAllRequest) -> Response:
    """Answer POST /embed_sparse: the weights above 0 of each text, by their index."""
    model, task = select_view(request, body.model, "fill", "embed_sparse")
    return await _embed_with(request, body, model, task, _weights_json)


async def _embed_with(
    request: Request,
    body: EmbedAllRequest,
    model: ServedModel,
    task: View,
    to_json: Callable[[Any], bytes],
) -> Response:
    """Return the JSON of each result of a view. It may have millions of numbers."""
    options = {"prompt_name": body.prompt_name, "truncate": body.to_option()}
    results = await run_inference(request, model, task, listed(body.inputs), options)

    def content() -> bytes:
        # One by one, because what makes JSON holds Python's lock.
        return b"[%b]" % b",".join(map(to_json, results))

    size = sum(map(_size, results))
    cost: ProcessingCost = "medium" if size <= _FEW_NUMBERS else "heavy"
    return Response(await model.in_thread(content, cost=cost), media_type="application/json")


def _size(result: Any) -> int:
    return result.values.size if isinstance(result, SparseVector) else result.size


def _vectors_json(vectors: NDArray[np.float32]) -> bytes:
    return orjson.dumps(np.ascontiguousarray(vectors), option=orjson.OPT_SERIALIZE_NUMPY)


def _weights_json(vector: SparseVector) -> bytes:
    weights = [
        {"index": index, "value": value}
        for index, value in zip(vector.indices.tolist(), vector.values, strict=True)
    ]
    return orjson.dumps(weights, option=orjson.OPT_SERIALIZE_NUMPY)


@routes.post(
    "/similarity",
    "/models/{model}/similarity",
    summary="Cosine similarity of one text to others",
    body=SimilarityRequest,
    response=list[float],
    runs_model=True,
)
async def similarity(request: Request, body: SimilarityRequest) -> Response:
    """Answer POST /similarity: cosine similarity of one text to others."""
    model, task = select_model(request, body.model, "embed")
    parameters = body.parameters or SimilarityParameters()
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    options = {
        "normalize": True,
        "prompt_name": parameters.prompt_name,
        "truncate": parameters.to_option(),
    }
    vectors = np.stack(await run_inference(request, model, task, texts, options))
    return json_response(vectors[1:] @ vectors[0])


@routes.post(
    "/predict",
    "/models/{model}/predict",
    summary="Classify texts or pairs of texts",
    body=PredictRequest,
    response=list[Label] | list[list[Label]],
    runs_model=True,
)
async def predict(request: Request, body: PredictRequest) -> Response:
    """Answer POST /predict: classify texts or pairs of texts, best label first."""
    model, task = select_model(request, body.model, "classify")
    is_single = isinstance(body.inputs, str) or isinstance(body.inputs[0], str)
    items: list[Any] = [body.inputs] if is_single else list(body.inputs)
    inputs = [
        item if isinstance(item, str) else tuple(item) if len(item) == 2 else item[0]
        for item in items
    ]
    options = {"activation": "none" if body.raw_scores else "auto", "truncate": body.to_option()}
    results = await run_inference(request, model, task, inputs, options)
    answers = [result.labels for result in results]
    return json_response(answers[0] if is_single else answers)


@routes.post(
    "/rerank",
    "/models/{model}/rerank",
    summary="Rank texts by relevance to a query",
    body=RerankRequest,
    other_bodies={
        "application/json": {
            "anyOf": [
                {"$ref": f"#/components/schemas/{kind.__name__}"}
                for kind in (RerankRequest, DocumentsRequest)
            ]
        }
    },
    response=list[Rank] | DocumentsResponse,
    runs_model=True,
)
async def rerank(request: Request) -> Response:
    """Answer POST /rerank: rank texts; or documents, as clients of Cohere and Jina send them."""
    content = request.scope["state"]["body"]
    values = await parsed(partial(json_object, content), len(content))
    if "documents" in values and "texts" not in values:
        documents = await parsed(partial(parse, DocumentsRequest, values), len(content))
        return await rerank_documents(request, documents)
    return await rank_texts(
        request, await parsed(partial(parse, RerankRequest, values), len(content))
    )


async def rank_texts(request: Request, body: RerankRequest) -> Response:
    """Rank texts by relevance to a query, best first."""
    options = {
        # A sigmoid, or for a regression the value itself, as /predict answers.
        "activation": "none" if body.raw_scores else "auto",
        "instruction": body.instruction or None,
        "truncate": body.to_option(),
    }
    _, scores = await score(request, body.model, body.query, body.texts, options)
    return json_response(
        [
            {
                "index": index,
                **({"text": body.texts[index]} if body.return_text else {}),
                "score": scores[index],
            }
            for index in best_first(scores)
        ]
    )


@routes.post(
    "/",
    "/models/{model}",
    "/invocations",
    summary="/embed, /similarity, /predict or /rerank, depending on the model",
    body=RootRequest,
    other_bodies={"application/json": {"type": "object"}},
    response=list[Any],
    runs_model=True,
)
async def root(request: Request) -> Response:
    """Answer POST / like /embed, /predict or /rerank, depending on the model.

    Inputs of /similarity, which TEI takes here with its task sentence-similarity, are an object.
    """
    content = request.scope["state"]["body"]
    values = await parsed(partial(json_object, content), len(content))
    name = parse(RootRequest, values).model
    model, task = select_model(request, name, "embed", "classify")
    values["model"] = model.name
    handler: Any
    kind: type[RequestBody]
    if task.verb == "embed":
        of_sentences = isinstance(values.get("inputs"), dict)
        handler, kind = (similarity, SimilarityRequest) if of_sentences else (embed, EmbedRequest)
    else:
        ranks = has_one_label(model)
        handler, kind = (rank_texts, RerankRequest) if ranks else (predict, PredictRequest)
    response: Response = await handler(
        request, await parsed(partial(parse, kind, values), len(content))
    )
    return response


@routes.post(
    "/tokenize",
    "/models/{model}/tokenize",
    summary="Tokenize texts",
    body=TokenizeRequest,
    response=list[list[Token]],
    statuses=INFERENCE_STATUSES,
)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Answer POST /tokenize: tokenize texts without truncation."""
    model, task = _text_model(request, body.model)
    if body.prompt_name:
        raise invalid_field(
            "prompt_name is not supported by /tokenize.",
            field="prompt_name",
            do="Put the prompt in front of the text.",
        )
    texts = listed(body.inputs)
    _check_count(request, len(texts))
    max_tokens = config_of(request).queue_tokens
    characters = sum(map(len, texts))
    # A token has a character at least, except for those that a tokenizer adds.
    _check_total(characters, _CHARACTERS_PER_TOKEN * max_tokens, "characters")
    if task.tokenizer.lower_case:  # as for inference
        texts = [text.lower() for text in texts]
    special = body.add_special_tokens is not False

    def tokens() -> bytes:
        encodings = task.tokenizer.encode_untruncated(texts, special=special)
        _check_total(sum(map(len, encodings)), max_tokens, "tokens")
        return b"[%b]" % b",".join(map(_tokens_json, texts, encodings))

    cost: ProcessingCost = "medium" if characters <= _SHORT_CHARACTERS else "heavy"
    content = await model.in_thread(tokens, inputs=len(texts), cost=cost)
    return Response(content, media_type="application/json")


@routes.post(
    "/decode",
    "/models/{model}/decode",
    summary="Decode token ids",
    body=DecodeRequest,
    response=list[str],
    statuses=INFERENCE_STATUSES,
)
async def decode(request: Request, body: DecodeRequest) -> Response:
    """Answer POST /decode: decode token ids to texts."""
    model, task = _text_model(request, body.model)
    rows = listed(body.ids)
    _check_count(request, len(rows))
    count = sum(map(len, rows))
    _check_total(count, config_of(request).queue_tokens, "tokens")
    vocabulary = task.tokenizer.backend.get_vocab_size()
    for row in rows:
        if max(row) >= vocabulary:
            raise invalid_field(
                f"ids: found the token id {max(row)}, expected 0 to {vocabulary - 1}.", field="ids"
            )
    skip = body.skip_special_tokens is not False

    def texts() -> list[str]:
        return [task.tokenizer.decode(row, skip_special=skip) for row in rows]

    cost: ProcessingCost = "medium" if count <= _SHORT_CHARACTERS else "heavy"
    return json_response(await model.in_thread(texts, inputs=len(rows), cost=cost))


def _text_model(request: Request, name: str | None) -> tuple[ServedModel, TextTask]:
    model, task = select_model(request, name, fits=lambda m: isinstance(m.task, TextTask))
    if not isinstance(task, TextTask):
        raise InputError(f"model '{model.name}' does not take texts, and has no tokenizer.")
    return model, task


def _check_count(request: Request, count: int) -> None:
    max_inputs = config_of(request).max_inputs
    if count > max_inputs:
        raise too_many_inputs(count, max_inputs)


def _check_total(total: int, limit: int, unit: str) -> None:
    """Raise HTTPError if a request has too many characters or tokens."""
    if total > limit:
        raise too_many_inputs(total, limit, unit)


def _tokens_json(text: str, encoding: Any) -> bytes:
    """Return the tokens of a text as JSON, made in pieces, since their dicts take more memory."""
    offsets = _byte_offsets(text)
    columns = (encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask)
    rows = zip(*columns, strict=True)
    pieces = []
    while piece := [
        {
            "id": token_id,
            "text": token if special else text[start:stop],
            "special": bool(special),
            "start": None if special else offsets[start],
            "stop": None if special else offsets[stop],
        }
        for token_id, token, (start, stop), special in islice(rows, _TOKENS_TOGETHER)
    ]:
        pieces.append(orjson.dumps(piece)[1:-1])
    return b"[%b]" % b",".join(pieces)


def _byte_offsets(text: str) -> Sequence[int]:
    """Return the UTF-8 byte offset of each character, and of the end."""
    if text.isascii():
        return range(len(text) + 1)
    offsets = [0]
    for letter in text:
        offsets.append(offsets[-1] + len(letter.encode()))
    return offsets
