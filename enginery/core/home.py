"""The directory of the store and its locks: `$ENGINERY_HOME`, or the platform's cache directory.

>>> with file_lock("minilm", home=tmp_path):
...     (tmp_path / "locks" / "minilm.lock").is_file()  # no other process holds this lock
True

The kernel releases a lock when its process ends; the lock file stays and means nothing.

What enginery makes there is listed in `.made-by-enginery`, so that `enginery store prune` removes
nothing else: the directory may be one that has other files, too.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from enginery.core.errors import EngineryError, os_errors_as

MADE = ".made-by-enginery"
"""The file with the names of what enginery made, one JSON string a line."""
REMEDY = "Set ENGINERY_HOME to a directory that you can write."


def enginery_home() -> Path:
    """Return the directory, which may not exist yet."""
    setting = os.environ.get("ENGINERY_HOME", "")
    return Path(setting).expanduser() if setting else user_cache_path("enginery")


def file_lock(name: str, *, home: Path | None = None, timeout_seconds: float = -1) -> FileLock:
    """Return a lock between processes, not acquired yet.

    Args:
        name: name of the lock; must be a valid file name.
        home: directory of the store; None for `enginery_home()`.
        timeout_seconds: time to wait before `filelock.Timeout` is raised; -1 to wait forever.

    Raises:
        EngineryError: the store cannot be written.
    """
    locks = (home or enginery_home()) / "locks"
    with os_errors_as(EngineryError, f"{locks.parent} cannot be used as the store", do=REMEDY):
        locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"{name}.lock", timeout=timeout_seconds)


def note_made(path: Path, home: Path) -> None:
    """List a file or a directory of the store as made by enginery, before it is made.

    A list that belongs to another user is left as it is: an entry is also known by its key.

    Raises:
        OSError: the list cannot be written.
    """
    name = path.relative_to(home).as_posix()
    if name in names_made(home):
        return
    home.mkdir(parents=True, exist_ok=True)
    with (
        suppress(PermissionError),
        (home / MADE).open("ab") as stream,
    ):  # several processes may append
        stream.write(json.dumps(name).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def names_made(home: Path) -> set[str]:
    """Return the paths that enginery made, relative to the store; damaged lines are left out."""
    names = set()
    with suppress(OSError), (home / MADE).open("rb") as stream:
        for line in stream:
            with suppress(ValueError):
                names.add(str(json.loads(line)))
    return names


def store_log(name: str) -> Path:
    """Return the path of a log in the store, and create its directory.

    Raises:
        EngineryError: the store cannot be written.
    """
    home = enginery_home()
    log = home / "logs" / name
    with os_errors_as(EngineryError, f"{home} cannot be used as the store", do=REMEDY):
        log.parent.mkdir(parents=True, exist_ok=True)
        note_made(log, home)
    return log
