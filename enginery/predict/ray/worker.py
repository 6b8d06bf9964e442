"""Code that runs on a Ray cluster: read the input, and predict its windows.

    windows = WindowSource(reader, skip=0)(table)
    actor = WindowActor(str(artifact.path), sha256, config, base, columns)
    predicted = actor(next(windows))

Windows travel as bytes in a table with one cell: record batches as Arrow streams, everything else
pickled. Expected errors travel as values, because Ray wraps exceptions into its own;
`result_or_raise` raises them again.
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
from enginery.predict.batch_predictor import BatchPredictor, PredictedBatch
from enginery.predict.columns import OutputColumns
from enginery.predict.config import PredictConfig

_PROBLEM = "problem"


def describe_predictor(path: str, content: str, config: PredictConfig, base: str) -> dict[str, Any]:
    """Open a `BatchPredictor` and return its properties, or an error as a value.

    Args:
        path: the artifact's path, the same on each node.
        content: the artifact's sha256.
        config: options of a local run.
        base: folder that relative image paths start from.
    """
    try:
        with _predictor(path, content, config, base) as predictor:
            return {
                "providers": predictor.providers,
                "notes": predictor.notes,
                "dim": predictor.dim,
            }
    except EngineryError as error:
        return _problem(error)


class WindowSource:
    """A callable for `map_batches` that reads the input."""

    def __init__(self, reader: DatasetReader, skip: int) -> None:
        self._reader, self._skip = reader, skip

    def __call__(self, _: Any) -> Iterator[Any]:
        """Yield a table for each window; if reading fails, the last table has the error."""
        reader = self._reader
        try:
            for window in reader.read(self._skip):
                yield _single_cell_table(
                    {
                        "rows": replace(window, kept=_batch_to_bytes(window.kept)),
                        "done": reader.fraction_read(),
                    }
                )
        except EngineryError as error:
            yield _single_cell_table(_problem(error))


class WindowActor:
    """An actor with a model. The first window opens its session."""

    def __init__(
        self, path: str, content: str, config: PredictConfig, base: str, columns: OutputColumns
    ) -> None:
        self._predictor_args = (path, content, config, base)
        self._columns = columns
        self._predictor: BatchPredictor | None = None

    def __call__(self, table: Any) -> Any:
        """Return a table with the predicted window or an error; `table` may have an error, too."""
        payload = pickle.loads(table.column("window")[0].as_buffer())  # noqa: S301  our own
        if _PROBLEM in payload:
            return table
        window: RowBatch = payload["rows"]
        try:
            if self._predictor is None:
                self._predictor = _predictor(*self._predictor_args)
            predicted = self._predictor(
                replace(window, kept=_batch_from_bytes(window.kept)), self._columns
            )
        except EngineryError as error:
            return _single_cell_table(_problem(error))
        packed = replace(predicted, batch=_batch_to_bytes(predicted.batch), done=payload["done"])
        return _single_cell_table({"predicted": packed})


def result_or_raise(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a result; if it is an error, raise it."""
    if _PROBLEM not in payload:
        return payload
    name, message, do = payload[_PROBLEM]
    raise getattr(errors, name, EngineryError)(message, do=do)


def unpack_prediction(payload: dict[str, Any]) -> PredictedBatch:
    """Return the predicted window of a result."""
    predicted: PredictedBatch = payload["predicted"]
    return replace(predicted, batch=_batch_from_bytes(predicted.batch))


def _predictor(path: str, content: str, config: PredictConfig, base: str) -> BatchPredictor:
    artifact = Artifact.open(path)
    if artifact.content_sha256() != content:
        raise ArtifactError(
            f"the artifact {path} on a node of the cluster differs from the one on this machine.",
            do="Put it into shared storage that all nodes mount at the same path.",
        )
    return BatchPredictor(artifact, config, workers=config.workers, base=Path(base))


def _problem(error: EngineryError) -> dict[str, Any]:
    return {_PROBLEM: (type(error).__name__, error.message, error.do)}


def _single_cell_table(payload: dict[str, Any]) -> Any:
    """Return a `pyarrow.Table` with one row and the column `window`."""
    import pyarrow as pa

    cell = pa.array([pickle.dumps(payload)], pa.large_binary())
    return pa.Table.from_arrays([cell], names=["window"])


def _batch_to_bytes(batch: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _batch_from_bytes(content: bytes) -> Any:
    import pyarrow as pa

    with pa.ipc.open_stream(content) as stream:
        return stream.read_next_batch()
