r"""Open any data file: for predict, calibration, validation, profiles and benchmarks.

>>> file = tmp_path / "reviews.csv"
>>> _ = file.write_text("id,text\n1,The engine is warm.\n")
>>> reader = open_dataset(file, ("text",))
>>> reader.names
['id', 'text']
>>> [row for batch in reader.read(skip=0) for row in batch.values]
[('The engine is warm.',)]

Every format is read in batches of bounded size. A row that cannot be used keeps its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginery.core.datasets.batches import DatasetReader, Format, ReadOptions
from enginery.core.datasets.delimited import CsvReader, LineReader
from enginery.core.datasets.folders import FolderReader, media_kind
from enginery.core.datasets.json_lines import JsonLinesReader
from enginery.core.datasets.parquet import ParquetReader
from enginery.core.errors import InputError
from enginery.core.extras import require_packages

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
    """Open a file or a folder of images or audio and find its columns.

    Args:
        path: path of a file, or a folder of images or audio.
        columns: columns whose values to read; ignored for text lines and folders, which have one.
        options: format, delimiter, encoding, rows per batch, and what to keep of a row.

    Raises:
        InputError: the data cannot be read, is empty, or lacks a column; the message has the most
            similar name.
        MissingPackageError: pyarrow is not installed.
    """
    kind = detect_format(path, options)
    require_packages("reading rows of a file", "pyarrow", later=["orjson"], extra="data")
    try:
        if kind in ("images", "audio"):
            return FolderReader(path, kind, options)
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
    """Return the names of the columns; `text` for text lines and `path` for folders.

    Only the header of a CSV file or the footer of a Parquet file is read, but a whole JSONL file.

    Raises:
        InputError: the file cannot be read, or is empty.
    """
    return open_dataset(path, (), options).names


def detect_format(path: Path, options: ReadOptions = _DEFAULT) -> Format:
    """Return the format of a file, from the option or the suffix.

    Raises:
        InputError: the path does not exist, is neither a file nor a folder, or has an unknown
            suffix.
    """
    if not path.exists():
        raise InputError(f"data '{path}': no such file or folder.")
    if path.is_dir() and options.format not in ("auto", "images", "audio"):
        raise InputError(f"data '{path}' is a folder, expected a {options.format} file.")
    if not path.is_dir() and not path.is_file():
        # Opening a named pipe blocks until another process writes, and a device may be endless.
        raise InputError(
            f"data '{path}' is a named pipe, a socket or a device, expected a file or a folder.",
            do="Write it to a file first.",
        )
    if options.format != "auto":
        return options.format
    if media := media_kind(path):
        return media
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise InputError(
            f"data '{path}': found a {suffix} file, expected {', '.join(filter(None, _FORMATS))} "
            "or a folder of images or audio.",
            do="Write one JSON object per line, as .jsonl."
            if suffix == ".json"
            else "Pass its format: predict has --format.",
        )
    return _FORMATS[suffix]
