"""The documentation's site, made by Sphinx of the pages beside this file and of the package.

Takes docs/*.md, the docstrings and the command line's definitions; leaves HTML that needs no
network to be read or searched.

    $ make docs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from enginery import __version__, cli  # noqa: E402  the checkout's own, not an installed one

project = "enginery"
author = "the authors of enginery"
version = release = __version__

extensions = [
    "myst_parser",  # the pages are Markdown, so that they read well in the repository, too
    "sphinx.ext.autodoc",
]

# A link to a page or a heading that is not there is a warning: `make docs` takes it for an error.
myst_heading_anchors = 4
# A quoted text over several lines is right in a shell; the lexer of consoles does not know it.
suppress_warnings = ["misc.highlighting_failure"]

default_role = "literal"  # docstrings write `code` with one backtick
autodoc_default_options = {"members": True, "exclude-members": "model_config"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_display_short_literal_types = True
maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"  # brings its fonts and scripts along
html_title = f"enginery {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False


def commands_in_markdown() -> str:
    """Every command with its options, as `--help` has them."""
    text = cli.commands().generate_docs(
        output_format="markdown", heading_level=1, usage_name="enginery"
    )
    text = text.replace(" -m sphinx", "")  # `python -m sphinx` is what runs now
    # Its own title and table of contents, which the page and the site have.
    text = text.partition("**Commands**:\n")[2]
    # A paragraph's later lines are indented, which below a list of the site would be code.
    return re.sub(r"\n {8}(?=\S)", " ", text)


def links_in_the_site(page: Path, text: str) -> str:
    """Links that the repository has and the site has not: to folders, and to Markdown elsewhere.

    A folder is named and not linked; a file outside docs/ is one to download.
    """

    def link(found: re.Match[str]) -> str:
        words, target = found[1], (page.parent / found[2]).resolve()
        if target.is_dir():
            return words
        download = target.suffix == ".md" and not target.is_relative_to(DOCS)
        return f"[{words}](path:{found[2]})" if download else found[0]

    text = text.replace("](../SECURITY.md", "](security.md")  # the page that includes it
    return re.sub(r"\[([^\]]+)\]\(([^)#:\s]+)\)", link, text)


def read_page(_: object, name: str, content: list[str]) -> None:
    """Sphinx's `source-read`: the text of one page, before it is parsed."""
    if name == "reference/commands":
        content[0] += commands_in_markdown()
    content[0] = links_in_the_site(DOCS / f"{name}.md", content[0])


def read_docstring(
    app: Any, what: str, name: str, described: object, options: object, lines: list[str]
) -> None:
    """Sphinx's `autodoc-process-docstring`: Google's sections in the terms of Sphinx.

    Napoleon as an extension would do it for fields, too, and take what is before a colon there for
    a type.
    """
    if what not in ("attribute", "data", "property"):
        google = GoogleDocstring(
            lines, Config(napoleon_use_rtype=False), app, what, name, described, options
        )
        lines[:] = google.lines()


def setup(app: Any) -> None:
    """Sphinx calls this with its application."""
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("source-read", read_page)
