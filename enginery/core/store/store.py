"""Finished artifacts, engines and graphs by fingerprint, under `$ENGINERY_HOME`.

Takes a kind, a fingerprint and the function that builds; leaves one whole directory, built once
however many processes ask for it at the same time.

    >>> build = lambda out: run(source, config, out)
    >>> artifact, built = Store().obtain(ARTIFACTS, fingerprint, "minilm", build)

Files that several directories share by hard links, as an engine's plan and the artifacts that it
is in, are counted once.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.staging import remove_leftovers
from enginery.core.errors import ArtifactError
from enginery.core.home import enginery_home, named_lock
from enginery.core.progress import SILENT, Progress
from enginery.core.store.entries import (
    ARTIFACTS,
    ENGINES,
    GRAPHS,
    KINDS,
    AnyKind,
    Finished,
    Inode,
    Kind,
    StoreEntry,
)

__all__ = ["ARTIFACTS", "ENGINES", "GRAPHS", "Kind", "Store", "StoreEntry"]

_KEY_DIGITS = 16
_NAME_LENGTH = 64  # file systems allow 255 with the stage, the key and a staging prefix


class Store:
    """The directory of finished artifacts and engines."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or enginery_home()

    @property
    def artifacts(self) -> Path:
        return self.home / ARTIFACTS.folder

    @property
    def engines(self) -> Path:
        return self.home / ENGINES.folder

    def path_for(self, kind: Kind[Finished], fingerprint: Fingerprint, name: str) -> Path:
        """Where what has this fingerprint is or will be."""
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", name)[:_NAME_LENGTH].strip("-.") or "model"
        directory = f"{fingerprint.stage}-{readable}-{fingerprint.key[:_KEY_DIGITS]}"
        return self.home / kind.folder / directory

    def find(self, kind: Kind[Finished], fingerprint: Fingerprint, name: str) -> Finished | None:
        """What is finished, verified; what is damaged counts as absent."""
        path = self.path_for(kind, fingerprint, name)
        if not path.is_dir():
            return None
        try:
            found = kind.open(path)
        except ArtifactError:
            return None
        if fingerprint not in kind.made_from(found):
            return None
        with suppress(OSError):  # a store that others share read-only still serves
            os.utime(path)  # the mark that pruning goes by
        return found

    def obtain(
        self,
        kind: Kind[Finished],
        fingerprint: Fingerprint,
        name: str,
        build: Callable[[Path], Finished],
        *,
        force: bool = False,
        progress: Progress = SILENT,
    ) -> tuple[Finished, bool]:
        """What has this fingerprint, and whether it was built now.

        One process builds; others that ask for the same wait for it and take what it made.
        """
        path = self.path_for(kind, fingerprint, name)
        with self._lock(path, progress):
            found = None if force else self.find(kind, fingerprint, name)
            if found:
                progress.say(f"{fingerprint.stage}: nothing to do, {path.name} is up to date")
                return found, False
            reason = self._reason(kind, fingerprint, path, force=force)
            progress.say(f"{fingerprint.stage}: {reason}")
            self._discard_damaged(kind, path)
            return build(path), True

    def _discard_damaged(self, kind: Kind[Finished], path: Path) -> None:
        """Clears the place for a build; the store is ours, so what is broken in it may go."""
        if path.is_dir():
            try:
                kind.open(path)
            except ArtifactError:
                shutil.rmtree(path)

    def entries(self) -> list[StoreEntry]:
        """Everything in the store, most recently used first."""
        found = [
            _entry(path, kind) for kind in KINDS for path in _directories(self.home / kind.folder)
        ]
        present = [entry for entry in found if entry]
        return sorted(present, key=lambda entry: entry.used, reverse=True)

    def size_bytes(self) -> int:
        """What the store takes on the disk, the leftovers of killed runs included."""
        roots = (self.home / kind.folder for kind in KINDS)
        return sum({i: size for root in roots for i, size in _files(root).items()}.values())

    def prune(self, *, max_size_bytes: int = 0) -> list[StoreEntry]:
        """Removes what is damaged and what killed runs left, then the least recently used.

        At most `max_size_bytes` is kept, so 0 empties the store. What another process is
        building now is left alone. Returns what was removed.
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
        for kind in KINDS:
            remove_leftovers(self.home / kind.folder)
        return removed

    def _remove(self, path: Path) -> bool:
        """Removes a directory, unless another process is building it anew."""
        try:
            with named_lock(path.name, home=self.home, timeout_seconds=0):
                shutil.rmtree(path, ignore_errors=True)
        except Timeout:
            return False
        return not path.exists()

    def _reason(
        self, kind: Kind[Finished], fingerprint: Fingerprint, path: Path, *, force: bool
    ) -> str:
        """Why this has to be built: the fields that differ from the nearest earlier one."""
        if force:
            return "building anew, as asked (--force)"
        if path.is_dir():
            return f"building anew: {path.name} is damaged"
        changes = []
        for other in _directories(self.home / kind.folder):
            with suppress(ArtifactError):
                earlier = kind.made_from(kind.open(other))[-1]
                if earlier.stage == fingerprint.stage and kind.related(fingerprint, earlier):
                    changes.append(fingerprint.changes(earlier.fields))
        nearest = min(changes, key=len, default=[])
        return (
            f"building anew: {'; '.join(nearest)}" if nearest else "building, not in the store yet"
        )

    @contextmanager
    def _lock(self, path: Path, progress: Progress) -> Iterator[None]:
        lock = named_lock(path.name, home=self.home)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress.say(f"waiting: another process is building {path.name}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _directories(root: Path) -> list[Path]:
    """What is finished below; what is being built has a hidden name."""
    found = root.iterdir() if root.is_dir() else ()
    return [path for path in found if path.is_dir() and not path.name.startswith(".")]


def _files(directory: Path) -> dict[Inode, int]:
    """The size of every file below; raises FileNotFoundError where one has just gone."""
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return {(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}


def _entry(path: Path, kind: AnyKind) -> StoreEntry | None:
    """What lies at `path`; None where another process has just removed it."""
    try:
        files = _files(path)
        used = path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        return StoreEntry(path, kind.folder, kind.open(path), "", files, used)
    except ArtifactError as error:
        return StoreEntry(path, kind.folder, None, error.message, files, used)
