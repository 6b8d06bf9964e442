"""The directory of the store and its locks: `$ENGINERY_HOME`, or the platform's cache directory.

>>> with file_lock("minilm", home=tmp_path):
...     (tmp_path / "locks" / "minilm.lock").is_file()  # no other process holds this lock
True

The kernel releases a lock when its process ends; the lock file stays and means nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from enginery.core.errors import EngineryError, os_errors_as

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
