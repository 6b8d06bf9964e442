"""CSV, TSV and text lines, row by row, every cell as the text that it is.

    >>> CsvReader(Path("reviews.csv"), ("text",), PredictConfig()).schema.names
    ['id', 'text', 'stars']

Python's reader takes a row of any size without a block that must hold it, and `007` stays `007`. A
row with too few or too many fields is kept as a bad row: what is too much stays in its last cell.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from enginery.core.datasets.arrow_arrays import array_of
from enginery.core.datasets.batches import (
    CELL_BYTES,
    Piece,
    is_clean,
    lines_of,
    pieces_of,
    require_names,
    shown,
)
from enginery.core.errors import InputError, nearest

if TYPE_CHECKING:
    from enginery.predict.config import PredictConfig

_MARKS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}


class CsvReader:
    """A table with a header line."""

    def __init__(self, path: Path, columns: Sequence[str], config: PredictConfig) -> None:
        """Reads the header.

        Args:
            path: the file.
            columns: what the model is asked, each one's name.
            config: format, delimiter, encoding and the rows of a piece.

        Raises:
            InputError: the file is empty, not in the encoding, or has no such column.
        """
        import pyarrow as pa

        is_tabs = config.format == "tsv" or (
            config.format == "auto" and path.suffix.lower() == ".tsv"
        )
        self._delimiter = config.delimiter
        if config.delimiter == "auto":
            self._delimiter = "\t" if is_tabs else ","
        self._path, self._config = path, config
        self._bytes = max(path.stat().st_size, 1)
        self._at = 0
        # The limit is the module's own, one for the process; it is only ever raised.
        csv.field_size_limit(max(csv.field_size_limit(), CELL_BYTES))
        with open_text(path, config.encoding) as stream:
            header = next(self._fields(stream), None)
        if header is None:
            raise InputError(f"data '{path}' is empty; expected a line with the columns' names.")
        if not all(is_clean(name) for name in header):
            raise InputError(
                f"data '{path}': its first line is not {config.encoding}.",
                do="Name what it is: --encoding cp1252, or utf-16.",
            )
        require_names(header, str(path))
        for column in columns:
            if column not in header:
                raise InputError(
                    f"data '{path}' has no column '{column}'{nearest(column, header)}",
                    do=f"Its columns: {', '.join(header) or 'none'}.{self._hint(header)}",
                )
        self._places = [header.index(column) for column in columns]
        self.names = header
        self.schema = pa.schema([(name, pa.string()) for name in header])

    def read(self, skip: int) -> Iterator[Piece]:
        """The rows after the first `skip`; see `rows.Reader`."""
        with open_text(self._path, self._config.encoding) as stream:
            rows = self._fields(stream)
            next(rows, None)
            first = 0
            while first < skip and next(rows, None) is not None:
                first += 1
            for piece in pieces_of(
                ((sum(map(len, row)), row) for row in rows), self._config.window
            ):
                self._at = stream.buffer.tell()
                yield self._piece(first, piece)
                first += len(piece)

    def done(self) -> float:
        """The share of the file's bytes that was read."""
        return min(self._at / self._bytes, 1.0)

    def _fields(self, stream: IO[str]) -> Iterator[list[str]]:
        reader = csv.reader(lines_of(stream, str(self._path)), delimiter=self._delimiter)
        try:
            for row in reader:
                if row:  # an empty line is no row, as in pyarrow and pandas
                    yield row
        except csv.Error as error:
            raise InputError(
                f"data '{self._path}': line {reader.line_num}: {error}.",
                do="Is a quotation mark not closed?" if "limit" in str(error) else "",
            ) from error

    def _piece(self, first: int, rows: list[list[str]]) -> Piece:
        import pyarrow as pa

        width = len(self.schema)
        errors: dict[int, str] = {}
        for index, row in enumerate(rows):
            if len(row) != width:
                errors[index] = f"the row has {len(row)} fields, expected {width}"
                extra = self._delimiter.join(row[width - 1 :])
                row[:] = [*row[: width - 1], *([extra] if len(row) >= width else [])]
                row.extend("" for _ in range(width - len(row)))
            if not is_clean("".join(row)):
                errors[index] = f"the row is not {self._config.encoding}"
                row[:] = [shown(cell) for cell in row]
        columns = [array_of(column, pa.string()) for column in zip(*rows, strict=True)]
        kept = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        values = [tuple(row[place] for place in self._places) for row in rows]
        return Piece(first, kept, values, errors)

    def _hint(self, header: Sequence[str]) -> str:
        """A header that was not cut, and what it seems to be cut by."""
        if len(header) != 1:
            return ""
        for mark, name in _MARKS.items():
            if mark in header[0] and mark != self._delimiter:
                return f" It seems to be separated by {name}: pass --delimiter '{mark}'."
        return ""


class LineReader:
    """One text a line; the column is named `text`."""

    def __init__(self, path: Path, config: PredictConfig) -> None:
        """Looks at the first byte; raises InputError for an empty file."""
        import pyarrow as pa

        self._path, self._config = path, config
        self._bytes = path.stat().st_size
        self._at = 0
        if not self._bytes:
            raise InputError(f"data '{path}' is empty; expected one text a line.")
        self.names = ["text"]
        self.schema = pa.schema([("text", pa.string())])

    def read(self, skip: int) -> Iterator[Piece]:
        """The lines after the first `skip`; see `rows.Reader`."""
        import pyarrow as pa

        with open_text(self._path, self._config.encoding, newline=None) as stream:
            lines = lines_of(stream, str(self._path))
            first = 0
            while first < skip and next(lines, None) is not None:
                first += 1
            for piece in pieces_of(((len(line), line) for line in lines), self._config.window):
                self._at = stream.buffer.tell()
                texts = [line.removesuffix("\n") for line in piece]
                errors = {
                    index: f"the line is not {self._config.encoding}"
                    for index, text in enumerate(texts)
                    if not is_clean(text)
                }
                texts = [shown(text) for text in texts]
                kept = pa.RecordBatch.from_arrays(
                    [array_of(texts, pa.string())], schema=self.schema
                )
                yield Piece(first, kept, [(text,) for text in texts], errors)
                first += len(piece)

    def done(self) -> float:
        """The share of the file's bytes that was read."""
        return min(self._at / max(self._bytes, 1), 1.0)


def open_text(path: Path, encoding: str, *, newline: str | None = "") -> Any:
    """A text stream; bytes that are no characters become lone surrogates."""
    # Excel begins its UTF-8 files with a byte order mark.
    named = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        return path.open(encoding=named, errors="surrogateescape", newline=newline)
    except OSError as error:
        raise InputError(f"data '{path}' cannot be read: {error.strerror}.") from error
