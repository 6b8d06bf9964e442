"""JSONL, row by row.

    >>> JsonLinesReader(Path("reviews.jsonl"), ("text",), PredictConfig(), raw=False).schema
    text: string
    stars: int64

A row's keys are known when the last one is read, so the file is read once before anything runs:
the columns, their types and lines that are no JSON object are known then. A column whose values are
not all of one plain type, and one that holds lists or objects, is kept as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginery.core.datasets.arrow_arrays import array_of
from enginery.core.datasets.batches import RAW_LINE, Piece, is_clean, lines_of, pieces_of, shown
from enginery.core.datasets.delimited import open_text
from enginery.core.errors import InputError, nearest

if TYPE_CHECKING:
    from enginery.predict.config import PredictConfig

_Row = tuple[str, dict[str, Any]]
_INT64 = 1 << 63
_EXACT = 1 << 53
"""Integers up to this are floats without loss."""


class JsonLinesReader:
    """One JSON object a line."""

    def __init__(
        self, path: Path, columns: Sequence[str], config: PredictConfig, *, raw: bool
    ) -> None:
        """Reads the file once.

        Args:
            path: the file.
            columns: what the model is asked, each one's name; a row may lack them.
            config: encoding and the rows of a piece.
            raw: keep each line as it is, for an output that is JSONL, too.

        Raises:
            InputError: a line is no JSON object, or no row has such a column.
        """
        import pyarrow as pa

        self._path, self._columns, self._config, self._raw = path, columns, config, raw
        self._bytes = max(path.stat().st_size, 1)
        self._at = 0
        kinds: dict[str, set[str]] = {}
        for _, row in self._rows():
            for name, value in row.items():
                kinds.setdefault(name, set()).add(_kind(value))
        self.names = list(kinds)
        """The keys of all rows, in the order in which they first appear."""
        if not kinds:
            raise InputError(f"data '{path}' is empty; expected one JSON object a line.")
        for column in columns:
            if column not in kinds:
                raise InputError(
                    f"data '{path}' has no column '{column}'{nearest(column, kinds)}",
                    do=f"Its columns: {', '.join(kinds)}.",
                )
        types = {name: _type(found) for name, found in kinds.items()}
        self._as_json = {
            name
            for name, found in kinds.items()
            if types[name] == "string" and found - {"null"} != {"str"}
        }
        fields = [(shown(name), getattr(pa, kind)()) for name, kind in types.items()]
        self.schema = pa.schema([(RAW_LINE, pa.string())] if raw else fields)

    def read(self, skip: int) -> Iterator[Piece]:
        """The rows after the first `skip`; see `rows.Reader`."""
        sized = ((len(line), (line, row)) for line, row in self._rows(skip))
        first = skip
        for piece in pieces_of(sized, self._config.window):
            yield self._piece(first, piece)
            first += len(piece)

    def done(self) -> float:
        """The share of the file's bytes that was read."""
        return min(self._at / self._bytes, 1.0)

    def _rows(self, skip: int = 0) -> Iterator[_Row]:
        with open_text(self._path, self._config.encoding, newline=None) as stream:
            for number, line in enumerate(lines_of(stream, str(self._path)), start=1):
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

    def _piece(self, first: int, rows: list[_Row]) -> Piece:
        import pyarrow as pa

        errors = {
            index: f"the line is not {self._config.encoding}"
            for index, (line, _) in enumerate(rows)
            if not is_clean(line)
        }
        if self._raw:
            # A bad byte becomes JSON's own escape: `\\udce9`.
            lines = [
                json.dumps(row) if index in errors else line
                for index, (line, row) in enumerate(rows)
            ]
            arrays = [array_of(lines, pa.string())]
        else:
            arrays = [
                array_of([self._cell(name, row.get(name)) for _, row in rows], field.type)
                for name, field in zip(self.names, self.schema, strict=True)
            ]
        kept = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        values = [tuple(row.get(column) for column in self._columns) for _, row in rows]
        return Piece(first, kept, values, errors)

    def _cell(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if name in self._as_json:
            return shown(json.dumps(value, ensure_ascii=False))
        return shown(value) if isinstance(value, str) else value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool):
        if -_EXACT <= value <= _EXACT:
            return "int"
        return "long" if -_INT64 <= value < _INT64 else "large"
    name = type(value).__name__
    return name if name in ("bool", "float", "str") else "nested"


def _type(found: set[str]) -> str:
    """The pyarrow type, by name, that holds all these kinds without loss."""
    kinds = found - {"null"}
    if kinds == {"bool"}:
        return "bool_"
    if kinds and kinds <= {"int", "long"}:
        return "int64"
    return "float64" if kinds and kinds <= {"int", "float"} else "string"
