"""OpenAI's routes for embeddings and models.

    client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.embeddings.create(model="minilm", input="The engine is warm.").data[0].embedding

Source: platform.openai.com/docs/api-reference/embeddings. Vectors have length one, as OpenAI's do,
before and after `dimensions` cuts them. `model` is a served model's name, or its source's id
("sentence-transformers/all-MiniLM-L6-v2") or the last part of that; without `model` the only one
that embeds answers. Any other name is 404: a client that asks for another model must not get this
one's vectors. Texts that are too long are cut or refused as the server's `truncate` says.
"""

from __future__ import annotations

import binascii
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from enginery.core.errors import nearest
from enginery.serve.api.endpoints import (
    Routes,
    has_task,
    json_response,
    registry_of,
    require_task,
    run_inference,
)
from enginery.serve.api.errors import HTTPError
from enginery.serve.api.requests import Dimensions, RequestBody, Schema, TextsOrIds, quote
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.models.served_model import ServedModel

routes = Routes("openai")

MAX_INPUTS = 2048
"""Of one request; OpenAI's own limit."""


class EmbeddingsRequest(RequestBody):
    """Body of /v1/embeddings."""

    input: TextsOrIds
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: str | None = None


class Embedding(Schema):
    """One vector; a string in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(Schema):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Schema):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage


class ModelResponse(Schema):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsResponse(Schema):
    """All models."""

    object: Literal["list"]
    data: list[ModelResponse]


@routes.post(
    "/v1/embeddings", "/embeddings", summary="Vectors of texts", body=EmbeddingsRequest,
    response=EmbeddingsResponse, statuses=(400, 404, 413, 429, 503),
)  # fmt: skip
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Answer POST /v1/embeddings."""
    model = find_model(registry_of(request), body.model or "")
    task = require_task(request, model, "embed")
    if len(body.input) > MAX_INPUTS:
        raise HTTPError(
            413,
            f"input: found {len(body.input)} inputs, expected {MAX_INPUTS} at most.",
            do="Send several requests.",
        )
    options = {"normalize": True, "dimensions": body.dimensions}
    vectors = await run_inference(request, model, task, body.input, options)
    as_base64 = body.encoding_format == "base64"
    tokens = request.scope["state"]["record"].timings.tokens
    return json_response({
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if as_base64 else vector,
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })  # fmt: skip


@routes.get("/v1/models", summary="All models", response=ModelsResponse, statuses=(503,))
async def list_models(request: Request) -> Response:
    """Answer GET /v1/models."""
    data = [_model_object(model) for model in registry_of(request)]
    return json_response({"object": "list", "data": data})


@routes.get("/v1/models/{model:path}", summary="One model", response=ModelResponse,
            statuses=(404, 503))  # fmt: skip
async def show_model(request: Request) -> Response:
    """Answer GET /v1/models/{model}."""
    model = find_model(registry_of(request), request.path_params["model"].removesuffix("/"))
    request.scope["state"]["record"].model = model.name
    return json_response(_model_object(model))


def find_model(registry: ModelRegistry, name: str) -> ServedModel:
    """Return the model of a name, source id or its last part; without one, the only that embeds.

    Raises:
        HTTPError: 404, none goes by it.
        ModelChoiceError: several models embed, and there is no name.
    """
    if not name:
        return registry.select(fits=lambda model: has_task(model, ("embed",)))
    if name in registry.names:
        return registry.get(name)
    for model in registry:
        source = model.artifact.manifest.source
        if name in (source.id, source.name):
            return model
    raise HTTPError(
        404,
        f"there is no model {quote(name)}{nearest(name[:200], registry.names)}",
        do=f"This server has: {', '.join(registry.names)}.",
        field="model",
        code="model_not_found",
    )


def _base64(vector: NDArray[np.float32]) -> str:
    """Return little-endian float32, as OpenAI's clients decode it."""
    return binascii.b2a_base64(np.asarray(vector, "<f4").tobytes(), newline=False).decode("ascii")


def _model_object(model: ServedModel) -> dict[str, Any]:
    stages = model.artifact.manifest.stages
    created = 0
    if stages:
        finished = datetime.fromisoformat(stages[-1].finished)
        created = int((finished if finished.tzinfo else finished.replace(tzinfo=UTC)).timestamp())
    return {"id": model.name, "object": "model", "created": created, "owned_by": "enginery"}
