"""Names of files that come from elsewhere: a manifest, an index, a registry's listing.

>>> resolve_inside(Path("minilm"), "reports/validation.json", what="the artifact")
PosixPath('minilm/reports/validation.json')
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from enginery.core.errors import CONTROL, ArtifactError

# A backslash separates directories on Windows, and a letter with a colon is a drive there.
_NOT_PORTABLE = re.compile(r"\\|^[A-Za-z]:")

_EXPECTED = "expected a relative path without '..' and control characters"


def is_inside(name: str) -> bool:
    """Return whether a name is a plain relative path, on POSIX and on Windows.

    Plain means normalized: no empty part, no `.`, no `..`, no backslash, no drive, and no control
    character, which would steer the terminal that shows it.
    """
    parts_are_plain = all(part not in ("", ".", "..") for part in name.split("/"))
    return parts_are_plain and not _NOT_PORTABLE.search(name) and not CONTROL.search(name)


def _require_inside(name: str) -> str:
    if not is_inside(name):
        raise ValueError(f"{name!r} lies outside the directory: {_EXPECTED}")
    return name


InsideName = Annotated[str, AfterValidator(_require_inside)]
"""A pydantic field that takes plain relative paths only."""


def resolve_inside(root: Path, name: str, *, what: str) -> Path:
    """Return the path of `name` below `root`, which no `..` and no symbolic link leads out of.

    The file need not exist. `root` itself may be reached through a link.

    Args:
        root: the directory that the name belongs to.
        name: a relative path with `/` between its parts, from an untrusted file.
        what: names the directory in messages: `the artifact /models/minilm`.

    Raises:
        ArtifactError: the name is absolute, not normalized, or goes through a symbolic link.
    """
    if not is_inside(name):
        raise ArtifactError(f"{name!r} lies outside {what}: {_EXPECTED}.")
    path = root
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise ArtifactError(
                f"{name} lies outside {what}: {path} is a symbolic link, and links are not "
                "followed.",
                do="Put the file itself in its place.",
            )
    return path
