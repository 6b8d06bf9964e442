"""JSON schemas that the routes' descriptions are made of.

>>> array(STRING, least=1)
{'type': 'array', 'items': {'type': 'string'}, 'minItems': 1}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
ANYTHING: Schema = {}
FREE_OBJECT: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TOKEN_IDS: Schema = {"type": "array", "items": {**COUNT, "maximum": 2**31 - 1}, "minItems": 1}

INFERENCE_STATUSES = (400, 404, 413, 422, 429, 503)
"""Of a route that asks a model; 401, 500 and the HTTP layer's own are added to every route."""


def array(items: Schema, *, least: int = 0, most: int = 0) -> dict[str, Any]:
    """A list."""
    ends = {"minItems": least} if least else {}
    return {"type": "array", "items": items, **ends, **({"maxItems": most} if most else {})}


def obj(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object; further fields are left open, as JSON schemas leave them."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def either(*schemas: Schema) -> Schema:
    """One of several schemas."""
    return {"anyOf": list(schemas)}


def word(*words: str) -> Schema:
    """One of several strings."""
    return {"type": "string", "enum": list(words)}


TEXTS = either(STRING, array(STRING, least=1))
TEXTS_OR_IDS = either(
    STRING, array(either(STRING, TOKEN_IDS), least=1), TOKEN_IDS,
)  # fmt: skip
VECTORS = array(array(nullable(NUMBER)))
LABEL = obj({"label": STRING, "score": NUMBER})
