"""Texts of a window through one session, in batches of bounded tokens that run side by side.

    >>> pool = RunPool(workers=2)
    >>> texts = WindowModel.open_for(artifact, runner, pool, PredictConfig()).fresh()
    >>> texts.embed(["The engine is warm."], prompt_name="").shape, texts.meter.tokens
    ((1, 384), 7)

One session is shared: its weights are in memory once, and each run stays on the thread that asks
for it. ONNX Runtime's own threads would wait for work in busy loops and take the cores from each
other. Batches of all windows go through one pool, so that the end of a window leaves no core idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.closing import Closing
from enginery.predict.config import PredictConfig
from enginery.predict.encoding_watch import EncodingWatch
from enginery.runtime.batching import plan_batches
from enginery.runtime.ort import OrtRunner, Outputs
from enginery.runtime.text_model import TextModel, fill_rows
from enginery.runtime.text_rows import Asked
from enginery.runtime.tokenizer import TextTokenizer, TokenIds


class RunPool(Closing):
    """Threads that run batches; closing waits for the batches that run."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="enginery-run")
        self.first_run: float | None = None
        """When the first batch went to the session, by `time.perf_counter`."""

    def submit(self, runner: OrtRunner, feeds: dict[str, NDArray[Any]]) -> Future[Any]:
        """The outputs of a batch and the seconds that they took, to come."""
        return self._threads.submit(self._run, runner, feeds)

    def close(self) -> None:
        """Drops what waits."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, runner: OrtRunner, feeds: dict[str, NDArray[Any]]) -> tuple[Outputs, float]:
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


@dataclass(frozen=True)
class WindowTokenizer(TextTokenizer):
    """The tokenizer, watched and with its time taken."""

    meter: Meter = field(default_factory=Meter)
    watch: EncodingWatch = field(default_factory=EncodingWatch)

    def encode(self, texts: Sequence[str | tuple[str, str]], *, offsets: bool = True) -> list[Any]:
        """As `TextTokenizer.encode`, and raises what `EncodingWatch` raises."""
        return self._watched(partial(super().encode, offsets=offsets), texts)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        """As `TextTokenizer.encode_pairs`, and raises what `EncodingWatch` raises."""
        return self._watched(super().encode_pairs, pairs)

    def _watched(self, encode: Callable[[Any], list[Any]], texts: Sequence[Any]) -> list[Any]:
        started = time.perf_counter()
        try:
            return self.watch(encode, texts)
        finally:
            self.meter.encode_seconds += time.perf_counter() - started


@dataclass
class WindowModel(TextModel):
    """A text model whose batches follow a token budget and run in a pool.

    `fresh` gives each window its own, with its own counts; tokenizer, watch and session are shared.
    """

    pool: RunPool | None = None
    max_rows: int = 0
    max_tokens: int = 0
    meter: Meter = field(default_factory=Meter)
    watch: EncodingWatch = field(default_factory=EncodingWatch)

    @classmethod
    def open_for(
        cls, artifact: Artifact, runner: OrtRunner, pool: RunPool, config: PredictConfig
    ) -> WindowModel:
        """Reads the model's files; raises what `TextModel.open` raises."""
        return cls.read(
            artifact, runner.record, runner=runner, pool=pool, max_rows=config.batch_rows,
            max_tokens=config.batch_tokens,
        )  # fmt: skip

    def fresh(self) -> WindowModel:
        """The same model with nothing counted."""
        meter = Meter()
        settings = {f.name: getattr(self.tokenizer, f.name) for f in fields(TextTokenizer)}
        tokenizer = WindowTokenizer(**settings, meter=meter, watch=self.watch)
        return replace(self, tokenizer=tokenizer, meter=meter, truncated=0)

    @property
    def dim(self) -> int:
        """The length of a vector, as token ids are answered: a tokenizer may fail on any text."""
        size = self.tokenizer.texts.get_vocab_size(with_added_tokens=True)
        row = TokenIds([size // 2] * min(8, self.tokenizer.limit))
        (vector,) = self._answers(Asked([row], list))
        return int(vector.shape[0])

    def _run(
        self, encodings: Sequence[Any]
    ) -> Iterator[tuple[list[int], dict[str, NDArray[Any]], Outputs]]:
        """The graph over all encodings; while one batch is looked at, others run."""
        pool = self.pool
        if pool is None:
            raise AssertionError("a window model is opened with a pool")
        waiting: deque[tuple[list[int], dict[str, NDArray[Any]], Future[Any]]] = deque()
        try:
            for batch, feeds in self._batches(encodings):
                waiting.append((batch, feeds, pool.submit(self.runner, feeds)))
                if len(waiting) > pool.workers:
                    yield self._finished(*waiting.popleft())
            while waiting:
                yield self._finished(*waiting.popleft())
        finally:
            for _, _, run in waiting:
                run.cancel()

    def _batches(
        self, encodings: Sequence[Any]
    ) -> Iterator[tuple[list[int], dict[str, NDArray[Any]]]]:
        inputs, profiles = self.runner.record.inputs, self.runner.profiles
        fixed = next((s.dims[0] for s in inputs if isinstance(s.dims[0], int)), 0)
        lengths = [len(encoding) for encoding in encodings]
        for batch in plan_batches(
            lengths,
            max_rows=fixed or (self._engine_rows if profiles else self.max_rows),
            max_tokens=self.max_tokens,
            equal_lengths=not self.tokenizer.can_pad(inputs),
        ):
            longest = max(lengths[index] for index in batch)
            rows, width = self.runner.padded_shape(inputs[0], (len(batch), max(longest, 1)))
            feeds = self.tokenizer.feeds([encodings[i] for i in batch], inputs, width=width)
            feeds = fill_rows(feeds, fixed or rows)
            self.meter.tokens += sum(lengths[index] for index in batch)
            self.meter.padded_tokens += int(feeds[inputs[0].name].size)
            yield batch, feeds

    def _engine_rows(self, tokens: int) -> int:
        return min(self._most_rows(tokens), self.max_rows)

    def _finished(
        self, batch: list[int], feeds: dict[str, NDArray[Any]], run: Future[Any]
    ) -> tuple[list[int], dict[str, NDArray[Any]], Outputs]:
        outputs, seconds = run.result()
        self.meter.run_seconds += seconds
        kept = {name: values[: len(batch)] for name, values in outputs.items()}
        return batch, feeds, kept
