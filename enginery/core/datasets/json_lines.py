"""Read JSONL, row by row.

>>> file = tmp_path / "reviews.jsonl"
>>> _ = file.write_text('{"text": "Great value.", "stars": 5}')
>>> JsonLinesReader(file, ("text",), ReadOptions()).schema
text: string
stars: int64

This uses Python's json instead of pyarrow: lines are kept byte for byte, an invalid line is
reported with its number, and a column may have values of several types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from enginery.core.datasets.arrow_arrays import to_arrow
from enginery.core.datasets.batches import (
    RAW_LINE,
    ReadOptions,
    RowBatch,
    batch_rows,
    escape_invalid,
    is_valid_text,
    open_text,
    read_lines,
    require_columns,
    require_few_columns,
)
from enginery.core.errors import InputError

_Row = tuple[str, dict[str, Any]]
_INT64 = 1 << 63
_EXACT = 1 << 53
"""Integers up to this magnitude are exact as floats."""


class JsonLinesReader:
    """A file with one JSON object per line.

    Rows may lack keys, so all columns are known only at the end of the file. The file is therefore
    read once first, to find the columns, their types, and invalid lines. A column with values of
    several types, or with lists or objects, is kept as JSON text.
    """

    def __init__(self, path: Path, columns: Sequence[str], options: ReadOptions) -> None:
        """Read the file once.

        Raises:
            InputError: a line is not a JSON object, or no row has one of the columns.
        """
        import pyarrow as pa

        self._path, self._columns, self._options = path, columns, options
        self._bytes = max(path.stat().st_size, 1)
        self._at = 0
        kinds: dict[str, set[str]] = {}
        for _, row in self._rows():
            for name, value in row.items():
                kinds.setdefault(name, set()).add(_kind(value))
            require_few_columns(len(kinds), path)
        self.names = list(kinds)
        """Keys of all rows, in order of appearance."""
        if not kinds:
            raise InputError(f"data '{path}' is empty; expected one JSON object per line.")
        require_columns(columns, self.names, path)
        types = {name: _type(kinds_of_column) for name, kinds_of_column in kinds.items()}
        self._as_json = {
            name
            for name, kinds_of_column in kinds.items()
            if types[name] == "string" and kinds_of_column - {"null"} != {"str"}
        }
        fields = [(escape_invalid(name), getattr(pa, kind)()) for name, kind in types.items()]
        raw = options.keep == "lines"
        self.schema = pa.schema([(RAW_LINE, pa.string())] if raw else fields)

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the rows after the first `skip`; see `DatasetReader`."""
        sized = ((len(line), (line, row)) for line, row in self._rows(skip))
        first = skip
        for batch in batch_rows(sized, self._options.rows):
            yield self._batch(first, batch)
            first += len(batch)

    def fraction_read(self) -> float:
        """Return the share of the file's bytes that was read."""
        return min(self._at / self._bytes, 1.0)

    def _rows(self, skip: int = 0) -> Iterator[_Row]:
        with open_text(self._path, self._options.encoding, newline=None) as stream:
            for number, line in enumerate(read_lines(stream, self._path), start=1):
                if not line.strip():
                    continue
                if skip > 0:
                    skip -= 1
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise InputError(
                        f"data '{self._path}' cannot be read: line {number}: {error}."
                    ) from error
                if not isinstance(row, dict):
                    raise InputError(
                        f"data '{self._path}' cannot be read: line {number} is a "
                        f"{type(row).__name__}, expected a JSON object."
                    )
                self._at = stream.buffer.tell()
                yield line.strip(), row

    def _batch(self, first: int, rows: list[_Row]) -> RowBatch:
        errors = {
            index: f"the line is not {self._options.encoding}"
            for index, (line, _) in enumerate(rows)
            if not is_valid_text(line)
        }
        values = [tuple(row.get(column) for column in self._columns) for _, row in rows]
        return RowBatch(first, self._kept(rows, errors), values, errors)

    def _kept(self, rows: list[_Row], errors: dict[int, str]) -> Any:
        import pyarrow as pa

        if self._options.keep == "nothing":
            return None
        if self._options.keep == "lines":
            # An invalid byte becomes a JSON escape: `\\udce9`.
            lines = [
                json.dumps(row) if index in errors else line
                for index, (line, row) in enumerate(rows)
            ]
            arrays = [to_arrow(lines, pa.string())]
        else:
            arrays = [
                to_arrow([self._cell(name, row.get(name)) for _, row in rows], field.type)
                for name, field in zip(self.names, self.schema, strict=True)
            ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _cell(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if name in self._as_json:
            return escape_invalid(json.dumps(value, ensure_ascii=False))
        return escape_invalid(value) if isinstance(value, str) else value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool):
        if -_EXACT <= value <= _EXACT:
            return "int"
        return "long" if -_INT64 <= value < _INT64 else "large"
    name = type(value).__name__
    return name if name in ("bool", "float", "str") else "nested"


def _type(value_kinds: set[str]) -> str:
    """Return the name of the pyarrow type that can hold all these kinds without loss."""
    kinds = value_kinds - {"null"}
    if kinds == {"bool"}:
        return "bool_"
    if kinds and kinds <= {"int", "long"}:
        return "int64"
    return "float64" if kinds and kinds <= {"int", "float"} else "string"
