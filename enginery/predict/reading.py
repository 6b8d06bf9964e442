"""What there is to predict on: a table, lines, a folder of images, or standard input.

Takes a path, or `-`; leaves a reader, its columns known and nothing else read.

    >>> reader = open_input(Path("reviews.csv"), ("text",), PredictConfig(), raw_lines=False)
    >>> reader.schema.names
    ['id', 'text', 'stars']
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from enginery.core.datasets.arrow_arrays import array_of
from enginery.core.datasets.batches import Piece, Reader, shown
from enginery.core.datasets.delimited import CsvReader, LineReader
from enginery.core.datasets.json_lines import JsonLinesReader
from enginery.core.datasets.parquet import ParquetReader
from enginery.core.datasets.samples import IMAGE_SUFFIXES, list_images
from enginery.core.errors import InputError, OptionError
from enginery.predict.config import Format, PredictConfig

STDIN = "-"
_FORMATS: dict[str, Format] = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".txt": "text", ".text": "text", "": "text",
}  # fmt: skip
IMAGE_WINDOW = 32
"""Images of a piece: as many as a batch has."""


def input_format(path: Path, config: PredictConfig) -> Format:
    """What an input is, by the option or by its suffix.

    Raises:
        InputError: there is nothing of that name, or its suffix is not known.
    """
    if not path.exists():
        raise InputError(f"data '{path}': there is nothing of that name.")
    if config.format != "auto":
        is_folder = path.is_dir()
        if is_folder and config.format != "images":
            raise InputError(f"data '{path}' is a folder, expected a {config.format} file.")
        return config.format
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in IMAGE_SUFFIXES:
        return "images"
    if suffix not in _FORMATS:
        raise InputError(
            f"data '{path}': found a {suffix} file, expected {', '.join(filter(None, _FORMATS))} "
            "or a folder of images.",
            do="Write one JSON object a line, as .jsonl." if suffix == ".json"
            else "Say what it is with --format.",
        )  # fmt: skip
    return _FORMATS[suffix]


def open_input(
    path: Path, columns: Sequence[str], config: PredictConfig, *, raw_lines: bool
) -> Reader:
    """The reader of an input.

    Args:
        path: a file, or a folder of images.
        columns: what the model is asked, each one's name; of no effect for lines and images.
        config: format, delimiter, encoding and the rows of a piece.
        raw_lines: keep JSONL's lines as they are.

    Raises:
        InputError: it cannot be read, is empty, or lacks a column.
    """
    kind = input_format(path, config)
    try:
        if kind == "images":
            return ImageReader(path)
        if kind == "text":
            return LineReader(path, config)
        if kind == "parquet":
            return ParquetReader(path, columns, config)
        if kind == "jsonl":
            return JsonLinesReader(path, columns, config, raw=raw_lines)
        return CsvReader(path, columns, config)
    except OSError as error:
        raise InputError(f"data '{path}' cannot be read: {error.strerror}.") from error


class ImageReader:
    """The images of a folder by their names; the column is named `path`, relative to the folder."""

    def __init__(self, path: Path) -> None:
        """Lists the folder; raises InputError where there is no image in it."""
        import pyarrow as pa

        self._root = path if path.is_dir() else path.parent
        self._paths = list_images(path, rows=sys.maxsize)
        self._read = 0
        self.names = ["path"]
        self.schema = pa.schema([("path", pa.string())])

    def read(self, skip: int) -> Iterator[Piece]:
        """The images after the first `skip`; see `rows.Reader`."""
        import pyarrow as pa

        for first in range(skip, len(self._paths), IMAGE_WINDOW):
            paths = self._paths[first : first + IMAGE_WINDOW]
            names = [shown(path.relative_to(self._root).as_posix()) for path in paths]
            kept = pa.RecordBatch.from_arrays([array_of(names, pa.string())], schema=self.schema)
            self._read = first + len(paths)
            yield Piece(first, kept, [(str(path.relative_to(self._root)),) for path in paths])

    def done(self) -> float:
        """The share of the images that was read."""
        return self._read / len(self._paths)


@contextmanager
def on_disk(source: str, spool: Path, config: PredictConfig, stream: IO[bytes] | None = None
            ) -> Iterator[Path]:  # fmt: skip
    """The input as a file: standard input is copied to `spool` first.

    So that it can be looked at before anything runs, and an interrupted run goes on when the same
    bytes come again.

    Args:
        source: a path, or `-`.
        spool: where standard input goes while it is needed.
        config: names the format, which standard input's has no suffix for.
        stream: read in place of standard input.

    Raises:
        OptionError: standard input without a format.
    """
    if source != STDIN:
        yield Path(source)
        return
    if config.format in ("auto", "images"):
        raise OptionError(
            f"standard input has no suffix, and its format is {config.format}.",
            do="Name it: --format csv, tsv, jsonl, parquet or text.",
        )
    if stream is None and sys.stdin is None:
        raise InputError("standard input is closed.")
    given: Any = stream or sys.stdin.buffer
    try:
        with spool.open("wb") as copy:
            shutil.copyfileobj(given, copy, 1 << 20)
        yield spool
    finally:
        spool.unlink(missing_ok=True)
