"""Stage options from untyped input: a recipe's mapping or a Python call's keywords.

    >>> options_from(ExportConfig, "export", {"opset": 20})
    ExportConfig(opset=20, ...)

The command line builds the same dataclasses by itself (cyclopts); this is for the other two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from enginery.core.errors import OptionError, nearest

Options = TypeVar("Options")


def option_names(options: type[Any]) -> list[str]:
    """The names of an options dataclass, in order."""
    return [field.name for field in dataclasses.fields(options)]


def options_from(options: type[Options], stage: str, values: Mapping[str, Any]) -> Options:
    """Builds `options` from plain values, converted to the fields' types.

    Raises:
        OptionError: a name is unknown, or a value does not fit its field's type.
    """
    # pydantic costs as much to import as the whole of `enginery --help`.
    from pydantic import TypeAdapter, ValidationError

    known = option_names(options)
    for name in values:
        if name not in known:
            raise unknown_option(name, stage, known)
    try:
        return TypeAdapter(options).validate_python(dict(values))
    except ValidationError as error:
        problems = error.errors()
        where = problems[0]["loc"][:1]
        name = f"option '{where[0]}' for {stage}" if where else stage
        words = unfit_value([found for found in problems if found["loc"][:1] == where])
        raise OptionError(f"{name}: {words}") from error


def unknown_option(name: str, stage: str, known: Sequence[str]) -> OptionError:
    """Return the error of an option that a stage does not have."""
    return OptionError(
        f"unknown option '{name}' for {stage}{nearest(name, known)}",
        do=f"Known options: {', '.join(known)}.",
    )


def unfit_value(problems: Sequence[Mapping[str, Any]]) -> str:
    """Say what pydantic expected of one value, and what was found.

    An option that may be a number or a word has one problem for each.
    """
    words = " or ".join(found["msg"][:1].lower() + found["msg"][1:] for found in problems)
    return f"{words}, found {problems[0]['input']!r}."


def options_dict(options: Any) -> dict[str, Any]:
    """Plain JSON values of an options dataclass, for a manifest or a fingerprint."""
    from pydantic import TypeAdapter

    plain: dict[str, Any] = TypeAdapter(type(options)).dump_python(options, mode="json")
    return plain
