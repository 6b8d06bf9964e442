"""Parse JSON bodies into pydantic models, with messages for every kind of invalid value.

A body is parsed as JSON whatever its content type, as in other servers. Null counts as absent. If a
key is repeated, its last value counts, as in most JSON parsers.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from enginery.core.errors import nearest
from enginery.core.trust.bounds import expected_by
from enginery.runtime.tasks.task import Modality, describe_value
from enginery.serve.api.errors import HTTPError, empty_input, invalid_body, invalid_field

MAX_TOKEN_ID = 2**31 - 1
MAX_VALUES = 2**20
"""Maximum number of values of a body, as its commas tell before it is parsed. Each becomes an
object, so that a body of some megabytes would take hundreds, and all other requests wait."""
MAX_OBJECTS = 2**17
"""Maximum number of lists, objects and strings of a body. Each takes 50 to 200 bytes for as few as
four of the body, and Python's garbage collector visits the lists while every request waits."""
_OBJECTS = re.compile(rb'[\[{]|"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""The start of a list or object, or an entire string; one without an end takes the rest."""
MAX_TOKEN_IDS = 2**18
"""Maximum number of token ids of a text."""
FILES: dict[Modality, str] = {"image": "an image file", "audio": "an audio file"}
"""What inputs that are not texts are called in messages."""

_NAME_LENGTH = 60
"""Maximum length of a client's text in an error message."""


class Schema(BaseModel):
    """Base of bodies and responses. A model is built on its first use, for a quick start."""

    model_config = ConfigDict(defer_build=True)


class RequestBody(Schema):
    """Base of bodies that ignore unknown fields, as other servers do."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Fields of other servers that may be there with values that ask for nothing."""


class StrictRequestBody(RequestBody):
    """Base of bodies in which unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, values: Any) -> Any:
        """Report the first unknown field, instead of one error for each of a hundred thousand."""
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    details = {"name": name, "fields": tuple(cls.model_fields)}
                    raise PydanticCustomError("unknown_field", "a known field", details)
        return values


BodyType = TypeVar("BodyType", bound=RequestBody)


# -- types of fields ----------------------------------------------------------------------------


TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
    Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True),
]
ListOfTexts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
Texts = str | ListOfTexts
TextsOrIds = str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, fail_fast=True)]
Dimensions = Annotated[int, Field(ge=1)]

_TOKEN_IDS = TypeAdapter(TokenIds, config=ConfigDict(strict=True, defer_build=True))


def listed(value: str | Sequence[Any]) -> list[Any]:
    """Return a text, the token ids of one, or a list of them as a list of inputs."""
    return [value] if isinstance(value, str) or type(value[0]) is int else list(value)


def read_token_ids(value: Any, path: str) -> list[int]:
    """Return the token ids of one text; raise HTTPError if they are invalid."""
    try:
        return _TOKEN_IDS.validate_python(value)
    except ValidationError as error:
        raise _invalid(error, value, path=path) from None


# -- reading ------------------------------------------------------------------------------------


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object; raise HTTPError if it is not one."""
    if not body:
        raise invalid_body("the body is empty, expected JSON.")
    if body.count(b",") > MAX_VALUES:
        raise HTTPError(
            413,
            f"the body has more than {MAX_VALUES} values or commas.",
            do="Send it in several requests, or tensors as binary data.",
        )
    if _has_many_objects(body):
        raise HTTPError(
            413,
            f"the body has more than {MAX_OBJECTS} lists, objects and strings.",
            do="Send it in several requests, or tensors as binary data.",
        )
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_body(f"the body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise invalid_body(f"the body is {describe_value(value)}, expected a JSON object.")
    return value


def _has_many_objects(body: bytes) -> bool:
    """Return True if a body has more lists, objects and strings than `MAX_OBJECTS`."""
    if body.count(b"[") + body.count(b"{") + body.count(b'"') // 2 <= MAX_OBJECTS:
        return False
    # Texts, such as code, have brackets and quotes, too.
    return next(islice(_OBJECTS.finditer(body), MAX_OBJECTS, None), None) is not None


def parse(kind: type[BodyType], values: dict[str, Any]) -> BodyType:
    """Validate a JSON object as a pydantic model.

    Args:
        kind: the model's class.
        values: the object.

    Raises:
        HTTPError: a field is missing, unknown or invalid.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = _invalid(error, values, unsupported=kind.unsupported)
    if problem.field in kind.model_fields and problem.field not in values:
        # The error for null says what is expected of the field.
        values = {**values, problem.field: None}
        try:
            kind.model_validate(values)
        except ValidationError as error:
            problem = _invalid(error, values, absent=problem.field)
    raise problem


def _invalid(
    error: ValidationError,
    value: Any,
    *,
    path: str = "",
    unsupported: Collection[str] = (),
    absent: str = "",
) -> HTTPError:
    """Return the error of a request whose `value` is invalid.

    Args:
        error: what pydantic has reported.
        value: the value.
        path: where the body has it.
        unsupported: fields that are not supported.
        absent: a field that is missing, and null in `value`.
    """
    errors = [(details, _path_keys(details, value)) for details in error.errors(include_url=False)]
    first, path_keys = max(errors, key=_relevance)
    alternatives = [details for details, keys in errors if keys == path_keys]
    if first["type"] == "too_long":
        alternatives = [first]
    # A number of the right type is meant, if it is too large or too small.
    alternatives = [d for d in alternatives if d["type"] in _OF_RANGE] or alternatives
    for key in path_keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else key
    if first["type"] == "unknown_field":
        return unknown_field(first["ctx"]["name"], first["ctx"]["fields"], f"{path}." * bool(path))
    if path_keys and path_keys[0] in unsupported:
        return invalid_field(
            f"{path}: found {describe_value(first['input'])}, which is not supported.",
            field=path,
            do="Leave it out.",
        )
    if first["type"] == "missing":
        return invalid_field(f"{path} is missing.", field=path)
    if any(details["type"] == "too_short" for details in alternatives):
        return empty_input(path)
    words = " or ".join(dict.fromkeys(map(expected_by, alternatives)))
    if path == absent:
        return invalid_field(f"{path} is missing, expected {words}.", field=path)
    return invalid_value(path, words, first["input"])


def _relevance(error: tuple[Any, list[Any]]) -> tuple[bool, bool, int, int]:
    """Return what is the largest for the error to report.

    An unknown field may be a misspelled one that is missing. Of the members of a union the one is
    meant that fits the largest part of the value: its error is the deepest, or the farthest.
    """
    details, path_keys = error
    index = path_keys[-1] if path_keys and isinstance(path_keys[-1], int) else -1
    return details["type"] == "unknown_field", details["type"] == "too_long", len(path_keys), index


_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
"""Types of pydantic's errors for numbers that are too large or too small."""


def _path_keys(details: Any, value: Any) -> list[Any]:
    """Return the keys and indices that lead to an error.

    Pydantic's locations also have the names of members of unions, which are not part of the body.
    """
    keys: list[Any] = []
    *_, missing = details["loc"] if details["type"] == "missing" else [None]
    for part in details["loc"]:
        if isinstance(value, dict) and (part in value or part == missing):
            keys.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            keys.append(part)
            value = value[part]
    return keys


def invalid_value(path: str, expected: str, value: Any) -> HTTPError:
    """Return the error for a field with an invalid value."""
    if value is None and not path.endswith("]"):
        return invalid_field(f"{path} is null, expected {expected}.", field=path)
    return invalid_field(f"{path}: found {describe_value(value)}, expected {expected}.", field=path)


def unknown_field(name: str, fields: Sequence[str], where: str = "") -> HTTPError:
    """Return the error for an unknown field."""
    return invalid_field(
        f"unknown field {quote(where + name)}{nearest(name[:_NAME_LENGTH], fields)}",
        field=f"{where}{name[:_NAME_LENGTH]}",
        do=f"Known: {', '.join(fields)}." if fields else "",
    )


def quote(text: str) -> str:
    """Quote a client's text for an error message, shortened if it is long."""
    return repr(text if len(text) <= _NAME_LENGTH else f"{text[:_NAME_LENGTH]}…")


def file_from_base64(text: str, name: str, modality: Modality) -> bytes:
    """Decode an image or audio file from base64 or a data URL.

    Args:
        text: base64, or a data URL with base64.
        name: what error messages call the input.
        modality: what the file is.

    Raises:
        HTTPError: the text is neither of them.
    """
    data = text.strip()
    if data.startswith("data:"):
        header, comma, data = data.partition(",")
        if not comma or not header.endswith(";base64"):
            raise invalid_field(f"{name} is a data URL without base64.", field=name)
    elif data[:8].lower().startswith(("http://", "https://")):
        raise invalid_field(
            f"{name} is a URL, expected {FILES[modality]} in base64.",
            field=name,
            do="Send the file itself; this server does not download anything.",
        )
    try:
        # Base64 is often split into lines. Remove whitespace, which strict mode rejects, along with
        # all other characters outside of base64.
        content = binascii.a2b_base64("".join(data.split()), strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_field(
            f"{name} is not valid base64: {str(error)[:80]}.",
            field=name,
            do=f"Encode the content of {FILES[modality]}.",
        ) from None
    if not content:
        raise empty_input(name, f"{name} is empty, expected {FILES[modality]}.")
    return content
