"""Make files and directories survive a power failure.

A written file is safe when it has been synced, and its name when the directory with that name has
been synced. Until then a file system may keep any of the changes, in any order.

>>> make_directory(tmp_path / "a" / "b")
>>> _ = (tmp_path / "a" / "b" / "model.onnx").write_bytes(b"graph")
>>> sync_tree(tmp_path / "a" / "b")
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from enginery.core.paths import list_tree

# Answers of file systems that cannot sync a directory, such as some FUSE and SMB shares.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, whose names are synced; it may exist already."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory. Does nothing on Windows, which cannot."""
    if sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def replace_synced(source: Path, target: Path) -> None:
    """Rename a synced file to `target`, and sync the change of names in both directories."""
    os.replace(source, target)
    for directory in {source.parent, target.parent}:
        sync_directory(directory)


def sync_tree(directory: Path) -> None:
    """Sync every file and every name below a directory, so that a rename cannot overtake them."""
    for path in list_tree(directory):
        if path.is_dir() and not path.is_symlink():
            sync_directory(path)
        elif path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    sync_directory(directory)
