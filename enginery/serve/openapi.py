"""The OpenAPI 3.1 document of the routes.

    >>> json.loads(openapi_json(table, with_keys=False))["openapi"]
    '3.1.0'

Made from the route table: each route declares its schemas and statuses beside its path. What the
HTTP layer can answer to any request (a message that cannot be read, or that is too slow) is added
to every route.
"""

from __future__ import annotations

from typing import Any

import orjson

from enginery import __version__
from enginery.serve.error_shapes import Family
from enginery.serve.routes.schemas import STRING, Schema, nullable, obj, word
from enginery.serve.routing import Route, Table

_REASONS = {
    200: "The answer.", 400: "The body cannot be read, or has no input.",
    401: "An API key is needed.", 403: "The route is off on this server.",
    404: "There is no such model or route.", 405: "The route has other methods.",
    408: "The request did not arrive in time.", 409: "A model could not be reloaded.",
    413: "Too many bytes, inputs or tokens.", 417: "An expectation that is not met.",
    422: "An input or an option cannot be used.",
    429: "The queue is full.", 431: "The headers are too large.",
    500: "A fault of the server; the log has its traceback.",
    503: "Loading, draining, or a worker is gone.",
}  # fmt: skip
_EVERYWHERE = (400, 405, 408, 413, 417, 431, 500, 503)

_TAGS = {
    "oip": "Open Inference Protocol", "tei": "text-embeddings-inference", "openai": "OpenAI",
    "plain": "Every task", "admin": "The server",
}  # fmt: skip
_ERRORS: dict[Family, str] = {
    "oip": "Error",
    "plain": "Error",
    "admin": "Error",
    "tei": "TeiError",
    "openai": "OpenAiError",
}
_SCHEMAS = {
    "Error": obj({"error": STRING}),
    "TeiError": obj({
        "error": STRING,
        "error_type": word(
            "Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"
        ),
    }),
    "OpenAiError": obj({
        "error": obj({
            "message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING),
        })
    }),
}  # fmt: skip


def openapi_json(table: Table, *, with_keys: bool) -> bytes:
    """The document; with keys, routes that need one say so."""
    paths: dict[str, dict[str, Any]] = {}
    for route in table.routes:
        path = route.pattern.replace("*}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, with_keys=with_keys)
    components: dict[str, Any] = {"schemas": _SCHEMAS}
    if with_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return orjson.dumps({
        "openapi": "3.1.0",
        "info": {
            "title": "enginery",
            "version": __version__,
            "description": "Models as ONNX artifacts, over HTTP.",
        },
        "tags": [{"name": name} for name in _TAGS.values()],
        "paths": paths,
        "components": components,
    })  # fmt: skip


def _operation(route: Route, *, with_keys: bool) -> dict[str, Any]:
    operation = route.operation
    found: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _operation_id(route),
        "tags": [_TAGS[route.family]],
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": STRING}
                for name in route.names
            ),
            *(
                {"name": name, "in": "query", "required": False, "schema": schema}
                for name, schema in operation.query.items()
            ),
        ],
        "responses": _responses(route, with_keys=with_keys),
    }
    bodies = {name: {"schema": schema} for name, schema in operation.other_bodies.items()}
    if operation.body is not None:
        bodies = {"application/json": {"schema": operation.body}, **bodies}
    if bodies:
        found["requestBody"] = {"required": not operation.optional_body, "content": bodies}
    if with_keys and not route.public:
        found["security"] = [{"bearer": []}, {"header": []}]
    return found


def _responses(route: Route, *, with_keys: bool) -> dict[str, Any]:
    operation = route.operation
    schema = {} if operation.answer is None else {"schema": operation.answer}
    answers = {kind: schema if "json" in kind else {} for kind in operation.answer_types}
    found: dict[str, Any] = {"200": {"description": _REASONS[200], "content": answers}}
    statuses = {*operation.statuses, *_EVERYWHERE}
    if with_keys and not route.public:
        statuses.add(401)
    error = {"$ref": f"#/components/schemas/{_ERRORS[route.family]}"}
    for status in sorted(statuses):
        kept: Schema = error
        if status == 503 and operation.not_ready is not None:
            kept = {"anyOf": [operation.not_ready, error]}
        found[str(status)] = {
            "description": _REASONS[status],
            "content": {"application/json": {"schema": kept}},
        }
        if status in (429, 503) and operation.not_ready is None:
            found[str(status)]["headers"] = {
                "retry-after": {"schema": {"type": "integer", "minimum": 1}}
            }
    return found


def _operation_id(route: Route) -> str:
    words = route.pattern.replace("{", "").replace("*}", "").replace("}", "").replace(".", "_")
    return "_".join([route.method.lower(), *filter(None, words.split("/"))])
