"""Temporary directories and files, locked by the process that uses them.

>>> with temporary_directory("example") as scratch:
...     _ = (scratch / "feeds.npz").write_bytes(b"feeds")
>>> scratch.exists()
False

There are two kinds. What is renamed to its final name at the end lies beside it, as
`.tmp-NAME-0123456789ab`. What is thrown away lies in the temporary folder (`TMPDIR`), as
`enginery-PURPOSE-0123456789ab`.

`locked_beside` locks a file or a directory that is not temporary, for one writer at a time: with
`.tmp-NAME-lock` beside it, so that it holds for all machines and containers that see the directory.

The kernel releases a lock when its process ends, even by SIGKILL. So what has no lock was left by a
killed run, and `remove_leftovers` removes it. On file systems without locks nothing is removed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from enginery.core.closing import Closeable
from enginery.core.durable import make_directory, replace_synced
from enginery.core.errors import EngineryError, os_errors_as
from enginery.core.home import file_lock
from enginery.core.paths import list_directory

PREFIX = ".tmp-"
_NO_HANDLE = -1
_NOT_HELD_SECONDS = 0.2
"""Time for which a lock may be taken although nobody writes: `remove_leftovers` looks at it."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_MAX_REMOVED = 100
"""Times that a new directory may be gone before it can be opened."""
_ours: set[Path] = set()
"""What this process uses. Its lock may be missing, if the system could not lock it at that time."""
_BESIDE = re.compile(r"^\.tmp-(?P<target>.+)-(?:[0-9a-f]{12}|lock)$")
_SCRATCH = re.compile(r"^enginery-(?P<target>[a-z-]+)-[0-9a-f]{12}$")


@contextmanager
def temporary_directory(purpose: str) -> Iterator[Path]:
    """Yield an empty directory in the temporary folder, and remove it at the end.

    What killed runs have left in the temporary folder is removed first.

    Args:
        purpose: part of the directory's name: lower-case letters and hyphens.

    Raises:
        EngineryError: the temporary folder cannot be written.
    """
    folder = Path(tempfile.gettempdir())
    with os_errors_as(
        EngineryError,
        f"the temporary folder {folder} cannot be used",
        do="Set TMPDIR to a directory that can be written.",
    ):
        _remove_unlocked(folder, _SCRATCH)
        # The temporary folder belongs to all users.
        scratch = _Scratch(lambda: folder / f"enginery-{purpose}-{_token()}", mode=0o700)
    with scratch:
        yield scratch.path


@contextmanager
def directory_beside(path: Path) -> Iterator[Path]:
    """Yield an empty directory that may be renamed to `path`; remove it unless it was.

    What killed runs have left beside `path` is removed first.
    """
    remove_leftovers(path.parent, path.name)
    with _Scratch(lambda: new_sibling(path)) as scratch:
        yield scratch.path


@contextmanager
def locked_beside(
    path: Path, on_wait: Callable[[], object] | None = None, *, create: bool = True
) -> Iterator[None]:
    """Let one process at a time write a file or a directory, wherever its ENGINERY_HOME is.

    The lock file is removed at the end. One that a killed process has left is taken over. Paths
    that lead to the same file through links have the same lock. There is none where the
    directory cannot be written, because `path` cannot be written either. On a file system without
    locks it is in ENGINERY_HOME, so that it holds for processes with the same one.

    Args:
        path: what is written, which need not exist.
        on_wait: called before waiting for another process; None to raise `Timeout` instead.
        create: create the parent directory if it does not exist.

    Raises:
        filelock.Timeout: another process holds the lock, and `on_wait` is None.
        OSError: the lock file cannot be written.
    """
    target = Path(os.path.realpath(path))
    if create:
        make_directory(target.parent)
    if not os.access(target.parent, os.W_OK):
        yield
        return
    file = target.with_name(f"{PREFIX}{target.name}-lock")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_file(file, on_wait))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            with suppress(OSError):
                file.unlink()
            digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
            lock = file_lock(f"beside-{digest}").lock_file
            stack.enter_context(locked_file(Path(lock), on_wait))
        else:
            inode = file.stat().st_ino
            stack.callback(_remove_lock_file, file, inode)
        yield


def _remove_lock_file(file: Path, inode: int) -> None:
    """Remove a lock file, unless its directory was replaced and this is another one."""
    with suppress(OSError):  # its directory is gone; or Windows, which keeps open files
        if file.stat().st_ino == inode:
            file.unlink()


@contextmanager
def locked_file(file: Path, on_wait: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold the lock of a lock file, which stays; see `locked_beside`."""
    # Another user may take over the file of a killed process.
    lock = FileLock(file, mode=0o666)
    try:
        lock.acquire(timeout=_NOT_HELD_SECONDS)
    except Timeout:
        if on_wait is None:
            raise
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably: readers see the old content or the new one."""
    remove_leftovers(path.parent, path.name)
    with _Scratch(lambda: new_sibling(path), is_file=True) as scratch:
        with os.fdopen(os.dup(scratch.handle), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if os.name == "nt":  # an open file cannot be renamed there
            scratch.unlock()
        replace_synced(scratch.path, path)


def remove_leftovers(
    parent: Path, target: str = "", on_removed: Callable[[Path], object] = lambda _: None
) -> int:
    """Remove the temporary directories and files in `parent` that no process holds a lock on.

    Args:
        parent: directory to look in.
        target: final name of what is removed; empty for any.
        on_removed: called with each removed path.

    Returns:
        The size of what was removed, in bytes.
    """
    return _remove_unlocked(parent, _BESIDE, target, on_removed)


def remove_scratch(on_removed: Callable[[Path], object] = lambda _: None) -> int:
    """Remove what killed runs have left in the temporary folder; return its size in bytes.

    Args:
        on_removed: called with each removed path.
    """
    return _remove_unlocked(Path(tempfile.gettempdir()), _SCRATCH, on_removed=on_removed)


def new_sibling(path: Path) -> Path:
    """Return a new hidden name in the same directory, so that a rename to `path` is atomic."""
    return path.parent / f"{PREFIX}{path.name}-{_token()}"


def final_name(path: Path) -> str:
    """Return the name of a file or directory, or the one it will have if it is temporary.

    >>> final_name(Path("artifacts/.tmp-minilm-0123456789ab"))
    'minilm'
    """
    match = _BESIDE.match(path.name)
    return match["target"] if match else path.name


def _token() -> str:
    return uuid.uuid4().hex[:12]


def _remove_unlocked(
    parent: Path,
    pattern: re.Pattern[str],
    target: str = "",
    on_removed: Callable[[Path], object] = lambda _: None,
) -> int:
    freed = 0
    with suppress(OSError):  # it cannot be listed: then nothing can be removed either
        for path in list_directory(parent):
            match = pattern.match(path.name)
            if match and target in ("", match["target"]):
                freed += _remove_if_unlocked(path, on_removed)
    return freed


def _remove_if_unlocked(path: Path, on_removed: Callable[[Path], object]) -> int:
    """Remove a directory or a file unless a process holds its lock; return the removed size."""
    if path in _ours:
        return 0
    with suppress(OSError):  # locked, removed meanwhile, foreign, or no locks in this file system
        mode = path.lstat().st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            return 0
        handle = os.open(path, os.O_RDONLY)
        try:
            _lock(handle, wait=False)
            size_bytes = _size_bytes(path)
            if stat.S_ISDIR(mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
            on_removed(path)
            return size_bytes
        finally:
            os.close(handle)
    return 0


def _size_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.lstat().st_size for file in files if file.is_file())


class _Scratch(Closeable):
    """A new directory or file that this process has locked; closing removes it, unless renamed."""

    def __init__(
        self, new_name: Callable[[], Path], *, is_file: bool = False, mode: int = 0o777
    ) -> None:
        """Create a directory, or a file, and lock it.

        Args:
            new_name: returns a path that does not exist.
            is_file: create a file.
            mode: permissions of a directory.
        """
        self._is_file = is_file
        removed = 0
        while True:
            self.path = new_name()
            try:
                self.handle = (
                    _create_file(self.path) if is_file else _create_directory(self.path, mode)
                )
            except FileNotFoundError:
                # Another process may have removed the directory before it was opened.
                removed += 1
                if removed == _MAX_REMOVED or not self.path.parent.is_dir():
                    raise
                continue
            with suppress(OSError):  # without locks, no process removes it either
                _lock(self.handle, wait=True)
            if self.path.exists():
                _ours.add(self.path)
                return
            self.unlock()  # another process removed it before it was locked

    def unlock(self) -> None:
        """Close the file descriptor, which holds the lock."""
        if self.handle != _NO_HANDLE:
            os.close(self.handle)
        self.handle = _NO_HANDLE

    def close(self) -> None:
        """Remove the directory or file, and release its lock."""
        if self._is_file:
            with suppress(OSError):  # renamed; or the disk is broken, and the next run removes it
                self.path.unlink()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        _ours.discard(self.path)
        self.unlock()


def _create_file(path: Path) -> int:
    """Create a file; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _create_directory(directory: Path, mode: int) -> int:
    """Create a directory; return its descriptor, or remove it again."""
    directory.mkdir(mode)
    if os.name == "nt":  # directories cannot be opened there
        return _NO_HANDLE
    try:
        return os.open(directory, os.O_RDONLY)
    except OSError:
        with suppress(FileNotFoundError):
            directory.rmdir()
        raise


def _lock(handle: int, *, wait: bool) -> None:
    """Lock a file or directory; raise OSError if it is locked (unless `wait`), or locks fail."""
    if sys.platform == "win32":
        raise OSError("a directory cannot be locked on Windows")
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
