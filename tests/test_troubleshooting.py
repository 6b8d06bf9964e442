"""`docs/troubleshooting.md`: the messages and commands are the code's."""

import ast
import re
from pathlib import Path

import pytest

from enginery.runtime.providers import availability
from enginery.runtime.tensorrt.options import FLAVORS

ROOT = Path(__file__).parents[1]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [
    cell
    for table in re.findall(r"^\| You see \|.*\n((?:\|.*\n)+)", TROUBLESHOOTING, re.MULTILINE)
    for cell in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
]


@pytest.fixture(scope="module")
def texts_of_the_code():
    """Return every text in the modules of the package that open a provider, one a line."""
    texts = []
    for folder in ("runtime", "doctor"):
        for path in sorted((ROOT / "enginery" / folder).rglob("*.py")):
            texts += [
                node.value
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    return "\n".join(texts)


@pytest.mark.parametrize("message", MESSAGES)
def test_message_of_the_page_is_one_of_the_code(message, texts_of_the_code):
    parts = [part for part in message.split("…") if re.search("[a-z]", part)]
    assert parts
    assert [part for part in parts if part not in texts_of_the_code] == []


def test_page_has_messages():
    assert len(MESSAGES) > 5


def test_page_has_the_commands_that_the_errors_name():
    said = re.sub(r"\s+", " ", TROUBLESHOOTING)
    for line in (*availability.INSTALL.values(), *(flavor.install for flavor in FLAVORS.values())):
        assert line in said
    assert f"version {availability.MIN_DRIVER} or newer" in said
