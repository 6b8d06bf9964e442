"""What a client sent, read with a message for whatever is wrong in it.

    >>> body = json_object(b'{"inputs": "The engine is warm.", "truncate": true}')
    >>> body.texts("inputs"), body.flag("truncate")
    (['The engine is warm.'], True)

Whatever the content type says, a body that is read here is JSON, as other servers have it. A null
counts as absent. Where a key comes twice, the last one counts, as JSON readers have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from enginery.core.errors import nearest
from enginery.serve.refusals import InvalidBodyError, InvalidInputError

_NAMES = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a whole number",
    float: "a number", type(None): "null",
}  # fmt: skip
_SHOWN = 60
_MOST_ID = 2**31 - 1


class FieldError(InvalidInputError):
    """A field of a request has a value that cannot be used; OpenAI's shape names the field."""

    def __init__(self, message: str, *, field: str, do: str = "") -> None:
        super().__init__(message, do=do)
        self.field = field


class EmptyInputError(FieldError):
    """There is nothing to answer."""

    status = 400
    tei_type = "Empty"


def found(value: Any) -> str:
    """A value of JSON in a message: its type, and short ones themselves.

    >>> found("3"), found([1, 2])
    ("the string '3'", 'a list')
    """
    name = _NAMES.get(type(value), type(value).__name__)
    if isinstance(value, str):
        return f"the string {shown(value)}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"the number {value:.12g}" if isinstance(value, float) else f"the number {value}"
    return f"{str(value).lower()}" if isinstance(value, bool) else name


def shown(text: str) -> str:
    """A client's words in a message: quoted, and not many of them."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def json_value(body: bytes) -> Any:
    """The JSON value of a body; raises InvalidBodyError where it is none."""
    if not body:
        raise InvalidBodyError("the body is empty, expected JSON.")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidBodyError(f"the body is not valid JSON: {error}.") from None


def json_object(body: bytes, where: str = "") -> JsonObject:
    """The JSON object of a body; raises InvalidBodyError where it is none."""
    value = json_value(body)
    if type(value) is not dict:
        raise InvalidBodyError(f"the body is {found(value)}, expected a JSON object.")
    return JsonObject(value, where)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object whose fields are asked for by type. All raise FieldError."""

    values: Mapping[str, Any]
    where: str = ""
    """What its fields' names begin with in messages, `parameters.`."""

    def wrong(self, name: str, expected: str, value: Any) -> FieldError:
        """The error for a field of the wrong type."""
        path = f"{self.where}{name}"
        return FieldError(f"{path}: found {found(value)}, expected {expected}.", field=path)

    def need(self, name: str, expected: str) -> Any:
        """The value of a field that has to be there."""
        value = self.values.get(name)
        if value is None:
            path = f"{self.where}{name}"
            is_null = "is null" if name in self.values else "is missing"
            raise FieldError(f"{path} {is_null}, expected {expected}.", field=path)
        return value

    def flag(self, name: str, default: bool | None = False) -> bool | None:
        """A boolean."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false", value)
        return value

    def string(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not str:
            raise self.wrong(name, "a string", value)
        return value

    def choice(self, name: str, options: Sequence[str], default: str) -> str:
        """One of several words."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not str or value not in options:
            raise self.wrong(name, " or ".join(options), value)
        return value

    def whole(self, name: str, default: int, *, least: int, most: int = _MOST_ID) -> int:
        """A whole number from `least` to `most`."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            end = f"from {least} to {most}" if most < _MOST_ID else f"of {least} or more"
            raise self.wrong(name, f"a whole number {end}", value)
        return value

    def object(self, name: str) -> JsonObject:
        """An object; an empty one where it is absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if type(value) is not dict:
            raise self.wrong(name, "an object", value)
        return JsonObject(value, f"{self.where}{name}.")

    def only(self, known: Iterable[str]) -> None:
        """Raises FieldError for a field that is not known."""
        names = tuple(known)
        for name in self.values:
            if name not in names:
                path = f"{self.where}{name}"
                raise FieldError(
                    f"{shown(path)} is not known here{nearest(name, names)}",
                    field=path[:_SHOWN],
                    do=f"Known: {', '.join(names) or 'none'}.",
                )

    def texts(self, name: str) -> list[str]:
        """A string or a list of strings, as a list."""
        value = self.need(name, "a string or a list of strings")
        if type(value) is str:
            return [value]
        if type(value) is not list:
            raise self.wrong(name, "a string or a list of strings", value)
        self._not_empty(name, value)
        for index, item in enumerate(value):
            if type(item) is not str:
                raise self.wrong(f"{name}[{index}]", "a string", item)
        return value

    def texts_or_ids(self, name: str, vocabulary: int) -> list[Any]:
        """A string, a list of strings, token ids, or a list of those: one item an input.

        Args:
            name: of the field.
            vocabulary: ids are below it; 0 where it is not known.
        """
        value = self.need(name, "a string, a list of strings, or token ids")
        if type(value) is str:
            return [value]
        if type(value) is not list:
            raise self.wrong(name, "a string, a list of strings, or token ids", value)
        self._not_empty(name, value)
        kinds = set(map(type, value))
        if kinds == {str}:
            return value
        if kinds == {int}:
            return [self.ids(name, value, vocabulary)]
        for index, item in enumerate(value):
            if type(item) is list:
                self.ids(f"{name}[{index}]", item, vocabulary)
            elif type(item) is not str:
                raise self.wrong(f"{name}[{index}]", "a string or a list of token ids", item)
        return value

    def ids(self, name: str, value: list[Any], vocabulary: int) -> list[int]:
        """Token ids of one text."""
        self._not_empty(name, value)
        most = (vocabulary or _MOST_ID + 1) - 1
        if set(map(type, value)) != {int} or not (min(value) >= 0 and max(value) <= most):
            for index, item in enumerate(value):
                if type(item) is not int or not 0 <= item <= most:
                    raise self.wrong(f"{name}[{index}]", f"a token id from 0 to {most}", item)
        return value

    def _not_empty(self, name: str, value: Sequence[Any]) -> None:
        if not value:
            path = f"{self.where}{name}"
            raise EmptyInputError(f"{path} is empty, expected one input or more.", field=path)
