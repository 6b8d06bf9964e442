"""Options of publish. Importing this module is fast, for `enginery --help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError
from enginery.core.paths import is_portable_name

LATEST = "latest"
"""Name of the newest version in every registry; versions and aliases cannot have it."""


@dataclass(frozen=True)
class PublishConfig:
    """Options of the publish stage."""

    name: str = ""
    """Name of the model in a folder; empty for its source's name. Other addresses contain the
    name."""
    version: str = ""
    """Version to create, `1.2.0`; empty for the registry's next one, in a folder 1, 2, 3, …"""
    alias: str = ""
    """Alias to move to the version, `production`: `NAME@production` pulls it. It cannot be the
    name of a version, and a folder has no aliases."""
    allow_failed: bool = False
    """Publish an artifact whose validation is missing or failed; the card says so."""
    layout: Literal["enginery", "hub"] = "enginery"
    """Where the graphs are. `enginery`: in the root, as in the artifact. `hub`: in `onnx/`, several
    artifacts of a model side by side, as transformers.js and sentence-transformers expect."""
    license: str = ""
    """Licence of the model, `apache-2.0`; empty for the one on the source's card."""
    base_model: str = ""
    """Hub id of the model that this one was made from; empty for the source's id."""
    private: bool = True
    """Create a new Hub repository as private; an existing one is not changed."""
    insecure: bool = False
    """Use plain HTTP for an OCI registry."""

    def __post_init__(self) -> None:
        """Raise OptionError for an invalid value."""
        for option in ("name", "version", "alias"):
            value = getattr(self, option)
            if value and not is_portable_name(value):
                raise OptionError(
                    f"option '{option}' is {value!r}, expected at most 128 letters, digits, '.', "
                    "'_' and '-', with a letter or digit first, no '.' at the end, and not a "
                    "device name of Windows.",
                    option=option,
                )
        for option in ("version", "alias"):
            if getattr(self, option).casefold() == LATEST:
                raise OptionError(
                    f"option '{option}' is '{LATEST}', which is reserved for the newest version.",
                    option=option,
                )
        if self.layout not in ("enginery", "hub"):
            raise OptionError(
                f"option 'layout' is {self.layout!r}, expected 'enginery' or 'hub'.",
                option="layout",
            )
        for option in ("license", "base_model"):
            value = getattr(self, option)
            if value != value.strip() or not value.isprintable():
                raise OptionError(
                    f"option '{option}' is {value!r}, expected one line of text.", option=option
                )
