"""Finished artifacts by fingerprint, under `$ENGINERY_HOME/artifacts`.

Takes a fingerprint and the function that builds; leaves a whole artifact, built once however many
processes ask for it at the same time.

    >>> artifact, built = Store().obtain(fingerprint, "minilm", lambda out: run(source, config, out))
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from enginery.core.artifact import Artifact, remove_stale_staging
from enginery.core.errors import ArtifactError
from enginery.core.fingerprint import Fingerprint
from enginery.core.home import enginery_home
from enginery.core.progress import SILENT, Progress

_KEY_DIGITS = 16


@dataclass(frozen=True)
class StoreEntry:
    """One directory of the store."""

    path: Path
    artifact: Artifact | None
    problem: str
    """Why it cannot be opened; empty when it can."""
    size_bytes: int
    used: float
    """Seconds since the epoch of the last time it was asked for."""


class Store:
    """The directory of finished artifacts."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or enginery_home()

    @property
    def artifacts(self) -> Path:
        return self.home / "artifacts"

    def path_for(self, fingerprint: Fingerprint, name: str) -> Path:
        """Where the artifact of this fingerprint is or will be."""
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "model"
        return self.artifacts / f"{fingerprint.stage}-{readable}-{fingerprint.key[:_KEY_DIGITS]}"

    def find(self, fingerprint: Fingerprint, name: str) -> Artifact | None:
        """The finished artifact, verified; a damaged one counts as absent."""
        path = self.path_for(fingerprint, name)
        if not path.is_dir():
            return None
        try:
            artifact = Artifact.open(path)
        except ArtifactError:
            return None
        if not any(stage.key == fingerprint.key for stage in artifact.manifest.stages):
            return None
        os.utime(path)  # the mark that pruning goes by
        return artifact

    def obtain(
        self,
        fingerprint: Fingerprint,
        name: str,
        build: Callable[[Path], Artifact],
        *,
        force: bool = False,
        progress: Progress = SILENT,
    ) -> tuple[Artifact, bool]:
        """The artifact of this fingerprint, and whether it was built now.

        One process builds; others that ask for the same wait for it and take what it made.
        """
        path = self.path_for(fingerprint, name)
        with self._lock(path, progress):
            found = None if force else self.find(fingerprint, name)
            if found:
                progress.say(f"{fingerprint.stage}: nothing to do, {path.name} is up to date")
                return found, False
            progress.say(f"{fingerprint.stage}: {self._reason(fingerprint, path, force=force)}")
            remove_stale_staging(path)
            return build(path), True

    def entries(self) -> list[StoreEntry]:
        """Everything in the store, most recently used first."""
        found = [
            _entry(path)
            for path in (self.artifacts.iterdir() if self.artifacts.is_dir() else ())
            if path.is_dir() and not path.name.startswith(".")
        ]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def prune(self, *, max_size_bytes: int = 0) -> list[StoreEntry]:
        """Removes damaged artifacts and what killed runs left, then the least recently used
        until `max_size_bytes` is kept. Returns what was removed."""
        removed = []
        entries = self.entries()
        kept = sum(entry.size_bytes for entry in entries)
        for entry in reversed(entries):
            if entry.problem or kept > max_size_bytes:
                with self._lock(entry.path, SILENT):
                    shutil.rmtree(entry.path)
                kept -= entry.size_bytes
                removed.append(entry)
        for leftover in self.artifacts.glob(".tmp-*"):
            self._remove_leftover(leftover)
        return removed

    def _remove_leftover(self, leftover: Path) -> None:
        """Removes a staging directory unless the process that fills it is alive (holds its lock)."""
        target = leftover.name.removeprefix(".tmp-").rpartition("-")[0]
        try:
            with FileLock(self._lock_path(self.artifacts / target), timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
        except Timeout:
            return

    def _reason(self, fingerprint: Fingerprint, path: Path, *, force: bool) -> str:
        """Why this has to be built: the fields that differ from the nearest earlier artifact."""
        if force:
            return "building anew, as asked (--force)"
        if path.is_dir():
            return f"building anew: {path.name} is damaged"
        changes = [
            fingerprint.changes(stage.fields)
            for entry in self.entries()
            if entry.artifact
            for stage in entry.artifact.manifest.stages[-1:]
            if stage.stage == fingerprint.stage
            and stage.fields.get("model") == fingerprint.fields.get("model")
        ]
        nearest = min(changes, key=len, default=[])
        return (
            f"building anew: {'; '.join(nearest)}" if nearest else "building, not in the store yet"
        )

    def _lock_path(self, path: Path) -> Path:
        locks = self.home / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        return locks / f"{path.name}.lock"

    @contextmanager
    def _lock(self, path: Path, progress: Progress) -> Iterator[None]:
        lock = FileLock(self._lock_path(path))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress.say(f"waiting: another process is building {path.name}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _entry(path: Path) -> StoreEntry:
    size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    used = path.stat().st_mtime
    try:
        return StoreEntry(path, Artifact.open(path), "", size_bytes, used)
    except ArtifactError as error:
        return StoreEntry(path, None, error.message, size_bytes, used)
