"""Read folders of images or audio.

    [path.name for path in list_images(Path("photos"), rows=2)]    # ['a.png', 'k.jpg']

The reader yields paths; the files are opened by the task that runs on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from enginery.core.datasets.arrow_arrays import to_arrow
from enginery.core.datasets.batches import Item, ReadOptions, RowBatch, escape_invalid
from enginery.core.errors import InputError
from enginery.core.paths import list_tree, require_utf8

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3")
_BATCH_FILES = 32
"""Largest number of files in a batch of rows."""

MediaKind = Literal["images", "audio"]
_SUFFIXES: dict[MediaKind, tuple[str, ...]] = {"images": IMAGE_SUFFIXES, "audio": AUDIO_SUFFIXES}


def list_images(path: Path, *, rows: int) -> list[Path]:
    """Return up to `rows` image files, at even intervals from the sorted files of a folder.

    The path may also be a single image file.

    Raises:
        InputError: the folder does not exist, or has no images.
    """
    return list_media(path, "images", rows=rows)


def media_kind(path: Path) -> MediaKind | None:
    """Return what a file or folder holds: audio, or images; None for another file.

    A folder with files of both kinds, or of neither, counts as images.
    """
    if not path.is_dir():
        suffix = path.suffix.lower()
        return next((kind for kind, suffixes in _SUFFIXES.items() if suffix in suffixes), None)
    suffixes = {file.suffix.lower() for file in list_tree(path)}
    has_audio, has_images = suffixes & set(AUDIO_SUFFIXES), suffixes & set(IMAGE_SUFFIXES)
    return "audio" if has_audio and not has_images else "images"


def list_media(path: Path, kind: MediaKind, *, rows: int) -> list[Path]:
    """Return up to `rows` files of a kind; see `list_images`."""
    suffixes = _SUFFIXES[kind]
    if path.is_file() and path.suffix.lower() in suffixes:
        return [path]
    if not path.is_dir():
        problem = "it is a file" if path.exists() else "no such file or folder"
        raise InputError(f"data '{path}': expected a folder of {kind}; {problem}.")
    # macOS creates hidden files `._photo.jpg`, which are not images.
    files = (p for p in list_tree(path) if p.suffix.lower() in suffixes and p.is_file())
    media = sorted(p for p in files if not p.name.startswith("."))
    for file in media:
        require_utf8(file, error=InputError)
    if not media:
        raise InputError(f"data '{path}' has no {kind}; known suffixes: {', '.join(suffixes)}.")
    return take_evenly(media, rows)


def take_evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items at even intervals; all items if there are not more.

    >>> take_evenly("abcdefgh", 4)
    ['a', 'c', 'e', 'g']
    """
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


class FolderReader:
    """The files of one kind in a folder, sorted; column `path` has names relative to the folder."""

    def __init__(self, path: Path, kind: MediaKind, options: ReadOptions) -> None:
        """List the folder; raise InputError if it has no file of the kind."""
        import pyarrow as pa

        self.kind = kind
        self._root = path if path.is_dir() else path.parent
        self._paths = list_media(path, kind, rows=sys.maxsize)
        self._most = min(options.rows, _BATCH_FILES)
        self._read = 0
        self.names = ["path"]
        self.schema = pa.schema([("path", pa.string())])

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the files after the first `skip`; see `DatasetReader`."""
        import pyarrow as pa

        for first in range(skip, len(self._paths), self._most):
            paths = self._paths[first : first + self._most]
            names = [escape_invalid(path.relative_to(self._root).as_posix()) for path in paths]
            kept_columns = pa.RecordBatch.from_arrays(
                [to_arrow(names, pa.string())], schema=self.schema
            )
            self._read = first + len(paths)
            yield RowBatch(
                first, kept_columns, [(str(path.relative_to(self._root)),) for path in paths]
            )

    def fraction_read(self) -> float:
        """Return the share of the files that has been read."""
        return self._read / len(self._paths)
