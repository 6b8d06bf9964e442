"""Rows on their way from a file: batches with a bounded size, and what every reader checks.

    >>> for batch in reader.read(skip=0):
    ...     batch.kept.num_rows, batch.values[0]
    (1024, ('The engine is warm.',))

A batch is bounded by rows and by bytes, so that memory depends neither on the file's size nor on
its longest cell times the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar

from enginery.core.errors import InputError, nearest

Format = Literal["auto", "csv", "tsv", "jsonl", "parquet", "text", "images"]

BATCH_BYTES = 4 << 20
"""A batch ends after the row that reaches this."""
CELL_BYTES = 64 << 20
"""The longest line or cell that is read. A longer one is a missing line break or quotation mark."""
MAX_COLUMNS = 4096
"""More columns than this are values that became names, or a transposed table. Parquet takes minutes
to write them: each column of each row group has a header, a page and statistics of its own."""
_SHOWN_COLUMNS = 30
"""Names of columns in a message."""

RAW_LINE = "line"
"""The one column that is kept of JSONL that becomes JSONL: the line as it was."""

Values = tuple[Any, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class ReadOptions:
    """How a file is read, and what is kept of it besides the values of the requested columns."""

    format: Format = "auto"
    """`auto` goes by the suffix."""
    delimiter: str = "auto"
    """What separates a CSV's fields; `auto` is a tab for TSV and a comma for CSV."""
    encoding: str = "utf-8"
    """Of CSV, TSV, JSONL and text lines."""
    rows: int = 1024
    """The most rows of a batch."""
    keep: Literal["columns", "lines", "nothing"] = "nothing"
    """`columns`: all columns, as Arrow arrays. `lines`: likewise, but JSONL's lines as they are."""


@dataclass(frozen=True)
class RowBatch:
    """Neighbouring rows of a data set."""

    first: int
    """The number of its first row, from 0."""
    kept: Any
    """`pyarrow.RecordBatch` of what the options keep; None for nothing."""
    values: list[Values]
    """What the requested columns hold, one tuple a row."""
    errors: dict[int, str] = field(default_factory=dict)
    """Why a row of the batch cannot be used, by its place in the batch."""


class DatasetReader(Protocol):
    """An opened data set with known columns."""

    schema: Any
    """`pyarrow.Schema` of what can be kept."""
    names: list[str]
    """The data set's own columns."""

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the rows after the first `skip`, in order.

        Raises:
            InputError: the data cannot be read to their end; the message has the line or the row.
        """

    def done(self) -> float:
        """Return the share of the data that was read, 0 to 1."""


def batch_rows(rows: Iterable[tuple[int, Item]], most: int) -> Iterator[list[Item]]:
    """Yield lists of up to `most` rows, given each row with its size in bytes."""
    batch: list[Item] = []
    size = 0
    for row_bytes, row in rows:
        batch.append(row)
        size += row_bytes
        if len(batch) >= most or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def open_text(path: Path, encoding: str, *, newline: str | None = "") -> Any:
    """Open a text stream in which bytes that are no characters become lone surrogates."""
    # Excel begins its UTF-8 files with a byte order mark.
    named = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    return path.open(encoding=named, errors="surrogateescape", newline=newline)


def read_lines(stream: IO[str], path: Path) -> Iterator[str]:
    """Yield the lines of a text stream, with their ends.

    Raises:
        InputError: a line is longer than any text.
    """
    number = 0
    try:
        while line := stream.readline(CELL_BYTES + 1):
            number += 1
            if len(line) > CELL_BYTES:
                raise InputError(
                    f"data '{path}': line {number} is longer than {CELL_BYTES >> 20} MiB.",
                    do="Is it a text file with line breaks?",
                )
            yield line
    except UnicodeError as error:  # of encodings that cannot go on after a bad byte
        raise InputError(f"data '{path}': line {number + 1}: {error}.") from error


def is_valid_text(text: str) -> bool:
    """Return whether every byte of a text was a character of its encoding.

    Bad bytes are read as lone surrogates (PEP 383), which no text has.
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escaped(text: str) -> str:
    r"""Return a text with what is no character written out, `caf\xe9`, so that nothing is lost."""
    if is_valid_text(text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()


def require_columns(
    columns: Sequence[str], names: Sequence[str], path: Path, *, hint: str = ""
) -> None:
    """Raise InputError for a column that is not there; the message has the nearest names."""
    for column in columns:
        if column not in names:
            shown = ", ".join(escaped(name) for name in names[:_SHOWN_COLUMNS]) or "none"
            more = len(names) - _SHOWN_COLUMNS
            raise InputError(
                f"data '{path}' has no column '{column}'{nearest(column, names)}",
                do=f"Its columns: {shown}{f' and {more:,} more' if more > 0 else ''}.{hint}",
                column=column,
            )


def require_few_columns(count: int, path: Path) -> None:
    """Raise InputError for more columns than a table has."""
    if count > MAX_COLUMNS:
        raise InputError(
            f"data '{path}' has {count:,} columns or more, expected at most {MAX_COLUMNS:,}.",
            do="Write a file with the columns that are needed.",
        )


def require_distinct(names: Sequence[str], path: Path) -> None:
    """Raise InputError for two columns of one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(
                f"data '{path}' has two columns named '{name}'.", do="Rename one of them."
            )
        seen.add(name)
