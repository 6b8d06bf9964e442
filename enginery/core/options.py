"""Build stage options from untyped values: a recipe's mapping or a Python call's keywords.

>>> from enginery.core.datasets.batches import ReadOptions
>>> options_from(ReadOptions, "predict", {"rows": "8"}).rows
8

The command line builds the same dataclasses with cyclopts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from enginery.core.errors import OptionError, nearest

Options = TypeVar("Options")

KeyPart = Literal["value", "content", "nothing"]
"""How an option counts in the cache key of its stage: its value does, the content of what it names,
or neither."""
LabelReading = Literal["auto", "names", "indices"]
"""What the labels in a column of data are: class names, or indices. `auto` reads the column."""
_KEY_PART = "enginery.key_part"


def by_content(default: Any = "", *, default_factory: Callable[[], Any] | None = None) -> Any:
    """Declare an option whose value names something, such as a file: the content is in the key.

    The same rows at another path are then the same input, and other rows at the same path another.
    """
    return _field("content", default, default_factory)


def not_in_key(default: Any = "", *, default_factory: Callable[[], Any] | None = None) -> Any:
    """Declare an option that has no part in the key: it leaves the result as it is.

    Give the reason in a comment. An option that is not declared so counts by its value.
    """
    return _field("nothing", default, default_factory)


def _field(part: KeyPart, default: Any, default_factory: Callable[[], Any] | None) -> Any:
    metadata = {_KEY_PART: part}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def key_parts(options: Any) -> dict[str, KeyPart]:
    """Return how each option of a dataclass counts in the cache key, in order.

    >>> from enginery.optimize.config import OptimizeConfig
    >>> parts = key_parts(OptimizeConfig)
    >>> parts["precision"], parts["data"], parts["allow_failed"]
    ('value', 'content', 'nothing')
    """
    fields = dataclasses.fields(options)
    return {field.name: field.metadata.get(_KEY_PART, "value") for field in fields}


def option_names(options: type[Any]) -> list[str]:
    """Return the names of the fields of an options dataclass, in order."""
    return [field.name for field in dataclasses.fields(options)]


def options_from(options: type[Options], stage: str, values: Mapping[str, Any]) -> Options:
    """Build `options` from plain values, which are converted to the types of the fields.

    Raises:
        OptionError: a name is unknown, a required option is missing, or a value has the wrong type.
    """
    # Importing pydantic takes as long as all of `enginery --help`.
    from pydantic import TypeAdapter, ValidationError

    names = option_names(options)
    for name in values:
        if name not in names:
            raise OptionError(
                f"unknown option '{name}' for {stage}{nearest(name, names)}",
                do=f"Known options: {', '.join(names)}.",
                option=name,
            )
    try:
        return TypeAdapter(options).validate_python(dict(values))
    except ValidationError as error:
        problems = error.errors()
        name = str(problems[0]["loc"][0])
        if problems[0]["type"] == "missing":
            raise OptionError(
                f"option '{name}' for {stage} is missing.", do=f"Add {name}, with its value."
            ) from None
        # An option that takes a number or a word has one problem for each type.
        expectations = " or ".join(_lower_first(p["msg"]) for p in problems if p["loc"][0] == name)
        raise OptionError(
            f"option '{name}' for {stage}: {expectations}, found {problems[0]['input']!r}.",
            option=name,
        ) from error


def read_assignments(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Return name -> value of texts of the form NAME=VALUE; a value that is JSON is read as JSON.

    The values of a name that is repeated are a list.

    >>> read_assignments(("top_k=3", "stop=END", "stop=STOP"), "set")
    {'top_k': 3, 'stop': ['END', 'STOP']}

    Args:
        texts: the texts.
        option: the name of the option that has them, for the error.

    Raises:
        OptionError: a text has another form.
    """
    values: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise OptionError(
                f"option '{option}' is '{text}', expected NAME=VALUE.",
                do="Write it as max_new_tokens=64.",
                option=option,
            )
        parsed: Any = value.strip()
        with suppress(ValueError):
            parsed = json.loads(value)
        values.setdefault(name.strip(), []).append(parsed)
    return {name: items if len(items) > 1 else items[0] for name, items in values.items()}


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def changed_options(options: Any) -> tuple[str, ...]:
    """Return the names of the fields of an options dataclass that differ from their defaults.

    A field without a default counts as changed.

    >>> from enginery.core.datasets.batches import ReadOptions
    >>> changed_options(ReadOptions(rows=8))
    ('rows',)
    """
    return tuple(
        field.name
        for field in dataclasses.fields(options)
        if getattr(options, field.name)
        != (
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )
    )


def options_dict(options: Any) -> dict[str, Any]:
    """Return an options dataclass as plain JSON values, for a manifest or a fingerprint."""
    from pydantic import TypeAdapter

    plain: dict[str, Any] = TypeAdapter(type(options)).dump_python(options, mode="json")
    return plain
