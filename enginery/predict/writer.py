r"""Write record batches to parts, and assemble parts to one Parquet, CSV or JSONL file.

>>> import pyarrow as pa
>>> batch = pa.record_batch({"text": ["It works."], "score": [0.5]})
>>> with PartWriter(tmp_path / "part", batch.schema) as part:
...     part.write(batch)
>>> with Assembly(tmp_path, "jsonl", batch.schema) as assembly:
...     assembly.add(FinishedPart.of(tmp_path / "part", rows=1))
...     digest = assembly.finish()
...     assembly.deliver(tmp_path / "out.jsonl")
>>> (tmp_path / "out.jsonl").read_text()
'{"text": "It works.", "score": 0.5}\n'

A part is an Arrow IPC stream, which is cheap to write and keeps the types. It is joined only if it
has the digest and the number of rows that the journal has recorded.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.closing import Closeable
from enginery.core.datasets.arrow_arrays import numeric_view
from enginery.core.datasets.batches import RAW_LINE
from enginery.core.errors import InputError
from enginery.core.scratch import replace_synced
from enginery.core.subprocess import WorkerProcess

OutputFormat = Literal["parquet", "csv", "jsonl"]
_SUFFIXES: dict[str, OutputFormat] = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
ASSEMBLED = "assembled"
_GROUP_BYTES = 8 << 20
"""Size of a Parquet row group before compression; assembling holds one row group in memory."""
_BACKGROUND_BYTES = 64 << 20
"""Size of the parts from which on they are joined while others are written."""
_BUFFER_BYTES = 1 << 20
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)
"""`default` is for dates and decimals."""
_SYNCED_BYTES = 64 << 20
"""Size after which the joined parts are synced to the disk."""


def output_format(output: Path) -> OutputFormat:
    """Return the format by the suffix; raise InputError for an unknown suffix."""
    name = _SUFFIXES.get(output.suffix.lower())
    if name is None:
        raise InputError(
            f"output '{output}' has the suffix '{output.suffix}', expected {', '.join(_SUFFIXES)}, "
            "or .npz for the graph's own outputs."
        )
    return name


class PartWriter(Closeable):
    """A part that is being written. Closing it syncs it to the disk."""

    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow as pa

        self.rows = 0
        self._stream = path.open("wb", _BUFFER_BYTES)
        self._arrow = pa.ipc.new_stream(self._stream, schema)

    def write(self, batch: Any) -> None:
        """Append the rows of a `pyarrow.RecordBatch`."""
        self._arrow.write_batch(batch)
        self.rows += batch.num_rows

    def close(self) -> None:
        """Sync the file to the disk. A second call does nothing."""
        if self._stream.closed:
            return
        with self._stream:
            self._arrow.close()
            self._stream.flush()
            os.fsync(self._stream.fileno())


@dataclass(frozen=True)
class FinishedPart:
    """A part that is synced to the disk."""

    path: Path
    sha256: str
    rows: int

    @classmethod
    def of(cls, path: Path, rows: int) -> FinishedPart:
        """Return the part with its digest."""
        return cls(path, file_sha256(path), rows)


class Assembly(Closeable):
    """Joins finished parts to the output.

    The parts of a large output are joined in a thread of its own while later ones are written.
    """

    def __init__(
        self, directory: Path, kind: OutputFormat, schema: Any, *, own_process: bool = False
    ) -> None:
        """Join parts to a file.

        Args:
            directory: a temporary directory for the file, which may then be renamed.
            kind: format of the output.
            schema: `pyarrow.Schema` of the rows.
            own_process: join those of a large output in a child process, because threads of this
                one that run a GPU need the GIL.
        """
        self._path = directory / ASSEMBLED
        self._kind, self._schema, self._own_process = kind, schema, own_process
        self._added: SimpleQueue[FinishedPart | None] = SimpleQueue()
        self._bytes = 0
        self.rows = 0
        """Number of rows of the joined parts."""
        self._thread: threading.Thread | None = None
        self._digest = ""
        self._error: BaseException | None = None
        self._is_closed = False

    def add(self, part: FinishedPart) -> None:
        """Append a finished part.

        Raises:
            OSError: the output cannot be written.
            InputError: another process has changed a part; see `OutputProcess`, too.
        """
        if self._error is not None:
            raise self._error
        self._added.put(part)
        self._bytes += part.path.stat().st_size
        if self._thread is None and self._bytes >= _BACKGROUND_BYTES:
            self._thread = threading.Thread(target=self._join, name="enginery-assemble")
            self._thread.start()

    def finish(self) -> str:
        """Wait until all parts are joined; return the output's sha256.

        Raises:
            OSError: the output cannot be written.
            InputError: another process has changed a part; see `OutputProcess`, too.
        """
        self._added.put(None)
        if self._thread is None:
            self._join()
        else:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest

    def deliver(self, output: Path) -> None:
        """Replace the output, atomically and durably, with the joined parts."""
        replace_synced(self._path, output)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._added.put(None)
        if self._thread is not None:
            self._thread.join()

    def _join(self) -> None:
        try:
            # A process of its own takes a second to start.
            in_background = self._thread is not None
            output_type = OutputProcess if self._own_process and in_background else OutputFile
            with output_type(self._path, self._kind, self._schema) as output:
                for part in self._parts():
                    output.add(part)
                    self.rows += part.rows
                self._digest = output.finish()
        except BaseException as error:  # raised by `finish`, or by `add`
            self._error = error

    def _parts(self) -> Iterator[FinishedPart]:
        """Yield the parts as they are added, until the last one."""
        while (part := self._added.get()) is not None and not self._is_closed:
            yield part


class OutputFile(Closeable):
    """An output that parts are appended to."""

    def __init__(self, path: Path, kind: OutputFormat, schema: Any) -> None:
        """Create the file.

        Args:
            path: path of the file.
            kind: its format.
            schema: `pyarrow.Schema` of the rows.

        Raises:
            OSError: it cannot be written.
        """
        self._schema = schema
        self._group: list[Any] = []
        """Record batches of the next row group of Parquet."""
        self._group_bytes = 0
        self._file = path.open("wb")
        self._stream = _HashedStream(self._file)
        self._parquet = _parquet_writer(self._stream, schema) if kind == "parquet" else None
        self._format = _csv_rows if kind == "csv" else _json_lines
        if kind == "csv":
            self._stream.write(_csv_header(schema))

    def add(self, part: FinishedPart) -> None:
        """Append the rows of a part.

        Raises:
            OSError: the file cannot be written.
            InputError: the part has not the digest or the rows that it had when it was finished.
        """
        import pyarrow as pa

        rows = 0
        with part.path.open("rb") as file:
            stream = _HashedReader(file)
            with suppress(pa.ArrowInvalid), pa.ipc.open_stream(stream) as batches:
                for batch in batches:
                    rows += batch.num_rows
                    self._add_batch(batch)
            while stream.read(_BUFFER_BYTES):
                pass
        if (stream.sha256.hexdigest(), rows) != (part.sha256, part.rows):
            raise InputError(
                f"{part.path} was changed by another process before it was joined to the output.",
                do="Run the command again: the rows of this part are then predicted again.",
            )

    def _add_batch(self, batch: Any) -> None:
        if self._parquet is None:
            self._stream.write(self._format(batch))
            return
        self._group.append(batch)
        self._group_bytes += batch.nbytes
        if self._group_bytes >= _GROUP_BYTES:
            self._write_group()

    def finish(self) -> str:
        """Write what is left; return the file's sha256.

        Raises:
            OSError: it cannot be written.
        """
        if self._parquet is not None:
            self._write_group()
            self._parquet.close()
        self._file.flush()
        return self._stream.sha256.hexdigest()

    def close(self) -> None:
        """Close the file; of Parquet it is complete only after `finish`."""
        if self._parquet is not None:
            with suppress(OSError, ValueError):  # pyarrow would write when it is freed
                self._parquet.close()
        self._file.close()

    def _write_group(self) -> None:
        import pyarrow as pa

        if self._parquet is not None and self._group:
            self._parquet.write_table(pa.Table.from_batches(self._group, self._schema))
        self._group, self._group_bytes = [], 0


class OutputProcess(WorkerProcess):
    """An `OutputFile` of a child process."""

    def __init__(self, path: Path, kind: OutputFormat, schema: Any) -> None:
        """Start the process, and create the file; see `OutputFile`."""
        super().__init__(
            "enginery.predict.writer_process", description=f"writing {path}", error=InputError
        )
        content = base64.b64encode(schema.serialize()).decode()
        try:
            self.request("open", path=str(path), kind=kind, schema=content)
        except BaseException:
            self.close()
            raise

    def add(self, part: FinishedPart) -> None:
        """Append the rows of a part."""
        self.request("add", part=str(part.path), sha256=part.sha256, rows=part.rows)

    def finish(self) -> str:
        """Complete the file and return its sha256."""
        return str(self.request("finish")["sha256"])


class _HashedReader(io.RawIOBase):
    """A stream that computes the sha256 of what is read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(size)
        self.sha256.update(content)
        return content


class _HashedStream(io.RawIOBase):
    """A stream that computes the sha256 of what is written, and syncs it to the disk meanwhile."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self._stream = stream
        self._unsynced = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def write(self, content: Any) -> int:
        self.sha256.update(content)
        size = self._stream.write(content)
        self._unsynced += size
        if self._unsynced >= _SYNCED_BYTES:  # so that the last sync is short
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._unsynced = 0
        return size


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, 64 hex digits, without a cache."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _parquet_writer(stream: _HashedStream, schema: Any) -> Any:
    """Return a `pyarrow.parquet.ParquetWriter`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Embeddings do not compress, and trying to takes longer than writing them.
    vectors = [
        f.name
        for f in schema
        if _is_vector(f.type) or (pa.types.is_list(f.type) and _is_vector(f.type.value_type))
    ]
    compression = {
        path: "none" if path.partition(".")[0] in vectors else "zstd" for path in _leaves(schema)
    }
    dictionaries = [path for path, codec in compression.items() if codec != "none"]
    return pq.ParquetWriter(
        stream,
        schema,
        compression=compression,
        use_dictionary=dictionaries,
        write_statistics=dictionaries,
    )


def _leaves(schema: Any) -> list[str]:
    """Return the Parquet paths of a schema's leaf columns, such as `scores.list.element.label`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema):
        pass
    parquet_schema = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [parquet_schema.column(index).path for index in range(len(parquet_schema))]


def _json_lines(batch: Any) -> bytes:
    names = batch.schema.names
    # The pieces of all lines: cells, and what is between them.
    pieces: list[Iterable[bytes]] = []
    between = b"{"
    if names[0] == RAW_LINE:
        # The line is a JSON object: insert the prediction before its closing brace.
        lines = [line.rstrip()[:-1].rstrip() for line in batch.column(0).to_pylist()]
        pieces.append([f"{line}, ".encode() if line != "{" else b"{" for line in lines])
        names, between = names[1:], b""
    for name, column in zip(names, batch.columns[-len(names) :], strict=True):
        pieces.append(repeat(b"%b%b: " % (between, _json(name).encode())))
        pieces.append(_json_cells(column))
        between = b", "
    pieces.append(repeat(b"}\n"))
    return b"".join(chain.from_iterable(zip(*pieces, strict=False)))


def _json_cells(column: Any) -> list[bytes]:
    """Return each value of a column as JSON."""
    import pyarrow as pa

    if column.null_count == len(column):
        return [b"null"] * len(column)
    if pa.types.is_string(column.type):
        return [_ENCODER.encode(cell).encode() for cell in column.to_pylist()]
    return [
        _vector_json(cell) if isinstance(cell, np.ndarray) else _json(cell).encode()
        for cell in _cells(column)
    ]


def _csv_header(schema: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(schema.names)
    return text.getvalue().encode()


def _csv_rows(batch: Any) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [_cells(column) for column in batch.columns]
    for cells in zip(*columns, strict=True):
        writer.writerow([_csv_cell(cell) for cell in cells])
    return text.getvalue().encode()


def _csv_cell(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    return _json(cell).removeprefix('"').removesuffix('"')


def _cells(column: Any) -> Any:
    """Return a column's values. Vectors stay arrays: float32 prints with fewer digits."""
    import pyarrow as pa

    dtype = column.type
    if _is_vector(dtype) or (
        pa.types.is_list(dtype) and (_is_number(dtype.value_type) or _is_vector(dtype.value_type))
    ):
        return _arrays(column)
    if pa.types.is_float32(dtype):
        return [None if cell is None else np.float32(cell) for cell in column.to_pylist()]
    return column.to_pylist()


def _is_number(dtype: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_floating(dtype) or str(dtype) in ("int8", "uint8", "int64")


def _is_vector(dtype: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_fixed_size_list(dtype) and _is_number(dtype.value_type)


def _arrays(column: Any) -> list[Any]:
    """Return the vectors, or lists of numbers or vectors, of a column; None for null."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        flat = numeric_view(column.values)
        rows = list(flat.reshape(-1, column.type.list_size)[column.offset :][: len(column)])
    else:
        values, offsets = column.values, column.offsets.to_pylist()
        if _is_vector(values.type):
            size = values.type.list_size
            flat = numeric_view(values.values).reshape(-1, size)[values.offset :]
        else:
            flat = numeric_view(values)
        rows = [flat[start:end] for start, end in itertools.pairwise(offsets)]
    valid = column.is_valid().to_pylist()
    return [row if is_valid else None for row, is_valid in zip(rows, valid, strict=True)]


def _json(value: Any) -> str:
    """Return a value as JSON: float32 with the fewest digits that identify it; NaN as null."""
    if isinstance(value, np.ndarray | np.float32):
        return _vector_json(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    if isinstance(value, bytes):
        return _json(value.hex())
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_json(str(k))}: {_json(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_json, value))}]"
    return _ENCODER.encode(value)


def _vector_json(vector: NDArray[np.float32] | np.float32) -> bytes:
    import orjson

    return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
