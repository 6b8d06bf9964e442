"""Sections as one HTML page that needs nothing else: no network, no script, no font.

>>> html = render_page("minilm", "all-MiniLM-L6-v2, fp32", sections)

Everything is escaped by the template engine; figures alone go in as they are, once their ids are
their own and their colors follow the page's. A figure may come from somebody else's artifact: what
could run or load anything is removed, and the page's content security policy forbids the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from enginery.bench.sections import Section
from enginery.core.errors import MissingPackageError

_TEMPLATES = Path(__file__).parent / "templates"
_UNWANTED = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>|<script\b.*?</script>"
    r"|<script\b[^>]*/>|<foreignObject\b.*?</foreignObject>",
    re.DOTALL | re.IGNORECASE,
)
_HANDLERS = re.compile(r"[\s/]on\w+\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s>]+)", re.IGNORECASE)
_OUTSIDE = re.compile(r"\s(?:xlink:)?href\s*=\s*(\"(?!#)[^\"]*\"|'(?!#)[^']*')", re.IGNORECASE)
_SIZE = re.compile(r"\s(?:width|height)=\"[^\"]*\"")


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page.

    Raises:
        MissingPackageError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MissingPackageError("jinja2", extra="report", purpose="The report page") from None
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = {}
    count = 0
    for section in sections:
        for figure in section.figures:
            count += 1
            figures[id(figure)] = inline_svg(figure.svg, f"figure{count}-", figure.caption)
    return environment.get_template("page.html").render(
        title=title, subtitle=subtitle, sections=sections, figures=figures,
        style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"), identify=id,
    )  # fmt: skip


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """An SVG document as part of a page.

    Args:
        svg: as matplotlib writes it.
        prefix: of all ids, so that two figures share none.
        label: what it shows, for those who do not see it.
    """
    text = _UNWANTED.sub("", svg)
    text = _OUTSIDE.sub("", _HANDLERS.sub("", text))
    text = re.sub(r"\bid=\"([^\"]+)\"", rf'id="{prefix}\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", text)
    text = re.sub(r"href=\"#([^\"]+)\"", rf'href="#{prefix}\1"', text)
    # White is the paper, black the ink: both are the page's.
    text = text.replace("#ffffff", "none").replace("#000000", "currentColor")
    head, mark, rest = text.partition("<svg")
    opening, end, body = rest.partition(">")
    opening = _SIZE.sub(_kept_width, opening)
    escaped = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'{head}{mark} role="img" aria-label="{escaped}"{opening}{end}{body}'.strip()


def _kept_width(match: re.Match[str]) -> str:
    """The natural width as a limit; the height follows from the view box."""
    word = match[0].strip()
    if not word.startswith("width"):
        return ""
    return f' style="max-width:{word.split(chr(34))[1]}"'
