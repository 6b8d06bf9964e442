"""Windows of rows answered by actors of a Ray cluster, as `Answerer` answers them here.

    >>> with RayAnswerer(artifact, PredictConfig(engine="ray"), base=Path()) as answerer:
    ...     columns = answerer.columns(reader.schema, reader.names)
    ...     windows = list(answerer.stream(reader, columns, skip=0))

Takes what `Answerer` takes. One task reads the input, on this machine; actors that hold a session
each answer its windows through Ray Data's `map_batches`; they come back in the input's order, and
parts and journal are written here as in a local run. Windows and their batches are the same as
there, and so are the answers.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.datasets.batches import DatasetReader
from enginery.core.errors import EngineryError, MissingPackageError
from enginery.predict.answering import Answered
from enginery.predict.asking import read_options, require_task
from enginery.predict.columns import AnswerColumns
from enginery.predict.config import PredictConfig
from enginery.predict.ray.cluster import connect, room_for
from enginery.predict.ray.worker import (
    WindowActor,
    WindowSource,
    describe,
    found_or_raised,
    unpacked,
)


class RayAnswerer(Closeable):
    """A cluster's actors in place of an `Answerer`. Closing ends a Ray that was started for it."""

    def __init__(self, artifact: Artifact, config: PredictConfig, *, base: Path) -> None:
        """Joins the cluster and opens the model there once, to know what it answers.

        Raises:
            MissingPackageError: Ray is not installed.
            OptionError: no cluster answers at the address, or it has no room for an actor.
            EngineryError: what opening an `Answerer` raises.
        """
        artifact.require_passed(allow_failed=config.allow_failed)
        self.task = require_task(artifact, config)
        try:
            ray = import_module("ray")
            import_module("ray.data")
        except ImportError:
            raise MissingPackageError("ray", extra="ray", purpose="predict on Ray") from None
        self._ray = ray
        self._owned = connect(ray, config.ray_address)
        # An actor sees the options of a local run: what is left to choose is chosen here.
        self._cpus = config.workers or 1
        self._config = replace(
            config, workers=self._cpus, engine="local", ray_address="", ray_actors=0, ray_gpus=0.0
        )
        self._place = {"num_cpus": self._cpus, "num_gpus": config.ray_gpus}
        self._given = (
            str(artifact.path.resolve()),
            artifact.content_sha256(),
            self._config,
            str(base.resolve()),
        )
        try:
            self._actors = config.ray_actors or room_for(ray, self._cpus, config.ray_gpus)
            look = ray.remote(describe).options(**self._place, max_retries=0)
            self._facts = found_or_raised(self._got(look.remote(*self._given)))
        except BaseException:
            self.close()
            raise
        self.first_run: float | None = None
        """When the first window was answered, by `time.perf_counter`."""

    @property
    def workers(self) -> int:
        """Batches at the same time, on all actors together."""
        return self._actors * self._cpus

    @property
    def takes_images(self) -> bool:
        return self.task.takes_images

    @property
    def providers(self) -> list[str]:
        return list(self._facts["providers"])

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the model, and where it ran."""
        note = f"answered on Ray {self._ray.__version__}, by up to {self._actors} actors"
        return (*self._facts["notes"], note)

    def columns(self, kept: Any, names: Sequence[str]) -> AnswerColumns:
        """Return what `Answerer.columns` returns."""
        return AnswerColumns.of(
            self.task,
            read_options(self.task, self._config),
            kept,
            names,
            prefix=self._config.prefix,
            dim=self._facts["dim"],
        )

    def stream(
        self, reader: DatasetReader, columns: AnswerColumns, *, skip: int
    ) -> Generator[Answered, None, None]:
        """The rows after the first `skip`, answered, window by window in their order.

        Raises:
            InputError: the input cannot be read to its end.
            EngineryError: Ray lost what it cannot make anew.
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
            answered = windows.map_batches(
                WindowActor,
                batch_size=1,
                batch_format="pyarrow",
                compute=data.ActorPoolStrategy(min_size=1, max_size=self._actors),
                fn_constructor_args=(*self._given, columns),
                **self._place,
            )
            rows = iter(
                answered.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2)
            )
            try:
                while (table := self._next(rows)) is not None:
                    for cell in table.column("window"):
                        found = found_or_raised(pickle.loads(cell.as_buffer()))  # noqa: S301  ours
                        self.first_run = self.first_run or time.perf_counter()
                        yield unpacked(found)
            finally:
                rows.close()  # ends the actors of a run that is given up

    def close(self) -> None:
        """Ends a Ray that was started for this run; a cluster goes on without it."""
        if self._owned:
            self._ray.shutdown()
            self._owned = False

    def _next(self, rows: Iterator[Any]) -> Any:
        try:
            return next(rows, None)
        except self._ray.exceptions.RayError as error:
            raise _lost(error) from error

    def _got(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise _lost(error) from error

    def _node(self) -> str:
        """The node of this machine, whose file the input is."""
        return str(self._ray.get_runtime_context().get_node_id())

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Ray Data's settings for this run, and then those that were."""
        context = self._ray.data.DataContext.get_current()
        ours = {
            "target_max_block_size": 1,  # a window is a block: it goes on as soon as it is read
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


def _lost(error: Exception) -> EngineryError:
    first = str(error).strip().rpartition("\n")[2]
    return EngineryError(
        f"Ray gave up: {type(error).__name__}: {first}",
        do="Finished parts stay: the same command goes on after them.",
    )
