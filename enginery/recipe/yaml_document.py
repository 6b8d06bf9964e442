"""Read YAML 1.2 as plain text, lists and dicts with line numbers.

>>> document = read_yaml("{model: org/name, revision: 012}", "recipe.yaml")
>>> document.data, document.line(("revision",))
({'model': 'org/name', 'revision': '012'}, 1)

YAML converts `1e-3` to a number and `2024-01-01` to a date. Here every scalar stays the text in the
file, and the type of the option decides. Only plain data is read: a tag such as `!!python/object`
is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.reader import ReaderError

from enginery.core.errors import RecipeError

_MAX_CHARACTERS = 1 << 20  # a model file passed as a recipe is refused before it is parsed
_MAX_VALUES = 10_000  # after expanding aliases: nine lines of them can make a billion values
_MAX_DEPTH = 20

_CORE = "tag:yaml.org,2002:"
_PLAIN_TAGS = {
    f"{_CORE}{kind}" for kind in ("str", "bool", "int", "float", "timestamp", "null", "seq", "map")
}

_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

Path = tuple[int | str, ...]
"""Keys and positions from the top of a document: `("stages", 0, "export", "opset")`."""


@dataclass
class Document:
    """A YAML document as plain data: text, None for `null` or an empty value, lists and dicts."""

    name: str
    """The file's name, for messages."""
    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    """The line of each value; in a mapping the line of its key."""

    def line(self, path: Path) -> int:
        """Return the line of a path, or of the nearest enclosing value."""
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def lines_in(self, path: Path) -> dict[str, int]:
        """Return the lines of a mapping's keys."""
        return {str(at[-1]): line for at, line in self.lines.items() if at and at[:-1] == path}


def error_at(name: str, line: int, problem: str, *, do: str) -> RecipeError:
    """Return the error for a line of a recipe: `recipe.yaml:3: the key 'model' is missing.`."""
    return RecipeError(f"{name}:{line}: {problem}", do=do)


def read_yaml(text: str, name: str) -> Document:
    """Read one YAML document, and expand environment variables in its values.

    Args:
        text: the document.
        name: the file's name, for messages.

    Raises:
        RecipeError: `name:line: …` for a syntax error, a repeated key, a tag, an unset
            environment variable, or aliases that expand without end.
    """
    if len(text) > _MAX_CHARACTERS:
        raise error_at(
            name,
            1,
            f"{len(text)} characters, expected at most {_MAX_CHARACTERS}.",
            do="Check the file name: a recipe is a short YAML file.",
        )
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        raise error_at(
            name,
            mark.line + 1 if mark else 1,
            f"{message}.",
            do="Fix the YAML: check brackets, quotes, tabs and indentation.",
        ) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}"
        raise error_at(
            name, line, f"{error.reason}, found {character}.", do="Remove the character."
        ) from error
    except AssertionError as error:  # raised by ruamel.yaml for a directive such as %YAML 1.3
        raise error_at(
            name, 1, f"{error}.", do="Leave the directive out: recipes are YAML 1.2."
        ) from error
    except RecursionError:
        raise error_at(
            name, 1, f"nested deeper than {_MAX_DEPTH} levels.", do="Close the brackets."
        ) from None
    if root is None:
        raise error_at(
            name,
            1,
            "the file is empty, expected the keys model and stages.",
            do="Start from one of recipes/.",
        )
    reader = _Reader(name)
    reader.document.data = reader.read(root, ())
    return reader.document


def expand_variables(text: str, environment: Mapping[str, str]) -> str:
    """Replace `${NAME}` and `${NAME:-default}`; `$${` is a literal `${`.

    The default is used if the variable is unset or empty. Any other `$` stays as it is, and the
    value of a variable is not expanded again.

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
    """Turn ruamel.yaml's nodes into plain data, within limits."""

    def __init__(self, name: str) -> None:
        self.document = Document(name)
        self._values = 0

    def read(self, node: Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self.document.lines.setdefault(path, line)  # in a mapping this is the line of the key
        self._values += 1
        if self._values > _MAX_VALUES:
            self._fail(
                line,
                f"more than {_MAX_VALUES} values after expanding aliases.",
                do="Write fewer values, or fewer aliases of aliases.",
            )
        if len(path) > _MAX_DEPTH:
            self._fail(line, f"nested deeper than {_MAX_DEPTH} levels.", do="Close the brackets.")
        self._check_tag(node, line)
        if isinstance(node, ScalarNode):
            return None if node.tag == f"{_CORE}null" else self._expand(node.value, line)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode):
                self._fail(
                    line,
                    "a key is a list or a mapping, expected a name.",
                    do="Write name: value.",
                )
            if key.tag == f"{_CORE}merge":
                self._fail(
                    line, "'<<' is not supported.", do="Use an alias for a whole value: *name."
                )
            self._check_tag(key, line)
            name = key.value
            if name in values:
                first_line = self.document.lines[*path, name]
                self._fail(
                    line,
                    f"the key '{name}' is repeated: see line {first_line}.",
                    do="Keep one.",
                )
            self.document.lines[*path, name] = line
            values[name] = self.read(value, (*path, name))
        return values

    def _check_tag(self, node: Node, line: int) -> None:
        if node.tag not in _PLAIN_TAGS:
            tag = str(node.tag).replace(_CORE, "!!")
            self._fail(
                line,
                f"the tag '{tag}' is not allowed; recipes have plain values only.",
                do="Leave the tag out.",
            )

    def _expand(self, text: str, line: int) -> str:
        if "\0" in text:
            self._fail(line, "a value contains a NUL character.", do="Leave it out.")
        try:
            return expand_variables(text, os.environ)
        except KeyError as error:
            variable = error.args[0]
            self._fail(
                line,
                f"the environment variable '{variable}' is not set.",
                do=f"Set it, or write ${{{variable}:-default}}; $${{ is a literal ${{.",
            )

    def _fail(self, line: int, problem: str, *, do: str) -> NoReturn:
        raise error_at(self.document.name, line, problem, do=do)
