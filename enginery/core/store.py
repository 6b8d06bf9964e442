"""Finished artifacts by fingerprint, under `$ENGINERY_HOME/artifacts`.

Takes a fingerprint and the function that builds; leaves a whole artifact, built once however many
processes ask for it at the same time.

    >>> build = lambda out: run(source, config, out)
    >>> artifact, built = Store().obtain(fingerprint, "minilm", build)
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from enginery.core.artifact import Artifact
from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.fingerprint import Fingerprint
from enginery.core.home import enginery_home
from enginery.core.progress import SILENT, Progress
from enginery.core.staging import remove_leftovers

_KEY_DIGITS = 16
_NAME_LENGTH = 64  # file systems allow 255 with the stage, the key and a staging prefix


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
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", name)[:_NAME_LENGTH].strip("-.") or "model"
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
        with suppress(OSError):  # a store that others share read-only still serves
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
            self._discard_damaged(path)
            return build(path), True

    def _discard_damaged(self, path: Path) -> None:
        """Clears the place for a build; the store is ours, so what is broken in it may go."""
        if path.is_dir() and (entry := _entry(path)) and entry.problem:
            shutil.rmtree(path)

    def entries(self) -> list[StoreEntry]:
        """Everything in the store, most recently used first."""
        found = [
            _entry(path)
            for path in (self.artifacts.iterdir() if self.artifacts.is_dir() else ())
            if path.is_dir() and not path.name.startswith(".")
        ]
        present = [entry for entry in found if entry]
        return sorted(present, key=lambda entry: entry.used, reverse=True)

    def prune(self, *, max_size_bytes: int = 0) -> list[StoreEntry]:
        """Removes damaged artifacts and what killed runs left, then the least recently used.

        At most `max_size_bytes` is kept, so 0 empties the store. What another process is
        building now is left alone. Returns what was removed.
        """
        removed = []
        entries = self.entries()
        kept = sum(entry.size_bytes for entry in entries)
        for entry in reversed(entries):
            if (entry.problem or kept > max_size_bytes) and self._remove(entry.path):
                kept -= entry.size_bytes
                removed.append(entry)
        remove_leftovers(self.artifacts)
        return removed

    def _remove(self, path: Path) -> bool:
        """Removes an artifact, unless another process is building it anew."""
        try:
            with FileLock(self._lock_path(path), timeout=0):
                shutil.rmtree(path, ignore_errors=True)
        except Timeout:
            return False
        return not path.exists()

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
        try:
            locks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineryError(
                f"{self.home} cannot be used as the store: {error.strerror}.",
                do="Set ENGINERY_HOME to a directory that you can write.",
            ) from error
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


def _entry(path: Path) -> StoreEntry | None:
    """What lies at `path`; None where another process has just removed it."""
    try:
        size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        used = path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        return StoreEntry(path, Artifact.open(path), "", size_bytes, used)
    except ArtifactError as error:
        return StoreEntry(path, None, error.message, size_bytes, used)
