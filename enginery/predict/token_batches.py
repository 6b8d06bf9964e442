"""Inputs of a window through one session, in batches of bounded tokens that run side by side.

    >>> model = WindowModel.open(artifact, runner, RunPool(workers=2), PredictConfig())
    >>> meter = Meter()
    >>> model(["The engine is warm."], meter)[0].shape, meter.tokens
    ((384,), 7)

One session is shared: its weights are in memory once, and each run stays on the thread that asks
for it. ONNX Runtime's own threads would wait for work in busy loops and take the cores from each
other. Batches of all windows go through one pool, so that the end of a window leaves no core idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.predict.asking import read_options, require_task
from enginery.predict.config import PredictConfig
from enginery.predict.encoding_watch import EncodingWatch
from enginery.runtime.onnxruntime.runner import OrtRunner, Outputs
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.images import ImageTask
from enginery.runtime.tasks.task import Arrays, ModelInputs, Row, Task, TaskOptions
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.text.pooling import Vectors
from enginery.runtime.text.tokenizer import TextTokenizer

_PROBE_TOKENS = 8


class RunPool(Closeable):
    """Threads that run batches; closing waits for the batches that run."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="enginery-run")
        self.first_run: float | None = None
        """When the first batch went to the session, by `time.perf_counter`."""

    def submit(self, runner: OrtRunner, feeds: Arrays) -> Future[Any]:
        """Return the outputs of a batch and the seconds that they took, to come."""
        return self._threads.submit(self._run, runner, feeds)

    def close(self) -> None:
        """Drop what waits."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, runner: OrtRunner, feeds: Arrays) -> tuple[Outputs, float]:
        started = time.perf_counter()
        if self.first_run is None:
            self.first_run = started
        return runner(feeds), time.perf_counter() - started


@dataclass
class Meter:
    """What one window took."""

    tokens: int = 0
    """Of the texts, special tokens included."""
    padded_tokens: int = 0
    """What the session was given, rows that only fill a batch included."""
    encode_seconds: float = 0.0
    run_seconds: float = 0.0
    """Summed over batches, which run side by side."""
    truncated: int = 0
    """Texts longer than the model takes, of those that were answered."""


@dataclass(frozen=True)
class WindowTokenizer(TextTokenizer):
    """The tokenizer, watched and with its time taken."""

    meter: Meter = field(default_factory=Meter)
    watch: EncodingWatch = field(default_factory=EncodingWatch)

    def encode(self, texts: Sequence[str | tuple[str, str]], *, offsets: bool = True) -> list[Any]:
        """Encode as `TextTokenizer.encode`; raise what `EncodingWatch` raises, too."""
        return self._watched(partial(super().encode, offsets=offsets), texts)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        """Encode as `TextTokenizer.encode_pairs`; raise what `EncodingWatch` raises, too."""
        return self._watched(super().encode_pairs, pairs)

    def _watched(self, encode: Callable[[Any], list[Any]], texts: Sequence[Any]) -> list[Any]:
        started = time.perf_counter()
        try:
            return self.watch(encode, texts)
        finally:
            self.meter.encode_seconds += time.perf_counter() - started


@dataclass(frozen=True)
class WindowModel:
    """A task over one session. Batches of texts follow a token budget and run in a pool.

    Any thread may call it; what a call takes is counted in the meter that it is given.
    """

    task: Task
    options: TaskOptions
    batches: BatchRunner
    pool: RunPool
    max_rows: int
    max_tokens: int
    watch: EncodingWatch = field(default_factory=EncodingWatch)

    @classmethod
    def open(
        cls, artifact: Artifact, runner: OrtRunner, pool: RunPool, config: PredictConfig
    ) -> WindowModel:
        """Read the model's files; raise what `require_task` and `Task.open` raise."""
        definition = require_task(artifact, config)
        task = definition.open(artifact, runner.record)
        return cls(
            task,
            read_options(definition, config),
            BatchRunner(task, runner),
            pool,
            max_rows=config.batch_rows,
            max_tokens=config.batch_tokens,
        )

    def __call__(self, inputs: Sequence[Any], meter: Meter) -> list[Any]:
        """Return a result of the task for each input.

        Raises:
            InputError: an input cannot be used, or the graph does not take the rows.
        """
        if isinstance(self.task, ImageTask):
            # In this thread: preparing an image takes longer than a thread's run of it.
            rows = self.batches.run_stream(self.task.image_rows(inputs))
            return self.task.postprocess(ModelInputs([]), rows, self.options)
        task = self.watched(meter)
        work = task.preprocess(inputs, self.options)
        results = task.postprocess(work, self._run(work.rows, meter), self.options)
        meter.truncated += sum(row.truncated for row in work.rows)
        return results

    def watched(self, meter: Meter) -> Task:
        """Return the task with a tokenizer that is watched and whose time `meter` counts."""
        if not isinstance(self.task, TextTask):
            return self.task
        settings = {f.name: getattr(self.task.tokenizer, f.name) for f in fields(TextTokenizer)}
        tokenizer = WindowTokenizer(**settings, meter=meter, watch=self.watch)
        return replace(self.task, tokenizer=tokenizer)

    @property
    def dim(self) -> int:
        """Return the length of a vector, from one made-up row; 0 for other results.

        Not every graph says it, and a tokenizer may fail on any text.
        """
        if self.task.result_type is not Vectors:
            return 0
        limit = self.task.tokenizer.limit if isinstance(self.task, TextTask) else _PROBE_TOKENS
        work = ModelInputs([self.task.probe(min(_PROBE_TOKENS, limit))])
        (vector,) = self.task.postprocess(work, self.batches.run(work.rows), self.options)
        return len(vector)

    def _run(self, rows: Sequence[Row], meter: Meter) -> list[Any]:
        """Return what the graph gives for each row; while one batch is looked at, others run."""
        outputs: list[Any] = [None] * len(rows)
        waiting: deque[tuple[list[int], Arrays, Future[Any]]] = deque()

        def finish() -> None:
            batch, feeds, run = waiting.popleft()
            found, seconds = run.result()
            meter.run_seconds += seconds
            parts = self.batches.split([rows[place] for place in batch], feeds, found)
            for place, part in zip(batch, parts, strict=True):
                outputs[place] = part

        plan = self.batches.plan(rows, max_rows=self.max_rows, max_tokens=self.max_tokens)
        first = self.batches.runner.record.inputs[0].name
        try:
            for batch in plan:
                feeds = self.batches.feeds([rows[place] for place in batch])
                meter.tokens += sum(rows[place].tokens for place in batch)
                meter.padded_tokens += int(feeds[first].size)
                waiting.append((batch, feeds, self.pool.submit(self.batches.runner, feeds)))
                if len(waiting) > self.pool.workers:
                    finish()
            while waiting:
                finish()
        finally:
            for _, _, run in waiting:
                run.cancel()
        return outputs
