"""Write files and directories so that they are whole at every moment, and nothing is left over.

What is written is first a `Scratch`: a new file or directory that its process has locked. Closing
it removes it, unless it was renamed.

>>> with Scratch.beside(tmp_path / "minilm") as scratch:
...     _ = (scratch.path / "model.onnx").write_bytes(b"graph")
...     replace_synced(scratch.path, tmp_path / "minilm")
>>> [path.name for path in tmp_path.iterdir()]
['minilm']

- **A file or a directory** is made beside its place, as `.tmp-NAME-0123456789ab`. `replace_synced`
  syncs it with all that is in it, renames it, and syncs the change of names. Until then a file
  system may keep any of the changes, in any order. So readers see the earlier content or the new
  one, also after a power failure. `write_atomically` does all that for the content of a file.
- **What is thrown away** lies in the temporary folder (`TMPDIR`), as `enginery-PURPOSE-…`:
  `temporary_directory`.
- **What one process at a time may write** has a lock file beside it, `.tmp-NAME-lock`: `locked`.
  So the lock holds for all machines and containers that see the directory.

The kernel releases a lock when its process ends, even by SIGKILL. So what has no lock was left by a
killed run, and the next run that writes there removes it, and `enginery store prune`:
`remove_leftovers`. On file systems without locks nothing is removed.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Self

from enginery.core.closing import Closeable
from enginery.core.errors import EngineryError, os_errors_as
from enginery.core.home import file_lock
from enginery.core.paths import list_directory, list_tree

PREFIX = ".tmp-"
_BESIDE = re.compile(r"\.tmp-(?P<target>.+)-(?:[0-9a-f]{12}|lock)")
_TEMPORARY = re.compile(r"enginery-(?P<target>[a-z-]+)-[0-9a-f]{12}")
# Answers of file systems without locks; EBADF is that of NFS for a directory.
_NO_LOCKS = [errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF]
# Answers of file systems that cannot sync a directory, such as some FUSE and SMB shares.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
_NOT_HELD_SECONDS = 0.2
"""Time for which a lock may be taken although nobody writes: `leftovers` looks at it."""
_POLL_SECONDS = 0.02
# linux/fs.h and fcntl.h
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Scratch(Closeable):
    """A file or a directory that this process has locked; closing removes it, unless renamed."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Own a path.

        Args:
            path: the file or directory.
            descriptor: its file descriptor, which holds the lock; None on a file system without
                locks, where no other process can lock it either, and so none removes it.
        """
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def beside(cls, target: Path, *, is_file: bool = False) -> Self:
        """Create a directory, or a file, that may be renamed to `target`.

        What killed runs have left beside `target` is removed first.

        Raises:
            OSError: it cannot be created.
        """
        remove_leftovers(target.parent, target.name)
        return cls.create(_hidden(target), is_file=is_file)

    @classmethod
    def create(cls, stem: Path, *, is_file: bool = False, mode: int = 0o777) -> Self:
        """Create a directory, or a file, whose name is unique.

        Args:
            stem: its path without the unique end.
            is_file: create a file.
            mode: permissions of a directory.

        Raises:
            OSError: it cannot be created.
        """
        while True:
            scratch = cls(_unique(stem))
            if is_file:
                scratch.path.touch(exist_ok=False)
            else:
                scratch.path.mkdir(mode)
            try:
                scratch._descriptor = _open_locked(scratch.path)
            except FileNotFoundError:
                # Another process took it for a leftover before it was locked.
                if not scratch.path.parent.is_dir():
                    raise
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    scratch.close()
                    raise
            return scratch

    @classmethod
    def lock_file(cls, target: Path, on_wait: Callable[[], object] | None) -> Self:
        """Take the lock beside `target`; see `locked`.

        Raises:
            TimeoutError: another process holds it, and `on_wait` is None.
            OSError: it cannot be written, or the file system has no locks.
        """
        file = Path(f"{_hidden(target)}-lock")
        give_up, must_wait = time.monotonic() + _NOT_HELD_SECONDS, False
        while True:
            try:
                return cls(file, _open_locked(file, os.O_RDWR | os.O_CREAT, wait=must_wait))
            except BlockingIOError:
                if time.monotonic() < give_up:
                    time.sleep(_POLL_SECONDS)
                elif on_wait is None:
                    raise TimeoutError(f"{file} is locked by another process") from None
                else:
                    on_wait()
                    must_wait = True
            except FileNotFoundError:  # its holder has removed it meanwhile
                if not file.parent.is_dir():
                    raise

    def close(self) -> None:
        """Remove it, unless it was renamed, and release its lock."""
        with suppress(OSError):  # it is gone, or cannot be removed: then the next run removes it
            # The path may be another process's by now, if a directory above it was replaced.
            if self._descriptor is None or _is_at(self._descriptor, self.path):
                _remove(self.path)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


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
        remove_temporary()
        # The temporary folder belongs to all users.
        scratch = Scratch.create(folder / f"enginery-{purpose}", mode=0o700)
    with scratch:
        yield scratch.path


@contextmanager
def locked(path: Path, on_wait: Callable[[], object] | None = None) -> Iterator[None]:
    """Let one process at a time write a file or a directory, wherever its ENGINERY_HOME is.

    The lock file is removed at the end. One that a killed process has left is taken over. Paths
    that lead to the same file through links have the same lock. On a file system without locks it
    is in ENGINERY_HOME, so that it holds for processes with the same one.

    Args:
        path: what is written, which need not exist; its directory does.
        on_wait: called before waiting for another process; None to raise TimeoutError instead.

    Raises:
        TimeoutError: another process holds the lock, and `on_wait` is None.
        OSError: the lock file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        lock: AbstractContextManager[object] = Scratch.lock_file(target, on_wait)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
        lock = file_lock(f"beside-{digest}", timeout_seconds=0 if on_wait is None else -1)
    with lock:
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably: readers see the old content or the new one."""
    with Scratch.beside(path, is_file=True) as scratch:
        scratch.path.write_bytes(content)
        replace_synced(scratch.path, path)


def replace_synced(source: Path, target: Path) -> None:
    """Sync a file or a directory with all that is in it, and rename it to `target`, atomically.

    If the system can exchange two names, an existing directory is never missing. Otherwise it is
    missing between two renames, while it has a hidden name beside `source`.

    Args:
        source: the new content, on the same file system as `target`.
        target: path of an earlier file or directory, which is removed, or of nothing.

    Raises:
        OSError: it cannot be synced or renamed; `target` is unchanged, unless only the sync of its
            new name failed.
    """
    sync_tree(source)
    if not (source.is_dir() and target.exists()):
        os.replace(source, target)
    elif not _exchange(source, target):
        earlier = _unique(_hidden(source.with_name(target.name)))
        os.replace(target, earlier)
        try:
            os.replace(source, target)
        except OSError:
            os.replace(earlier, target)
            raise
        os.replace(earlier, source)
    for directory in {source.parent, target.parent}:
        sync(directory)
    with suppress(OSError):  # there was none
        _remove(source)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, whose names are synced; it may exist already."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def sync_tree(path: Path) -> None:
    """Sync a file, or every file and every name below a directory."""
    for inner in list_tree(path):
        if inner.is_file() or (inner.is_dir() and not inner.is_symlink()):
            sync(inner)
    sync(path)


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a directory. Does nothing on Windows."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def leftovers(
    parent: Path, target: str = "", *, pattern: re.Pattern[str] = _BESIDE
) -> Iterator[Scratch]:
    """Lock and yield what killed runs have left in a directory. Closing it removes it.

    Args:
        parent: directory to look in.
        target: final name of what is looked for; empty for any.
        pattern: names of what may be a leftover.

    Raises:
        OSError: the directory cannot be listed.
    """
    for path in list_directory(parent):
        match = pattern.fullmatch(path.name)
        if match and target in ("", match["target"]):
            try:
                descriptor = _open_locked(path)
            except OSError:  # in use, removed meanwhile, a link, foreign, or there are no locks
                continue
            yield Scratch(path, descriptor)


def remove_leftovers(
    parent: Path,
    target: str = "",
    on_removed: Callable[[Path], object] = lambda _: None,
    *,
    pattern: re.Pattern[str] = _BESIDE,
) -> int:
    """Remove what killed runs have left in a directory; return its size in bytes.

    Args:
        parent: directory to look in.
        target: final name of what is removed; empty for any.
        on_removed: called with each removed path.
        pattern: names of what may be a leftover.
    """
    freed = 0
    with suppress(OSError):  # what cannot be listed cannot be removed either
        for leftover in leftovers(parent, target, pattern=pattern):
            with leftover, suppress(OSError):  # of what cannot be read the size does not count
                files = [leftover.path, *list_tree(leftover.path)]
                freed += sum(path.lstat().st_size for path in files if path.is_file())
            on_removed(leftover.path)
    return freed


def remove_temporary(on_removed: Callable[[Path], object] = lambda _: None) -> int:
    """Remove what killed runs have left in the temporary folder; see `remove_leftovers`."""
    folder = Path(tempfile.gettempdir())
    return remove_leftovers(folder, on_removed=on_removed, pattern=_TEMPORARY)


def final_name(path: Path) -> str:
    """Return the name of a file or directory, or the one it will have if it is temporary.

    >>> final_name(Path("artifacts/.tmp-minilm-0123456789ab"))
    'minilm'
    """
    match = _BESIDE.fullmatch(path.name)
    return match["target"] if match else path.name


def _hidden(target: Path) -> Path:
    """Return the path of what becomes `target`, in the same directory, without its unique end."""
    return target.with_name(f"{PREFIX}{target.name}")


def _unique(stem: Path) -> Path:
    return Path(f"{stem}-{uuid.uuid4().hex[:12]}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _open_locked(path: Path, flags: int = os.O_RDONLY, *, wait: bool = False) -> int:
    """Open and lock a file or a directory; return the descriptor, which holds the lock.

    Raises:
        BlockingIOError: another process has locked it, and `wait` is False.
        FileNotFoundError: it was removed or replaced before it was locked.
        OSError: it cannot be opened, or the file system has no locks.
    """
    if sys.platform == "win32":
        raise OSError(errno.ENOTSUP, "directories cannot be locked on Windows", str(path))
    import fcntl

    # Neither a link that somebody has put there is followed, nor a pipe waited for.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        if flags & os.O_CREAT:
            with suppress(PermissionError):  # another user may take over what a killed run left
                os.fchmod(descriptor, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if _is_at(descriptor, path):
            return descriptor
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):  # an error of a call with a descriptor has no path
            error.filename = str(path)
        raise


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file or directory still has this path."""
    return os.path.samestat(os.fstat(descriptor), path.lstat())


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories atomically; return False if the system does not support it."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library older than 2018, or musl
        return False
    directory, names = _AT_FDCWD, (os.fsencode(first), os.fsencode(second))
    return bool(renameat2(directory, names[0], directory, names[1], _RENAME_EXCHANGE) == 0)
