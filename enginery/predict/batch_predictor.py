"""Run inference on windows of rows. Everything else in `predict` reads windows or writes results.

A window is up to `--window` consecutive rows; its texts are sorted by length and cut into batches.

    with BatchPredictor(artifact, PredictConfig(), workers=2) as predictor:
        columns = predictor.columns(reader.schema, reader.names)
        predictor(window, columns).batch.schema.names  # ['id', 'text', 'embedding', 'error']

A predictor is thread-safe. Rows are independent: a row that fails gets a message in its `error`
column, and the other rows get their predictions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.datasets.batches import DatasetReader, RowBatch, Values
from enginery.core.errors import InputError
from enginery.predict.columns import OutputColumns
from enginery.predict.config import PredictConfig
from enginery.predict.generation import Generate, GenerationRunner, read_generation_options
from enginery.predict.report import Counts, WindowStats
from enginery.predict.task_inputs import (
    column_names,
    find_input_problem,
    output_options,
    provider_specs,
    require_task,
    row_message,
)
from enginery.predict.token_batches import InferencePool, WindowRunner
from enginery.runtime.generation.generator import TextGenerator
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.known import CPU, CUDA
from enginery.runtime.providers.specification import check_run_options
from enginery.runtime.tasks.task import Modality

_CONCURRENT_TEXT_WINDOWS = 2
"""While the batches of one window run, the other is tokenized or written. Preparing an image takes
longer than running the model on it in one thread, so images and audio use one window per worker."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class PredictedBatch:
    """A window of rows with its predictions."""

    first: int
    """Index of the window's first row in the input, from 0."""
    batch: Any
    """`pyarrow.RecordBatch` with the kept columns, the prediction's columns, and `error`."""
    counts: Counts
    first_bad: tuple[int, str] | None
    """Index in the input and problem of the first bad row; None if all rows are good."""
    done: float = 0.0
    """Share of the input that has been read, 0 to 1."""


class BatchPredictor(Closeable):
    """A model that predicts windows of rows. A context manager; closing frees its session."""

    def __init__(
        self, artifact: Artifact, config: PredictConfig, *, workers: int, base: Path = Path()
    ) -> None:
        """Open the session.

        Args:
            artifact: a model for a task that `load_model` supports.
            config: the options.
            workers: number of text batches that run at the same time.
            base: folder that relative paths of images or audio start from.

        Raises:
            ArtifactError: the task is not supported, or a file of the artifact cannot be used.
            ProviderError: the provider is not available, or does not support CUDA graphs.
            OptionError: an option does not fit the task, or options exclude each other.
        """
        artifact.require_passed(allow_failed=config.allow_failed)
        self._config, self._base = config, base
        self.workers = workers
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
        generates = issubclass(definition, Generate)
        # Batches of texts overlap, so that a session for batches that do not would hardly be used.
        has_lone_runs = on_cpu and not generates and definition.modality != "text"

        def open_graph(file: str = "") -> OrtRunner:
            return OrtRunner(
                artifact,
                graph=file,
                providers=specs,
                allow_fallback=config.allow_fallback,
                threads=1 if on_cpu and not generates else 0,
                lone_threads=workers if has_lone_runs else 0,
                io_binding=config.io_binding,
                cuda_graph=config.cuda_graph,
                shrink_arena=config.shrink_arena,
                keep_optimized=config.optimized_graph,
            )

        self._pool = InferencePool(workers)
        with ExitStack() as opened:
            opened.enter_context(self._pool)
            self._model: WindowRunner | GenerationRunner
            if issubclass(definition, Generate):
                on_cuda = specs[0].full_name == CUDA
                generator = opened.enter_context(
                    TextGenerator(artifact, open_graph, fixed_cache=on_cuda)
                )
                options = read_generation_options(config)
                self._model = GenerationRunner(generator, options, batch_rows=config.batch_rows)
                self._providers = generator.providers
            else:
                runner = opened.enter_context(open_graph())
                self._model = WindowRunner.open(definition, artifact, runner, self._pool, config)
                opened.callback(self._model.watchdog.close)
                runner.warm_up()
                self._providers = runner.providers
            self._opened = opened.pop_all()

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
            output_options(self.task, self._config),
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
        errors = dict(window.errors)
        rows: list[int] = []
        inputs: list[Any] = []
        for row, values in enumerate(window.values):
            if row in errors:
                continue
            if problem := find_input_problem(values, self._names):
                errors[row] = problem
                continue
            rows.append(row)
            inputs.append(self._input(values))
        stats = WindowStats()
        answers: list[Any] = [None] * len(window.values)
        self._bisect_failures(rows, inputs, answers, errors, stats)
        for row in rows:
            if row not in errors and not self._model.task.is_finite(answers[row]):
                answers[row], errors[row] = None, "the model returned NaN or infinity"
        batch = columns.batch(window.kept, answers, errors)
        bad = min(errors) if errors else None
        counts = Counts(
            rows=len(window.values),
            bad_rows=len(errors),
            truncated=stats.truncated,
            tokens=stats.tokens,
            padded_tokens=stats.padded_tokens,
            encode_seconds=stats.encode_seconds,
            run_seconds=stats.run_seconds,
        )
        first_bad = None if bad is None else (window.first + bad, errors[bad])
        return PredictedBatch(window.first, batch, counts, first_bad)

    def stream(
        self, reader: DatasetReader, columns: OutputColumns, *, skip: int
    ) -> Generator[PredictedBatch, None, None]:
        """Yield the predicted windows in order, without the first `skip` rows of the input.

        Raises:
            InputError: the input cannot be read to its end.
        """
        threads = _CONCURRENT_TEXT_WINDOWS if self.modality == "text" else self.workers
        if isinstance(self._model, GenerationRunner):
            threads = 1  # its batches have all cores
        windows = reader.read(skip)
        for predicted in map_in_order(partial(self, columns=columns), windows, threads=threads):
            yield replace(predicted, done=reader.fraction_read())

    def close(self) -> None:
        """Free the session."""
        self._opened.close()

    @property
    def dim(self) -> int:
        """Length of an embedding; 0 for other tasks."""
        return self._model.dim

    def _bisect_failures(
        self,
        rows: Sequence[int],
        inputs: Sequence[Any],
        answers: list[Any],
        errors: dict[int, str],
        stats: WindowStats,
    ) -> None:
        """Predict all rows at once; if that fails, bisect until the bad rows are found.

        Rows are usually all good, so one call does. With b bad rows among n, about b log2(n) calls
        fail, and every good row still gets its prediction.
        """
        if not rows:
            return
        try:
            found = self._model(inputs, stats)
        except InputError as error:
            if len(rows) == 1:
                errors[rows[0]] = row_message(self.task, error.message)
                return
            middle = len(rows) // 2
            for part in (slice(None, middle), slice(middle, None)):
                self._bisect_failures(rows[part], inputs[part], answers, errors, stats)
            return
        for row, answer in zip(rows, found, strict=True):
            answers[row] = answer

    def _input(self, values: Values) -> Any:
        if self.modality != "text":
            return str(self._base / values[0])
        return values[0] if len(values) == 1 else values


def map_in_order(
    function: Callable[[Item], Result], stream: Iterator[Item], *, threads: int
) -> Iterator[Result]:
    """Yield the function's result for each item of a stream, in order, using several threads.

    The stream is read only one item ahead of the threads, so that memory stays bounded.
    `Executor.map` does the same from Python 3.14 on, with `buffersize`.

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
        pool.shutdown(cancel_futures=True)
