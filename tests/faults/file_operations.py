"""A layer between Python code and the file system that counts operations, and fails or stops there.

    with FileOperations(root, FailOnce(7, errno.EIO)) as operations:
        run()
    operations.fired    # False if `run` has fewer than seven operations

Operations are calls of `open` and of functions in `os` and `fcntl` that create, read, change or
lock something below `root`, also in the child processes that stages start (`tests.faults.child`).
Libraries written in C are not seen here: SQLite, for example.

Linux only: paths that are relative to a descriptor are read from /proc.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import json
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from enginery.core import scratch
from enginery.core import subprocess as children

VARIABLE = "FILE_OPERATIONS"
"""Environment variable that tells a child process what to count, and which fault strikes."""
_REPOSITORY = str(Path(__file__).parents[2])
STOPPED = 77
"""The exit status of a process that a `Stop` ended."""

READING = frozenset({"read", "list"})
LOCKING = frozenset({"lock"})
FREEING = frozenset({"unlink", "rmdir"})
"""What a full disk, or a full quota, allows."""


@dataclass(frozen=True)
class FailOnce:
    """The operation with this number fails, and all others work.

    A lock that is denied (EACCES) is one that another process holds, which is no fault.
    """

    number: int
    code: int

    def strike(self, number: int, kind: str, act: Callable[[], object]) -> None:
        if number == self.number and (kind, self.code) != ("lock", errno.EACCES):
            raise OSError(self.code, os.strerror(self.code))


@dataclass(frozen=True)
class FailFrom:
    """From this number on, every operation fails that the error can stop.

    A full disk (ENOSPC) and a full quota (EDQUOT) still let a process read, remove and lock; a disk
    that has become read-only (EROFS) lets it only read and lock. A broken one (EIO) does nothing.
    """

    number: int
    code: int

    def strike(self, number: int, kind: str, act: Callable[[], object]) -> None:
        allowed: frozenset[str] = {
            errno.ENOSPC: READING | LOCKING | FREEING,
            errno.EDQUOT: READING | LOCKING | FREEING,
            errno.EROFS: READING | LOCKING,
        }.get(self.code, frozenset())
        if number >= self.number and kind not in allowed:
            raise OSError(self.code, os.strerror(self.code))


@dataclass(frozen=True)
class Stop:
    """The process ends before the operation with this number, in the middle of a write."""

    number: int

    def strike(self, number: int, kind: str, act: Callable[[], object]) -> None:
        if number == self.number:
            act()
            os._exit(STOPPED)


_FAULTS = {kind.__name__: kind for kind in (FailOnce, FailFrom, Stop)}


Fault = FailOnce | FailFrom | Stop


class Tally:
    """What a process and the children that it forks or starts count together."""

    def __init__(self, path: str = "") -> None:
        """Start at zero, or go on with the tally of another process, which has this path there."""
        self._handle = os.open(path, os.O_RDWR) if path else os.memfd_create("tally")
        os.ftruncate(self._handle, _TALLY_BYTES)
        self._shared = mmap.mmap(self._handle, _TALLY_BYTES)
        self._counts = memoryview(self._shared)[:_MARKS].cast("q")

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._handle}"

    def close(self) -> None:
        """Share it with no more processes."""
        os.close(self._handle)

    def count(self, *, is_child: bool) -> int:
        """Count an operation and return its number."""
        self._counts[0] += 1
        self._shared[_MARKS + self._counts[0]] = is_child
        return self.operations

    def count_strike(self) -> None:
        """Count that a fault struck."""
        self._counts[1] += 1

    @property
    def operations(self) -> int:
        return self._counts[0]

    @property
    def strikes(self) -> int:
        return self._counts[1]

    @property
    def in_children(self) -> list[int]:
        return [n for n in range(1, self.operations + 1) if self._shared[_MARKS + n]]


_TALLY_BYTES = 1 << 14
_MARKS = 16
"""Where a tally has a byte for each operation: 1 if it is one of a child process."""


class FileOperations:
    """Count the operations below a directory, and let a fault strike them."""

    def __init__(
        self,
        root: Path,
        fault: Fault | None = None,
        *,
        after: Callable[[str, tuple[str, ...]], None] = lambda *_: None,
    ) -> None:
        """Prepare the layer.

        Args:
            root: a directory; operations elsewhere are left alone.
            fault: what happens to one or more operations; None to count only.
            after: called with the kind and the paths of each operation that has succeeded, without
                those of child processes.
        """
        self._root = os.path.realpath(root) + os.sep
        self._fault = fault
        self._after = after
        self._lock = threading.RLock()
        self._patches = ExitStack()
        self._tally = Tally()
        self._is_child = False

    @classmethod
    def of_parent(cls) -> FileOperations:
        """Return the layer of a child process: it goes on with the numbers of its parent."""
        given = json.loads(os.environ[VARIABLE])
        fault = _FAULTS[given["kind"]](**given["fault"]) if given["kind"] else None
        operations = cls(Path(given["root"]), fault)
        operations._tally.close()
        operations._tally = Tally(given["tally"])
        operations._is_child = True
        return operations

    @property
    def count(self) -> int:
        """Number of operations."""
        return self._tally.operations

    @property
    def numbers_in_children(self) -> list[int]:
        """Numbers of the operations in child processes."""
        return self._tally.in_children

    @property
    def fired(self) -> bool:
        """True if the fault has struck."""
        return self._tally.strikes > 0

    def __enter__(self) -> FileOperations:
        given = {
            "root": self._root,
            "kind": type(self._fault).__name__ if self._fault else "",
            "fault": asdict(self._fault) if self._fault else {},
            "tally": self._tally.path,
        }
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _REPOSITORY]))
        environment = {VARIABLE: json.dumps(given), "PYTHONPATH": path}
        self._patches.enter_context(mock.patch.dict(os.environ, environment))
        command = children.python_command
        self._patch(children, "python_command", partial(command, "tests.faults.child"))
        for name, kind, places in _FUNCTIONS:
            self._patch(os, name, self._function(getattr(os, name), kind, places))
        self._patch(os, "open", self._os_open(os.open))
        opened = self._open(io.open)
        self._patch(io, "open", opened)
        self._patch(builtins, "open", opened)
        flock = fcntl.flock
        locked = self._function(flock, "lock", (0,))

        def lock_or_unlock(handle: Any, how: int) -> None:
            # A lock can always be released.
            (flock if how & fcntl.LOCK_UN else locked)(handle, how)

        self._patch(fcntl, "flock", lock_or_unlock)
        # renameat2 is called through ctypes; it reports errors as False.
        exchange = self._function(scratch._exchange, "exchange", (0, 1))
        self._patch(scratch, "_exchange", _false_on_error(exchange))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        self.close()

    def close(self) -> None:
        """Count the operations of no more processes."""
        self._tally.close()

    def _patch(self, module: Any, name: str, function: Any) -> None:
        self._patches.enter_context(mock.patch.object(module, name, function))

    def before(
        self, kind: str, paths: tuple[str, ...], act: Callable[[], object] = lambda: None
    ) -> bool:
        """Let the fault strike an operation; return True if it is below the root."""
        if not any((path + os.sep).startswith(self._root) for path in paths):
            return False
        with self._lock:
            number = self._tally.count(is_child=self._is_child)
            if self._fault is not None:
                try:
                    self._fault.strike(number, kind, act)
                except OSError as error:
                    self._tally.count_strike()
                    # A write or a sync by a descriptor has no path to report.
                    if kind in ("write", "fsync", "truncate"):
                        raise
                    raise OSError(error.errno, error.strerror, *_named(paths)) from None
        return True

    def done(self, kind: str, paths: tuple[str, ...]) -> None:
        """Report an operation that has succeeded."""
        with self._lock:
            self._after(kind, paths)

    def _function(self, real: Any, kind: str, places: tuple[int, ...]) -> Any:
        def function(*arguments: Any, **options: Any) -> Any:
            if len(arguments) <= max(places):  # the working directory is listed
                return real(*arguments, **options)
            base = options.get("dir_fd") or options.get("src_dir_fd")
            paths = tuple(_absolute(arguments[place], base) for place in places)
            if not self.before(kind, paths, lambda: _half(kind, arguments)):
                return real(*arguments, **options)
            found = real(*arguments, **options)
            self.done(kind, paths)
            return found

        return function

    def _os_open(self, real: Any) -> Any:
        def function(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            kind = "create" if flags & (os.O_CREAT | os.O_TRUNC) else "read"
            paths = (_absolute(path, dir_fd),)
            if not self.before(kind, paths):
                return int(real(path, flags, mode, dir_fd=dir_fd))
            found = int(real(path, flags, mode, dir_fd=dir_fd))
            self.done(kind, paths)
            return found

        return function

    def _open(self, real: Any) -> Any:
        def function(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            whole = (mode, buffering, encoding, errors, newline, closefd, opener)
            paths = (_absolute(file, None),)
            writes = bool(set(mode) & set("wax+"))
            if isinstance(file, int):
                known = (paths[0] + os.sep).startswith(self._root)
            else:
                known = self.before("create" if writes else "read", paths)
            if not known or not writes:
                return real(file, *whole)
            raw = _FileIO(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)
            self.done("create", paths)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

        return function


class _FileIO(io.FileIO):
    """A file whose writes are operations."""

    def __init__(
        self, operations: FileOperations, file: Any, mode: str, closefd: bool, opener: Any
    ) -> None:
        super().__init__(file, mode, closefd, opener)
        self._operations = operations

    def write(self, content: Any) -> int:
        paths = (_absolute(self.fileno(), None),)
        half = memoryview(content).cast("B")
        write = super().write
        self._operations.before("write", paths, lambda: write(half[: len(half) // 2]))
        found = write(content)
        self._operations.done("write", paths)
        return found

    def truncate(self, size: int | None = None) -> int:
        paths = (_absolute(self.fileno(), None),)
        self._operations.before("truncate", paths)
        found = super().truncate(size)
        self._operations.done("truncate", paths)
        return found


_FUNCTIONS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("write", "write", (0,)),
    ("sendfile", "write", (0,)),
    ("copy_file_range", "write", (1,)),
    ("fsync", "fsync", (0,)),
    ("truncate", "truncate", (0,)),
    ("ftruncate", "truncate", (0,)),
    ("rename", "rename", (0, 1)),
    ("replace", "rename", (0, 1)),
    ("link", "link", (0, 1)),
    ("symlink", "symlink", (1,)),
    ("unlink", "unlink", (0,)),
    ("remove", "unlink", (0,)),
    ("mkdir", "mkdir", (0,)),
    ("rmdir", "rmdir", (0,)),
    ("utime", "attributes", (0,)),
    ("chmod", "attributes", (0,)),
    ("listdir", "list", (0,)),
    ("scandir", "list", (0,)),
)
"""(function of os, kind of operation, positions of its paths or descriptors)."""


def _absolute(path: Any, base: int | None) -> str:
    """Return the absolute path of a path or a descriptor, without following links."""
    if hasattr(path, "fileno"):
        path = path.fileno()
    if isinstance(path, int):
        return _readlink(f"/proc/self/fd/{path}")
    text = os.fsdecode(path)
    if base is not None and not text.startswith(os.sep):
        text = f"{_readlink(f'/proc/self/fd/{base}')}/{text}"
    return os.path.abspath(text)  # noqa: PTH100  links are not followed


_readlink = os.readlink


def _half(kind: str, arguments: tuple[Any, ...]) -> None:
    """Copy nothing: a copy in the kernel may stop before its first byte."""


def _named(paths: tuple[str, ...]) -> tuple[Any, ...]:
    return (paths[0],) if len(paths) == 1 else (paths[0], None, paths[1])


def _false_on_error(function: Any) -> Any:
    def exchange(*arguments: Any) -> bool:
        try:
            return bool(function(*arguments))
        except OSError:
            return False

    return exchange
