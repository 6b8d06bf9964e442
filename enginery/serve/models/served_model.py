"""A model that answers requests: its backend, its queue and its workers.

Inputs are preprocessed when they arrive, wait in the queue for a free worker, and run with whatever
else of about their length waits. A request that is cancelled leaves the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Literal, TypeVar

from enginery.core.artifact import Artifact
from enginery.core.errors import EngineryError, InputError
from enginery.runtime.tasks.task import Arrays, RowTask, Task, TaskOptions, Weight
from enginery.runtime.tokenizer_files import is_panic
from enginery.serve.batching.preprocess_pool import PreprocessPool
from enginery.serve.batching.queue import QueueEntry
from enginery.serve.batching.scheduler import BatchScheduler, BatchStatistics, Timings
from enginery.serve.config import ServeConfig
from enginery.serve.models.backend import ModelBackend

_log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stuck", "failed", "closed"]
Result = TypeVar("Result")
OnBatch = Callable[[str, BatchStatistics], None]

_MEASURING = Lock()
"""Models that are measured at the same time would measure each other."""
_RETIRE_SECONDS = 0.5
"""Until a model that was replaced takes nothing more: requests that have found it may be on their
way."""
_PROBE_SECONDS = 1.0
"""Failures within it are looked into once."""


class UnavailableError(EngineryError):
    """The model cannot answer now."""

    def __init__(self, message: str, *, do: str = "", retry_after_seconds: float = 1.0) -> None:
        super().__init__(message, do=do)
        self.retry_after_seconds = retry_after_seconds


class TooManyInputsError(InputError):
    """One request has more inputs than are taken at once."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The results of one request, in the order of its inputs."""

    results: Any
    timings: Timings


class ServedModel:
    """One artifact, served."""

    def __init__(
        self,
        name: str,
        path: Path,
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: OnBatch | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            name: as routes call it.
            path: the artifact's directory.
            config: how it is batched and what is refused.
            loop: where requests wait.
            on_batch: called with the name and each batch that ran.
        """
        self.name, self.path = name, path
        self.state: State = "loading"
        self.reason = "the model is being loaded"
        """Why it is not ready."""
        self._config, self._loop, self._on_batch = config, loop, on_batch
        self._backend: ModelBackend | None = None
        self._scheduler: BatchScheduler | None = None
        self._requests, self._idle = 0, asyncio.Event()
        self._idle.set()
        self._pool = PreprocessPool(loop, most=config.queue_inputs, name=name)
        self._probed_at = 0.0

    @property
    def is_loaded(self) -> bool:
        """Whether the artifact was opened."""
        return self._backend is not None

    @property
    def backend(self) -> ModelBackend:
        """Return the opened artifact; raise UnavailableError before it is opened."""
        if self._backend is None:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        return self._backend

    @property
    def scheduler(self) -> BatchScheduler:
        """Return queue and workers; raise UnavailableError before they are there."""
        if self._scheduler is None:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        return self._scheduler

    @property
    def artifact(self) -> Artifact:
        return self.backend.artifact

    @property
    def task(self) -> Task | None:
        """Return how the artifact's task is answered; None where only tensors are."""
        return self.backend.task

    def info(self) -> dict[str, Any]:
        """Return what it is, where and how it runs, as JSON."""
        queue = self._scheduler.queue if self._scheduler else None
        found = {
            "name": self.name, "state": self.state, "reason": self.reason,
            "queue": {
                "inputs": queue.rows + self._pool.inputs if queue else 0,
                "tokens": queue.tokens if queue else 0,
                "wait_seconds": round(queue.wait_seconds, 3) if queue else 0.0,
                "max_inputs": self._config.queue_inputs, "max_tokens": self._config.queue_tokens,
                "max_wait": self._config.max_wait,
            },
        }  # fmt: skip
        return {**found, **self._backend.info()} if self._backend else found

    # -- answering ----------------------------------------------------------------------------

    async def answer(self, inputs: Sequence[Any], options: TaskOptions) -> InferenceResult:
        """Answer inputs by the model's task.

        Raises:
            InputError, ShapeError: an input or an option cannot be used.
            OverloadedError: too much waits already.
            UnavailableError: the model cannot answer, or its results are NaN or infinite.
        """
        task = self.task
        if task is None:
            raise InputError(f"{self.name} answers tensors alone.")
        if not self._config.truncate and getattr(options, "truncate", True) is None:
            options = options.model_copy(update={"truncate": False})
        answered = await self._run(task, inputs, options, len(inputs))
        if not all(map(task.is_finite, answered.results)):
            raise UnavailableError(
                "the model's numbers are NaN or infinite.",
                do="Its precision cannot hold this input; `enginery validate` says more.",
            )
        return answered

    async def infer(self, feeds: Arrays) -> InferenceResult:
        """Run the graph on its own inputs; results are its outputs by name.

        Raises:
            InputError, ShapeError: the graph does not take them.
            OverloadedError: too much waits already.
            UnavailableError: the model cannot answer.
        """
        count = max((len(array) for array in feeds.values() if array.ndim), default=1)
        return await self._run(self.backend.tensors, feeds, TaskOptions(), count)

    async def _run(self, task: RowTask, inputs: Any, options: Any, count: int) -> InferenceResult:
        if self.state != "ready":
            raise UnavailableError(f"{self.name}: {self.reason}.")
        self._require_count(count, "inputs")
        self._begin_request()
        try:
            started = time.perf_counter()
            weight = task.preprocess_weight(inputs)
            if weight == "light":
                work = task.preprocess(inputs, options)
            else:
                work = await self.in_thread(
                    lambda _: task.preprocess(inputs, options), inputs=count, weight=weight
                )
            timings = Timings(tokenize_seconds=time.perf_counter() - started)
            if len(work.rows) > count:
                self._require_count(len(work.rows), "windows of contexts")
            entries = self.backend.entries(task, work.rows)
            for row in work.rows:
                timings.tokens += row.tokens
                timings.truncated += row.truncated
            outputs = await self.scheduler.run(entries, timings) if entries else []
            weight = task.postprocess_weight(work, options)
            if weight == "light":
                results = task.postprocess(work, outputs, options)
            else:
                results = await self.in_thread(
                    lambda _: task.postprocess(work, outputs, options), weight=weight
                )
        finally:
            self._end_request()
        return InferenceResult(results, timings)

    async def in_thread(
        self, work: Callable[[Event], Result], *, inputs: int = 0, weight: Weight
    ) -> Result:
        """Run work in a thread of the model's own.

        Args:
            work: called with an event that is set when nobody waits any more.
            inputs: that it is for; they have their places in the queue meanwhile.
            weight: how long it may take.

        Raises:
            OverloadedError: too much is being preprocessed already.
        """
        waiting = self.scheduler.queue.rows
        self._begin_request()
        try:
            return await self._pool.run(
                work, inputs=inputs, waiting=waiting, short=weight != "heavy"
            )
        except BaseException as error:
            if is_panic(error):  # of Rust code: no Exception, which would end the server
                raise RuntimeError(f"panic: {error}") from error
            raise
        finally:
            self._end_request()

    def _require_count(self, count: int, what: str) -> None:
        if count > self._config.max_inputs:
            raise TooManyInputsError(
                f"found {count} {what}, expected {self._config.max_inputs} at most.",
                do="Send them in several requests.",
            )

    # -- its life -----------------------------------------------------------------------------

    def load(self) -> None:
        """Open the artifact, run it once, and start its workers. Blocks: for a thread.

        Raises:
            EngineryError: it cannot be loaded; `state` is then failed, and `reason` says why.
        """
        try:
            backend = ModelBackend.open(self.path, self._config, self._pool.spread)
            try:
                backend.warm_up()
            except BaseException:
                backend.close()
                raise
        except EngineryError as error:
            self.state, self.reason = "failed", str(error)
            raise
        self._backend = backend
        config = self._config
        self._scheduler = BatchScheduler(
            self._run_batch, backend.rules, self._loop, workers=backend.workers,
            max_rows=config.queue_inputs, max_tokens=config.queue_tokens,
            max_wait_seconds=config.max_wait, on_batch=self._learn, name=self.name,
        )  # fmt: skip
        self.state, self.reason = "ready", ""
        # Beside the first requests, and of several models one after the other.
        Thread(target=self._measure, name=f"enginery-measure-{self.name}", daemon=True).start()

    def watch(self) -> None:
        """Look whether a batch or a text is stuck, or a worker gone; `state` then says so."""
        if self.state not in ("ready", "stuck") or self._scheduler is None:
            return
        if not self._scheduler.workers.alive:
            self.state, self.reason = "failed", "a worker has ended"
            return
        running, preprocessing = self._scheduler.workers.busy_seconds(), self._pool.busy_seconds()
        if max(running, preprocessing) > self._config.stuck_after:
            self.state = "stuck"
            self.reason = f"a batch has been running for {running:.0f} s"
            if preprocessing > running:
                takes_images = self.task is not None and self.task.takes_images
                what = "decoding an image" if takes_images else "tokenizing a text"
                self.reason = f"{what} has been running for {preprocessing:.0f} s"
        elif self.state == "stuck":
            self.state, self.reason = "ready", ""

    def refuse_all(self, error: EngineryError) -> None:
        """Answer everything that waits or runs with an error."""
        if self._scheduler is not None:
            self._scheduler.fail_all(error)
        self._pool.close()

    async def close(self, *, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        """Answer what came before (with `drain`), then free the session."""
        if self.state == "stuck":
            timeout_seconds = 0.0  # what does not end is not waited for
        if drain and self.state == "ready":
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        if self.state != "failed":
            self.state, self.reason = "closed", "the model was closed"
        if self._scheduler is not None:
            self._scheduler.close(drain=drain)
            join = self._scheduler.workers.join
            if await self._loop.run_in_executor(None, join, timeout_seconds):
                self.backend.close()  # a session under a running batch must not be freed
        self._pool.close()

    async def retire(self, *, timeout_seconds: float) -> None:
        """Close a model that another has taken the place of, without losing a request."""
        await asyncio.sleep(_RETIRE_SECONDS)
        await self.close(timeout_seconds=timeout_seconds)

    def _begin_request(self) -> None:
        """Count a request; closing waits for it."""
        self._requests += 1
        self._idle.clear()

    def _end_request(self) -> None:
        self._requests -= 1
        if not self._requests:
            self._idle.set()

    def _run_batch(self, batch: Sequence[QueueEntry]) -> list[Any]:
        """Run a batch in a worker's thread; find out whether a failure is of the provider."""
        try:
            return self.backend.run(batch)
        except EngineryError:
            now = time.perf_counter()
            if len(batch) > 1 or now - self._probed_at < _PROBE_SECONDS:
                raise  # its rows will be run one by one; or this was looked into just now
            self._probed_at = now
            try:
                self.backend.warm_up()
            except EngineryError as error:
                # Not this input: nothing runs any more. A device that was lost stays lost.
                self.state = "failed"
                self.reason = f"the provider no longer runs the model: {error.message}"
                raise UnavailableError(f"{self.name}: {self.reason}") from error
            raise

    def _learn(self, batch: BatchStatistics) -> None:
        """Follow what batches cost."""
        if self.backend.learn(batch):
            self._follow_rules()
        self.scheduler.queue.seconds_per_token = self.backend.seconds_per_token
        if self._on_batch:
            self._on_batch(self.name, batch)

    def _follow_rules(self) -> None:
        self.scheduler.queue.rules = self.backend.rules
        self.scheduler.queue.seconds_per_token = self.backend.seconds_per_token

    def _measure(self) -> None:
        """Measure what a batch costs and where nodes run; in a thread of its own."""
        with _MEASURING:
            try:
                self.backend.measure()
            except Exception:  # a bug; it answers all the same
                _log.exception("%s could not be measured", self.name)
        self._follow_rules()
