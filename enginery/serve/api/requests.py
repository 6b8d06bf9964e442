"""Parse JSON bodies into pydantic models, with messages for every kind of invalid value.

A body is parsed as JSON whatever its content type, as in other servers. Null counts as absent. If a
key is repeated, its last value counts, as in most JSON parsers.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo

from enginery.core.errors import nearest
from enginery.runtime.tasks.task import (
    Modality,
    describe_value,
    expected_values,
    without_null,
)
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
FILES: Mapping[Modality, str] = {"image": "an image file", "audio": "an audio file"}
"""What inputs that are not texts are called in messages."""

_NAME_LENGTH = 60
"""Maximum length of a client's text in an error message."""


class Schema(BaseModel):
    """Base of bodies and responses. A model is built on its first use, for a quick start."""

    model_config = ConfigDict(defer_build=True)


class RequestBody(Schema):
    """Base of bodies that ignore unknown fields, as other servers do."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StrictRequestBody(RequestBody):
    """Base of bodies in which unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


BodyType = TypeVar("BodyType", bound=BaseModel)


class FieldValueError(ValueError):
    """An invalid value found by a validator: the value, what was expected, and its path."""

    def __init__(
        self, value: Any, expected: str, path: str = "", *, is_empty: bool = False
    ) -> None:
        super().__init__(expected)
        self.value, self.expected, self.path, self.is_empty = value, expected, path, is_empty


# -- types of fields ----------------------------------------------------------------------------


def _one_or_more(value: Any) -> Any:
    """Wrap a string in a list; raise FieldValueError for an empty list."""
    if isinstance(value, str):
        return [value]
    if value == []:
        raise FieldValueError(value, "one input or more", is_empty=True)
    return value


def _texts_or_ids(value: Any) -> list[str | list[int]]:
    """Convert a text, token ids, or a list of them to a list of inputs."""
    expected = "a string, a list of strings, or token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise FieldValueError(value, expected)
    _one_or_more(value)
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    if kinds == {int}:
        return [token_ids(value)]
    for index, item in enumerate(value):
        if isinstance(item, list):
            token_ids(item, f"[{index}]")
        elif not isinstance(item, str):
            raise FieldValueError(item, "a string or a list of token ids", f"[{index}]")
    return value


def token_ids(value: list[Any], path: str = "") -> list[int]:
    """Check the token ids of one text; raise FieldValueError if they are invalid."""
    if not value:
        raise FieldValueError(value, "one token id or more", path, is_empty=True)
    if len(value) > MAX_TOKEN_IDS:
        raise FieldValueError(value, f"{MAX_TOKEN_IDS} token ids at most", path)
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise FieldValueError(item, f"a token id from 0 to {MAX_TOKEN_ID}", f"{path}[{index}]")
    return value


def any_of(*schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that allows any of several schemas."""
    return {"anyOf": list(schemas)}


def array_of(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    """Return the JSON schema of a list with at least `least` items."""
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


STRING = {"type": "string"}
TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
TOKEN_IDS = array_of(TOKEN_ID, 1)

Texts = Annotated[
    list[str],
    BeforeValidator(_one_or_more),
    WithJsonSchema(any_of(STRING, array_of(STRING, 1))),
    Field(description="a string or a list of strings"),
]
ListOfTexts = Annotated[list[str], Field(min_length=1, description="a list of strings")]
TextsOrIds = Annotated[
    list[Any],
    PlainValidator(_texts_or_ids),
    WithJsonSchema(any_of(STRING, array_of(any_of(STRING, TOKEN_IDS), 1), TOKEN_IDS)),
    Field(description="a string, a list of strings, or token ids"),
]
Dimensions = Annotated[int, Field(ge=1)]


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
        errors = error.errors(include_url=False)
    # If all members of a union fail, report the error of the member that matched most deeply.
    first = max(
        errors,
        key=lambda details: (details["loc"][:1] == errors[0]["loc"][:1], len(details["loc"])),
    )
    owner, field, names = _field_at(kind, first["loc"])
    path = _path(names)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldValueError):
        path += cause.path
        if cause.is_empty:
            raise empty_input(path, f"{path} is empty, expected {cause.expected}.")
        raise invalid_value(path, cause.expected, cause.value)
    if first["type"] == "extra_forbidden":
        where = f"{path}." if path else ""
        raise unknown_field(str(first["loc"][-1]), tuple(owner.model_fields), where)
    expected = _expected(owner, field, names, first)
    if first["type"] == "missing":
        raise invalid_field(f"{path} is missing, expected {expected}.", field=path)
    if first["type"] == "too_short":
        raise empty_input(path)
    raise invalid_value(path, expected, first["input"])


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
        do=f"Known: {', '.join(fields) or 'none'}.",
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


def _field_at(
    kind: type[BaseModel], loc: Sequence[int | str]
) -> tuple[type[BaseModel], FieldInfo | None, list[Any]]:
    """Find the field that a validation error refers to.

    Locations inside a union also contain names of its members, which are not part of the body.

    Returns:
        The model that the field belongs to; the field, or None if it is unknown; and the names and
        indices that lead to it.
    """
    owner, current = kind, kind
    field: FieldInfo | None = None
    names: list[Any] = []
    for part in loc:
        if isinstance(part, int):
            names.append(part)
        elif current is not None:
            owner, field = current, current.model_fields.get(part)
            if field is None:
                break
            names.append(part)
            current = _model_of(field.annotation)
    return owner, field, names


def _model_of(annotation: Any) -> Any:
    """Return the model within an annotation such as `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = getattr(annotation, "__args__", ())
    return next((model for argument in inner if (model := _model_of(argument)) is not None), None)


def _path(names: Sequence[Any]) -> str:
    path = ""
    for name in names:
        path += f"[{name}]" if isinstance(name, int) else f".{name}" if path else str(name)
    return path


def _expected(
    owner: type[BaseModel], field: FieldInfo | None, names: Sequence[Any], error: Any
) -> str:
    """Describe the values that a field takes."""
    is_item = bool(names) and isinstance(names[-1], int)
    if error["type"] == "string_type" and is_item:
        return "a string"
    if field is not None and field.description:
        return field.description
    if field is None or is_item or _model_of(field.annotation) is not None:
        words = {
            "string_type": "a string",
            "bool_type": "true or false",
            "dict_type": "an object",
            "list_type": "a list",
            "int_type": "a whole number",
            "model_type": "an object",
        }
        return words.get(error["type"], "another value")
    return expected_values(without_null(owner.model_json_schema()["properties"][names[-1]]))
