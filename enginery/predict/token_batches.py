"""Run the inputs of windows in batches with a token budget, several batches at a time.

    model = WindowRunner.open(Embed, artifact, runner, InferencePool(workers=2), PredictConfig())
    counts = Counts()
    model(["The engine is warm."], counts)[0].shape, counts.tokens  # (384,), 7

All batches share one session, so that its weights are in memory once. On the CPU each batch runs on
a thread of our pool, not on ONNX Runtime's threads: those wait for work in busy loops, and several
runs would take the cores from each other. Batches of all windows share the pool, so that no core is
idle at the end of a window. On a GPU the pool has one thread: it records CUDA graphs and replays
them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.errors import OptionError
from enginery.predict.config import MAX_ROWS, MAX_TOKENS, PredictConfig
from enginery.predict.report import Counts
from enginery.predict.task_inputs import read_options
from enginery.predict.tokenizer_watchdog import TokenizerWatchdog
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.results import TokenVectors
from enginery.runtime.tasks.row_stream import (
    PREPARED_BATCHES,
    SWITCH_INTERVAL,
    RowStream,
    Window,
    read_ahead,
)
from enginery.runtime.tasks.task import (
    Arrays,
    InputLimits,
    MediaTask,
    ModelInputs,
    Row,
    RowValues,
    Task,
    TaskOptionError,
    TaskOptions,
)
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.tasks.views import View
from enginery.runtime.text.batching import GPU_MAX_ROWS, GPU_MAX_TOKENS
from enginery.runtime.text.pooling import Vectors
from enginery.runtime.text.tokenizer import TextTokenizer

_GPU_QUEUE = 4
"""Batches that wait for a GPU at most, so that it does not wait for a thread that submits them."""
_GPU_WINDOWS = 3
"""Windows that wait at most until they are written, while a part is synced to the disk."""
_PROBE_TOKENS = 8
_GREY_IMAGE = np.full((64, 64, 3), 128, np.uint8)


Result = TypeVar("Result")
Origin = TypeVar("Origin")
Item = TypeVar("Item")


class InferencePool(Closeable):
    """Threads that run batches. Closing waits for the batches that run."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="enginery-run")
        self.first_run: float | None = None
        """Time when the first batch started, by `time.perf_counter`; None before that."""

    def submit(self, run: Callable[[], Arrays]) -> Future[tuple[Arrays, float]]:
        """Start a batch; return a future of its outputs and its run time in seconds."""
        return self._threads.submit(self._run, run)

    def call(self, function: Callable[[], Result]) -> Result:
        """Return the result of a function that a thread of the pool calls."""
        return self._threads.submit(function).result()

    def close(self) -> None:
        """Drop the batches that wait."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, run: Callable[[], Arrays]) -> tuple[Arrays, float]:
        started = time.perf_counter()
        if self.first_run is None:
            self.first_run = started
        return run(), time.perf_counter() - started


class PooledBatchRunner(BatchRunner):
    """A session that runs in a pool, while the threads that ask for batches prepare them."""

    def __init__(self, task: Task, runner: OrtRunner, pool: InferencePool) -> None:
        super().__init__(task, runner)
        self._pool = pool

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Run rows as one batch; see `BatchRunner.run`."""
        feeds = self.feeds(rows)
        run = partial(self.runner, feeds, self.task.outputs_read(raw=rows[0].reads_raw))
        return list(self.split(rows, feeds, self._pool.call(run)))


def _until(is_stopped: threading.Event, items: Generator[Item]) -> Generator[Item]:
    """Yield items until the event is set; close them at the end."""
    with closing(items):
        for item in items:
            if is_stopped.is_set():
                break
            yield item


@dataclass(frozen=True)
class WatchedTokenizer(TextTokenizer):
    """A tokenizer with a timeout: it also raises the errors of `TokenizerWatchdog`."""

    watchdog: TokenizerWatchdog = field(default_factory=TokenizerWatchdog)

    def encode(self, texts: Sequence[str | tuple[str, str]], **options: Any) -> list[Any]:
        """Encode as `TextTokenizer.encode`."""
        return self.watchdog(partial(super().encode, **options), texts)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        """Encode as `TextTokenizer.encode_pairs`."""
        return self.watchdog(super().encode_pairs, pairs)


@dataclass(frozen=True)
class WindowRunner:
    """A task on one session. Text batches have a token budget and run in a pool. Thread-safe."""

    task: Task
    options: TaskOptions
    batches: BatchRunner
    pool: InferencePool
    max_rows: int
    max_tokens: int
    stopped: threading.Event = field(default_factory=threading.Event)
    """Is set when nobody waits for a window any more, whose remaining batches may take long."""

    @classmethod
    def open(
        cls,
        definition: type[Task],
        artifact: Artifact,
        runner: OrtRunner,
        pool: InferencePool,
        config: PredictConfig,
    ) -> WindowRunner:
        """Open a task of the artifact; raise the errors of `read_options` and `Task.open`."""
        limits = InputLimits(unproved=config.unproved)
        view = definition if issubclass(definition, View) else None
        task = (view.of if view else definition).open(artifact, runner.record, limits)
        if isinstance(task, TextTask):
            settings = {f.name: getattr(task.tokenizer, f.name) for f in fields(TextTokenizer)}
            task = replace(task, tokenizer=WatchedTokenizer(**settings))
        options = read_options(definition, config)
        if isinstance(task, MediaTask):
            try:  # what does not fit this model is no error of every row
                task.preprocess([], options)
            except TaskOptionError as error:
                raise OptionError(error.message, option=error.field) from error
        on_cpu = runner.device.kind == "cpu"
        batches = BatchRunner(task, runner)
        if view and isinstance(task, TextTask):
            task = view.over(task, artifact)
        if isinstance(task, MediaTask) and not on_cpu:
            batches = PooledBatchRunner(task, runner, pool)
        return cls(
            task,
            options,
            batches,
            pool,
            max_rows=config.batch_rows or (MAX_ROWS if on_cpu else GPU_MAX_ROWS),
            max_tokens=config.batch_tokens or (MAX_TOKENS if on_cpu else GPU_MAX_TOKENS),
        )

    def __call__(self, inputs: Sequence[Any], counts: Counts) -> RowValues:
        """Return the task's result for each input, and add counts and times to `counts`.

        Raises:
            InputError: an input cannot be used, or the graph rejects the rows.
            CancelledError: `stopped` is set.
        """
        if isinstance(self.task, MediaTask):
            # In this thread: preparing an image takes longer than running the model on it.
            truncated = 0

            def counted(row: Row) -> Row:
                nonlocal truncated
                truncated += row.truncated
                return row

            work = ModelInputs([])
            read = self.task.read_rows(inputs, self.options, work)
            rows = takewhile(lambda _: not self.stopped.is_set(), map(counted, read))
            results = self.batches.answer_stream(rows, self.options, work)
            if self.stopped.is_set():
                raise CancelledError
            counts.truncated += truncated
            return results
        stream = self._stream()
        (window,) = stream.run(stream.prepare([Window(inputs, None)]))
        return self.finish(window, counts)

    def run_windows(
        self,
        windows: Generator[Window[Origin]],
        on_batch: Callable[[Window[Origin]], object] = lambda _: None,
    ) -> Generator[Window[Origin]]:
        """Run windows of texts: the next ones are read and tokenized in a thread of their own.

        Args:
            windows: the windows, which are closed at the end.
            on_batch: is called after each batch, with its window, in another thread.

        Yields:
            Each window with its outputs, for `finish`, in order. If its inputs cannot be predicted
            together, it has an `error`.
        """
        stream = replace(self._stream(), on_batch=on_batch)
        ahead = max(PREPARED_BATCHES, 2 * self.pool.workers)
        prepared = stream.prepare_ahead(windows, ahead=ahead)
        is_stopped = threading.Event()
        collected = read_ahead(
            stream.run(_until(is_stopped, prepared)),
            ahead=1 if self._on_cpu else _GPU_WINDOWS,
            name="enginery-collect",
            closed=is_stopped,  # the rest of a window may take long
        )
        with closing(collected), nullcontext() if self._on_cpu else SWITCH_INTERVAL.lowered():
            yield from collected

    def finish(self, window: Window[Any], counts: Counts) -> RowValues:
        """Return the task's result for each input of a window, and add its counts to `counts`.

        Raises:
            InputError: the window's `error`.
        """
        rows = window.work.rows
        counts.encode_seconds += window.preprocess_seconds
        if window.error is not None:
            raise window.error
        results = self.task.postprocess(window.work, window.outputs(), self.options)
        counts.tokens += sum([row.tokens for row in rows])
        counts.truncated += sum([row.truncated for row in rows])
        counts.padded_tokens += window.padded_tokens
        counts.run_seconds += window.run_seconds
        return results

    def close(self) -> None:
        """End the threads of the tokenizer."""
        if isinstance(self.task, TextTask) and isinstance(self.task.tokenizer, WatchedTokenizer):
            self.task.tokenizer.watchdog.close()

    @property
    def dim(self) -> int:
        """Length of an embedding, measured with one generated row; 0 for other tasks.

        It is measured because not every graph declares it. The row has token ids, not a text,
        because a tokenizer may fail on any text.
        """
        if self.task.result_type not in (Vectors, TokenVectors):
            return 0
        if isinstance(self.task, TextTask):
            limit = self.task.tokenizer.limit
            work = ModelInputs([self.task.probe(min(_PROBE_TOKENS, limit))])
            outputs = self.pool.call(partial(self.batches.run, work.rows))
        else:
            work = self.task.preprocess([_GREY_IMAGE], self.options)
            outputs = self.batches.run(work.rows)
        (vector,) = self.task.postprocess(work, outputs, self.options)
        return int(vector.shape[-1])

    @property
    def _on_cpu(self) -> bool:
        return self.batches.runner.device.kind == "cpu"

    def _stream(self) -> RowStream:
        return RowStream(
            self.batches,
            partial(self.task.preprocess, options=self.options),
            self._plan,
            self.pool.submit,
            concurrent=self.pool.workers if self._on_cpu else _GPU_QUEUE,
        )

    def _plan(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the indices of the rows of each batch.

        On the CPU a worker has one core, so rows that fill fewer batches than there are workers are
        divided among all of them.
        """

        def plan(max_tokens: int) -> list[list[int]]:
            return self.batches.plan(rows, max_rows=self.max_rows, max_tokens=max_tokens)

        def fits(max_tokens: int) -> bool:
            return len(plan(max_tokens)) <= self.pool.workers

        full = plan(self.max_tokens)
        if len(full) >= self.pool.workers or self.batches.fixed_rows or not self._on_cpu:
            return full
        return plan(bisect_left(range(self.max_tokens), True, lo=1, key=fits))
