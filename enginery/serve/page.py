"""The web pages: at `/` to try a model, at `/docs` the OpenAPI document for people.

Each is one HTML document, of which the first requests nothing but this server's own routes, and the
second, which has no script, nothing at all. Responses are inserted as text only. In addition, the
content security policy allows only a page's own script and style, by their hashes, so that HTML in
a response could not run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from starlette.responses import Response

_FILE = Path(__file__).with_name("page.html")
_DOCS = Path(__file__).with_name("docs.html")


@cache
def page_html() -> bytes:
    """Return the document, in UTF-8."""
    return _FILE.read_bytes()


@cache
def page_headers() -> tuple[tuple[str, str], ...]:
    """Return the headers of the page, including its content security policy (w3.org/TR/CSP3)."""
    return html_headers(page_html())


def html_headers(html: bytes) -> tuple[tuple[str, str], ...]:
    """Return the headers of a page that may run its own script, if it has one, and nothing else."""
    policy = {
        "default-src": "'none'",
        **{f"{tag}-src": source for tag in ("script", "style") if (source := _hash(html, tag))},
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return (
        (
            "content-security-policy",
            "; ".join(f"{name} {sources}" for name, sources in policy.items()),
        ),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-cache"),
    )


def page_response() -> Response:
    """Return the response to `GET /`."""
    return Response(page_html(), headers=dict(page_headers()), media_type="text/html")


def docs_html(openapi: bytes) -> bytes:
    """Return the page of an OpenAPI document, in UTF-8."""
    from jinja2 import Environment, select_autoescape

    document = orjson.loads(openapi)
    groups: dict[str, list[dict[str, Any]]] = {tag["name"]: [] for tag in document["tags"]}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups[operation["tags"][0]].append({**operation, "method": method, "path": path})
    environment = Environment(
        autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_DOCS.read_text(encoding="utf-8"))
    return page.render(document=document, groups=groups).encode()


def docs_response(html: bytes) -> Response:
    """Return the response to `GET /docs`."""
    return Response(html, headers=dict(html_headers(html)), media_type="text/html")


def _hash(html: bytes, tag: str) -> str:
    """Return the hash of a page's only element of this name, for the policy; empty without one."""
    # Browsers normalize line ends to \n before hashing; git may have checked out \r\n.
    text = html.replace(b"\r\n", b"\n")
    elements = re.findall(rb"<%b>(.*?)</%b>" % ((tag.encode(),) * 2), text, re.DOTALL)
    if not elements:
        return ""
    (inside,) = elements
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"
