"""No function takes more than six parameters: more are a dataclass that has no name yet."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "enginery"
LIMIT = 6
OPTIONS = "a command has a parameter for each option, from which cyclopts makes its help"
LONGER = {
    "cli: init": (11, OPTIONS),
    "cli: inspect": (8, OPTIONS),
    "cli: run": (12, OPTIONS),
    "cli: try_out": (10, OPTIONS),
    "runtime: load_model": (12, "its keywords are the documentation of the public function"),
}
"""Functions that take more: how many parameters, and the reason why they are no dataclass."""


def parameter_counts(source):
    """Yield the qualified name of each function, and how many arguments a call can pass."""

    def visit(node, scope):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from visit(child, scope)
                continue
            name = f"{scope}{child.name}"
            if not isinstance(child, ast.ClassDef):
                taken = child.args
                names = [a.arg for a in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
                yield name, len([n for n in names if n not in ("self", "cls")])
            yield from visit(child, f"{name}.")

    yield from visit(ast.parse(source), "")


def long_signatures():
    """Return how many parameters each function above the limit has, by folder and name."""
    counts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name, count in parameter_counts(path.read_text(encoding="utf-8")):
            if count > LIMIT:
                key = f"{folder}: {name}"
                counts[key] = max(count, counts.get(key, 0))
    return counts


@pytest.mark.more
def test_functions_take_few_parameters():
    longer = {
        key: count
        for key, count in long_signatures().items()
        if count > LONGER.get(key, (LIMIT,))[0]
    }
    assert not longer, "name a frozen dataclass for what belongs together"


@pytest.mark.more
def test_every_exception_is_needed():
    counts = long_signatures()
    assert [key for key, (count, _) in LONGER.items() if counts.get(key, 0) < count] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, /, b, *c, d, **e): ...", {"f": 3}),
        ("class A:\n    def f(self, a): ...\n    async def g(cls): ...", {"A.f": 1, "A.g": 0}),
        ("def f():\n    if True:\n        def g(a): ...", {"f": 0, "f.g": 1}),
    ],
)
def test_parameters_are_counted(source, expected):
    assert dict(parameter_counts(source)) == expected
