r"""Split labelled rows into those to calibrate on and those to measure on: `enginery init`.

>>> _ = (tmp_path / "reviews.csv").write_text("text,label\n" + "warm,1\n" * 40)
>>> split_rows(tmp_path / "reviews.csv", tmp_path / "rest.parquet", tmp_path / "measured.parquet")
(30, 10)
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from enginery.core.datasets.batches import ReadOptions
from enginery.core.datasets.reader import open_dataset
from enginery.core.scratch import Scratch

MAX_ROWS = 1024
"""Held-out rows at most, as many as quantize and the recipe's validations measure on."""
_STRIDE = 4
_MIN_ROWS = 8


def split_rows(data: Path, calibrating: Path, held_out: Path) -> tuple[int, int] | None:
    """Write every fourth row to one Parquet file and the others to another one.

    Of many rows, fewer are held out, evenly spread. Rows that cannot be read are left out.

    Args:
        data: a table or a text file.
        calibrating: the file of the rows to calibrate on.
        held_out: the file of the rows to measure on.

    Returns:
        Number of rows in each file; None if there are fewer than eight rows, which are not split.

    Raises:
        InputError: the data cannot be read.
        MissingPackageError: pyarrow is not installed.
        OSError: a file cannot be written.
    """
    reader = open_dataset(data, (), ReadOptions(keep="columns"))
    count = sum(batch.kept.num_rows for batch in reader.read(0))
    if count < _MIN_ROWS:
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    every = max(_STRIDE, -(-count // MAX_ROWS))
    written = {calibrating: 0, held_out: 0}
    with Scratch.beside(held_out) as scratch, ExitStack() as stack:
        writers: dict[Path, Any] = {
            path: stack.enter_context(pq.ParquetWriter(scratch.path / path.name, reader.schema))
            for path in written
        }
        for batch in reader.read(0):
            rows = [row for row in range(batch.kept.num_rows) if row not in batch.errors]
            for path in written:
                chosen = [
                    row
                    for row in rows
                    if ((batch.first + row + 1) % every == 0) == (path is held_out)
                ]
                table = pa.Table.from_batches([batch.kept], reader.schema)
                writers[path].write_table(table.take(chosen))
                written[path] += len(chosen)
        stack.close()  # it writes the ends of the files
        for path in written:
            os.replace(scratch.path / path.name, path)
    return written[calibrating], written[held_out]
