"""OpenAI-compatible routes for embeddings and models.

    client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.embeddings.create(model="minilm", input="The engine is warm.").data[0].embedding

Source: platform.openai.com/docs/api-reference/embeddings. Vectors are normalized, as OpenAI's are,
both before and after they are shortened to `dimensions`. `model` is a served model's name, the id
of its source ("sentence-transformers/all-MiniLM-L6-v2") or the last part of that id. Without
`model` the server's only embedding model is used. Any other name is an error (404), so that clients
never get vectors from a model other than the one they expect. The server's option `truncate`
determines whether texts that are too long are truncated or rejected.
"""

from __future__ import annotations

import binascii
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from enginery.runtime.text.vector_dtypes import VectorDtype
from enginery.serve.api.endpoints import (
    Routes,
    json_response,
    registry_of,
    run_inference,
    select_model,
)
from enginery.serve.api.errors import invalid_field
from enginery.serve.api.requests import Dimensions, RequestBody, Schema, TextsOrIds, listed
from enginery.serve.models.served_model import ServedModel, too_many_inputs

routes = Routes("openai")

MAX_INPUTS = 2048
"""Maximum number of inputs of one request, which is OpenAI's own limit."""


class EmbeddingsRequest(RequestBody):
    """Body of /v1/embeddings."""

    input: TextsOrIds
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    dtype: VectorDtype | None = None
    """Not in OpenAI's API; see `VectorOptions`."""
    user: str | None = None


class Embedding(Schema):
    """One vector, as numbers or as a base64 string."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(Schema):
    """Number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Schema):
    """Response of /v1/embeddings."""

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
    "/v1/embeddings",
    "/embeddings",
    summary="Embed texts",
    body=EmbeddingsRequest,
    response=EmbeddingsResponse,
    runs_model=True,
)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Answer POST /v1/embeddings: embed texts or token ids."""
    model, task = select_model(request, body.model, "embed")
    inputs = listed(body.input)
    if len(inputs) > MAX_INPUTS:
        raise too_many_inputs(len(inputs), MAX_INPUTS)
    as_base64 = body.encoding_format == "base64"
    if as_base64 and body.dtype not in (None, "float32"):
        # OpenAI's clients ask for base64 themselves, and read float32 from it.
        raise invalid_field(
            f"encoding_format is base64, which clients read as float32, and dtype is {body.dtype}.",
            field="encoding_format",
            do='Set encoding_format to "float".',
        )
    options = {"normalize": True, "dimensions": body.dimensions, "dtype": body.dtype}
    vectors = await run_inference(request, model, task, inputs, options)
    tokens = request.scope["state"]["record"].timings.tokens
    return json_response(
        {
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
        }
    )


@routes.get("/v1/models", summary="List models", response=ModelsResponse, statuses=(503,))
async def list_models(request: Request) -> Response:
    """Answer GET /v1/models: list the models."""
    data = [_model_object(model) for model in registry_of(request)]
    return json_response({"object": "list", "data": data})


@routes.get(
    "/v1/models/{model:path}",
    summary="Retrieve a model",
    response=ModelResponse,
    statuses=(404, 503),
)
async def show_model(request: Request) -> Response:
    """Answer GET /v1/models/{model}: retrieve one model."""
    model = registry_of(request).get(request.path_params["model"].removesuffix("/"))
    request.scope["state"]["record"].model = model.name
    return json_response(_model_object(model))


def _base64(vector: NDArray[np.float32]) -> str:
    """Encode a vector as base64 of little-endian float32, which OpenAI's clients decode."""
    return binascii.b2a_base64(np.asarray(vector, "<f4").tobytes(), newline=False).decode("ascii")


def _model_object(model: ServedModel) -> dict[str, Any]:
    stages = model.artifact.manifest.stages
    created = 0
    if stages:
        finished = datetime.fromisoformat(stages[-1].finished)
        created = int((finished if finished.tzinfo else finished.replace(tzinfo=UTC)).timestamp())
    return {"id": model.name, "object": "model", "created": created, "owned_by": "enginery"}
