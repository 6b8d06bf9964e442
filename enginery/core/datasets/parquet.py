"""Parquet, in pieces that are bounded by rows and by bytes.

    >>> ParquetReader(Path("reviews.parquet"), ("text",), PredictConfig()).schema.names
    ['id', 'text', 'stars']

A small file can hold gigabytes: one long text a thousand times is stored once. Columns of text stay
dictionaries until a piece is cut from them, and the rows that are decoded at a time follow from
what the file's own footer says of their size. What cannot be bounded so is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginery.core.datasets.arrow_arrays import lengths_in, numbers_in
from enginery.core.datasets.batches import CELL_BYTES, PIECE_BYTES, Piece, require_names
from enginery.core.errors import InputError, nearest

if TYPE_CHECKING:
    from enginery.predict.config import PredictConfig

_PAGES_BYTES = 1 << 20
"""Of a column that are read at one time; without, it is a whole row group."""
_DECODED_BYTES = 16 << 20
"""Of rows that are decoded at one time."""
_BOMB_BYTES = 256 << 20
_BOMB_RATIO = 200
"""A column chunk that is larger, and so many times larger than what is stored, has pages that no
reader can open in bounded memory. Text compresses by 2 to 10."""


class ParquetReader:
    """A table with typed columns, which are kept as they are."""

    def __init__(self, path: Path, columns: Sequence[str], config: PredictConfig) -> None:
        """Reads the footer.

        Args:
            path: the file.
            columns: what the model is asked, each one's name.
            config: the rows of a piece.

        Raises:
            InputError: not a Parquet file, no rows, no such column or no text in it, or a row
                group that decompresses to more than memory should hold.
        """
        import pyarrow.parquet as pq

        self._path, self._columns, self._most = path, columns, config.window
        self._rows_read = 0
        with _reading(path), pq.ParquetFile(path) as file:
            self.schema = file.schema_arrow
            self._groups = [_group(file.metadata.row_group(g)) for g in range(file.num_row_groups)]
        self._rows = sum(rows for rows, _ in self._groups)
        self.names = names = list(self.schema.names)
        require_names(names, str(path))
        for column in columns:
            if column not in names:
                raise InputError(
                    f"data '{path}' has no column '{column}'{nearest(column, names)}",
                    do=f"Its columns: {', '.join(names) or 'none'}.",
                )
            if not _holds_text(self.schema.field(column).type):
                kind = self.schema.field(column).type
                raise InputError(f"data '{path}': column '{column}' holds {kind}, expected text.")
        if not self._rows:
            raise InputError(f"data '{path}' holds no rows.")
        with _reading(path), pq.ParquetFile(path) as file:
            _refuse_bombs(file.metadata, path)

    def read(self, skip: int) -> Iterator[Piece]:
        """The rows after the first `skip`; see `rows.Reader`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = [f.name for f in self.schema if pa.types.is_string(f.type)
                 or pa.types.is_binary(f.type)]  # fmt: skip
        first = 0
        with (
            _reading(self._path),
            pq.ParquetFile(
                self._path, buffer_size=_PAGES_BYTES, pre_buffer=False, read_dictionary=texts
            ) as file,
        ):
            for group, (rows, size) in enumerate(self._groups):
                if first + rows <= skip:
                    first += rows
                    continue
                at_once = max(1, min(self._most, rows * _DECODED_BYTES // max(size, 1)))
                for batch in file.iter_batches(at_once, row_groups=[group], use_threads=False):
                    past = min(max(skip - first, 0), batch.num_rows)
                    first += past
                    for part in _bounded(batch.slice(past)):
                        plain = self._plain(part)
                        self._rows_read = first + plain.num_rows
                        yield Piece(first, plain, self._values(plain))
                        first += plain.num_rows

    def done(self) -> float:
        """The share of the file's rows that was read."""
        return self._rows_read / self._rows

    def _plain(self, batch: Any) -> Any:
        """A batch with the file's own types."""
        import pyarrow as pa

        arrays = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(batch.columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _values(self, batch: Any) -> list[tuple[Any, ...]]:
        columns = [batch.column(batch.schema.get_field_index(c)) for c in self._columns]
        return list(zip(*(column.to_pylist() for column in columns), strict=True))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"data '{path}' cannot be read: {first}.") from error


def _group(group: Any) -> tuple[int, int]:
    return group.num_rows, group.total_byte_size


def _refuse_bombs(metadata: Any, path: Path) -> None:
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for number in range(group.num_columns):
            chunk = group.column(number)
            large, stored = chunk.total_uncompressed_size, max(chunk.total_compressed_size, 1)
            row_bytes = large // max(group.num_rows, 1)
            if row_bytes > CELL_BYTES or (large > _BOMB_BYTES and large > _BOMB_RATIO * stored):
                raise InputError(
                    f"data '{path}': row group {index} of column '{chunk.path_in_schema}' "
                    f"decompresses from {stored:,} to {large:,} bytes, {row_bytes:,} a row.",
                    do="Write the file anew with smaller row groups, if it is meant to be so.",
                )


def _holds_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)
        or pa.types.is_string_view(kind)
    )  # fmt: skip


def _bounded(batch: Any) -> Iterator[Any]:
    """Parts of a batch that are small once their dictionaries are written out."""
    sizes = np.zeros(batch.num_rows)
    for column in batch.columns:
        sizes += _row_bytes(column)
    start, size = 0, 0.0
    for row, row_bytes in enumerate(sizes.tolist(), start=1):
        size += row_bytes
        if size >= PIECE_BYTES:
            yield batch.slice(start, row - start)
            start, size = row, 0.0
    if start < batch.num_rows:
        yield batch.slice(start)


def _row_bytes(column: Any) -> Any:
    """float64 (rows,): the size of each cell, or of the average one."""
    import pyarrow as pa

    if not len(column):
        return 0.0
    kind = column.type
    if pa.types.is_dictionary(kind) and _has_length(kind.value_type) and len(column.dictionary):
        lengths = lengths_in(column.dictionary)
        places = numbers_in(column.indices)
        return lengths[np.clip(places, 0, len(lengths) - 1)]  # a null's place may be anything
    if _has_length(kind):
        return lengths_in(column)
    return column.nbytes / len(column)


def _has_length(kind: Any) -> bool:
    import pyarrow as pa

    return any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string,
                      pa.types.is_large_binary)
    )  # fmt: skip
