"""YAML with line numbers, read as text: what a value means is said by the option it is for.

>>> parse_yaml("{model: org/name, revision: 012}", "recipe.yaml").entries["revision"]
Scalar(text='012', line=1, is_null=False)

YAML 1.1 guesses: `no` is False, `012` is 10, `1e-3` is a string. None of that happens here; a
scalar stays as it is written. Only plain data is read: a tag such as `!!python/object` is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml
from yaml.reader import ReaderError

from enginery.core.errors import RecipeError

_MAX_CHARACTERS = 1 << 20  # a model passed for a recipe is refused before it is parsed
_MAX_VALUES = 10_000  # after aliases are followed: nine lines of them can make a billion values
_MAX_DEPTH = 20

_CORE = "tag:yaml.org,2002:"
_SCALAR_TAGS = {f"{_CORE}{kind}" for kind in ("str", "bool", "int", "float", "timestamp", "null")}

_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Scalar:
    """One value as it is written, environment variables expanded."""

    text: str
    line: int
    is_null: bool = False
    """Nothing is written there, or `null` or `~` without quotes."""

    kind = "text"


@dataclass(frozen=True)
class Sequence:
    """A list of values."""

    items: tuple[Node, ...]
    line: int

    kind = "a list"


@dataclass(frozen=True)
class Table:
    """A mapping; every key is text and occurs once."""

    entries: dict[str, Node]
    key_lines: dict[str, int]
    line: int

    kind = "a mapping"


Node = Scalar | Sequence | Table


def parse_yaml(text: str, name: str) -> Node:
    """Reads one YAML document.

    Args:
        text: the document.
        name: the file's name, for messages.

    Raises:
        RecipeError: `name:line: …` for a syntax error, a repeated key, a tag, an unset
            environment variable, or aliases that expand without end.
    """
    if len(text) > _MAX_CHARACTERS:
        raise RecipeError(f"{name}:1: {len(text)} characters, expected at most {_MAX_CHARACTERS}.")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"{name}:{mark.line + 1 if mark else 1}: {words}.") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        found = f"U+{ord(text[error.position]):04X}"
        raise RecipeError(f"{name}:{line}: {error.reason}, found {found}.") from error
    except RecursionError:
        raise RecipeError(f"{name}:1: nested deeper than {_MAX_DEPTH} levels.") from None
    if root is None:
        raise RecipeError(f"{name}:1: the file is empty, expected the keys model and stages.")
    return _Reader(name).read(root, 0)


def plain(node: Node) -> Any:
    """Text, lists and dicts, without their lines."""
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.entries.items()}


def expand_variables(text: str, environment: Mapping[str, str]) -> str:
    """Replaces `${NAME}` and `${NAME:-default}`; `$${` is a literal `${`.

    The default is taken where the variable is unset or empty. Any other `$` is left alone, and
    what a variable holds is not expanded again.

    Raises:
        KeyError: a variable without a default is not set; its argument is the name.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name is None:
            return "${"
        return environment[name] if default is None else environment.get(name) or default

    return _VARIABLE.sub(value, text)


class _Reader:
    """Turns PyYAML's nodes into ours, within limits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values = 0

    def read(self, node: yaml.Node, depth: int) -> Node:
        self._values += 1
        line = node.start_mark.line + 1
        if self._values > _MAX_VALUES:
            self._fail(line, f"more than {_MAX_VALUES} values once aliases are followed.")
        if depth > _MAX_DEPTH:
            self._fail(line, f"nested deeper than {_MAX_DEPTH} levels.")
        if isinstance(node, yaml.ScalarNode):
            self._check_tag(node, _SCALAR_TAGS)
            return Scalar(self._expanded(node.value, line), line, node.tag == f"{_CORE}null")
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, {f"{_CORE}seq"})
            return Sequence(tuple(self.read(item, depth + 1) for item in node.value), line)
        self._check_tag(node, {f"{_CORE}map"})
        return self._table(node, depth)

    def _table(self, node: yaml.Node, depth: int) -> Table:
        entries: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._fail(line, "a key is a list or a mapping, expected a name.")
            if key.tag == f"{_CORE}merge":
                self._fail(line, "'<<' is not read; name a whole value with an alias (*name).")
            self._check_tag(key, _SCALAR_TAGS)
            if key.value in entries:
                self._fail(line, f"the key '{key.value}' is there already, at line "
                                 f"{lines[key.value]}.")  # fmt: skip
            entries[key.value] = self.read(value, depth + 1)
            lines[key.value] = line
        return Table(entries, lines, node.start_mark.line + 1)

    def _check_tag(self, node: yaml.Node, allowed: set[str]) -> None:
        if node.tag not in allowed:
            tag = node.tag.replace(_CORE, "!!")
            self._fail(
                node.start_mark.line + 1,
                f"the tag '{tag}' is not allowed; a recipe holds plain values only.",
            )

    def _expanded(self, text: str, line: int) -> str:
        try:
            return expand_variables(text, os.environ)
        except KeyError as error:
            variable = error.args[0]
            raise RecipeError(
                f"{self._name}:{line}: the environment variable '{variable}' is not set.",
                do=f"Set it, or write ${{{variable}:-default}}; $${{ is a literal ${{.",
            ) from None

    def _fail(self, line: int, problem: str) -> NoReturn:
        raise RecipeError(f"{self._name}:{line}: {problem}")
