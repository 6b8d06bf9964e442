"""Write Triton's `config.pbtxt` in protobuf's text format, without protobuf.

>>> fields = {"name": "minilm", "input": [{"data_type": EnumValue("TYPE_INT64")}]}
>>> print(config_text(fields), end="")
name: "minilm"
input {
  data_type: TYPE_INT64
}

A list is a repeated field, and `map_entries` makes a map field. The tests parse all configurations
with Triton's `model_config.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class EnumValue(str):
    """Name of an enum value, which is written without quotes."""

    __slots__ = ()


def config_text(fields: Mapping[str, Any]) -> str:
    """Return the text of a message; leave out fields that are None.

    Raises:
        TypeError: a value has a type that protobuf fields do not have.
    """
    return "\n".join(_lines(fields, "")) + "\n"


def map_entries(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a map field: one message with key and value per entry."""
    return [{"key": key, "value": value} for key, value in values.items()]


def parameters(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the field `parameters` of a model configuration."""
    return map_entries({name: {"string_value": value} for name, value in values.items()})


def _lines(fields: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in fields.items():
        if value is None:
            continue
        items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, list | tuple) and items and not isinstance(items[0], Mapping):
            yield f"{indent}{name}: [{', '.join(_scalar(item) for item in items)}]"
            continue
        for item in items:
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, EnumValue):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return f'"{_escaped(value)}"'
    raise TypeError(f"{value!r} is a {type(value).__name__}, which a protobuf field cannot be.")


def _escaped(text: str) -> str:
    """Escape a protobuf string; only ASCII control characters, quotes and backslashes need it."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(
        f"\\{ord(letter):03o}" if ord(letter) < 32 or ord(letter) == 127 else letter
        for letter in plain
    )
