"""Build the OpenAPI 3.1 document from the endpoints and their pydantic models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from enginery.core.version import __version__
from enginery.serve.api.endpoints import INFERENCE_STATUSES, Endpoint
from enginery.serve.api.requests import Schema
from enginery.serve.observability.record import Protocol

_REASONS = {
    200: "The response.",
    400: "The body is malformed, or has no input.",
    401: "An API key is required.",
    403: "The route is disabled on this server.",
    404: "Unknown model or route.",
    405: "Wrong method.",
    409: "A model could not be reloaded.",
    413: "Too many bytes, inputs or tokens.",
    422: "An input or an option is invalid.",
    429: "Too many requests are waiting.",
    500: "Internal error; the server's log has its traceback.",
    503: "The model is loading, the server is draining, or a worker has failed.",
}
_EVERYWHERE = (400, 405, 413, 500, 503)
_TAGS: dict[Protocol, str] = {
    "oip": "Open Inference Protocol",
    "tei": "text-embeddings-inference",
    "openai": "OpenAI",
    "plain": "Every task",
    "admin": "The server",
}
_REF = "#/components/schemas/{model}"


class Error(Schema):
    """An error."""

    error: str


class TeiError(Error):
    """An error in the format of text-embeddings-inference."""

    error_type: str


class OpenAiErrorBody(Schema):
    """The error's message and type."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiError(Schema):
    """An error in OpenAI's format."""

    error: OpenAiErrorBody


_ERRORS: dict[Protocol, type[BaseModel]] = {"tei": TeiError, "openai": OpenAiError}


def openapi_json(endpoints: Sequence[Endpoint], *, with_keys: bool) -> bytes:
    """Build the document, in JSON.

    Args:
        endpoints: the server's routes.
        with_keys: the server has API keys; declare them for the routes that need one.
    """
    models: list[type[BaseModel]] = [Error, TeiError, OpenAiError]
    models += [endpoint.body for endpoint in endpoints if endpoint.body]
    _, components = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template=_REF
    )
    schemas: dict[str, Any] = components["$defs"]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        operation = _operation(endpoint, path, schemas, with_keys=with_keys)
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "enginery",
            "version": __version__,
            "description": "Models as ONNX artifacts, over HTTP.",
        },
        "tags": [{"name": name} for name in _TAGS.values()],
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return orjson.dumps(document)


def _operation(
    endpoint: Endpoint, path: str, schemas: dict[str, Any], *, with_keys: bool
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": "_".join([endpoint.method.lower(), *re.findall(r"[\w-]+", path)]),
        "tags": [_TAGS[endpoint.protocol]],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "responses": _responses(endpoint, schemas, with_keys=with_keys),
    }
    bodies = {name: {"schema": schema} for name, schema in endpoint.other_bodies.items()}
    if endpoint.body is not None and "application/json" not in bodies:
        reference = {"$ref": _REF.format(model=endpoint.body.__name__)}
        bodies = {"application/json": {"schema": reference}, **bodies}
    if bodies:
        operation["requestBody"] = {"required": not endpoint.has_optional_body, "content": bodies}
    if with_keys and not endpoint.public:
        operation["security"] = [{"bearer": []}, {"header": []}]
    return operation


def _responses(endpoint: Endpoint, schemas: dict[str, Any], *, with_keys: bool) -> dict[str, Any]:
    answer = TypeAdapter(endpoint.response).json_schema(ref_template=_REF, mode="serialization")
    schemas.update(answer.pop("$defs", {}))
    answers = {
        kind: {"schema": answer} if "json" in kind else {} for kind in endpoint.response_types
    }
    responses: dict[str, Any] = {"200": {"description": _REASONS[200], "content": answers}}
    statuses = {*endpoint.statuses, *_EVERYWHERE}
    if endpoint.runs_model:
        statuses.update(INFERENCE_STATUSES)
    if endpoint.protocol == "openai":  # whose status for invalid requests is 400
        statuses.discard(422)
    if with_keys and not endpoint.public:
        statuses.add(401)
    error = {"$ref": _REF.format(model=_ERRORS.get(endpoint.protocol, Error).__name__)}
    for status in sorted(statuses):
        schema = error
        if status == 503 and endpoint.is_readiness:
            schema = {"anyOf": [answer, error]}  # type: ignore[dict-item]
        responses[str(status)] = {
            "description": _REASONS[status],
            "content": {"application/json": {"schema": schema}},
        }
        if status in (429, 503) and not endpoint.is_readiness:
            responses[str(status)]["headers"] = {
                "retry-after": {"schema": {"type": "integer", "minimum": 1}}
            }
    return responses
