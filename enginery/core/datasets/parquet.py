"""Parquet, in batches that are bounded by rows and by bytes.

    >>> ParquetReader(Path("reviews.parquet"), ("text",), ReadOptions()).names
    ['id', 'text', 'stars']

A small file can hold gigabytes: one long text a thousand times is stored once. Columns of text stay
dictionaries until a batch is cut from them, and the rows that are decoded at a time follow from
what the file's own footer says of their size. What cannot be bounded so is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.datasets.arrow_arrays import numeric_view, value_lengths
from enginery.core.datasets.batches import (
    BATCH_BYTES,
    CELL_BYTES,
    ReadOptions,
    RowBatch,
    require_columns,
    require_distinct,
    require_few_columns,
)
from enginery.core.errors import InputError

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

    def __init__(self, path: Path, columns: Sequence[str], options: ReadOptions) -> None:
        """Read the footer.

        Raises:
            InputError: not a Parquet file, no rows, no such column, or a row group that
                decompresses to more than memory should hold.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path, self._columns, self._options = path, columns, options
        self._rows_read = 0
        with _reading(path), pq.ParquetFile(path) as file:
            require_few_columns(file.metadata.num_columns, path)
            schema = file.schema_arrow
            self._groups = _bounded_groups(file.metadata, path)
        self._rows = sum(rows for rows, _ in self._groups)
        self.names = list(schema.names)
        require_columns(columns, self.names, path)
        if not self._rows:
            raise InputError(f"data '{path}' holds no rows.")
        keep = options.keep != "nothing"
        read = [field for field in schema if keep or field.name in columns]
        require_distinct([field.name for field in read], path)
        self.schema = pa.schema(read, metadata=schema.metadata)

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the rows after the first `skip`; see `DatasetReader`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = [
            f.name for f in self.schema if pa.types.is_string(f.type) or pa.types.is_binary(f.type)
        ]
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
                at_once = max(1, min(self._options.rows, rows * _DECODED_BYTES // max(size, 1)))
                for batch in file.iter_batches(
                    at_once, row_groups=[group], columns=self.schema.names, use_threads=False
                ):
                    past = min(max(skip - first, 0), batch.num_rows)
                    first += past
                    for part in _cut(batch.slice(past)):
                        yield self._batch(first, part)
                        first += part.num_rows

    def done(self) -> float:
        """Return the share of the file's rows that was read."""
        return self._rows_read / self._rows

    def _batch(self, first: int, batch: Any) -> RowBatch:
        import pyarrow as pa

        # The file's own types: dictionaries are written out now.
        columns = [(batch.column(field.name), field.type) for field in self.schema]
        arrays = [column if column.type == kind else column.cast(kind) for column, kind in columns]
        plain = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        values = [plain.column(name).to_pylist() for name in self._columns]
        self._rows_read = first + plain.num_rows
        kept = None if self._options.keep == "nothing" else plain
        return RowBatch(first, kept, list(zip(*values, strict=True)))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"data '{path}' cannot be read: {first}.") from error


def _bounded_groups(metadata: Any, path: Path) -> list[tuple[int, int]]:
    """Return the rows and the decompressed bytes of each row group.

    Raises:
        InputError: a column of one decompresses to more than memory should hold.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    for index, group in enumerate(groups):
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
    return [(group.num_rows, group.total_byte_size) for group in groups]


def _cut(batch: Any) -> Iterator[Any]:
    """Yield parts of a batch that are small once their dictionaries are written out."""
    sizes = np.zeros(batch.num_rows)
    for column in batch.columns:
        sizes += _row_bytes(column)
    start, size = 0, 0.0
    for row, row_bytes in enumerate(sizes.tolist(), start=1):
        size += row_bytes
        if size >= BATCH_BYTES:
            yield batch.slice(start, row - start)
            start, size = row, 0.0
    if start < batch.num_rows:
        yield batch.slice(start)


def _row_bytes(column: Any) -> Any:
    """Return float64 (rows,): the size of each cell, or the average size for all of them."""
    import pyarrow as pa

    if not len(column):
        return 0.0
    kind = column.type
    if pa.types.is_dictionary(kind) and _has_length(kind.value_type) and len(column.dictionary):
        lengths = value_lengths(column.dictionary)
        places = numeric_view(column.indices)
        return lengths[np.clip(places, 0, len(lengths) - 1)]  # a null's place may be anything
    if _has_length(kind):
        return value_lengths(column)
    return column.nbytes / len(column)


def _has_length(kind: Any) -> bool:
    import pyarrow as pa

    return any(
        check(kind)
        for check in (
            pa.types.is_string,
            pa.types.is_binary,
            pa.types.is_large_string,
            pa.types.is_large_binary,
        )
    )
