"""The web page at `/docs`: the routes, bodies and responses of the OpenAPI document, for people.

It has no script and requests nothing; requests are made at `/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

_FILE = Path(__file__).with_name("docs.html")


def docs_html(openapi: bytes) -> bytes:
    """Return the page of an OpenAPI document, in UTF-8."""
    from jinja2 import Environment, select_autoescape
    from markupsafe import Markup

    document = orjson.loads(openapi)
    schemas = document["components"]["schemas"]
    groups: dict[str, list[dict[str, Any]]] = {tag["name"]: [] for tag in document["tags"]}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            groups[operation["tags"][0]].append(
                {
                    "id": operation["operationId"],
                    "method": method.upper(),
                    "path": path,
                    "summary": operation["summary"],
                    "needs_key": "security" in operation,
                    "bodies": {
                        kind: _resolved(body["schema"], schemas) for kind, body in content.items()
                    },
                    "responses": operation["responses"],
                }
            )
    environment = Environment(
        autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )

    def type_of(schema: dict[str, Any]) -> Markup:
        return Markup(" or ").join(_types(schema, Markup))

    page = environment.from_string(_FILE.read_text(encoding="utf-8"))
    return page.render(document=document, groups=groups, type_of=type_of).encode()


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that a reference names, or the schema itself."""
    name = schema.get("$ref", "").rpartition("/")[2]
    resolved: dict[str, Any] = schemas.get(name, schema)
    return resolved


def _types(schema: dict[str, Any], markup: Any) -> list[Any]:
    """Return what a value may be, in words; names of objects are links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return [markup('<a href="#object-{0}"><code>{0}</code></a>').format(name)]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            words = [word for option in schema[key] for word in _types(option, markup)]
            return list(dict.fromkeys(words))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return [markup("<code>{}</code>").format(orjson.dumps(value).decode()) for value in values]
    kind = schema.get("type", "any value")
    if kind == "array":
        items = markup(" or ").join(_types(schema.get("items", {}), markup))
        return [markup("list of {}").format(items)]
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    bounds = (
        f", {low} to {high}"
        if low is not None and high is not None
        else f", {low} or more"
        if low is not None
        else ""
    )
    return [markup("{}{}").format(kind, bounds)]
