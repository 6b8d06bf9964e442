"""Count lines, and read the limits of all figures."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).parent / "budget.json"


def count_lines():
    """Return the lines of Python of each folder of the package, of its top, and of tests."""
    package = ROOT / "enginery"
    lines = {
        folder.name: _lines(folder.rglob("*.py"))
        for folder in sorted(package.iterdir())
        if (folder / "__init__.py").is_file()
    }
    tests = (ROOT / "tests").rglob("*.py")
    return lines | {"(top)": _lines(package.glob("*.py")), "tests": _lines(tests)}


def read_limits():
    """Return the limits of each figure, oldest first: lists of dicts with a reason."""
    return json.loads(LIMITS.read_text(encoding="utf-8"))


def _lines(paths):
    return sum(len(path.read_bytes().splitlines()) for path in paths)
