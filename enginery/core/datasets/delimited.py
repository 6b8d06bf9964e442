r"""Read CSV and TSV tables and lines of text; every cell is text.

>>> file = tmp_path / "reviews.csv"
>>> _ = file.write_text("id,text\n1,Great value.\n")
>>> CsvReader(file, ("text",), ReadOptions()).names
['id', 'text']

This uses Python's csv module instead of pyarrow. If a quotation mark is not closed, pyarrow 26
reads all following lines as one row, without an error. It also needs blocks that hold the longest
row, and its report of a row with too many fields or invalid bytes lacks the row's position.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

from enginery.core.datasets.arrow_arrays import to_arrow
from enginery.core.datasets.batches import (
    CELL_BYTES,
    ReadOptions,
    RowBatch,
    batch_rows,
    escape_invalid,
    is_valid_text,
    open_text,
    read_lines,
    require_columns,
    require_distinct,
    require_few_columns,
)
from enginery.core.errors import InputError

_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}


class CsvReader:
    """A table with a header line. Empty lines are skipped, as in pyarrow and pandas.

    A row with too few or too many fields is kept as a bad row; extra fields are joined into its
    last cell. A row with invalid bytes is also kept as a bad row, with the bytes escaped.
    """

    def __init__(self, path: Path, columns: Sequence[str], options: ReadOptions) -> None:
        """Read the header.

        Raises:
            InputError: the file is empty, has another encoding, or lacks a column.
        """
        import pyarrow as pa

        is_tabs = options.format == "tsv" or (
            options.format == "auto" and path.suffix.lower() == ".tsv"
        )
        self._delimiter = options.delimiter
        if options.delimiter == "auto":
            self._delimiter = "\t" if is_tabs else ","
        self._path, self._options = path, options
        self._bytes = max(path.stat().st_size, 1)
        self._at = 0
        # The limit is global, so it is only ever raised.
        csv.field_size_limit(max(csv.field_size_limit(), CELL_BYTES))
        with open_text(path, options.encoding) as stream:
            header = next(self._rows(stream), None)
        if header is None:
            raise InputError(f"data '{path}' is empty; expected a header line.")
        if not all(is_valid_text(name) for name in header):
            raise InputError(
                f"data '{path}': its first line is not {options.encoding}.",
                do="Save it as UTF-8, or pass its encoding: predict has --encoding cp1252.",
            )
        require_few_columns(len(header), path)
        require_columns(columns, header, path, hint=self._delimiter_hint(header))
        require_distinct(
            [name for name in header if options.keep != "nothing" or name in columns], path
        )
        self._places = [header.index(column) for column in columns]
        self.names = header
        self.schema = pa.schema([(name, pa.string()) for name in header])

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the rows after the first `skip`; see `DatasetReader`."""
        with open_text(self._path, self._options.encoding) as stream:
            rows = self._rows(stream)
            for _ in range(1 + skip):
                next(rows, None)
            first = skip
            sized = ((sum(map(len, row)), row) for row in rows)
            for batch in batch_rows(sized, self._options.rows):
                self._at = stream.buffer.tell()
                yield self._batch(first, batch)
                first += len(batch)

    def fraction_read(self) -> float:
        """Return the share of the file's bytes that was read."""
        return min(self._at / self._bytes, 1.0)

    def _rows(self, stream: IO[str]) -> Iterator[list[str]]:
        """Yield the fields of each row, starting with the header.

        A quotation mark that is not closed includes all lines up to the next mark, or to the end of
        the file. The csv module's strict mode finds it: the next mark is not followed by a
        delimiter, or the file ends. If text follows a closed quotation within one line, as in
        `"5" nails`, no other line was included, and the line is read as pandas reads it.
        """
        line = ""

        def lines() -> Iterator[str]:
            nonlocal line
            for text in read_lines(stream, self._path):
                line = text
                yield text

        reader = csv.reader(lines(), delimiter=self._delimiter, strict=True)
        while True:
            start = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                if reader.line_num > start or "expected after" not in str(error):
                    raise InputError(
                        f"data '{self._path}': line {start}: a quotation mark is not closed; the "
                        f"row extends to line {reader.line_num}: {error}.",
                        do='Close it; write "" for a quotation mark inside a text.',
                    ) from error
                row = next(csv.reader([line], delimiter=self._delimiter))
            if row is None:
                return
            if row:
                yield row

    def _batch(self, first: int, rows: list[list[str]]) -> RowBatch:
        import pyarrow as pa

        width = len(self.schema)
        errors: dict[int, str] = {}
        # Rows are usually all good, which is found faster for all of them together.
        is_good = {len(row) for row in rows} == {width} and is_valid_text(
            "".join(chain.from_iterable(rows))
        )
        for index, row in enumerate([] if is_good else rows):
            if len(row) != width:
                errors[index] = f"the row has {len(row)} fields, expected {width}"
                extra = self._delimiter.join(row[width - 1 :])
                row[:] = [*row[: width - 1], *([extra] if len(row) >= width else [])]
                row.extend("" for _ in range(width - len(row)))
            if not is_valid_text("".join(row)):
                errors[index] = f"the row is not {self._options.encoding}"
                row[:] = [escape_invalid(cell) for cell in row]
        columns = list(zip(*rows, strict=True))
        values = list(zip(*(columns[position] for position in self._places), strict=True))
        if self._options.keep == "nothing":
            return RowBatch(first, None, values, errors)
        arrays = [to_arrow(column, pa.string()) for column in columns]
        kept_columns = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        return RowBatch(first, kept_columns, values, errors)

    def _delimiter_hint(self, header: Sequence[str]) -> str:
        """Return a hint at the delimiter if the header has only one column."""
        if len(header) != 1:
            return ""
        for mark, name in _DELIMITERS.items():
            if mark in header[0] and mark != self._delimiter:
                expected = _DELIMITERS.get(self._delimiter, repr(self._delimiter))
                return (
                    f" The file seems to be separated by {name}, expected {expected}. Convert it "
                    f"or pass the delimiter: predict has --delimiter '{mark}'."
                )
        return ""


class LineReader:
    """A file with one text per line; the column is named `text`."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        """Check the size; raise InputError for an empty file."""
        import pyarrow as pa

        self._path, self._options = path, options
        self._bytes = path.stat().st_size
        self._at = 0
        if not self._bytes:
            raise InputError(f"data '{path}' is empty; expected one text per line.")
        self.names = ["text"]
        self.schema = pa.schema([("text", pa.string())])

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the lines after the first `skip`; see `DatasetReader`."""
        import pyarrow as pa

        # Do not use splitlines(): a text may contain U+2028 and similar characters.
        with open_text(self._path, self._options.encoding, newline=None) as stream:
            lines = read_lines(stream, self._path)
            for _ in range(skip):
                next(lines, None)
            first = skip
            sized = ((len(line), line) for line in lines)
            for batch in batch_rows(sized, self._options.rows):
                self._at = stream.buffer.tell()
                texts = [line.removesuffix("\n") for line in batch]
                errors = {
                    index: f"the line is not {self._options.encoding}"
                    for index, text in enumerate(texts)
                    if not is_valid_text(text)
                }
                texts = [escape_invalid(text) for text in texts]
                kept_columns = None
                if self._options.keep != "nothing":
                    column = to_arrow(texts, pa.string())
                    kept_columns = pa.RecordBatch.from_arrays([column], schema=self.schema)
                yield RowBatch(first, kept_columns, [(text,) for text in texts], errors)
                first += len(batch)

    def fraction_read(self) -> float:
        """Return the share of the file's bytes that was read."""
        return min(self._at / self._bytes, 1.0)
