"""Run the inputs of a window in batches with a token budget, several batches at a time.

    model = WindowRunner.open(Embed, artifact, runner, InferencePool(workers=2), PredictConfig())
    stats = WindowStats()
    model(["The engine is warm."], stats)[0].shape, stats.tokens  # (384,), 7

All batches share one session, so that its weights are in memory once. Each batch runs on a thread
of our pool, not on ONNX Runtime's threads: those wait for work in busy loops, and several runs
would take the cores from each other. Batches of all windows share the pool, so that no core is idle
at the end of a window.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.predict.config import PredictConfig
from enginery.predict.report import WindowStats
from enginery.predict.task_inputs import read_options
from enginery.predict.tokenizer_watchdog import TokenizerWatchdog
from enginery.runtime.onnxruntime.runner import OrtRunner, Outputs
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.task import (
    Arrays,
    MediaTask,
    ModelInputs,
    Row,
    Task,
    TaskOptions,
)
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.text.pooling import Vectors
from enginery.runtime.text.tokenizer import TextTokenizer

_PROBE_TOKENS = 8


class InferencePool(Closeable):
    """Threads that run batches. Closing waits for the batches that run."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="enginery-run")
        self.first_run: float | None = None
        """Time when the first batch started, by `time.perf_counter`; None before that."""

    def submit(self, runner: OrtRunner, feeds: Arrays) -> Future[Any]:
        """Start a batch; return a future of its outputs and its run time in seconds."""
        return self._threads.submit(self._run, runner, feeds)

    def close(self) -> None:
        """Drop the batches that wait."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, runner: OrtRunner, feeds: Arrays) -> tuple[Outputs, float]:
        started = time.perf_counter()
        if self.first_run is None:
            self.first_run = started
        return runner(feeds), time.perf_counter() - started


@dataclass(frozen=True)
class TimedTokenizer(TextTokenizer):
    """A tokenizer with a timeout that adds its time to the statistics of a window."""

    stats: WindowStats = field(default_factory=WindowStats)
    watchdog: TokenizerWatchdog = field(default_factory=TokenizerWatchdog)

    def encode(self, texts: Sequence[str | tuple[str, str]], **options: Any) -> list[Any]:
        """Encode as `TextTokenizer.encode`; also raise the errors of `TokenizerWatchdog`."""
        return self._encode_timed(partial(super().encode, **options), texts)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        """Encode as `TextTokenizer.encode_pairs`; also raise the errors of `TokenizerWatchdog`."""
        return self._encode_timed(super().encode_pairs, pairs)

    def _encode_timed(self, encode: Callable[[Any], list[Any]], texts: Sequence[Any]) -> list[Any]:
        started = time.perf_counter()
        try:
            return self.watchdog(encode, texts)
        finally:
            self.stats.encode_seconds += time.perf_counter() - started


@dataclass(frozen=True)
class WindowRunner:
    """A task on one session. Text batches have a token budget and run in a pool. Thread-safe."""

    task: Task
    options: TaskOptions
    batches: BatchRunner
    pool: InferencePool
    max_rows: int
    max_tokens: int
    watchdog: TokenizerWatchdog = field(default_factory=TokenizerWatchdog)

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
        task = definition.open(artifact, runner.record)
        return cls(
            task,
            read_options(definition, config),
            BatchRunner(task, runner),
            pool,
            max_rows=config.batch_rows,
            max_tokens=config.batch_tokens,
        )

    def __call__(self, inputs: Sequence[Any], stats: WindowStats) -> list[Any]:
        """Return the task's result for each input, and add counts and times to `stats`.

        Raises:
            InputError: an input cannot be used, or the graph rejects the rows.
        """
        if isinstance(self.task, MediaTask):
            # In this thread: preparing an image takes longer than running the model on it.
            truncated = 0

            def counted(row: Row) -> Row:
                nonlocal truncated
                truncated += row.truncated
                return row

            rows = self.batches.run_stream(map(counted, self.task.read_rows(inputs)))
            results = self.task.postprocess(ModelInputs([]), rows, self.options)
            stats.truncated += truncated
            return results
        task = self.with_watchdog(stats)
        work = task.preprocess(inputs, self.options)
        results = task.postprocess(work, self._run(work.rows, stats), self.options)
        stats.truncated += sum(row.truncated for row in work.rows)
        return results

    def with_watchdog(self, stats: WindowStats) -> Task:
        """Return the task with a tokenizer that has a timeout and adds its time to `stats`."""
        if not isinstance(self.task, TextTask):
            return self.task
        settings = {f.name: getattr(self.task.tokenizer, f.name) for f in fields(TextTokenizer)}
        tokenizer = TimedTokenizer(**settings, stats=stats, watchdog=self.watchdog)
        return replace(self.task, tokenizer=tokenizer)

    @property
    def dim(self) -> int:
        """Length of an embedding, measured with one generated row; 0 for other tasks.

        It is measured because not every graph declares it. The row has token ids, not a text,
        because a tokenizer may fail on any text.
        """
        if self.task.result_type is not Vectors:
            return 0
        limit = self.task.tokenizer.limit if isinstance(self.task, TextTask) else _PROBE_TOKENS
        work = ModelInputs([self.task.probe(min(_PROBE_TOKENS, limit))])
        (vector,) = self.task.postprocess(work, self.batches.run(work.rows), self.options)
        return len(vector)

    def _run(self, rows: Sequence[Row], stats: WindowStats) -> list[Any]:
        """Return the graph's outputs for each row. Batches run while others are prepared."""
        outputs: list[Any] = [None] * len(rows)
        waiting: deque[tuple[list[int], Arrays, Future[Any]]] = deque()

        def finish() -> None:
            batch, feeds, run = waiting.popleft()
            found, seconds = run.result()
            stats.run_seconds += seconds
            parts = self.batches.split([rows[place] for place in batch], feeds, found)
            for place, part in zip(batch, parts, strict=True):
                outputs[place] = part

        plan = self._plan(rows)
        first = self.batches.runner.record.inputs[0].name
        try:
            for batch in plan:
                feeds = self.batches.feeds([rows[place] for place in batch])
                stats.tokens += sum(rows[place].tokens for place in batch)
                stats.padded_tokens += int(feeds[first].size)
                waiting.append((batch, feeds, self.pool.submit(self.batches.runner, feeds)))
                if len(waiting) > self.pool.workers:
                    finish()
            while waiting:
                finish()
        finally:
            for _, _, run in waiting:
                run.cancel()
        return outputs

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
        on_cpu = self.batches.runner.device.kind == "cpu"
        if len(full) >= self.pool.workers or self.batches.fixed_rows or not on_cpu:
            return full
        return plan(bisect_left(range(self.max_tokens), True, lo=1, key=fits))
