"""Batches of rows with a bounded size, and the checks that all readers share.

A batch is bounded by rows and by bytes, so that memory depends neither on the size of the file nor
on the length of its longest cell times the rows.

>>> list(batch_rows([(3, "a"), (3, "b"), (3, "c")], max_rows=2))
[['a', 'b'], ['c']]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar

from enginery.core.errors import InputError, nearest

Format = Literal["auto", "csv", "tsv", "jsonl", "parquet", "text", "images", "audio"]

BATCH_BYTES = 4 << 20
"""A batch ends with the row that reaches this size."""
CELL_BYTES = 64 << 20
"""Longest line or cell. A longer one is due to a missing line break or quotation mark."""
MAX_COLUMNS = 4096
"""Largest number of columns. More are probably values instead of names, or a transposed table.
Parquet would take minutes to write them: each column of each row group has a header, a page and
statistics."""
_SHOWN_COLUMNS = 30
"""Largest number of column names in a message."""

RAW_LINE = "line"
"""The only column kept if JSONL is converted to JSONL: the unchanged line."""

Values = tuple[Any, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class ReadOptions:
    """Options of reading a file, and what to keep besides the values of the requested columns."""

    format: Format = "auto"
    """`auto` is decided by the suffix."""
    delimiter: str = "auto"
    """Delimiter of a CSV file; `auto` is a tab for TSV and a comma for CSV."""
    encoding: str = "utf-8"
    """Encoding of CSV, TSV, JSONL and text lines."""
    rows: int = 1024
    """Largest number of rows in a batch."""
    keep: Literal["columns", "lines", "nothing"] = "nothing"
    """`columns`: all columns as Arrow arrays. `lines`: the same, but unchanged lines for JSONL."""


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows of a dataset."""

    first: int
    """Index of the first row, from 0."""
    kept: Any
    """`pyarrow.RecordBatch` of the kept columns; None if nothing is kept."""
    values: list[Values]
    """Values of the requested columns, one tuple per row."""
    errors: dict[int, str] = field(default_factory=dict)
    """Index in the batch -> reason why the row cannot be used."""
    done: float = 0.0
    """Share of the dataset up to the end of the batch, 0 to 1."""


class DatasetReader(Protocol):
    """An open dataset with known columns."""

    schema: Any
    """`pyarrow.Schema` of the columns that can be kept."""
    names: list[str]
    """Names of the columns of the dataset."""

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the rows after the first `skip`, in order.

        Raises:
            InputError: the data cannot be read; the message has the line or the row.
        """

    def fraction_read(self) -> float:
        """Return the share of the data that has been read, 0 to 1."""


def batch_rows(rows: Iterable[tuple[int, Item]], max_rows: int) -> Iterator[list[Item]]:
    """Yield lists of up to `max_rows` rows and about `BATCH_BYTES`, given (size in bytes, row)."""
    batch: list[Item] = []
    size = 0
    for row_bytes, row in rows:
        batch.append(row)
        size += row_bytes
        if len(batch) >= max_rows or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def open_text(path: Path, encoding: str, *, newline: str | None = "") -> Any:
    """Open a text stream in which invalid bytes become lone surrogates (PEP 383)."""
    # Excel writes a byte order mark at the start of UTF-8 files.
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    return path.open(encoding=codec, errors="surrogateescape", newline=newline)


def read_lines(stream: IO[str], path: Path) -> Iterator[str]:
    """Yield the lines of a text stream, with their line breaks.

    Raises:
        InputError: a line is longer than `CELL_BYTES`, or cannot be decoded.
    """
    number = 0
    try:
        while line := stream.readline(CELL_BYTES + 1):
            number += 1
            if len(line) > CELL_BYTES:
                raise InputError(
                    f"data '{path}': line {number} is longer than {CELL_BYTES >> 20} MiB.",
                    do="Check that it is a text file with line breaks.",
                )
            yield line
    except UnicodeError as error:  # some encodings cannot continue after an invalid byte
        raise InputError(f"data '{path}': line {number + 1}: {error}.") from error


def is_valid_text(text: str) -> bool:
    """Return True if a text has no lone surrogates, which stand for invalid bytes (PEP 383)."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape_invalid(text: str) -> str:
    r"""Return a text with invalid bytes written as escapes: `caf\xe9`."""
    if is_valid_text(text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()


def require_columns(
    columns: Sequence[str], names: Sequence[str], path: Path, *, hint: str = ""
) -> None:
    """Raise InputError for a missing column; the message has the most similar name."""
    for column in columns:
        if column not in names:
            listed = ", ".join(escape_invalid(name) for name in names[:_SHOWN_COLUMNS]) or "none"
            if len(names) > _SHOWN_COLUMNS:
                listed += f" and {len(names) - _SHOWN_COLUMNS:,} more"
            raise InputError(
                f"data '{path}' has no column '{column}'{nearest(column, names)}",
                do=f"Its columns: {listed}.{hint}",
                column=column,
            )


def require_few_columns(count: int, path: Path) -> None:
    """Raise InputError for more than `MAX_COLUMNS` columns."""
    if count > MAX_COLUMNS:
        raise InputError(
            f"data '{path}' has {count:,} columns or more, expected at most {MAX_COLUMNS:,}.",
            do="Write a file with fewer columns.",
        )


def require_distinct(names: Sequence[str], path: Path) -> None:
    """Raise InputError if two columns have the same name."""
    earlier: set[str] = set()
    for name in names:
        if name in earlier:
            raise InputError(
                f"data '{path}' has two columns named '{name}'.", do="Rename one of them."
            )
        earlier.add(name)
