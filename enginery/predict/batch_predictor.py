"""Run inference on windows of rows. Everything else in `predict` reads windows or writes results.

A window is up to `--window` consecutive rows; its texts are sorted by length and cut into batches.

    with BatchPredictor(artifact, PredictConfig(workers=2)) as predictor:
        columns = predictor.columns(reader.schema, reader.names)
        predictor(window, columns).batch.schema.names  # ['id', 'text', 'embedding', 'error']

A predictor is thread-safe. Rows are independent: a row that fails gets a message in its `error`
column, and the other rows get their predictions.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.datasets.batches import DatasetReader, RowBatch, Values
from enginery.core.errors import InputError
from enginery.predict.columns import OutputColumns
from enginery.predict.config import MAX_ROWS, PredictConfig
from enginery.predict.generation import GenerationRunner, read_generation_options
from enginery.predict.report import Counts
from enginery.predict.task_inputs import (
    are_usable_texts,
    column_names,
    find_input_problem,
    provider_specs,
    read_options,
    require_task,
    row_message,
)
from enginery.predict.token_batches import InferencePool, WindowRunner
from enginery.runtime.machine import usable_cores
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.known import CPU, CUDA
from enginery.runtime.providers.specification import check_run_options
from enginery.runtime.tasks.generate import Generate
from enginery.runtime.tasks.results import is_finite
from enginery.runtime.tasks.row_stream import Window
from enginery.runtime.tasks.task import InputLimits, Modality, RowValues
from enginery.runtime.tasks.text_generator import TextGenerator

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class PredictedBatch:
    """A window of rows with its predictions."""

    batch: Any
    """`pyarrow.RecordBatch` with the kept columns, the prediction's columns, and `error`."""
    counts: Counts
    first_bad: tuple[int, str] | None
    """Index in the input and problem of the first bad row; None if all rows are good."""
    done: float = 0.0
    """Share of the input up to the end of the window, 0 to 1."""


@dataclass(frozen=True)
class SelectedRows:
    """The rows of a window that the model can take."""

    batch: RowBatch
    """All rows of the window."""
    rows: list[int]
    """Index in the window of each row to predict."""
    inputs: list[Any]
    """The inputs of these rows."""
    errors: dict[int, str]
    """Index in the window of each bad row -> its problem."""


class BatchPredictor(Closeable):
    """A model that predicts windows of rows. A context manager; closing frees its session."""

    def __init__(self, artifact: Artifact, config: PredictConfig, *, base: Path = Path()) -> None:
        """Open the session.

        Args:
            artifact: a model for a task that `load_model` supports.
            config: the options.
            base: folder that relative paths of images or audio start from.

        Raises:
            ArtifactError: the task is not supported, or a file of the artifact cannot be used.
            ProviderError: the provider is not available, or does not support CUDA graphs.
            OptionError: an option does not fit the task, or options exclude each other.
        """
        artifact.require_passed(allow_failed=config.allow_failed)
        self._config, self._base = config, base
        workers = config.workers or usable_cores()
        self.task = require_task(artifact, config)
        self._names = column_names(self.task, config)
        # Each batch runs on one of our threads, so ONNX Runtime needs none of its own.
        specs = provider_specs(config)
        on_cpu = specs[0].full_name == CPU
        check_run_options(
            specs,
            io_binding=config.io_binding,
            cuda_graph=config.cuda_graph,
            shrink_arena=config.shrink_arena,
        )
        definition = self.task
        in_steps = definition.runs_in_steps  # each of them uses all cores
        self._threads = 1 if in_steps else workers
        # Batches of texts overlap, so that a session for batches that do not would hardly be used.
        has_lone_runs = on_cpu and not in_steps and definition.modality != "text"

        runner_options = RunnerOptions(
            threads=1 if on_cpu and not in_steps else 0,
            lone_threads=workers if has_lone_runs else 0,
            io_binding=config.io_binding,
            cuda_graph=config.cuda_graph,
            ladder=config.ladder and not in_steps,
            shrink_arena=config.shrink_arena,
            keep_optimized=config.optimized_graph,
        )

        def open_graph(file: str = "") -> OrtRunner:
            return OrtRunner(
                artifact,
                runner_options,
                graph=file,
                providers=specs,
                allow_fallback=config.allow_fallback,
            )

        with ExitStack() as opened:
            self._model: WindowRunner | GenerationRunner
            if issubclass(definition, Generate):
                on_cuda = specs[0].full_name == CUDA
                limits = InputLimits(unproved=config.unproved)
                task = definition.open(artifact, artifact.manifest.graphs[0], limits)
                generator = TextGenerator(task, open_graph, fixed_cache=on_cuda)
                opened.enter_context(generator)
                options = read_generation_options(config)
                self._model = GenerationRunner(
                    generator, options, batch_rows=config.batch_rows or MAX_ROWS
                )
                self._providers, self._device = generator.runner.providers, generator.runner.device
                self._pool = opened.enter_context(InferencePool(workers))
            else:
                runner = opened.enter_context(open_graph())
                on_gpu = runner.device.kind != "cpu"
                self._pool = opened.enter_context(InferencePool(1 if on_gpu else workers))
                self._model = WindowRunner.open(definition, artifact, runner, self._pool, config)
                opened.callback(self._model.close)
                self._pool.call(runner.warm_up)
                self._providers, self._device = runner.providers, runner.device
            self._opened = opened.pop_all()

    @property
    def workers(self) -> int:
        """Number of batches that run at the same time."""
        return self._pool.workers

    @property
    def on_gpu(self) -> bool:
        """True if this process runs batches on a GPU."""
        return self._device.kind != "cpu"

    @property
    def providers(self) -> list[str]:
        return [provider.name for provider in self._providers]

    @property
    def modality(self) -> Modality:
        return self.task.modality

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions made for this model, with their reasons."""
        return self._model.task.notes

    @property
    def first_run(self) -> float | None:
        """Time when the first batch of texts ran, by `time.perf_counter`; None before that."""
        return self._pool.first_run

    def columns(self, kept: Any, names: Sequence[str]) -> OutputColumns:
        """Return the columns of the output.

        Args:
            kept: `pyarrow.Schema` of the columns that are kept of the input.
            names: names of the input's columns.

        Raises:
            InputError: a column of the input has the name of an output column.
        """
        return OutputColumns.of(
            self.task,
            read_options(self.task, self._config),
            kept,
            names,
            prefix=self._config.prefix,
            dim=self.dim,
        )

    def __call__(self, window: RowBatch, columns: OutputColumns) -> PredictedBatch:
        """Predict the rows of a window.

        Raises:
            EngineryError: the error is not caused by a row; the graph needs another input, for
                example.
        """
        return self._predict(self._select(window), columns)

    def stream(
        self,
        reader: DatasetReader,
        columns: OutputColumns,
        *,
        skip: int,
        show: Callable[[float], object] = lambda _: None,
    ) -> Generator[PredictedBatch, None, None]:
        """Yield the predicted windows in order, without the first `skip` rows of the input.

        Args:
            reader: the input.
            columns: the columns of the output.
            skip: number of rows that are left out.
            show: is called within windows, in any thread, with the share of the input that is
                predicted, 0 to 1.

        Raises:
            InputError: the input cannot be read to its end.
        """
        batches = with_share(reader, skip)
        if isinstance(self._model, WindowRunner) and self.modality == "text":
            predicted = self._stream_texts(batches, columns, self._model, show)
        else:  # preparing an image takes longer than running the model on it in one thread
            predicted = map_in_order(
                partial(self, columns=columns),
                batches,
                threads=self._threads,
                stopped=self._model.stopped,
            )
        with closing(predicted):
            yield from predicted

    def close(self) -> None:
        """Free the session."""
        self._opened.close()

    @property
    def dim(self) -> int:
        """Length of an embedding; 0 for other tasks."""
        return self._model.dim

    def _stream_texts(
        self,
        batches: Iterable[RowBatch],
        columns: OutputColumns,
        model: WindowRunner,
        show: Callable[[float], object],
    ) -> Generator[PredictedBatch, None, None]:
        """Yield predicted windows of texts. Reading, running and this thread's work overlap."""

        def show_batch(window: Window[SelectedRows]) -> None:
            batch = window.origin.batch
            share_of_rows = (batch.first + window.rows_done) / (batch.first + len(batch.values))
            show(batch.done * share_of_rows)

        selections = map(self._select, batches)
        windows = (Window(selection.inputs, selection) for selection in selections)
        with closing(model.run_windows(windows, show_batch)) as finished:
            for window in finished:
                yield self._predict(window.origin, columns, partial(model.finish, window))

    def _select(self, batch: RowBatch) -> SelectedRows:
        """Check the rows of a window."""
        if len(self._names) == 1 and self.modality == "text" and not batch.errors:
            texts = [values[0] for values in batch.values]
            if are_usable_texts(texts):
                return SelectedRows(batch, list(range(len(texts))), texts, {})
        errors = dict(batch.errors)
        rows: list[int] = []
        inputs: list[Any] = []
        for row, values in enumerate(batch.values):
            if row in errors:
                continue
            if problem := find_input_problem(values, self._names):
                errors[row] = problem
                continue
            rows.append(row)
            inputs.append(self._input(values))
        return SelectedRows(batch, rows, inputs, errors)

    def _predict(
        self,
        selected: SelectedRows,
        columns: OutputColumns,
        finish: Callable[[Counts], RowValues] | None = None,
    ) -> PredictedBatch:
        """Predict the rows of a window.

        Args:
            selected: the rows.
            columns: the columns of the output.
            finish: returns the results of rows that have run; None to run them.
        """
        batch, errors = selected.batch, selected.errors
        counts = Counts(rows=len(batch.values))
        finish = finish or partial(self._model, selected.inputs)
        rows = selected.rows
        results: RowValues = []
        if rows:
            try:
                results = finish(counts)
            except InputError as error:
                # A bad row fails its whole batch; the other rows still get their predictions.
                answers: dict[int, Any] = {}
                self._bisect_failures(rows, selected.inputs, error, answers, errors, counts)
                rows, results = list(answers), list(answers.values())
        for row, finite in zip(rows, self._finite(results), strict=True):
            if not finite:
                errors[row] = "the model returned NaN or infinity"
        if errors:
            # Bad rows were left out before the run: put the results back into the window's order.
            by_row = dict(zip(rows, results, strict=True))
            results = [None if row in errors else by_row[row] for row in range(len(batch.values))]
        counts.bad_rows = len(errors)
        bad_row = min(errors, default=None)
        first_bad = None if bad_row is None else (batch.first + bad_row, errors[bad_row])
        return PredictedBatch(
            columns.batch(batch.kept, results, errors), counts, first_bad, batch.done
        )

    def _finite(self, results: RowValues) -> Iterable[bool]:
        """Return for each result whether all of its numbers are finite."""
        if isinstance(results, np.ndarray):
            finite: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(results), axis=1)
            return list(finite)
        return map(is_finite, results)

    def _bisect_failures(
        self,
        rows: Sequence[int],
        inputs: Sequence[Any],
        failure: InputError,
        answers: dict[int, Any],
        errors: dict[int, str],
        counts: Counts,
    ) -> None:
        """Predict rows that failed together: bisect them until the bad ones are found.

        Rows are usually all good, so that one call predicts them. With b bad rows among n, about
        b log2(n) calls fail, and every good row still gets its prediction.

        Args:
            rows: indices of the rows in the window.
            inputs: their inputs.
            failure: why they cannot be predicted together.
            answers: receives the results of good rows, by index.
            errors: receives the problems of bad rows, by index.
            counts: receives counts and times.
        """
        if len(rows) == 1:
            errors[rows[0]] = row_message(self.task, failure.message)
            return
        middle = len(rows) // 2
        for half in (slice(None, middle), slice(middle, None)):
            try:
                results = self._model(inputs[half], counts)
            except InputError as error:
                self._bisect_failures(rows[half], inputs[half], error, answers, errors, counts)
            else:
                answers.update(zip(rows[half], results, strict=True))

    def _input(self, values: Values) -> Any:
        if self.modality != "text":
            return str(self._base / values[0])
        return values[0] if len(values) == 1 else values


def map_in_order(
    function: Callable[[Item], Result],
    stream: Iterator[Item],
    *,
    threads: int,
    stopped: threading.Event,
) -> Generator[Result, None, None]:
    """Yield the function's result for each item of a stream, in order, using several threads.

    The stream is read only one item ahead of the threads, so that memory stays bounded.
    `Executor.map` does the same from Python 3.14 on, with `buffersize`.

    Args:
        function: computes a result.
        stream: the items.
        threads: number of threads.
        stopped: is set at the end, so that calls under way can end early.

    Raises:
        Exception: any error of the function or the stream; pending items are dropped.
    """
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="enginery-window")
    try:
        for item in stream:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def with_share(reader: DatasetReader, skip: int) -> Iterator[RowBatch]:
    """Yield the windows of a dataset, each with the share of the dataset up to its end."""
    for batch in reader.read(skip):
        # Now, because the reader is windows ahead when the predictions of this one are written.
        yield replace(batch, done=reader.fraction_read())
