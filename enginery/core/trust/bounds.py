"""Read a stranger's JSON files into types with ranges.

    class ModelFile(SettingsFile):
        FILE = "config.json"
        vocab_size: Annotated[int, number(0, 2**24)] = 0

    ModelFile.read(Path("downloaded-model")).vocab_size

Unknown keys are ignored. Every known key is optional, and null counts as missing, because
transformers writes null for many defaults. An integer may be written as `30522`, `30522.0` or
`"30522"`. The size of the document bounds the lists and texts in it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.json_file import load_json, read_json

MAX_COUNT = 2**31 - 1
"""Tokens, or samples of audio."""

T = TypeVar("T")


def number(low: float, high: float) -> Any:
    """Return the range of a number, for `Annotated`."""
    return Field(ge=low, le=high)


Count = Annotated[int, number(0, MAX_COUNT)]
TokenId = Annotated[int, number(-1, MAX_COUNT)]


def expected(words: str) -> WrapValidator:
    """Return what describes an invalid value of several possible types in one message."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("expected", "{words}", {"words": words}) from None

    return WrapValidator(validate)


def conflict(key: str, value: Any, words: str) -> PydanticCustomError:
    """Return an error for a value that contradicts the values of other keys."""
    return PydanticCustomError("conflict", "{words}", {"key": key, "value": value, "words": words})


class Settings(BaseModel):
    """The keys that are read of a JSON object."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


class SettingsFile(Settings):
    """A JSON file in the directory of a model."""

    FILE: ClassVar[str]

    @classmethod
    def read(cls, directory: Path, *, error: type[EngineryError] = ArtifactError) -> Self:
        """Read the file in a model's directory; if it is missing, all keys are.

        Args:
            directory: directory of an artifact or a model.
            error: class of the error to raise; SourceError for a model that is being exported.

        Raises:
            EngineryError: the file is not a JSON object, or a value has the wrong type or is out
                of range; the class is `error`.
        """
        return cls._read(directory / cls.FILE, error)

    @classmethod
    def _read(cls, file: Path, error: type[EngineryError]) -> Self:
        document = read_json(file, error=error)
        return _validated(file, lambda: cls.model_validate(document), error)


def read_list(file: Path, kind: type[T], noun: str) -> list[T]:
    """Read a JSON file that has a list.

    Raises:
        ArtifactError: the file is not a list of such values.
    """
    document = load_json(file, error=ArtifactError)
    if not isinstance(document, list):
        raise ArtifactError(
            f"{file} contains a {type(document).__name__}, expected a list of {noun}."
        )
    adapter = TypeAdapter(list[kind])  # type: ignore[valid-type]  # pydantic reads it at run time
    return _validated(file, lambda: adapter.validate_python(document), ArtifactError)


def _validated(file: Path, validate: Callable[[], T], error: type[EngineryError]) -> T:
    """Validate a document; raise `error` with file, key, value and expectation."""
    try:
        return validate()
    except ValidationError as invalid:
        problem = invalid.errors(include_url=False)[0]
    raise error(f"{file}: {_describe(problem)}.")


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60
_EXPECTED = {
    "dict": "an object",
    "model": "an object",
    "list": "a list",
    "tuple": "a list",
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "bool": "true or false",
    "string": "a string",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_unicode": "text without lone surrogates",
}
"""Type of pydantic's error, or its first word -> what was expected."""


def expected_by(problem: Mapping[str, Any]) -> str:
    """Return what an error of pydantic says was expected."""
    context = problem.get("ctx", {})
    kind: str = problem["type"]
    words = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0])
    message: str = problem["msg"].removeprefix("Input should be ")
    return context.get("words") or (words.format(**context) if words else message)


def _describe(problem: Mapping[str, Any]) -> str:
    """Describe an error of pydantic: the key, what was found and what was expected."""
    context, keys = problem.get("ctx", {}), [str(part) for part in problem["loc"]]
    kind, wanted = problem["type"], expected_by(problem)
    value = _SHORT.repr(context.get("value", problem["input"]))
    if keys and keys[-1] == "[key]":
        return f"{'.'.join(keys[:-2])} has the key {value}, expected {wanted}"
    if kind == "missing":
        return f"{'.'.join(keys)} is missing"
    key = ".".join([*keys, *([context["key"]] if "key" in context else [])])
    return f"{key or 'the document'} is {value}, expected {wanted}"
