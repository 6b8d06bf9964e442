"""Write atomically: a directory or a file appears complete or not at all.

>>> with staging(tmp_path / "out") as directory:
...     _ = (directory / "model.onnx").write_bytes(b"graph")
>>> [path.name for path in (tmp_path / "out").iterdir()]
['model.onnx']

A process holds a lock on each staging directory that it creates. The kernel releases the lock when
the process ends, even by SIGKILL. A staging directory without a lock was left by a killed run, and
the next run removes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from enginery.core.errors import ArtifactError
from enginery.core.json_file import load_json, read_document

MANIFEST = "manifest.json"
CARD = "README.md"
"""The model card that `publish` adds to an artifact; not a file of the model."""
LISTING = "reports/publication.json"
"""The list of all files, with their hashes, that `publish` adds to an artifact."""
STAGING_PREFIX = ".tmp-"
# linux/fs.h and fcntl.h
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_LEFTOVER = re.compile(r"^\.tmp-(?P<target>.+)-[0-9a-f]{12}$")


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """Yield an empty directory that is renamed to `out` at the end of the block.

    If the block raises, or the process is killed, nothing is left that looks finished. If `out` is
    a symbolic link, the directory that it points to is replaced and the link stays.

    Raises:
        ArtifactError: `out` exists and is not an artifact (it is never overwritten then), or its
            parent cannot be written.
    """
    check_overwritable(out)
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        directory, handle = _create_locked(out)
    except OSError as error:
        raise ArtifactError(
            f"{out} cannot be written: {error.strerror}: {error.filename}.",
            do="Choose another --out.",
        ) from error
    try:
        remove_leftovers(out.parent, out.name)
        yield directory
        _sync(directory)
        old = _temporary_sibling(out)
        replace_directory(directory, out, old=old)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(handle)


def check_overwritable(out: Path) -> None:
    """Raise ArtifactError if `out` is not an artifact, or has files that do not belong to it."""
    if not out.exists():
        return
    if _is_manifest(out / MANIFEST):
        if others := _untracked_files(out):
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise ArtifactError(
                f"{out} is an artifact with files that do not belong to it and would be lost: "
                f"{', '.join(others[:3])}{more}.",
                do="Move them elsewhere, or choose another --out.",
            )
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    raise ArtifactError(
        f"{out} exists and is not an enginery artifact, so it is not overwritten.",
        do="Choose another --out, or remove it yourself.",
    )


def remove_leftovers(parent: Path, target: str = "") -> None:
    """Remove the staging directories in `parent` that no process holds a lock on.

    Args:
        parent: directory to look in.
        target: name of the final directory; empty for any.
    """
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _LEFTOVER.match(path.name)
        if not match or target not in ("", match["target"]) or not path.is_dir():
            continue
        with suppress(OSError):  # locked, removed meanwhile, or no locks in this file system
            handle = os.open(path, os.O_RDONLY)
            try:
                _lock(handle, wait=False)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def replace_directory(directory: Path, out: Path, *, old: Path) -> None:
    """Rename a directory to `out`; keep the content of an existing `out` under another name.

    If the system can exchange two names, `out` is never missing, and `directory` has the old
    content afterwards. Otherwise `old` has it, and `out` is missing between the two renames.

    Args:
        directory: the new directory, on the same file system.
        out: path of a directory, or of nothing.
        old: unused path on the same file system.

    Raises:
        OSError: a rename failed; `out` is unchanged.
    """
    if not out.exists():
        os.replace(directory, out)
        return
    if _exchange(directory, out):
        return
    os.replace(out, old)
    try:
        os.replace(directory, out)
    except OSError:
        os.replace(old, out)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new one, never a part."""
    fresh = _temporary_sibling(path)
    try:
        with fresh.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _create_locked(out: Path) -> tuple[Path, int]:
    """Create a staging directory; return it with the file descriptor that holds its lock."""
    while True:
        directory = _temporary_sibling(out)
        directory.mkdir()
        handle = os.open(directory, os.O_RDONLY)
        with suppress(OSError):  # without locks, no process removes it either
            _lock(handle, wait=True)
        if directory.is_dir():
            return directory, handle
        os.close(handle)  # another process removed it before it was locked


def _lock(handle: int, *, wait: bool) -> None:
    """Lock a directory; raise OSError if it is locked (unless `wait`) or locks do not work."""
    if sys.platform == "win32":
        raise OSError("a directory cannot be locked on Windows")
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _is_manifest(manifest: Path) -> bool:
    """Return True for an artifact's manifest.json of any version; web apps have such a file too."""
    try:
        found = load_json(manifest, error=ArtifactError)
    except ArtifactError:
        return False
    if not isinstance(found, dict) or not {"source", "graphs", "stages", "files"} <= found.keys():
        return False
    return isinstance(found["files"], dict)


def _untracked_files(artifact: Path) -> list[str]:
    """Return the files of an artifact that are neither in its manifest nor reports."""
    try:
        known = load_json(artifact / MANIFEST, error=ArtifactError)["files"]
    except (ArtifactError, KeyError):
        return []
    names = (path.relative_to(artifact) for path in artifact.rglob("*") if path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if name.as_posix() not in known
        and name.as_posix() not in (MANIFEST, *_published_card(artifact))
        and name.parts[0] != "reports"
        and not name.name.startswith(STAGING_PREFIX)
    )


def _published_card(artifact: Path) -> tuple[str, ...]:
    """Return (CARD,) if the README.md is the unchanged card that `publish` wrote, else ()."""
    try:
        listed = load_json(artifact / LISTING, error=ArtifactError)["files"]
        found = hashlib.sha256(read_document(artifact / CARD)).hexdigest()
        return (CARD,) if listed[CARD]["sha256"] == found else ()
    except (ArtifactError, OSError, KeyError, TypeError):
        return ()


def _sync(directory: Path) -> None:
    """Flush every file, so that the rename cannot reach the disk before the content."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories atomically; return False if the system does not support it."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library older than 2018, or musl
        return False
    here, names = _AT_FDCWD, (os.fsencode(one), os.fsencode(other))
    return bool(renameat2(here, names[0], here, names[1], _RENAME_EXCHANGE) == 0)


def _temporary_sibling(path: Path) -> Path:
    """Return a new hidden name in the same directory, so that a rename to `path` is atomic."""
    return path.parent / f"{STAGING_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}"
