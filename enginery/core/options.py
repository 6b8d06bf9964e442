"""Build stage options from untyped values: a recipe's mapping or a Python call's keywords.

>>> from enginery.core.datasets.batches import ReadOptions
>>> options_from(ReadOptions, "predict", {"rows": "8"}).rows
8

The command line builds the same dataclasses with cyclopts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from enginery.core.errors import OptionError, nearest

Options = TypeVar("Options")


def option_names(options: type[Any]) -> list[str]:
    """Return the names of the fields of an options dataclass, in order."""
    return [field.name for field in dataclasses.fields(options)]


def old_names(options: type[Any]) -> dict[str, str]:
    """Return the earlier names of options -> their names, from `OLD_NAMES` of the dataclass."""
    found: dict[str, str] = {}
    for kind in options.__mro__:
        found |= vars(kind).get("OLD_NAMES", {})
    return found


def with_new_names(options: type[Any], stage: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the names that the options have now.

    Raises:
        OptionError: an option is given under both names.
    """
    renamed, found = old_names(options), dict[str, Any]()
    for written, value in values.items():
        name = renamed.get(written, written)
        if name in found:
            old = next(old for old, new in renamed.items() if new == name)
            raise OptionError(
                f"{stage} has both '{old}' and '{name}', which are the same option.",
                do=f"Keep '{name}'.",
                option=written,
            )
        found[name] = value
    return found


def options_from(options: type[Options], stage: str, values: Mapping[str, Any]) -> Options:
    """Build `options` from plain values, which are converted to the types of the fields.

    Raises:
        OptionError: a name is unknown or given twice, a required option is missing, or a value has
            the wrong type.
    """
    # Importing pydantic takes as long as all of `enginery --help`.
    from pydantic import TypeAdapter, ValidationError

    known = option_names(options)
    values = with_new_names(options, stage, values)
    for name in values:
        if name not in known:
            raise OptionError(
                f"unknown option '{name}' for {stage}{nearest(name, known)}",
                do=f"Known options: {', '.join(known)}.",
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
        words = " or ".join(_lower_first(p["msg"]) for p in problems if p["loc"][0] == name)
        raise OptionError(
            f"option '{name}' for {stage}: {words}, found {problems[0]['input']!r}.", option=name
        ) from error


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
