r"""POST /v1/rerank and /v2/rerank in the shapes of Cohere's and Jina's clients.

    $ curl -d '{"query": "pump", "documents": ["The pump runs.", "A cat sleeps."], "top_n": 1}' \
        localhost:8000/v1/rerank
    {"id":"rerank-…","model":"ranker","results":[{"index":0,"relevance_score":0.93}],…}

/rerank is text-embeddings-inference's, see `tei`, unless the body has `documents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from enginery.serve.api.endpoints import (
    Routes,
    has_task,
    json_response,
    run_inference,
    select_model,
)
from enginery.serve.api.errors import invalid_field
from enginery.serve.api.requests import RequestBody, Schema
from enginery.serve.models.served_model import ServedModel

routes = Routes("plain")


class Document(RequestBody):
    """A document, as an object."""

    text: str


class DocumentsRequest(RequestBody):
    """Body of /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    model: str | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    max_chunks_per_doc: Annotated[int, Field(ge=1, le=1)] | None = None
    """Documents are cut once, at the model's own limit."""
    rank_fields: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    """Documents are ranked by their text."""


class RankedDocument(Schema):
    """A document's index in the request, and its score."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankUsage(Schema):
    """Number of tokens of all pairs."""

    total_tokens: int


class DocumentsResponse(Schema):
    """Response of /v1/rerank and /v2/rerank: the best documents, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage


@routes.post(
    "/v1/rerank",
    "/v2/rerank",
    summary="Rank documents by relevance to a query",
    body=DocumentsRequest,
    response=DocumentsResponse,
    runs_model=True,
)
async def rerank_documents(request: Request, body: DocumentsRequest) -> Response:
    """Answer POST /v1/rerank and /v2/rerank."""
    texts = [item if isinstance(item, str) else item.text for item in body.documents]
    model, _ = select_model(request, body.model, "classify", fits=is_reranker)
    limit = model.backend.limit
    if body.max_tokens_per_doc is not None and body.max_tokens_per_doc < limit:
        raise invalid_field(
            f"max_tokens_per_doc: found {body.max_tokens_per_doc}, expected the model's limit, "
            f"{limit}, or more.",
            field="max_tokens_per_doc",
            do="Leave it out.",
        )
    model, scores = await score(request, body.model, body.query, texts, {})
    record = request.scope["state"]["record"]
    results = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": texts[index]}} if body.return_documents else {}),
        }
        for index in best_first(scores)[: body.top_n]
    ]
    return json_response(
        {
            "id": f"rerank-{record.request_id}",
            "model": model.name,
            "results": results,
            "usage": {"total_tokens": record.timings.tokens},
        }
    )


async def score(
    request: Request,
    name: str | None,
    query: str,
    texts: Sequence[str],
    options: dict[str, Any],
) -> tuple[ServedModel, list[float]]:
    """Return the model of a request, and the relevance of each text to a query.

    Args:
        request: the request.
        name: the model's name in the body.
        query: the query.
        texts: the texts.
        options: options of `classify`.

    Raises:
        HTTPError: the model has several labels, or see `run_inference` and `select_model`.
    """
    model, task = select_model(request, name, "classify", fits=is_reranker)
    if not has_one_label(model):
        raise invalid_field(
            f"model '{model.name}' has several labels, expected a reranker, which has one.",
            field="model",
            do="Send pairs to /predict.",
        )
    pairs = [(query, text) for text in texts]
    results = await run_inference(request, model, task, pairs, options)
    return model, [result.score for result in results]


def best_first(scores: Sequence[float]) -> list[int]:
    """Return the indices of scores, the highest first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def is_reranker(model: ServedModel) -> bool:
    """Return True if a model scores pairs of texts with one number."""
    return has_task(model, ("classify",)) and has_one_label(model)


def has_one_label(model: ServedModel) -> bool:
    """Return True for a model with one label."""
    # Without id2label in config.json, transformers assumes two labels.
    return len(model.backend.config.id2label or (0, 1)) == 1
