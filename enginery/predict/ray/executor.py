"""Predict windows of rows in the actors of a Ray cluster, with the interface of `BatchPredictor`.

    with RayPredictor(artifact, PredictConfig(engine="ray"), base=Path()) as predictor:
        columns = predictor.columns(reader.schema, reader.names)
        windows = list(predictor.stream(reader, columns, skip=0))

A task on this machine reads the input. Actors, each with its own session, predict the windows
through Ray Data's `map_batches`, which returns them in the input's order. Parts and journal are
written on this machine. Windows and batches are the same as in a local run, and so are the results.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.datasets.batches import DatasetReader
from enginery.core.errors import EngineryError
from enginery.core.extras import require_packages
from enginery.predict.batch_predictor import PredictedBatch
from enginery.predict.columns import OutputColumns
from enginery.predict.config import PredictConfig
from enginery.predict.ray.cluster import connect, max_actors
from enginery.predict.ray.worker import (
    WindowActor,
    WindowSource,
    describe_predictor,
    result_or_raise,
    unpack_prediction,
)
from enginery.predict.task_inputs import read_options, require_task
from enginery.runtime.tasks.task import Modality


class RayPredictor(Closeable):
    """Actors of a Ray cluster. Closing stops a Ray that was started for this run."""

    def __init__(self, artifact: Artifact, config: PredictConfig, *, base: Path) -> None:
        """Connect to the cluster and open the model there once, to read its properties.

        Args:
            artifact: the model; its path must be the same on each node.
            config: the options.
            base: folder that relative paths of images or audio start from.

        Raises:
            MissingPackageError: Ray is not installed.
            OptionError: no cluster answers at the address, or no actor fits into it.
            EngineryError: opening a `BatchPredictor` failed.
        """
        artifact.require_passed(allow_failed=config.allow_failed)
        self.task = require_task(artifact, config)
        require_packages("predict on Ray", "ray")
        ray = import_module("ray")
        import_module("ray.data")
        self._ray = ray
        self._owned = connect(ray, config.ray_address)
        # An actor gets the options of a local run.
        self._cpus = config.workers or 1
        self._config = replace(
            config, workers=self._cpus, engine="local", ray_address="", ray_actors=0, ray_gpus=0.0
        )
        self._resources = {"num_cpus": self._cpus, "num_gpus": config.ray_gpus}
        self._predictor_args = (
            str(artifact.path.resolve()),
            artifact.content_sha256(),
            self._config,
            str(base.resolve()),
        )
        try:
            self._actors = config.ray_actors or max_actors(ray, self._cpus, config.ray_gpus)
            look = ray.remote(describe_predictor).options(**self._resources, max_retries=0)
            self._facts = result_or_raise(self._get(look.remote(*self._predictor_args)))
        except BaseException:
            self.close()
            raise
        self.first_run: float | None = None
        """Time when the first window returned, by `time.perf_counter`; None before that."""

    @property
    def workers(self) -> int:
        """Number of batches that run at the same time on all actors."""
        return self._actors * self._cpus

    @property
    def modality(self) -> Modality:
        return self.task.modality

    @property
    def on_gpu(self) -> bool:
        """False: no batch runs in this process."""
        return False

    @property
    def providers(self) -> list[str]:
        return list(self._facts["providers"])

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions made for this model, and where it ran."""
        note = f"predicted on Ray {self._ray.__version__}, by up to {self._actors} actors"
        return (*self._facts["notes"], note)

    def columns(self, kept: Any, names: Sequence[str]) -> OutputColumns:
        """Return the columns of the output; see `BatchPredictor.columns`."""
        return OutputColumns.of(
            self.task,
            read_options(self.task, self._config),
            kept,
            names,
            prefix=self._config.prefix,
            dim=self._facts["dim"],
        )

    def stream(
        self,
        reader: DatasetReader,
        columns: OutputColumns,
        *,
        skip: int,
        show: Callable[[float], object] = lambda _: None,  # noqa: ARG002  actors tell of windows only
    ) -> Generator[PredictedBatch, None, None]:
        """Yield the predicted windows in order, without the first `skip` rows of the input.

        Raises:
            InputError: the input cannot be read to its end.
            EngineryError: Ray lost a task or an actor and could not recover it.
        """
        source = WindowSource(reader, skip)
        with self._settings():
            data = self._ray.data
            windows = data.from_items([0], override_num_blocks=1).map_batches(
                source,
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=0,
                label_selector={"ray.io/node-id": self._node()},
            )
            predicted = windows.map_batches(
                WindowActor,
                batch_size=1,
                batch_format="pyarrow",
                compute=data.ActorPoolStrategy(min_size=1, max_size=self._actors),
                fn_constructor_args=(*self._predictor_args, columns),
                **self._resources,
            )
            rows = iter(
                predicted.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2)
            )
            try:
                while (table := self._next(rows)) is not None:
                    for cell in table.column("window"):
                        result = result_or_raise(pickle.loads(cell.as_buffer()))  # noqa: S301  ours
                        self.first_run = self.first_run or time.perf_counter()
                        yield unpack_prediction(result)
            finally:
                rows.close()  # ends the actors if the caller stops early

    def close(self) -> None:
        """Stop a Ray that was started for this run; leave any other cluster running."""
        if self._owned:
            self._ray.shutdown()
            self._owned = False

    def _next(self, rows: Iterator[Any]) -> Any:
        try:
            return next(rows, None)
        except self._ray.exceptions.RayError as error:
            raise _ray_error(error) from error

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise _ray_error(error) from error

    def _node(self) -> str:
        """Return the id of this machine's node; the input is a file of this machine."""
        return str(self._ray.get_runtime_context().get_node_id())

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Set Ray Data's options for this run; restore the earlier ones at the end."""
        context = self._ray.data.DataContext.get_current()
        ours = {
            "target_max_block_size": 1,  # one window per block: it moves on as soon as it is read
            "enable_progress_bars": False,
        }
        before = {name: getattr(context, name) for name in ours}
        ordered = context.execution_options.preserve_order
        for name, value in ours.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = True
        try:
            yield
        finally:
            context.execution_options.preserve_order = ordered
            for name, value in before.items():
                setattr(context, name, value)


def _ray_error(error: Exception) -> EngineryError:
    last_line = str(error).strip().rpartition("\n")[2]
    return EngineryError(
        f"Ray failed: {type(error).__name__}: {last_line}",
        do="Run the same command again: it resumes after the finished parts.",
    )
