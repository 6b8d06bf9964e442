"""Record what an operation does to a tree of files, and build the trees a power failure may leave.

    recorder = Recorder(root)
    with FileOperations(root, after=recorder.record):
        run()
    for tree in recorder.trees(length):
        tree.write(root)

Until a file is synced, its content may be missing, cut off or outdated. Until a directory is
synced, each change of a name in it may be missing, whatever happened to later changes. A rename or
an exchange of two names is one change: it happens or it does not. That is all that POSIX promises;
most file systems promise more.
"""

from __future__ import annotations

import io
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_scandir = os.scandir  # the real one: `FileOperations` replaces it while an operation is recorded
ROOT = 0
"""The identifier of the root directory."""


@dataclass(frozen=True)
class Content:
    """A file has a content and a modification time; a link has a target."""

    file: int
    content: bytes
    mtime_ns: int
    is_link: bool = False


@dataclass(frozen=True)
class Names:
    """Names in one or two directories were given to files or directories, or taken from them."""

    changes: tuple[tuple[int, str, int | None], ...]
    """(directory, name, what has it now)."""


@dataclass(frozen=True)
class Sync:
    """A file or a directory was synced."""

    what: int


Event = Content | Names | Sync


class Recorder:
    """The events of an operation, and the tree before it."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._ids: dict[tuple[int, int], int] = {}
        self._times: dict[int, tuple[int, int, int]] = {}
        self._contents: dict[int, Content] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._next = ROOT + 1
        self.directories = {ROOT}
        self.events: list[Event] = []
        self._compare(set(), is_rename=False)
        self.start, self.events = self.events, []

    def record(self, kind: str, paths: tuple[str, ...]) -> None:
        """Append the events of an operation that has succeeded."""
        if kind in ("read", "list", "lock"):
            return
        self._compare(set(paths), is_rename=kind in ("rename", "exchange"))
        if kind == "fsync" and (found := self._id_of(paths[0])) is not None:
            self.events.append(Sync(found))

    def _id_of(self, path: str) -> int | None:
        if path == self._root:
            return ROOT
        try:
            stat = os.lstat(path)
        except FileNotFoundError:
            return None
        return self._ids.get((stat.st_dev, stat.st_ino))

    def _compare(self, touched: set[str], *, is_rename: bool) -> None:
        """Append the difference between the tree and its last known state."""
        names: dict[int, dict[str, int]] = {}
        ids: dict[tuple[int, int], int] = {}
        contents: list[Event] = []
        todo = [(ROOT, self._root)]
        while todo:
            directory, place = todo.pop()
            names[directory] = {}
            with _scandir(place) as entries:
                for entry in entries:
                    stat = entry.stat(follow_symlinks=False)
                    key = (stat.st_dev, stat.st_ino)
                    known = self._ids.get(key)
                    if known is None:
                        known = ids.get(key, self._next)
                        self._next = max(self._next, known + 1)
                    ids[key] = names[directory][entry.name] = known
                    if entry.is_dir(follow_symlinks=False):
                        self.directories.add(known)
                        todo.append((known, entry.path))
                        continue
                    times = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
                    if self._times.get(known) == times and entry.path not in touched:
                        continue
                    self._times[known] = times
                    content = Content(known, _read(entry), stat.st_mtime_ns, entry.is_symlink())
                    if self._contents.get(known) != content:
                        self._contents[known] = content
                        contents.append(content)
        changes = [
            (directory, name, names.get(directory, {}).get(name))
            for directory in {**self._names, **names}
            for name in {**self._names.get(directory, {}), **names.get(directory, {})}
            if self._names.get(directory, {}).get(name) != names.get(directory, {}).get(name)
        ]
        if is_rename:
            self.events += [Names(tuple(changes))] if changes else []
        else:
            self.events += [Names((change,)) for change in changes]
        self.events += contents
        # The file system gives the number of a removed file to a new one.
        self._ids, self._names = ids, names

    def trees(self, length: int, *, seed: int = 0) -> Iterator[Tree]:
        """Yield trees that a power failure after this many events may leave.

        With n changes of names that were not synced there are 2**n: these are those in which none
        or all have happened, all but one or only one of the last eight, and five drawn at random.
        """
        events = self.events[:length]
        synced = [
            index
            for index, event in enumerate(events)
            if isinstance(event, Names)
            and all(Sync(place) in events[index:] for place, _, _ in event.changes)
        ]
        open_ = [
            index
            for index, event in enumerate(events)
            if isinstance(event, Names) and index not in synced
        ]
        draw = random.Random(seed * 100_003 + length)
        chosen = [set(open_), set()]
        chosen += [set(open_) - {index} for index in open_[-8:]]
        chosen += [{index} for index in open_[-8:]]
        chosen += [{index for index in open_ if draw.random() < 0.5} for _ in range(5)]
        for happened in chosen:
            for lost in ("nothing", "half", "all", "since the first write"):
                yield self._tree(events, {*synced, *happened}, lost)

    def _tree(self, events: list[Event], happened: set[int], lost: str) -> Tree:
        tree = Tree(self.directories)
        for event in self.start:
            tree.apply(event)
        unsynced: dict[int, list[Content]] = {}
        for index, event in enumerate(events):
            if isinstance(event, Names) and index in happened:
                tree.apply(event)
            elif isinstance(event, Content):
                if event.is_link:
                    tree.apply(event)
                else:
                    unsynced.setdefault(event.file, []).append(event)
            elif isinstance(event, Sync):
                for content in unsynced.pop(event.what, []):
                    tree.apply(content)
        for contents in unsynced.values():
            last = contents[-1]
            if lost == "nothing":
                tree.apply(last)
            elif lost == "half":
                half = last.content[: len(last.content) // 2]
                tree.apply(Content(last.file, half, last.mtime_ns))
            elif lost == "since the first write":
                tree.apply(contents[0])
        return tree


def _read(entry: os.DirEntry[str]) -> bytes:
    """Return the content of a file or the target of a link."""
    if entry.is_symlink():
        return os.fsencode(Path(entry.path).readlink())
    with io.FileIO(entry.path) as stream:
        return stream.readall()


@dataclass
class Tree:
    """Files and directories by identifier, as they are on the disk."""

    directories: set[int]
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    files: dict[int, Content] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Let an event happen."""
        if isinstance(event, Content):
            self.files[event.file] = event
        elif isinstance(event, Names):
            for directory, name, what in event.changes:
                if what is None:
                    self.names.setdefault(directory, {}).pop(name, None)
                else:
                    self.names.setdefault(directory, {})[name] = what

    def listing(self) -> tuple[tuple[str, bytes | None], ...]:
        """Return the path and the content of every file; None as the content of a directory."""
        found: list[tuple[str, bytes | None]] = []
        todo = [(ROOT, "")]
        while todo:
            directory, place = todo.pop()
            for name, what in self.names.get(directory, {}).items():
                path = f"{place}{name}"
                if what in self.directories:
                    found.append((path, None))
                    todo.append((what, f"{path}/"))
                else:
                    found.append((path, self.files[what].content if what in self.files else b""))
        return tuple(sorted(found))

    def write(self, root: Path) -> None:
        """Replace the tree at `root` by this one."""
        shutil.rmtree(root)
        root.mkdir()
        todo = [(ROOT, root)]
        while todo:
            directory, place = todo.pop()
            for name, what in self.names.get(directory, {}).items():
                path = place / name
                file = self.files.get(what)
                if what in self.directories:
                    path.mkdir()
                    todo.append((what, path))
                elif file is not None and file.is_link:
                    path.symlink_to(os.fsdecode(file.content))
                else:
                    path.write_bytes(file.content if file else b"")
                    if file:
                        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
