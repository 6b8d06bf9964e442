"""Locks between processes, under `$ENGINERY_HOME/locks`.

>>> with named_lock("minilm"):
...     ...  # nobody else who asks for "minilm" is here

The kernel lets go of a lock when its process dies; the file stays and means nothing.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from enginery.core.errors import EngineryError
from enginery.core.home import enginery_home


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
