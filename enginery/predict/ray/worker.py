"""What runs on a Ray cluster: the reading of an input, and the answering of its windows.

    >>> windows = WindowSource(reader, skip=0)(table)
    >>> actor = WindowActor(str(artifact.path), sha256, config, base, columns)
    >>> pickle.loads(actor(next(windows)).column("window")[0].as_py())["counts"].rows
    1024

Windows travel as bytes in a column: Arrow batches as Arrow streams, the rest pickled. What is no
bug travels as a value, because Ray would bury an exception in its own: `found_or_raised` raises it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginery.core import errors
from enginery.core.artifact.artifact import Artifact
from enginery.core.datasets.batches import DatasetReader, RowBatch
from enginery.core.errors import ArtifactError, EngineryError
from enginery.predict.answering import Answered, Answerer
from enginery.predict.columns import AnswerColumns
from enginery.predict.config import PredictConfig

_PROBLEM = "problem"


def describe(path: str, content: str, config: PredictConfig, base: str) -> dict[str, Any]:
    """What an `Answerer` says of itself, or a problem.

    Args:
        path: the artifact's, the same on each node.
        content: its SHA-256.
        config: of a local run.
        base: what relative paths of images are relative to.
    """
    try:
        with _answerer(path, content, config, base) as answerer:
            return {
                "providers": answerer.providers,
                "notes": answerer.notes,
                "dim": answerer.dim,
            }
    except EngineryError as error:
        return _problem(error)


class WindowSource:
    """Reads an input: called once, gives a row with a window each."""

    def __init__(self, reader: DatasetReader, skip: int) -> None:
        self._reader, self._skip = reader, skip

    def __call__(self, _: Any) -> Iterator[Any]:
        """One table of one row for each window; a problem is the last one."""
        reader = self._reader
        try:
            for window in reader.read(self._skip):
                yield _table(
                    {
                        "rows": replace(window, kept=_bytes_of(window.kept)),
                        "done": reader.fraction_read(),
                    }
                )
        except EngineryError as error:
            yield _table(_problem(error))


class WindowActor:
    """A model on a node. Its session is opened by the first window."""

    def __init__(
        self, path: str, content: str, config: PredictConfig, base: str, columns: AnswerColumns
    ) -> None:
        self._given = (path, content, config, base)
        self._columns = columns
        self._answerer: Answerer | None = None

    def __call__(self, table: Any) -> Any:
        """The answers to a window, or the problem that came with it or came up."""
        found = pickle.loads(table.column("window")[0].as_buffer())  # noqa: S301  our own
        if _PROBLEM in found:
            return table
        window: RowBatch = found["rows"]
        try:
            if self._answerer is None:
                self._answerer = _answerer(*self._given)
            answered = self._answerer(replace(window, kept=_batch_of(window.kept)), self._columns)
        except EngineryError as error:
            return _table(_problem(error))
        packed = replace(answered, batch=_bytes_of(answered.batch), done=found["done"])
        return _table({"answered": packed})


def found_or_raised(found: dict[str, Any]) -> dict[str, Any]:
    """What came back; raises the EngineryError that came in place of it."""
    if _PROBLEM not in found:
        return found
    name, message, do = found[_PROBLEM]
    kind = getattr(errors, name, EngineryError)
    plain = kind.__init__ is EngineryError.__init__  # one of the tree makes its own message
    raise (kind if plain else EngineryError)(message, do=do)


def unpacked(found: dict[str, Any]) -> Answered:
    """A window that came back."""
    answered: Answered = found["answered"]
    return replace(answered, batch=_batch_of(answered.batch))


def _answerer(path: str, content: str, config: PredictConfig, base: str) -> Answerer:
    artifact = Artifact.open(path)
    if artifact.content_sha256() != content:
        raise ArtifactError(
            f"{path} on a node of the cluster is another artifact than here.",
            do="Put it where all nodes read the same, at the same path.",
        )
    return Answerer(artifact, config, workers=config.workers, base=Path(base))


def _problem(error: EngineryError) -> dict[str, Any]:
    return {_PROBLEM: (type(error).__name__, error.message, error.do)}


def _table(found: dict[str, Any]) -> Any:
    """A `pyarrow.Table` with one row."""
    import pyarrow as pa

    cell = pa.array([pickle.dumps(found)], pa.large_binary())
    return pa.Table.from_arrays([cell], names=["window"])


def _bytes_of(batch: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _batch_of(content: bytes) -> Any:
    import pyarrow as pa

    with pa.ipc.open_stream(content) as stream:
        return stream.read_next_batch()
