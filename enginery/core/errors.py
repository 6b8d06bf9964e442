"""All errors that enginery raises, in one tree.

    EngineryError                    exit 2: the command cannot be carried out
    ├── OptionError                  an option's name or value is wrong
    │   └── RecipeError              an OptionError in a recipe, with file and line
    ├── SourceError                  the source model cannot be found or read
    │   └── UntrustedModelError      the source model needs trust or attempted harm
    ├── ShapeError                   a dim, a shape or a profile does not fit the model
    ├── ArtifactError                a directory is not an artifact, or is damaged
    │   └── RejectedArtifactError    the artifact failed its validation
    ├── ExportError                  the export failed, or gave an invalid ONNX graph
    ├── ProviderError                an execution provider is unavailable, or rejects the model
    ├── RegistryError                a registry is unreachable, refuses, or has other content
    ├── InputError                   a text, an image, a tensor or a data file cannot be used
    ├── MissingPackageError          an optional package is required but not installed
    ├── CheckFailedError             exit 1: everything ran, and a check failed
    └── BadRowsError                 exit 3: everything ran, and some rows have no result

`message` says what was found and what was expected, `do` what to do about it. `option` names the
invalid option of the stage, so that a recipe can point to its line. The command line prints message
and `do`, and exits; any other exception is a bug.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""The control characters C0, DEL and C1, which make up terminal escape sequences."""


class EngineryError(Exception):
    """An expected failure, with a message for the user who can fix it."""

    exit_code = 2

    def __init__(self, message: str, *, do: str = "", option: str = "", column: str = "") -> None:
        super().__init__(f"{message} {do}" if do else message)
        self.message = message
        self.do = do
        """What the user can do about it; may be empty."""
        self.option = option
        """Name of the invalid option; empty if there is none."""
        self.column = column
        """Name of the column that the data lacks; empty if there is none."""


class OptionError(EngineryError):
    """An option has an unknown name or an invalid value."""

    problems: tuple[OptionError, ...] = ()
    """The problems that the message lists, if there are several."""


class RecipeError(OptionError):
    """A recipe has an invalid key or value; the message starts with `file:line`."""


class SourceError(EngineryError):
    """The source model cannot be found or read."""


class UntrustedModelError(SourceError):
    """The model needs trust that only the user may give, or its code attempted harm."""


class ShapeError(EngineryError):
    """A dim, a shape or a profile does not fit the model."""


class ArtifactError(EngineryError):
    """A directory is not an artifact, or is damaged."""


class RejectedArtifactError(ArtifactError):
    """The artifact is undamaged, but failed its validation."""


class ExportError(EngineryError):
    """The export failed, or gave an invalid ONNX graph."""


class ProviderError(EngineryError):
    """An execution provider is unavailable, or rejects the model."""


class RegistryError(EngineryError):
    """A registry cannot be reached, refuses a request, or has other content than expected."""


class InputError(EngineryError):
    """A text, an image, a tensor or a data file cannot be used."""


class MissingPackageError(EngineryError):
    """An optional package is required but not installed; see `core/extras.py`."""


class CheckFailedError(EngineryError):
    """Everything ran, and a check failed."""

    exit_code = 1


class BadRowsError(EngineryError):
    """Everything ran, and some rows have no result."""

    exit_code = 3


_NO_SPACE = "Free disk space. --out, ENGINERY_HOME and TMPDIR name places on other disks."


@contextmanager
def os_errors_as(kind: type[EngineryError], start: str, *, do: str = "") -> Iterator[None]:
    """Raise an EngineryError for an OSError of the block.

    Args:
        kind: class of the error.
        start: start of the message, which the cause and the file follow.
        do: what the user can do about it, unless the disk is full.

    >>> with os_errors_as(InputError, "data 'reviews.csv' cannot be read"):
    ...     open("/missing")
    Traceback (most recent call last):
    enginery.core.errors.InputError: data 'reviews.csv' cannot be read: No such file or directory: \
/missing.
    """
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        # An error of a write, or of a call with a descriptor, has no path.
        has_path = isinstance(error.filename, str | bytes | os.PathLike)
        file = f": {os.fsdecode(error.filename)}" if has_path else ""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise kind(f"{start}: {cause}{file}.", do=_NO_SPACE if is_full else do) from error


_SYSTEM_FAILURES = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ESTALE,
    }
)
"""Failures that are none of a model's or an input's: a file that does not exist, a folder in a
file's place and a name that is too long may be."""


def is_system_error(error: BaseException) -> bool:
    """Return True if the system denied or failed an operation, and that led to this error.

    >>> try:
    ...     with os_errors_as(InputError, "the tokenizer cannot be loaded"):
    ...         raise PermissionError(errno.EACCES, "Permission denied")
    ... except InputError as error:
    ...     is_system_error(error)
    True
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _SYSTEM_FAILURES:
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def raise_system_error(error: BaseException) -> None:
    """Raise the error again if it is the system's, where all others are taken for a model's."""
    if is_system_error(error):
        raise error


def join_problems(problems: Iterable[OptionError]) -> OptionError:
    """Return the only problem, or one error of their class that lists all, each with what to do.

    >>> print(join_problems([OptionError("a is 0.", do="Pass --a 1."), OptionError("no b.")]))
    found 2 problems:
    - a is 0. Pass --a 1.
    - no b.
    """
    parts = [part for problem in problems for part in (problem.problems or (problem,))]
    if len(parts) == 1:
        return parts[0]
    lines = [f"found {len(parts)} problems:", *(f"- {problem}" for problem in parts)]
    kinds = {type(part) for part in parts}
    kind = kinds.pop() if len(kinds) == 1 else OptionError
    joined = kind("\n".join(lines), option=parts[0].option)
    joined.problems = tuple(parts)
    return joined


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the end of a sentence: a question with the nearest known word, or a full stop.

    >>> nearest("opsets", ["opset", "task"])
    "; did you mean 'opset'?"
    """
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else "."


def printable(text: str) -> str:
    r"""Escape every control character except newlines and tabs.

    >>> printable("bert" + chr(27) + "]52;c;eA==")
    'bert\\x1b]52;c;eA=='
    """
    return CONTROL_CHARACTERS.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[0] in "\n\t" else f"\\x{ord(match[0]):02x}"
