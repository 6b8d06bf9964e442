"""Written beside, then renamed: a directory or a file appears whole or not at all.

Takes a path; leaves the finished directory there, and nothing else beside it.

    >>> with staging(Path("minilm")) as directory:
    ...     (directory / "model.onnx").write_bytes(graph)

A staging directory is held by a lock on itself. The kernel lets go of it when the process dies,
however it dies: what nobody holds is a leftover, and the next run removes it.
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
"""The model card that publishing adds; no file of the model."""
LISTING = "reports/publication.json"
"""The listing that it leaves of all files."""
STAGING_PREFIX = ".tmp-"
# linux/fs.h and fcntl.h
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_LEFTOVER = re.compile(r"^\.tmp-(?P<target>.+)-[0-9a-f]{12}$")


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """Yields an empty directory beside `out` that becomes `out` when the block ends well.

    When the block raises, or the process is killed, nothing is left that looks finished. Where
    `out` is a link, the directory that it points to is replaced and the link stays.

    Raises:
        ArtifactError: `out` exists and is not an artifact, which is never overwritten; or its
            parent cannot be written.
    """
    check_overwritable(out)
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        directory, handle = _claim(out)
    except OSError as error:
        raise ArtifactError(
            f"{out} cannot be written: {error.strerror}: {error.filename}.",
            do="Name another --out.",
        ) from error
    try:
        remove_leftovers(out.parent, out.name)
        yield directory
        _sync(directory)
        _swap(directory, out)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(handle)


def check_overwritable(out: Path) -> None:
    """Raises ArtifactError if `out` holds anything that is not an artifact, or not of it."""
    if not out.exists():
        return
    if _is_ours(out / MANIFEST):
        if others := _strangers(out):
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise ArtifactError(
                f"{out} is an artifact, but holds files that are not its own and would be lost: "
                f"{', '.join(others[:3])}{more}.",
                do="Move them elsewhere, or name another --out.",
            )
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    raise ArtifactError(
        f"{out} exists and is not an enginery artifact, so it is not overwritten.",
        do="Name another --out, or remove it yourself.",
    )


def remove_leftovers(parent: Path, target: str = "") -> None:
    """Removes the staging directories in `parent` that no living process holds.

    Args:
        parent: where to look.
        target: only those that were to become this name; empty for all.
    """
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _LEFTOVER.match(path.name)
        if not match or target not in ("", match["target"]) or not path.is_dir():
            continue
        with suppress(OSError):  # held, gone meanwhile, or a file system without locks
            handle = os.open(path, os.O_RDONLY)
            try:
                _lock(handle, wait=False)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def replace_directory(directory: Path, out: Path, *, old: Path) -> None:
    """Renames a directory to `out`; one that is there keeps its content, under another name.

    Where the system can exchange two names, `out` is never missing, and `directory` has the old
    content afterwards. Elsewhere `old` has it, and for the moment between two renames that alone.

    Args:
        directory: what is to be at `out`, on the same file system.
        out: a directory, or nothing.
        old: a name that is free, likewise.

    Raises:
        OSError: a rename failed; `out` is as it was.
    """
    if not out.exists():
        os.replace(directory, out)
        return
    if _exchanged(directory, out):
        return
    os.replace(out, old)
    try:
        os.replace(directory, out)
    except OSError:
        os.replace(old, out)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces one file at once: readers see the old content or the new, never a part."""
    fresh = _beside(path)
    try:
        with fresh.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _claim(out: Path) -> tuple[Path, int]:
    """Makes a staging directory and holds its lock, which is on the handle returned."""
    while True:
        directory = _beside(out)
        directory.mkdir()
        handle = os.open(directory, os.O_RDONLY)
        with suppress(OSError):  # without locks here, nobody removes it either
            _lock(handle, wait=True)
        if directory.is_dir():
            return directory, handle
        os.close(handle)  # another process took it for a leftover before it was held


def _lock(handle: int, *, wait: bool) -> None:
    """Raises OSError where the lock is held (unless `wait`) or the file system has none."""
    if sys.platform == "win32":
        raise OSError("a directory cannot be locked on Windows")
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _is_ours(manifest: Path) -> bool:
    """Whether a manifest.json is an artifact's, of whatever version; browsers have them, too."""
    try:
        found = load_json(manifest, error=ArtifactError)
    except ArtifactError:
        return False
    if not isinstance(found, dict) or not {"source", "graphs", "stages", "files"} <= found.keys():
        return False
    return isinstance(found["files"], dict)


def _strangers(artifact: Path) -> list[str]:
    """Files below an artifact that neither its manifest nor a report accounts for."""
    try:
        known = load_json(artifact / MANIFEST, error=ArtifactError)["files"]
    except (ArtifactError, KeyError):
        return []
    names = (path.relative_to(artifact) for path in artifact.rglob("*") if path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if name.as_posix() not in known
        and name.as_posix() not in (MANIFEST, *_card(artifact))
        and name.parts[0] != "reports"
        and not name.name.startswith(STAGING_PREFIX)
    )


def _card(artifact: Path) -> tuple[str, ...]:
    """The card, where it is the one that publishing wrote; a text of one's own is none."""
    try:
        listed = load_json(artifact / LISTING, error=ArtifactError)["files"]
        found = hashlib.sha256(read_document(artifact / CARD)).hexdigest()
        return (CARD,) if listed[CARD]["sha256"] == found else ()
    except (ArtifactError, OSError, KeyError, TypeError):
        return ()


def _sync(directory: Path) -> None:
    """Flushes every file, so that the rename cannot reach the disk before the content."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def _swap(directory: Path, out: Path) -> None:
    old = _beside(out)
    replace_directory(directory, out, old=old)
    for left in (directory, old):  # one of the two has the old content now
        shutil.rmtree(left, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Swaps two directories at once; False, and nothing done, where the system cannot.

    Without it there is a moment between two renames in which neither is in its place.
    """
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library older than 2018, or musl
        return False
    here, names = _AT_FDCWD, (os.fsencode(one), os.fsencode(other))
    return bool(renameat2(here, names[0], here, names[1], _RENAME_EXCHANGE) == 0)


def _beside(path: Path) -> Path:
    """A fresh hidden name in the same directory, so that a rename to `path` is atomic."""
    return path.parent / f"{STAGING_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}"
