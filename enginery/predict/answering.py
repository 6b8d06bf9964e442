"""A window of rows in, its answers out: the one function that the rest of predict is around.

    >>> with Answerer(artifact, PredictConfig(), workers=2) as answer:
    ...     columns = answer.columns(reader.schema, reader.names)
    ...     answer(window, columns).batch.schema.names
    ['id', 'text', 'embedding', 'error']

It may be called from several threads. Rows are independent: where one cannot be answered, its
`error` says why, and the others are answered all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.datasets.batches import DatasetReader, RowBatch, Values
from enginery.core.errors import InputError
from enginery.predict.asking import (
    column_names,
    find_problem,
    own_message,
    providers_of,
    read_options,
    require_task,
)
from enginery.predict.columns import AnswerColumns
from enginery.predict.config import PredictConfig
from enginery.predict.report import Counts
from enginery.predict.token_batches import Meter, RunPool, WindowModel
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.specification import check_run_options

_TEXT_WINDOWS = 2
"""While the batches of one run, the other is tokenized or its answers are written. For images,
whose preparation takes longer than a thread's run, there is a window for each worker."""

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Answered:
    """A window with its answers."""

    first: int
    batch: Any
    """`pyarrow.RecordBatch`: what is kept of the rows, the answer's columns, and `error`."""
    counts: Counts
    first_bad: tuple[int, str] | None
    """The number of the first bad row, from 0, and what is wrong with it."""
    done: float = 0.0
    """The share of the input, 0 to 1, that was read by then."""


class Answerer(Closeable):
    """A model that answers windows of rows. A context manager; closing frees its session."""

    def __init__(
        self, artifact: Artifact, config: PredictConfig, *, workers: int, base: Path = Path()
    ) -> None:
        """Open the session.

        Args:
            artifact: answers one of the tasks that `load_model` answers.
            config: the provider, and how answers are made.
            workers: batches of texts at the same time.
            base: what relative paths of images are relative to.

        Raises:
            ArtifactError: the task is not answered, or a file that answers cannot be made from.
            ProviderError: the provider cannot be had, or has no CUDA graphs.
            OptionError: an option does not fit the task, or ways of running exclude each other.
        """
        artifact.require_passed(allow_failed=config.allow_failed)
        self._config, self._base = config, base
        self.workers = workers
        self.task = require_task(artifact, config)
        """How rows are answered."""
        self._names = column_names(self.task, config)
        # A thread each for the batches that run side by side: none of ONNX Runtime's own.
        specs = providers_of(config)
        on_cpu = specs[0].full_name == CPU
        check_run_options(
            specs,
            io_binding=config.io_binding,
            cuda_graph=config.cuda_graph,
            shrink_arena=config.shrink_arena,
        )
        self._runner = OrtRunner(
            artifact,
            providers=specs,
            allow_fallback=config.allow_fallback,
            threads=1 if on_cpu else 0,
            io_binding=config.io_binding,
            cuda_graph=config.cuda_graph,
            shrink_arena=config.shrink_arena,
            keep_optimized=config.optimized_graph,
        )
        self._pool = RunPool(workers)
        try:
            self._model = WindowModel.open(artifact, self._runner, self._pool, config)
            self._runner.warm_up()
        except BaseException:
            self._pool.close()
            self._runner.close()
            raise

    @property
    def providers(self) -> list[str]:
        return [provider.name for provider in self._runner.providers]

    @property
    def takes_images(self) -> bool:
        return self.task.takes_images

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices that were made for this model, with their reasons."""
        return self._model.task.notes

    @property
    def first_run(self) -> float | None:
        """When the first batch of texts ran, by `time.perf_counter`."""
        return self._pool.first_run

    def columns(self, kept: Any, names: Sequence[str]) -> AnswerColumns:
        """Return the columns of the answer beside those that are kept.

        Args:
            kept: the schema of what is kept of the input.
            names: the input's own columns.

        Raises:
            InputError: the input has a column of such a name already.
        """
        return AnswerColumns.of(
            self.task,
            read_options(self.task, self._config),
            kept,
            names,
            prefix=self._config.prefix,
            dim=self.dim,
        )

    def __call__(self, window: RowBatch, columns: AnswerColumns) -> Answered:
        """Answer a window, row by row.

        Raises:
            EngineryError: what no row is to blame for, as a graph that wants another input.
        """
        errors = dict(window.errors)
        rows: list[int] = []
        inputs: list[Any] = []
        for row, values in enumerate(window.values):
            if row in errors:
                continue
            if problem := find_problem(values, self._names):
                errors[row] = problem
                continue
            rows.append(row)
            inputs.append(self._input(values))
        meter = Meter()
        answers: list[Any] = [None] * len(window.values)
        self._spread(rows, inputs, answers, errors, meter)
        for row in rows:
            if row not in errors and not self._model.task.is_finite(answers[row]):
                answers[row], errors[row] = None, "the model answered NaN or infinity"
        batch = columns.batch(window.kept, answers, errors)
        bad = min(errors) if errors else None
        counts = Counts(
            rows=len(window.values),
            bad_rows=len(errors),
            truncated=meter.truncated,
            tokens=meter.tokens,
            padded_tokens=meter.padded_tokens,
            encode_seconds=meter.encode_seconds,
            run_seconds=meter.run_seconds,
        )
        first_bad = None if bad is None else (window.first + bad, errors[bad])
        return Answered(window.first, batch, counts, first_bad)

    def stream(
        self, reader: DatasetReader, columns: AnswerColumns, *, skip: int
    ) -> Generator[Answered, None, None]:
        """Yield the rows after the first `skip`, answered, window by window in their order.

        Raises:
            InputError: the input cannot be read to its end.
        """
        threads = self.workers if self.takes_images else _TEXT_WINDOWS
        windows = reader.read(skip)
        for answered in in_order(partial(self, columns=columns), windows, threads=threads):
            yield replace(answered, done=reader.fraction_read())

    def close(self) -> None:
        """Free the session."""
        self._model.watch.close()
        self._pool.close()
        self._runner.close()

    @property
    def dim(self) -> int:
        """Return the length of a vector; 0 for other results."""
        return self._model.dim

    def _spread(
        self,
        rows: Sequence[int],
        inputs: Sequence[Any],
        answers: list[Any],
        errors: dict[int, str],
        meter: Meter,
    ) -> None:
        """Answer all rows at once, or halve them until the bad ones are alone."""
        if not rows:
            return
        try:
            found = self._model(inputs, meter)
        except InputError as error:
            if len(rows) == 1:
                errors[rows[0]] = own_message(self.task, error.message)
                return
            middle = len(rows) // 2
            for part in (slice(None, middle), slice(middle, None)):
                self._spread(rows[part], inputs[part], answers, errors, meter)
            return
        for row, answer in zip(rows, found, strict=True):
            answers[row] = answer

    def _input(self, values: Values) -> Any:
        if self.takes_images:
            return str(self._base / values[0])
        return values[0] if len(values) == 1 else values


def in_order(
    function: Callable[[Given], Made], stream: Iterator[Given], *, threads: int
) -> Iterator[Made]:
    """Yield what `function` makes of each item of a stream, several at a time, in order.

    The stream is read no further than what runs and one more, so that memory does not follow it;
    `Executor.map` can do that from Python 3.14 on, with its `buffersize`.

    Raises:
        Whatever the function or the stream raises; what waits is dropped then.
    """
    waiting: deque[Future[Made]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="enginery-window")
    try:
        for item in stream:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
