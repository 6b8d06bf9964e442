r"""Notice that an input was replaced or written while a stage read it.

A stage hashes its inputs for its cache key, and reads them again to work with them. What it makes
belongs to the key only if the files were the same all the time.

>>> file = tmp_path / "reviews.csv"
>>> _ = file.write_text("text")
>>> inputs = InputFiles()
>>> with inputs.recording():
...     note_input(file)  # `sha256_of` does it for every file that it hashes
>>> with inputs.unchanged():
...     _ = file.write_text("text\nThe engine is warm.\n")
Traceback (most recent call last):
    ...
enginery.core.errors.InputError: .../reviews.csv changed while it was read. Run the command again.

Nothing is hashed twice: a file is the same if its size, inode and times are. Programs cannot set
ctime, and renaming a file or a folder sets it, so that a file or folder that was moved away and
back is noticed, too.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from enginery.core.errors import InputError, os_errors_as

_REMEDY = "Run the command again."


@dataclass(frozen=True, slots=True)
class _State:
    """A file, a folder or a link at one time."""

    kind: int
    size_bytes: int
    inode: int
    links: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: str) -> _State:
        status = os.lstat(path)
        return cls(
            stat.S_IFMT(status.st_mode),
            status.st_size,
            status.st_ino,
            status.st_nlink,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


@dataclass
class InputFiles:
    """The files that a key was computed from, as they were before they were read."""

    _states: dict[str, _State] = field(default_factory=dict)
    """Path of a file, or of a folder or a link on the way to it -> its state."""
    _digests: dict[str, str] = field(default_factory=dict)
    """Path of a hashed file -> its sha256."""
    _listings: dict[str, tuple[Callable[[], Iterable[str]], frozenset[str]]] = field(
        default_factory=dict
    )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add every file that `sha256_of` hashes in the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check the files at the end of the block.

        Raises:
            InputError: a file was changed, replaced or removed, or was so for a time; or it cannot
                be looked at.
        """
        with self.explained():
            yield
        self.check()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Check the files if the block fails, because a change may be the reason.

        Raises:
            InputError: see `unchanged`.
        """
        try:
            yield
        except Exception:
            with suppress(OSError):  # the block's own error says more
                self._compare()
            raise

    def check(self, *, first: int | None = None) -> None:
        """Raise InputError if a file was changed, replaced or removed since it was added.

        Args:
            first: look only at so many files, in the order in which they were added, and not for
                new ones.
        """
        with os_errors_as(InputError, "what was read cannot be looked at again"):
            self._compare(first)

    def _compare(self, first: int | None = None) -> None:
        for path, before in islice(self._states.items(), first):
            try:
                same = self._is_same(path, before, _State.of(path))
            except (FileNotFoundError, NotADirectoryError):
                raise InputError(f"{path} was removed while it was read.", do=_REMEDY) from None
            if not same:
                raise InputError(f"{path} changed while it was read.", do=_REMEDY)
        if first is None:
            for folder, (list_names, names) in self._listings.items():
                if changed := names ^ set(list_names()):
                    raise InputError(
                        f"{folder} changed while it was read: {min(changed)} came or went.",
                        do=_REMEDY,
                    )

    def add_listing(self, folder: Path, list_names: Callable[[], Iterable[str]]) -> None:
        """Add the names of the files that count in a folder; they are listed again by `check`."""
        self._listings.setdefault(str(folder), (list_names, frozenset(list_names())))

    def add(self, path: Path) -> None:
        """Add a file, and the folders and links that lead to it, unless they are there already."""
        paths = [path.absolute()]
        while paths:
            leaf = paths.pop()
            if str(leaf) in self._states:
                continue  # as it was when it was added
            for part in (*reversed(leaf.parents), leaf):
                if str(part) not in self._states:
                    state = self._states[str(part)] = _State.of(str(part))
                    if stat.S_ISLNK(state.kind):
                        paths.append(part.parent / part.readlink())

    def add_digest(self, path: Path, sha256: str) -> None:
        """Add the digest of a file that `add` has added."""
        for name in {str(path.absolute()), str(path.resolve())}:
            self._digests.setdefault(name, sha256)

    def _is_same(self, path: str, before: _State, now: _State) -> bool:
        if now.kind != before.kind:
            return False
        if stat.S_ISDIR(before.kind):
            # Names that come and go change both times, and are none of this: of a folder only its
            # own name matters, because another folder may have had it.
            renamed = now.mtime_ns == before.mtime_ns and now.ctime_ns != before.ctime_ns
            return not renamed or _is_on_overlay(path)
        if (now.size_bytes, now.mtime_ns) != (before.size_bytes, before.mtime_ns):
            return False
        if now.inode == before.inode:
            # A new hard link, as `link_or_copy` makes them, changes ctime and not the content.
            return now.ctime_ns == before.ctime_ns or now.links != before.links
        # Some network file systems have no constant inodes.
        return now.ctime_ns == before.ctime_ns and self._has_digest(path)

    def _has_digest(self, path: str) -> bool:
        if path not in self._digests:
            return False
        with Path(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == self._digests[path]


def _is_on_overlay(folder: str) -> bool:
    """Return True if a folder is on an overlay file system, as the root of a container is.

    Writing anywhere below such a folder copies it to the upper layer, which sets its ctime as a
    rename does, and keeps its mtime.
    """
    device = os.lstat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        for line in mounts.splitlines():
            mount, _, file_system = line.partition(" - ")
            if mount.split()[2] == number:
                return file_system.startswith("overlay ")
    return False


_current: ContextVar[InputFiles | None] = ContextVar("inputs", default=None)


def recorded_inputs() -> InputFiles:
    """Return the files of the `recording` block that this is called in; none outside of it."""
    return _current.get() or InputFiles()


def note_input(path: Path) -> None:
    """Add a file to those of the `recording` block, before it is read; it is not hashed yet.

    Does nothing outside of such a block, and for what does not exist, which the reader reports.
    """
    inputs = _current.get()
    if inputs is not None and path.is_file():
        inputs.add(path)


def note_listing(folder: Path, list_names: Callable[[], Iterable[str]]) -> None:
    """Add the names of the files that count in a folder to the `recording` block."""
    inputs = _current.get()
    if inputs is not None:
        inputs.add_listing(folder, list_names)


def note_digest(path: Path, sha256: str) -> None:
    """Add the digest of a file to those of the `recording` block."""
    inputs = _current.get()
    if inputs is not None:
        inputs.add_digest(path, sha256)
