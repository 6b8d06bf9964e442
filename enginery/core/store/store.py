"""The store of finished artifacts, engines and graphs, by fingerprint, under `$ENGINERY_HOME`.

    store = Store()
    artifact, built = store.obtain(ARTIFACTS, fingerprint, "minilm", lambda out: run(config, out))

Processes that need the same entry at the same time build it once. Files that several entries share
by hard links (an engine's plan is also in the artifacts that contain the engine) are counted once.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import Timeout

from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.manifest import REPORTS
from enginery.core.errors import ArtifactError, EngineryError, os_errors_as
from enginery.core.home import REMEDY, enginery_home, file_lock, names_made, note_made
from enginery.core.paths import list_directory, list_tree
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import final_name, remove_leftovers
from enginery.core.store.entries import (
    ARTIFACTS,
    ENGINES,
    ENTRY_TYPES,
    GRAPHS,
    Content,
    EntryType,
    Inode,
    StoreEntry,
)

__all__ = ["ARTIFACTS", "ENGINES", "GRAPHS", "EntryType", "Store", "StoreEntry"]

_KEY_DIGITS = 16
_MOST_CHANGES = 4
"""Fields by which the nearest earlier entry may differ; with more it is of something else."""
_MAX_AGE_SECONDS = 30 * 24 * 3600
_LOGS = "logs"
_MAX_LOG_BYTES = 100_000_000
_ENTRY_NAME = re.compile(rf"[a-z][a-z-]*-.+-[0-9a-f]{{{_KEY_DIGITS}}}")
"""The form of an entry's name: stage, readable name, key."""
_NAME_LENGTH = 64  # file systems allow 255 with the stage, the key and a staging prefix


@dataclass(frozen=True)
class Store:
    """The directory of finished artifacts, engines and optimized graphs."""

    home: Path = field(default_factory=enginery_home)

    @property
    def artifacts(self) -> Path:
        return self.home / ARTIFACTS.folder

    @property
    def engines(self) -> Path:
        return self.home / ENGINES.folder

    def path_for(self, kind: EntryType[Content], fingerprint: Fingerprint, name: str) -> Path:
        """Return the path of the entry with this fingerprint, which need not exist yet."""
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", name)[:_NAME_LENGTH].strip("-.") or "model"
        directory = f"{fingerprint.stage}-{readable}-{fingerprint.key[:_KEY_DIGITS]}"
        return self.home / kind.folder / directory

    def find(self, kind: EntryType[Content], fingerprint: Fingerprint, name: str) -> Content | None:
        """Return the verified entry with this fingerprint; None if it is missing or damaged."""
        path = self.path_for(kind, fingerprint, name)
        try:
            if not path.is_dir():
                return None
            content = kind.open(path)
        except (ArtifactError, OSError):
            return None
        if fingerprint not in kind.provenance(content):
            return None
        with suppress(OSError):  # the store may be shared read-only
            os.utime(path)  # prune() removes the least recently used entries
        return content

    def obtain(
        self,
        kind: EntryType[Content],
        fingerprint: Fingerprint,
        name: str,
        build: Callable[[Path], Content],
        *,
        force: bool = False,
        progress: Progress = SILENT,
    ) -> tuple[Content, bool]:
        """Return the entry with this fingerprint, and True if it was built now.

        Only one process builds an entry; others that need it wait and take the result. An entry
        that exists is taken without a lock, which a store that can only be read does not have.

        Args:
            kind: type of the entry.
            fingerprint: its fingerprint.
            name: readable part of the directory's name.
            build: builds the entry at the given path.
            force: build even if the entry exists.
            progress: receives the reason for building.

        Raises:
            EngineryError: the store cannot be read or written, or `build` failed.
        """
        path = self.path_for(kind, fingerprint, name)
        remove_leftovers(path.parent, path.name)
        content = None if force else self.find(kind, fingerprint, name)
        if content is None:
            with self._errors(), self._locked(path.name, progress):
                content = None if force else self.find(kind, fingerprint, name)
                if content is None:
                    reason = self._reason(kind, fingerprint, path, force=force)
                    progress.say(f"{fingerprint.stage}: {reason}")
                    _remove_damaged(path, kind)
                    note_made(path, self.home)
                    return build(path), True
        progress.say(f"{fingerprint.stage}: nothing to do, {path.name} is up to date")
        return content, False

    def entries(self) -> list[StoreEntry]:
        """Return all entries, the most recently used first.

        Directories that the store did not make are left out.
        """
        return [entry for entry in self._read_entries() if entry.is_own]

    def foreign(self) -> list[Path]:
        """Return the directories beside the entries that the store is not known to have made."""
        return sorted(entry.path for entry in self._read_entries() if not entry.is_own)

    def _read_entries(self) -> list[StoreEntry]:
        with self._errors():
            names = names_made(self.home)
            read_entries = [
                _entry(path, kind, is_listed=f"{kind.folder}/{path.name}" in names)
                for kind in ENTRY_TYPES
                for path in _directories(self.home / kind.folder)
            ]
        present = [entry for entry in read_entries if entry]
        return sorted(present, key=lambda entry: entry.used, reverse=True)

    def size_bytes(self) -> int:
        """Return the disk space used by the store, in bytes, including leftovers of killed runs."""
        roots = (self.home / kind.folder for kind in ENTRY_TYPES)
        with self._errors():
            return sum({i: size for root in roots for i, size in _files(root).items()}.values())

    def prune(
        self, *, max_size_bytes: int = 0, on_removed: Callable[[Path], object] = lambda _: None
    ) -> list[StoreEntry]:
        """Remove damaged entries and leftovers, then the least recently used; return the removed.

        Entries that another process is building are kept. Old logs are removed, too.
        What the store did not make is kept, and so is what is behind a link.

        Args:
            max_size_bytes: size of the store afterwards, at most; 0 empties it.
            on_removed: called with each other file or directory that is removed.
        """
        removed = []
        roots = {kind.folder: self.home / kind.folder for kind in ENTRY_TYPES}
        roots = {folder: root for folder, root in roots.items() if not root.is_symlink()}
        entries = [entry for entry in self.entries() if entry.kind in roots]
        holders = Counter(inode for entry in entries for inode in entry.files)
        size_bytes = sum({i: size for entry in entries for i, size in entry.files.items()}.values())
        for entry in reversed(entries):
            if (entry.problem or size_bytes > max_size_bytes) and self._remove(entry):
                holders.subtract(entry.files.keys())
                size_bytes -= sum(size for i, size in entry.files.items() if not holders[i])
                removed.append(entry)
        with self._errors():
            # A killed run may also have left a manifest or a report that it was writing.
            for entry in self.entries():
                if entry.kind in roots:
                    for folder in (entry.path, entry.path / REPORTS):
                        remove_leftovers(folder, on_removed=on_removed)
            for root in roots.values():
                for name in {final_name(path) for path in list_directory(root)}:
                    if _ENTRY_NAME.fullmatch(name):
                        remove_leftovers(root, name, on_removed)
            names = names_made(self.home)
            logs = self.home / _LOGS
            if not logs.is_symlink():
                files = [
                    path
                    for path in list_directory(logs)
                    if f"{_LOGS}/{path.name}" in names and not path.is_symlink()
                ]
                _remove_oldest(files, _MAX_LOG_BYTES, on_removed)
        return removed

    def _remove(self, entry: StoreEntry) -> bool:
        """Remove an entry and return True, unless another process is building it, or has."""
        (kind,) = (kind for kind in ENTRY_TYPES if kind.folder == entry.kind)
        with self._errors():
            try:
                with file_lock(entry.path.name, home=self.home, timeout_seconds=0):
                    present = _entry(entry.path, kind, is_listed=True)
                    if entry.problem and present and not present.problem:
                        return False
                    shutil.rmtree(entry.path, ignore_errors=True)
            except Timeout:  # an OSError, too
                return False
            return not entry.path.exists()

    @contextmanager
    def _locked(self, name: str, progress: Progress) -> Iterator[None]:
        """Hold the lock of an entry."""
        lock = file_lock(name, home=self.home)
        try:
            acquired = lock.acquire(timeout=0)
        except Timeout:
            progress.say(f"waiting: another process is building {name}")
            acquired = lock.acquire()
        with acquired:
            yield

    def _errors(self) -> AbstractContextManager[None]:
        """Raise an EngineryError for an OSError."""
        return os_errors_as(EngineryError, f"the store {self.home} cannot be used", do=REMEDY)

    def _reason(
        self, kind: EntryType[Content], fingerprint: Fingerprint, path: Path, *, force: bool
    ) -> str:
        """Return why an entry is built: the fields that differ from the nearest earlier one."""
        if force:
            return "rebuilding (--force)"
        if path.exists():
            return f"rebuilding: {path.name} is damaged"
        changes = []
        for other in _directories(self.home / kind.folder):
            with suppress(ArtifactError, OSError):
                earlier = kind.provenance(kind.open(other))[-1]
                if earlier.stage == fingerprint.stage and kind.is_earlier_version(
                    fingerprint, earlier
                ):
                    changes.append(fingerprint.changes(earlier.fields))
        nearest = min(changes, key=len, default=[])
        if not 1 <= len(nearest) <= _MOST_CHANGES:
            return "building, not in the store yet"
        return f"rebuilding: {'; '.join(nearest)}"


def _directories(root: Path) -> list[Path]:
    """Return the finished entries; those being built have hidden names."""
    return [
        path
        for path in list_directory(root)
        if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
    ]


def _remove_damaged(path: Path, kind: EntryType[Content]) -> None:
    """Remove an entry that does not open: a stage overwrites artifacts only."""
    try:
        kind.open(path)
    except (ArtifactError, OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _remove_oldest(
    paths: Iterable[Path], max_bytes: int, on_removed: Callable[[Path], object]
) -> None:
    """Remove files that were written long ago, then the oldest until the rest fits."""
    files = [path for path in paths if path.is_file()]
    stats = {path: path.stat() for path in files}
    size_bytes = sum(stat.st_size for stat in stats.values())
    for path in sorted(files, key=lambda path: stats[path].st_mtime):
        if size_bytes <= max_bytes and time.time() - stats[path].st_mtime < _MAX_AGE_SECONDS:
            break
        path.unlink(missing_ok=True)
        on_removed(path)
        size_bytes -= stats[path].st_size


def _files(directory: Path) -> dict[Inode, int]:
    """Return the size of every file below; raise FileNotFoundError if one was just removed."""
    stats = [path.stat() for path in list_tree(directory) if path.is_file()]
    return {(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}


def _entry(path: Path, kind: EntryType[Any], *, is_listed: bool) -> StoreEntry | None:
    """Return the entry at `path`; None if another process has just removed it.

    Where the list of what was made is damaged, an entry is known by the key in its name.
    """
    try:
        files = _files(path)
        used = path.stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        return StoreEntry(path, kind.folder, None, problem, {}, 0.0, is_own=is_listed)
    try:
        content = kind.open(path)
    except (ArtifactError, OSError) as error:
        message = getattr(error, "message", "") or f"{path}: {getattr(error, 'strerror', error)}"
        return StoreEntry(path, kind.folder, None, message, files, used, is_own=is_listed)
    is_own = is_listed or any(
        path.name.startswith(f"{key.stage}-") and path.name.endswith(f"-{key.key[:_KEY_DIGITS]}")
        for key in kind.provenance(content)
    )
    return StoreEntry(path, kind.folder, content, "", files, used, is_own=is_own)
