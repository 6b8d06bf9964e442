"""The one tree of errors.

    EngineryError                    exit 2: the command cannot do what was asked
    ├── OptionError                  an option's name or value is wrong
    │   └── RecipeError              the same in a recipe, with file and line
    ├── SourceError                  the model to start from cannot be found or read
    │   └── UntrustedModelError      it asks for what only the user may grant, or did harm
    ├── ShapeError                   a dim, a shape or a profile does not fit the model
    ├── ArtifactError                a directory is not an artifact, or not a whole one
    │   └── RejectedArtifactError    whole, but its validation failed
    ├── ExportError                  the model could not be turned into a sound ONNX graph
    ├── ProviderError                an execution provider cannot be had, or did not take the model
    ├── RegistryError                a registry cannot be reached, refuses, or holds something else
    ├── InputError                   a text, an image, a tensor or a data file cannot be used
    ├── MissingPackageError          an optional package is needed and not installed
    ├── CheckFailedError             exit 1: everything ran, and the answer is no
    └── BadRowsError                 exit 3: everything ran, and some rows have no answer

A message says what was found and what was expected; `do` says what to do next. `option` names the
option of the stage that is wrong, so that a recipe can point to its line.
The command line prints the two and exits; any other exception is a bug.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""What steers a terminal instead of being shown: C0, DEL and C1."""


class EngineryError(Exception):
    """An expected failure, in words for the person who can mend it."""

    exit_code = 2

    def __init__(self, message: str, *, do: str = "", option: str = "", column: str = "") -> None:
        super().__init__(f"{message} {do}" if do else message)
        self.message = message
        self.do = do
        """What to do about it."""
        self.option = option
        """The option that is wrong, if one is."""
        self.column = column
        """The column that a file of data does not have, if that is the matter."""


class OptionError(EngineryError):
    """An option's name or value is wrong."""


class RecipeError(OptionError):
    """A recipe's key or value is wrong; the message starts with `file:line`."""


class SourceError(EngineryError):
    """The model to start from cannot be found or read."""


class UntrustedModelError(SourceError):
    """The model's files ask for what only the user may grant, or its code tried to do harm."""


class ShapeError(EngineryError):
    """A dim, a shape or a profile does not fit the model."""


class ArtifactError(EngineryError):
    """A directory is not an artifact, or not a whole one."""


class RejectedArtifactError(ArtifactError):
    """The artifact is whole, but its validation failed."""


class ExportError(EngineryError):
    """The model could not be turned into a sound ONNX graph."""


class ProviderError(EngineryError):
    """An execution provider cannot be had, or did not take the model."""


class RegistryError(EngineryError):
    """A registry cannot be reached, refuses, or holds something else than was asked for."""


class InputError(EngineryError):
    """A text, an image, a tensor or a data file cannot be used."""


class MissingPackageError(EngineryError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed.",
            do=f"Install it with: pip install 'enginery[{extra}]'",
        )


class CheckFailedError(EngineryError):
    """Everything that was asked for ran, and the answer is no."""

    exit_code = 1


class BadRowsError(EngineryError):
    """Everything ran, and some rows have no answer."""

    exit_code = 3


def nearest(word: str, known: Iterable[str]) -> str:
    """Ends a sentence: `; did you mean 'opset'?` for the known word nearest to `word`, or `.`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else "."


def printable(text: str) -> str:
    r"""Escape what would steer a terminal: every control character but newlines and tabs.

    >>> printable("bert" + chr(27) + "]52;c;eA==")
    'bert\\x1b]52;c;eA=='
    """
    return CONTROL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found[0] in "\n\t" else f"\\x{ord(found[0]):02x}"
