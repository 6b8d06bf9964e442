"""Read folders of images.

    [path.name for path in list_images(Path("photos"), rows=2)]    # ['a.png', 'k.jpg']

The reader yields paths; images are opened by the task that runs on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from enginery.core.datasets.arrow_arrays import to_arrow
from enginery.core.datasets.batches import Item, ReadOptions, RowBatch, escape_invalid
from enginery.core.errors import InputError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_BATCH_IMAGES = 32
"""Largest number of images in a batch of rows."""


def list_images(path: Path, *, rows: int) -> list[Path]:
    """Return up to `rows` image files, at even intervals from the sorted files of a folder.

    The path may also be a single image file.

    Raises:
        InputError: the folder does not exist, or has no images.
    """
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return [path]
    if not path.is_dir():
        found = "it is a file" if path.exists() else "no such file or folder"
        raise InputError(f"data '{path}': expected a folder of images; {found}.")
    # macOS creates hidden files `._photo.jpg`, which are not images.
    images = (p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    found_images = sorted(p for p in images if not p.name.startswith("."))
    if not found_images:
        raise InputError(
            f"data '{path}' has no images; known suffixes: {', '.join(IMAGE_SUFFIXES)}."
        )
    return take_evenly(found_images, rows)


def take_evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items at even intervals; all items if there are not more.

    >>> take_evenly("abcdefgh", 4)
    ['a', 'c', 'e', 'g']
    """
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


class ImageReader:
    """The images of a folder, sorted; the column `path` has names relative to the folder."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        """List the folder; raise InputError if it has no images."""
        import pyarrow as pa

        self._root = path if path.is_dir() else path.parent
        self._paths = list_images(path, rows=sys.maxsize)
        self._most = min(options.rows, _BATCH_IMAGES)
        self._read = 0
        self.names = ["path"]
        self.schema = pa.schema([("path", pa.string())])

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the images after the first `skip`; see `DatasetReader`."""
        import pyarrow as pa

        for first in range(skip, len(self._paths), self._most):
            paths = self._paths[first : first + self._most]
            names = [escape_invalid(path.relative_to(self._root).as_posix()) for path in paths]
            kept = pa.RecordBatch.from_arrays([to_arrow(names, pa.string())], schema=self.schema)
            self._read = first + len(paths)
            yield RowBatch(first, kept, [(str(path.relative_to(self._root)),) for path in paths])

    def fraction_read(self) -> float:
        """Return the share of the images that has been read."""
        return self._read / len(self._paths)
