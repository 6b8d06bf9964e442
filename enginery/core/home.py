"""Where enginery keeps what it makes: `$ENGINERY_HOME`, or the platform's cache directory."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from enginery.core.errors import EngineryError


def enginery_home() -> Path:
    """The directory; it may not exist yet."""
    named = os.environ.get("ENGINERY_HOME", "")
    return Path(named).expanduser() if named else user_cache_path("enginery")


def named_lock(name: str, *, home: Path | None = None, timeout_seconds: float = -1) -> FileLock:
    """A lock on a name, not yet taken.

    Args:
        name: fit for a file name.
        home: the store; None for `$ENGINERY_HOME`.
        timeout_seconds: how long to wait before `filelock.Timeout`; -1 for ever.

    Raises:
        EngineryError: the store cannot be written.
    """
    locks = (home or enginery_home()) / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineryError(
            f"{locks.parent} cannot be used as the store: {error.strerror}.",
            do="Set ENGINERY_HOME to a directory that you can write.",
        ) from error
    return FileLock(locks / f"{name}.lock", timeout=timeout_seconds)
