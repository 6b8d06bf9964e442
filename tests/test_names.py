"""Variables say what they are: words that say nothing are few among assigned names.

$ python -m tests.test_names    # the share of each folder
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "enginery"
VAGUE = frozenset(
    ("apart", "each", "found", "given", "made", "most", "one", "place", "said", "there", "what")
)
LIMIT = 0.003
"""Share of vague names; below 0.001 in httpx, uvicorn, Polygraphy and others."""
FOLDERS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())


def assigned_names(source):
    """Yield the names that a module assigns, and its parameters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def count_names(folder):
    """Return the numbers of vague names and of all."""
    names = Counter(
        name.strip("_") in VAGUE
        for path in (PACKAGE / folder).rglob("*.py")
        for name in assigned_names(path.read_text(encoding="utf-8"))
    )
    return names[True], names.total()


@pytest.mark.parametrize("folder", FOLDERS)
def test_few_names_are_vague(folder):
    vague, total = count_names(folder)
    assert vague <= LIMIT * total + 1


def test_vague_names_are_counted():
    source = "def f(given):\n    for each in given:\n        found = each\n    batch = 1\n"
    assert Counter(name in VAGUE for name in assigned_names(source)) == {True: 3, False: 1}


if __name__ == "__main__":
    for folder in FOLDERS:
        vague, total = count_names(folder)
        sys.stdout.write(f"{folder:12}{total:7}{vague:6}{vague / total:8.1%}\n")
