"""The options of publish; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

from dataclasses import dataclass

from enginery.core.errors import OptionError
from enginery.core.paths import is_portable_name

LATEST = "latest"
"""What every registry calls the newest version; nobody else's name."""


@dataclass(frozen=True)
class PublishConfig:
    """What a published model is called, what its card says of its rights, and who may see it."""

    name: str = ""
    """The model's name in a folder; empty for its source's. Other addresses have the name in
    them."""
    version: str = ""
    """The version to make, `1.2.0`; empty for the registry's next: in a folder 1, 2, 3, …"""
    alias: str = ""
    """A name that points to the version from now on, `production`: `NAME@production` pulls it.
    Never the name of a version."""
    allow_unvalidated: bool = False
    """Publish an artifact that has no validation, or one that failed; the card says so."""
    license: str = ""
    """The model's licence, `apache-2.0`; empty for what the source's own card says."""
    base_model: str = ""
    """The Hub id of the model that this one was made from; empty for the source's own."""
    private: bool = True
    """Make a new repository on the Hub private; one that is there stays as it is."""
    insecure: bool = False
    """Talk plain HTTP to an OCI registry."""

    def __post_init__(self) -> None:
        """Raises OptionError for a value that no registry takes."""
        for option in ("name", "version", "alias"):
            value = getattr(self, option)
            if value and not is_portable_name(value):
                raise OptionError(
                    f"option '{option}' is {value!r}, expected letters, digits, '.', '_' and '-', "
                    "at most 128, the first a letter or a digit, the last no '.', and no name "
                    "that Windows keeps for a device.",
                    option=option,
                )
        for option in ("version", "alias"):
            if getattr(self, option).casefold() == LATEST:
                raise OptionError(
                    f"option '{option}' is '{LATEST}', which is always the newest version.",
                    option=option,
                )
        for option in ("license", "base_model"):
            value = getattr(self, option)
            if value != value.strip() or not value.isprintable():
                raise OptionError(
                    f"option '{option}' is {value!r}, expected one line of text.", option=option
                )
