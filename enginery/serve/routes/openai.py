"""OpenAI's routes for embeddings and models.

    >>> client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    >>> client.embeddings.create(model="minilm", input="The engine is warm.").data[0].embedding
    [0.0123, …]

Source: platform.openai.com/docs/api-reference/embeddings. Vectors have length one, as OpenAI's do,
before and after `dimensions` cuts them. `model` is a hosted model's name, or its source's id
("sentence-transformers/all-MiniLM-L6-v2") or the last part of that; without `model` the only one
that embeds answers. Any other name is 404: a client that asks for another model must not get this
one's vectors. Texts that are too long are cut or refused as the server's `truncate` says.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from enginery.core.errors import nearest
from enginery.serve.call import Call, vocabulary_size
from enginery.serve.messages import Response
from enginery.serve.reading import shown
from enginery.serve.refusals import NotFoundError, TooLargeError
from enginery.serve.rooms import HostedModel, Models
from enginery.serve.routes.schemas import (
    COUNT,
    INTEGER,
    NUMBER,
    STRING,
    TEXTS_OR_IDS,
    array,
    either,
    nullable,
    obj,
    word,
)
from enginery.serve.routes.tei import embeds
from enginery.serve.routes.vectors import Vector, finish_vectors, read_dimensions
from enginery.serve.routing import Operation, Route, get, post

MAX_INPUTS = 2048
"""Of one request; OpenAI's own limit."""


class ModelNotFoundError(NotFoundError):
    """No hosted model goes by that name, in OpenAI's words."""

    code = "model_not_found"
    field = "model"


async def embeddings(call: Call) -> Response:
    """POST /v1/embeddings."""
    body = call.json()
    model = call.take(find_model(call.parts.models, body.string("model")), "embed")
    inputs = body.texts_or_ids("input", vocabulary_size(model))
    if len(inputs) > MAX_INPUTS:
        raise TooLargeError(
            f"input: found {len(inputs)} inputs, expected {MAX_INPUTS} at most.",
            do="Send several requests.",
        )
    encoding = body.choice("encoding_format", ("float", "base64"), "float")
    dimensions = read_dimensions(body, model)
    body.string("user")
    reply = await model.embed(inputs)
    values = call.keep(reply, inputs=len(inputs), characters=sum(map(len, inputs)))
    vectors = finish_vectors(values, normalize=True, dimensions=dimensions)
    tokens = reply.timings.tokens
    return Response.of_json({
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if encoding == "base64" else vector,
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })  # fmt: skip


async def list_models(call: Call) -> Response:
    """GET /v1/models."""
    data = [_described(model) for model in call.parts.models]
    return Response.of_json({"object": "list", "data": data})


async def show_model(call: Call) -> Response:
    """GET /v1/models/{model}."""
    model = find_model(call.parts.models, call.path_values["model"])
    call.model = model
    return Response.of_json(_described(model))


def find_model(models: Models, name: str) -> HostedModel:
    """The model of that name, source id or last part of it; without a name the only that embeds.

    Raises:
        ModelNotFoundError: none goes by it.
        InvalidInputError: several models embed, and there is no name.
    """
    if not name:
        return models.only(fits=embeds)
    if name in models.names:
        return models.get(name)
    for model in models:
        source = model.artifact.manifest.source
        if name in (source.id, source.name):
            return model
    raise ModelNotFoundError(
        f"there is no model {shown(name)}{nearest(name[:200], models.names)}",
        do=f"This server has: {', '.join(models.names)}.",
    )


def _base64(vector: Vector) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return binascii.b2a_base64(np.asarray(vector, "<f4").tobytes(), newline=False).decode("ascii")


def _described(model: HostedModel) -> dict[str, Any]:
    stages = model.artifact.manifest.stages
    created = 0
    if stages:
        finished = datetime.fromisoformat(stages[-1].finished)
        created = int((finished if finished.tzinfo else finished.replace(tzinfo=UTC)).timestamp())
    return {"id": model.name, "object": "model", "created": created, "owned_by": "enginery"}


_EMBEDDINGS = Operation(
    "Vectors of texts",
    body=obj(
        {"input": TEXTS_OR_IDS},
        {
            "model": nullable(STRING), "encoding_format": nullable(word("float", "base64")),
            "dimensions": nullable({"type": "integer", "minimum": 1}), "user": nullable(STRING),
        },
    ),
    answer=obj({
        "object": word("list"), "model": STRING,
        "data": array(obj({
            "object": word("embedding"), "index": COUNT,
            "embedding": either(array(NUMBER), STRING),
        })),
        "usage": obj({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }),
    statuses=(400, 404, 413, 429, 503),
)  # fmt: skip
_OPENAI_MODEL = obj({"id": STRING, "object": word("model"), "created": INTEGER, "owned_by": STRING})


def openai_routes() -> Iterator[Route]:
    """The routes."""
    for path in ("/v1/embeddings", "/embeddings"):
        yield post("openai", path, embeddings, _EMBEDDINGS)
    listed = obj({"object": word("list"), "data": array(_OPENAI_MODEL)})
    models = Operation("All models", answer=listed, statuses=(503,))
    yield get("openai", "/v1/models", list_models, models)
    model = Operation("One model", answer=_OPENAI_MODEL, statuses=(404, 503))
    yield get("openai", "/v1/models/{model*}", show_model, model)
