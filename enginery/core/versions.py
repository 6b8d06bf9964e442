"""Tell which family of packages an environment exports with.

Optimum's exporter requires transformers 4.57, and transformers 5 has an exporter of its own, so an
environment has one of them. This is the only module that knows both. It reads metadata and imports
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Family = Literal["optimum", "transformers5", ""]

OPTIMUM: Family = "optimum"
TRANSFORMERS5: Family = "transformers5"

_EXTRAS = ("export", "transformers5")
"""The extras that install a family: of Optimum, and of transformers 5."""


def transformers_family(version_of: Callable[[str], str] | None = None) -> Family:
    """Return the family of an environment; empty if it exports with neither.

    Args:
        version_of: returns the version of a package in that environment, or an empty text; None for
            this environment.
    """
    version_of = version_of or installed_version
    major = version_of("transformers").partition(".")[0]
    if not major.isdecimal():
        return ""
    if int(major) >= 5:
        return TRANSFORMERS5
    return OPTIMUM if version_of("optimum-onnx") else ""


def export_extra(family: Family | None = None) -> str:
    """Return the extra that has, or would have, what a family exports with; None for this one's."""
    family = transformers_family() if family is None else family
    return _EXTRAS[family == TRANSFORMERS5]


def other_export_extra() -> str:
    """Return the extra of the other family, whose packages do not fit this environment."""
    return _EXTRAS[transformers_family() != TRANSFORMERS5]


def installed_version(package: str) -> str:
    """Return the version of an installed package, or an empty text."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
