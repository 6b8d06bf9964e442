"""The one reader of data files: for predict, calibration, validation, profiles and benchmarks.

    >>> reader = open_dataset(Path("reviews.csv"), ("text",))
    >>> reader.names
    ['id', 'text', 'stars']
    >>> for batch in reader.read(skip=0):
    ...     batch.values[0]
    ('The engine is warm.',)

Every format is read in batches of bounded size, and a row that cannot be used keeps its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginery.core.datasets.batches import DatasetReader, Format, ReadOptions
from enginery.core.datasets.delimited import CsvReader, LineReader
from enginery.core.datasets.images import IMAGE_SUFFIXES, ImageReader
from enginery.core.datasets.json_lines import JsonLinesReader
from enginery.core.datasets.parquet import ParquetReader
from enginery.core.errors import InputError

_DEFAULT = ReadOptions()
_FORMATS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    "": "text",
}


def open_dataset(
    path: Path, columns: Sequence[str] = (), options: ReadOptions = _DEFAULT
) -> DatasetReader:
    """Open a file or a folder of images; its columns are known and no batch is read yet.

    Args:
        path: a file, or a folder of images.
        columns: those whose values are read; of no effect for lines and images, which have one.
        options: format, delimiter, encoding, the rows of a batch, and what is kept of a row.

    Raises:
        InputError: it cannot be read, is empty, or lacks a column; the message names the nearest.
    """
    kind = detect_format(path, options)
    try:
        if kind == "images":
            return ImageReader(path, options)
        if kind == "text":
            return LineReader(path, options)
        if kind == "parquet":
            return ParquetReader(path, columns, options)
        if kind == "jsonl":
            return JsonLinesReader(path, columns, options)
        return CsvReader(path, columns, options)
    except OSError as error:
        raise InputError(f"data '{path}' cannot be read: {error.strerror}.") from error


def column_names(path: Path, options: ReadOptions = _DEFAULT) -> list[str]:
    """Return the names of a file's columns, `text` for lines and `path` for images.

    The first line of a CSV and the footer of a Parquet file say them; JSONL is read to its end.

    Raises:
        InputError: the file cannot be read, or is empty.
    """
    return open_dataset(path, (), options).names


def detect_format(path: Path, options: ReadOptions = _DEFAULT) -> Format:
    """Return the format of a file, by the option or by its suffix.

    Raises:
        InputError: there is nothing of that name, it is neither a file nor a folder, or its suffix
            is not known.
    """
    if not path.exists():
        raise InputError(f"data '{path}': there is nothing of that name.")
    if path.is_dir() and options.format not in ("auto", "images"):
        raise InputError(f"data '{path}' is a folder, expected a {options.format} file.")
    if not path.is_dir() and not path.is_file():
        # Opening a named pipe waits for somebody who writes, and a device may have no end.
        raise InputError(
            f"data '{path}' is a named pipe, a socket or a device, expected a file or a folder.",
            do="Write it to a file first.",
        )
    if options.format != "auto":
        return options.format
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in IMAGE_SUFFIXES:
        return "images"
    if suffix not in _FORMATS:
        raise InputError(
            f"data '{path}': found a {suffix} file, expected {', '.join(filter(None, _FORMATS))} "
            "or a folder of images.",
            do="Write one JSON object a line, as .jsonl."
            if suffix == ".json"
            else "Name its format: predict takes --format.",
        )
    return _FORMATS[suffix]
