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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout

from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.staging import remove_leftovers
from enginery.core.errors import ArtifactError
from enginery.core.home import enginery_home, file_lock
from enginery.core.progress import SILENT, Progress
from enginery.core.store.entries import (
    ARTIFACTS,
    ENGINES,
    ENTRY_TYPES,
    GRAPHS,
    AnyEntryType,
    Content,
    EntryType,
    Inode,
    StoreEntry,
)

__all__ = ["ARTIFACTS", "ENGINES", "GRAPHS", "EntryType", "Store", "StoreEntry"]

_KEY_DIGITS = 16
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
        if not path.is_dir():
            return None
        try:
            found = kind.open(path)
        except ArtifactError:
            return None
        if fingerprint not in kind.provenance(found):
            return None
        with suppress(OSError):  # the store may be shared read-only
            os.utime(path)  # prune() removes the least recently used entries
        return found

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

        Only one process builds an entry; others that need it wait and take the result.

        Args:
            kind: type of the entry.
            fingerprint: its fingerprint.
            name: readable part of the directory's name.
            build: builds the entry at the given path.
            force: build even if the entry exists.
            progress: receives the reason for building.
        """
        path = self.path_for(kind, fingerprint, name)
        lock = file_lock(path.name, home=self.home)
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            progress.say(f"waiting: another process is building {path.name}")
            held = lock.acquire()
        with held:
            found = None if force else self.find(kind, fingerprint, name)
            if found:
                progress.say(f"{fingerprint.stage}: nothing to do, {path.name} is up to date")
                return found, False
            reason = self._reason(kind, fingerprint, path, force=force)
            progress.say(f"{fingerprint.stage}: {reason}")
            if path.is_dir():
                try:
                    kind.open(path)
                except ArtifactError:
                    shutil.rmtree(path)  # a stage refuses to overwrite what is no artifact
            return build(path), True

    def entries(self) -> list[StoreEntry]:
        """Return all entries, the most recently used first."""
        found = [
            _entry(path, kind)
            for kind in ENTRY_TYPES
            for path in _directories(self.home / kind.folder)
        ]
        present = [entry for entry in found if entry]
        return sorted(present, key=lambda entry: entry.used, reverse=True)

    def size_bytes(self) -> int:
        """Return the disk space used by the store, in bytes, including leftovers of killed runs."""
        roots = (self.home / kind.folder for kind in ENTRY_TYPES)
        return sum({i: size for root in roots for i, size in _files(root).items()}.values())

    def prune(self, *, max_size_bytes: int = 0) -> list[StoreEntry]:
        """Remove damaged entries and leftovers, then the least recently used; return the removed.

        Entries that another process is building are kept.

        Args:
            max_size_bytes: size of the store afterwards, at most; 0 empties it.
        """
        removed = []
        entries = self.entries()
        holders = Counter(inode for entry in entries for inode in entry.files)
        kept = sum({i: size for entry in entries for i, size in entry.files.items()}.values())
        for entry in reversed(entries):
            if (entry.problem or kept > max_size_bytes) and self._remove(entry.path):
                holders.subtract(entry.files.keys())
                kept -= sum(size for i, size in entry.files.items() if not holders[i])
                removed.append(entry)
        for kind in ENTRY_TYPES:
            remove_leftovers(self.home / kind.folder)
        return removed

    def _remove(self, path: Path) -> bool:
        """Remove a directory and return True, unless another process is building it."""
        try:
            with file_lock(path.name, home=self.home, timeout_seconds=0):
                shutil.rmtree(path, ignore_errors=True)
        except Timeout:
            return False
        return not path.exists()

    def _reason(
        self, kind: EntryType[Content], fingerprint: Fingerprint, path: Path, *, force: bool
    ) -> str:
        """Return why an entry is built: the fields that differ from the nearest earlier one."""
        if force:
            return "rebuilding (--force)"
        if path.is_dir():
            return f"rebuilding: {path.name} is damaged"
        changes = []
        for other in _directories(self.home / kind.folder):
            with suppress(ArtifactError):
                earlier = kind.provenance(kind.open(other))[-1]
                if earlier.stage == fingerprint.stage and kind.is_earlier_version(
                    fingerprint, earlier
                ):
                    changes.append(fingerprint.changes(earlier.fields))
        nearest = min(changes, key=len, default=[])
        return f"rebuilding: {'; '.join(nearest)}" if nearest else "building, not in the store yet"


def _directories(root: Path) -> list[Path]:
    """Return the finished entries; those being built have hidden names."""
    found = root.iterdir() if root.is_dir() else ()
    return [path for path in found if path.is_dir() and not path.name.startswith(".")]


def _files(directory: Path) -> dict[Inode, int]:
    """Return the size of every file below; raise FileNotFoundError if one was just removed."""
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return {(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}


def _entry(path: Path, kind: AnyEntryType) -> StoreEntry | None:
    """Return the entry at `path`; None if another process has just removed it."""
    try:
        files = _files(path)
        used = path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        return StoreEntry(path, kind.folder, kind.open(path), "", files, used)
    except ArtifactError as error:
        return StoreEntry(path, kind.folder, None, error.message, files, used)
