"""Run many inputs: windows of them are preprocessed ahead, and their batches run one by one.

    stream = RowStream(batches, partial(task.preprocess, options=options), batches.plan, submit)
    with closing(stream.prepare_ahead(windows, ahead=32)) as prepared:
        for window in stream.run(prepared):
            results = task.postprocess(window.work, window.outputs(), options)

A window is a list of inputs. Its rows are sorted by length and cut into batches. While the model
runs the batches of one window, a thread pads those of the next one, another thread tokenizes the
one after it, and a third reads what follows; the thread that iterates over `run` starts the batches
and collects their outputs. Windows come out in order, and memory depends on their size, not on
their number.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from enginery.core.errors import InputError
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.task import Arrays, ModelInputs, Row, RowValues

PREPARED_BATCHES = 32
"""Batches that are prepared ahead: about those of a window, so that the model runs them while the
next window is tokenized."""

_SWITCH_SECONDS = 0.0002
"""Time after which a thread that computes in Python lets another one go on, while a GPU waits for
its next batch. Python's default is 5 ms, several times the run of a batch."""

Item = TypeVar("Item")
Origin = TypeVar("Origin")


@dataclass(eq=False)
class Window(Generic[Origin]):
    """Inputs that are preprocessed together, and the outputs of their rows."""

    inputs: Sequence[Any]
    origin: Origin
    """Where the inputs come from; for the caller."""
    work: ModelInputs = field(default_factory=lambda: ModelInputs([]))
    """The preprocessed inputs."""
    error: InputError | None = None
    """Why the inputs cannot be predicted together; then there are no outputs."""
    preprocess_seconds: float = 0.0
    padded_tokens: int = 0
    """Number of tokens with padding, including rows that only fill a batch."""
    run_seconds: float = 0.0
    """Sum over the batches, which may run concurrently."""
    _parts: list[tuple[list[int], RowValues]] = field(default_factory=list)
    """Indices of the rows of each batch, and their outputs."""

    @property
    def rows_done(self) -> int:
        """Number of rows that have outputs."""
        return sum(len(indices) for indices, _ in self._parts)

    def add(self, indices: list[int], outputs: RowValues) -> None:
        """Add the outputs of a batch, one for each of the rows with these indices."""
        self._parts.append((indices, outputs))

    def outputs(self) -> Any:
        """Return the outputs in the order of the rows: a list, or an array if batches gave some."""
        count = len(self.work.rows)
        arrays = [outputs for _, outputs in self._parts if isinstance(outputs, np.ndarray)]
        kinds = {(array.shape[1:], array.dtype) for array in arrays}
        if len(arrays) == len(self._parts) and len(kinds) == 1:
            (shape, dtype) = kinds.pop()
            joined = np.empty((count, *shape), dtype)
            for indices, outputs in self._parts:
                joined[indices] = outputs
            return joined
        ordered: list[Any] = [None] * count
        for indices, outputs in self._parts:
            for index, output in zip(indices, outputs, strict=True):
                ordered[index] = output
        return ordered


@dataclass(frozen=True)
class PreparedBatch(Generic[Origin]):
    """A batch of a window that is ready to run."""

    window: Window[Origin]
    indices: list[int]
    """Indices of its rows in the window; empty for a window that has none."""
    feeds: Arrays
    is_last: bool
    """True for the last batch of the window."""


@dataclass(frozen=True)
class RowStream:
    """Prepares the batches of windows and runs them, in order."""

    batches: BatchRunner
    preprocess: Callable[[Sequence[Any]], ModelInputs]
    """Preprocesses the inputs of a window."""
    plan: Callable[[Sequence[Row]], list[list[int]]]
    """Returns the indices of the rows of each batch."""
    submit: Callable[[Callable[[], Arrays]], Future[tuple[Arrays, float]]]
    """Starts a run; returns a future of its outputs and its time in seconds."""
    concurrent: int = 1
    """Number of runs that wait or run at the same time."""
    on_batch: Callable[[Window[Any]], object] = lambda _: None
    """Is called after each batch, with its window."""

    def prepare_ahead(
        self, windows: Generator[Window[Origin]], *, ahead: int
    ) -> Generator[PreparedBatch[Origin]]:
        """Yield what `prepare` yields: threads read windows, preprocess them and make batches.

        Args:
            windows: the windows, which are closed at the end.
            ahead: number of batches that wait at most.
        """
        # The threads of `tokenizers` work on a window while the next one is read, and the one
        # before it padded.
        read = read_ahead(windows, ahead=1, name="enginery-read")
        preprocessed = read_ahead(self._preprocessed(read), ahead=1, name="enginery-preprocess")
        return read_ahead(self._batched(preprocessed), ahead=ahead, name="enginery-prepare")

    def prepare(self, windows: Iterable[Window[Origin]]) -> Generator[PreparedBatch[Origin]]:
        """Yield the batches of windows, at least one for each.

        An InputError ends its window, not the stream: it is the window's `error`.
        """
        return self._batched(self._preprocessed(window for window in windows))

    def _preprocessed(self, windows: Generator[Window[Origin]]) -> Generator[Window[Origin]]:
        """Preprocess the inputs of each window, and yield it. Closes `windows`."""
        with closing(windows):
            for window in windows:
                started = time.perf_counter()
                try:
                    if window.inputs:
                        window.work = self.preprocess(window.inputs)
                except InputError as error:
                    window.error = error
                window.preprocess_seconds = time.perf_counter() - started
                yield window

    def _batched(self, windows: Generator[Window[Origin]]) -> Generator[PreparedBatch[Origin]]:
        """Yield the batches of windows that are preprocessed. Closes `windows`."""
        with closing(windows):
            for window in windows:
                yield from self._batches_of(window)

    def _batches_of(self, window: Window[Origin]) -> Generator[PreparedBatch[Origin]]:
        """Yield the batches of a window; the last one even without rows or after an error."""
        indices: list[int] = []
        feeds: Arrays = {}
        try:
            rows = window.work.rows
            plan = self.plan(rows) if rows and window.error is None else []
            for indices in plan[:-1]:
                if window.error is not None:  # a batch that failed in the meantime
                    break
                feeds = self.batches.feeds([rows[index] for index in indices])
                yield PreparedBatch(window, indices, feeds, is_last=False)
            indices, feeds = [], {}
            if plan and window.error is None:
                indices = plan[-1]
                feeds = self.batches.feeds([rows[index] for index in indices])
        except InputError as error:
            window.error = error
            indices, feeds = [], {}
        yield PreparedBatch(window, indices, feeds, is_last=True)

    def run(self, batches: Generator[PreparedBatch[Origin]]) -> Generator[Window[Origin]]:
        """Run batches; yield each window when all of its batches are done. Closes `batches`.

        Raises:
            Exception: an error of a run other than InputError; batches that wait are dropped.
        """
        first_input = self.batches.runner.record.inputs[0].name
        running: deque[tuple[PreparedBatch[Origin], Future[tuple[Arrays, float]] | None]] = deque()

        def finish() -> Generator[Window[Origin]]:
            batch, run = running.popleft()
            window = batch.window
            if run is not None:
                try:
                    outputs, seconds = run.result()
                    rows = [window.work.rows[index] for index in batch.indices]
                    window.add(batch.indices, self.batches.split(rows, batch.feeds, outputs))
                    window.run_seconds += seconds
                    window.padded_tokens += int(batch.feeds[first_input].size)
                    self.on_batch(window)
                except InputError as error:
                    # The first error stays; other batches may have been under way already.
                    window.error = window.error or error
            if batch.is_last:
                yield window

        try:
            with closing(batches):
                for batch in batches:
                    run = None
                    if batch.indices and batch.window.error is None:
                        first = batch.window.work.rows[batch.indices[0]]
                        outputs = self.batches.task.outputs_read(raw=first.reads_raw)
                        run = self.submit(partial(self.batches.runner, batch.feeds, outputs))
                    running.append((batch, run))
                    # Enough batches wait; the oldest is collected first, so that windows come out
                    # in order.
                    if len(running) > self.concurrent:
                        yield from finish()
            while running:
                yield from finish()
        finally:
            for _, run in running:
                if run is not None:
                    # The caller has stopped or a run has failed: nobody will collect these batches.
                    run.cancel()


class _SwitchInterval:
    """Lowers Python's switch interval while it is in use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0

    @contextmanager
    def lowered(self) -> Generator[None]:
        """Let threads that compute in Python give way soon, in the whole process."""
        with self._lock:
            if not self._users:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECONDS, self._before))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    sys.setswitchinterval(self._before)


SWITCH_INTERVAL = _SwitchInterval()


def run_here(run: Callable[[], Arrays]) -> Future[tuple[Arrays, float]]:
    """Run a batch in this thread; see `RowStream.submit`."""
    future: Future[tuple[Arrays, float]] = Future()
    started = time.perf_counter()
    try:
        future.set_result((run(), time.perf_counter() - started))
    except InputError as error:
        future.set_exception(error)
    return future


def read_ahead(
    items: Generator[Item], *, ahead: int, name: str, closed: threading.Event | None = None
) -> Generator[Item]:
    """Yield the items of a generator that a thread of its own reads, up to `ahead` of them early.

    Closing this generator, or an error, ends the thread after the item that it is working on, and
    closes `items`.

    Args:
        items: a generator, which only the thread uses.
        ahead: number of items that wait at most.
        name: name of the thread.
        closed: is set when this generator is closed, so that the item that the thread is working
            on can end early.

    Raises:
        BaseException: any error of `items`, after the items before it.
    """
    queue: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
    slots = threading.Semaphore(ahead)
    is_closed = closed or threading.Event()

    def read() -> None:
        end: BaseException | None = None
        try:
            with closing(items):
                for item in items:
                    # Bounds the memory: no item is read before there is space for it.
                    slots.acquire()
                    if is_closed.is_set():
                        break
                    queue.put((True, item))
                    del item  # it may be large
        except BaseException as error:
            end = error
        queue.put((False, end))

    thread = threading.Thread(target=read, name=name, daemon=True)
    thread.start()
    try:
        while True:
            is_item, value = queue.get()
            if not is_item:
                break
            slots.release()
            yield value
            del value
    finally:
        is_closed.set()
        # The thread may be waiting for a slot; it sees the event then, and ends.
        slots.release()
        thread.join()
    if value is not None:
        raise value
