"""Sections as one HTML page that needs nothing else: no network, no script, no font.

>>> html = render_page("minilm", "all-MiniLM-L6-v2, fp32", sections)

Everything is escaped by the template engine. A figure may come from somebody else's artifact: it is
in the page as an image, in which no browser runs or loads anything, and the page's content security
policy forbids the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginery.bench.sections import Section
from enginery.core.errors import MissingPackageError

_TEMPLATES = Path(__file__).parent / "templates"


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
    return environment.get_template("page.html").render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
    )
