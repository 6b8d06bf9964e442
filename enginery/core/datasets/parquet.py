"""Read Parquet in batches that are bounded by rows and by bytes.

    reader = ParquetReader(Path("reviews.parquet"), ("text",), ReadOptions())
    reader.names    # ['id', 'text', 'stars']

A small file can decompress to gigabytes: a long text that occurs a thousand times is stored once.
So text columns stay dictionary-encoded until they are split into batches, and the number of rows
decoded at a time is computed from the sizes in the file's footer. Files that cannot be read in
bounded memory are rejected.
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
"""Bytes of a column that are read at a time; by default pyarrow reads a whole row group."""
_DECODED_BYTES = 16 << 20
"""Bytes of rows that are decoded at a time."""
_BOMB_BYTES = 256 << 20
_BOMB_RATIO = 200
"""A column chunk above both limits (decompressed size, ratio to the stored size) has pages that no
reader can decode in bounded memory. Text compresses by a factor of 2 to 10."""


class ParquetReader:
    """A table with typed columns, whose types are kept."""

    def __init__(self, path: Path, columns: Sequence[str], options: ReadOptions) -> None:
        """Read the footer.

        Raises:
            InputError: the file is not Parquet, has no rows, lacks a column, or decompresses to
                more memory than allowed.
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
            raise InputError(f"data '{path}' has no rows.")
        keep = options.keep != "nothing"
        fields = [field for field in schema if keep or field.name in columns]
        require_distinct([field.name for field in fields], path)
        self.schema = pa.schema(fields, metadata=schema.metadata)

    def read(self, skip: int) -> Iterator[RowBatch]:
        """Yield the rows after the first `skip`; see `DatasetReader`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        # Texts stay dictionaries until a batch is converted, so that repeated ones are held once.
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

    def fraction_read(self) -> float:
        """Return the share of the rows that has been read."""
        return self._rows_read / self._rows

    def _batch(self, first: int, batch: Any) -> RowBatch:
        import pyarrow as pa

        # Convert to the types in the file: expand dictionaries.
        columns = [(batch.column(field.name), field.type) for field in self.schema]
        arrays = [column if column.type == kind else column.cast(kind) for column, kind in columns]
        plain = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        values = [plain.column(name).to_pylist() for name in self._columns]
        self._rows_read = first + plain.num_rows
        kept_columns = None if self._options.keep == "nothing" else plain
        return RowBatch(first, kept_columns, list(zip(*values, strict=True)))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"data '{path}' cannot be read: {first}.") from error


def _bounded_groups(metadata: Any, path: Path) -> list[tuple[int, int]]:
    """Return (number of rows, decompressed bytes) of each row group.

    Raises:
        InputError: a column chunk decompresses to more memory than allowed.
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
                    do="If this is intended, write the file with smaller row groups.",
                )
    return [(group.num_rows, group.total_byte_size) for group in groups]


def _cut(batch: Any) -> Iterator[Any]:
    """Yield slices of a batch that stay small when their dictionaries are expanded."""
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
    """Return the size of each cell, float64 (rows,), or the average size of all cells."""
    import pyarrow as pa

    if not len(column):
        return 0.0
    kind = column.type
    if pa.types.is_dictionary(kind) and _has_length(kind.value_type) and len(column.dictionary):
        lengths = value_lengths(column.dictionary)
        places = numeric_view(column.indices)
        return lengths[np.clip(places, 0, len(lengths) - 1)]  # the index of a null is undefined
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
