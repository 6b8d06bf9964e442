"""Columns of CSV, TSV, JSONL and Parquet files, row by row.

    >>> for text, label in stream_columns(Path("reviews.csv"), ["text", "label"]):
    ...     print(label, text)

Never more than a block of the file is in memory. CSV and Parquet are read through pyarrow, the
columns asked for only; JSONL line by line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from enginery.core.errors import InputError, nearest

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

# pyarrow reads CSV in blocks that must hold a whole row; a row can be a whole book.
_BLOCK_BYTES = 64 << 20
_PYTHON_ROWS = 1024
"""Rows that are Python objects at one time."""
_PAGES_BYTES = 1 << 20
"""Of a Parquet column that are read at one time; without, it is a whole row group."""

Row = tuple[Any, ...]


def stream_columns(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The values of some columns, one tuple a row, in the order in which the columns are named.

    A CSV's values are strings, whatever they look like. A JSONL row without the column has None.

    Args:
        path: a file with one of the suffixes in `TABLES`.
        columns: their names.

    Raises:
        InputError: the file cannot be read, or has no such column; the message names the nearest.
    """
    import pyarrow as pa

    suffix = path.suffix.lower()
    read = {".parquet": _parquet, ".jsonl": _jsonl, ".ndjson": _jsonl}.get(suffix, _csv)
    try:
        yield from read(path, columns)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"data '{path}' cannot be read: {first}.") from error


def _require(columns: Sequence[str], names: Sequence[str], path: Path) -> None:
    for column in columns:
        if column not in names:
            raise InputError(
                f"data '{path}' has no column '{column}'{nearest(column, names)}",
                do=f"Its columns: {', '.join(names) or 'none'}.{_delimiter_hint(names, path)}",
            )


def _delimiter_hint(names: Sequence[str], path: Path) -> str:
    """A header that was not cut, and what it seems to be cut by."""
    suffix = path.suffix.lower()
    if len(names) != 1 or suffix not in (".csv", ".tsv"):
        return ""
    for mark, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "commas")):
        if mark in names[0]:
            expected = "tabs" if suffix == ".tsv" else "commas"
            return f" It seems to be separated by {name}; a {suffix} file is by {expected}."
    return ""


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, buffer_size=_PAGES_BYTES) as file:
        _require(columns, list(file.schema_arrow.names), path)
        once = list(dict.fromkeys(columns))
        for batch in file.iter_batches(batch_size=_PYTHON_ROWS, columns=once):
            yield from _rows(batch, [batch.schema.names.index(column) for column in columns])


def _csv(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.csv

    reading = pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES)
    # Reviews hold line breaks inside quotes.
    parsing = pyarrow.csv.ParseOptions(
        delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True
    )
    # Read as text whatever it looks like: "5" is a review as well.
    as_text = {column: pa.string() for column in columns}
    converting = pyarrow.csv.ConvertOptions(column_types=as_text)
    with pyarrow.csv.open_csv(
        path, read_options=reading, parse_options=parsing, convert_options=converting
    ) as reader:
        _require(columns, list(reader.schema.names), path)
    once = list(as_text)
    converting = pyarrow.csv.ConvertOptions(column_types=as_text, include_columns=once)
    with pyarrow.csv.open_csv(
        path, read_options=reading, parse_options=parsing, convert_options=converting
    ) as reader:
        for batch in reader:
            yield from _rows(batch, [once.index(column) for column in columns])


def _rows(batch: Any, places: Sequence[int]) -> Iterator[Row]:
    for start in range(0, batch.num_rows, _PYTHON_ROWS):
        part = batch.slice(start, _PYTHON_ROWS)
        yield from zip(*(part.column(place).to_pylist() for place in places), strict=True)


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """A column need not be in every row, so one that is in none is known at the end of the file."""
    names: dict[str, None] = {}
    with path.open(encoding="utf-8-sig") as lines:
        for row in _objects(lines, path):
            names.update(dict.fromkeys(row))
            yield tuple(row.get(column) for column in columns)
    if names:
        _require(columns, list(names), path)


def _objects(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"data '{path}' cannot be read: line {number}: {error}.") from error
        if not isinstance(row, dict):
            raise InputError(
                f"data '{path}' cannot be read: line {number} is a {type(row).__name__}, "
                "expected a JSON object."
            )
        yield row
