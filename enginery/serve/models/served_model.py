"""A served model: its backend (sessions and task), its queues and its workers.

Inputs are preprocessed on arrival, wait in the queue for a free worker, and run in batches with
other inputs of similar length. Models that generate texts do that in one batch, which inputs join
and leave between its steps. A cancelled request leaves queue and batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar, Literal, TypeVar, cast

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import EngineryError, InputError
from enginery.runtime.tasks.generate import Generate
from enginery.runtime.tasks.results import is_finite
from enginery.runtime.tasks.task import (
    ModelInputs,
    ProcessingCost,
    Row,
    RowTask,
    Task,
    TaskOptions,
    count_characters,
    count_inputs,
)
from enginery.runtime.tasks.text_generator import TextGenerator
from enginery.runtime.text.tokenizer_files import is_panic
from enginery.serve.batching.generation import GenerationScheduler, Progress
from enginery.serve.batching.preprocess_pool import PreprocessPool
from enginery.serve.batching.queue import BatchQueue, QueueEntry
from enginery.serve.batching.scheduler import (
    BatchScheduler,
    BatchStatistics,
    RowScheduler,
    Timings,
    WorkerOptions,
)
from enginery.serve.config import ServeConfig
from enginery.serve.models.backend import ModelBackend, ModelFiles

_log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stuck", "failed", "closed"]
Result = TypeVar("Result")
OnBatch = Callable[[str, BatchStatistics], None]

_MAX_DECODED = 20_000
"""Maximum number of texts that a request may have decoded. Each takes up to a millisecond, and
decoding cannot be cancelled."""
_MAX_NUMBERS = 2**23
"""Maximum number of numbers of a request's results: 32 MiB, and about 90 as JSON."""
_PREPROCESSING = {
    "text": "tokenizing a text",
    "image": "decoding an image",
    "audio": "decoding audio",
}
_MEASURING = Lock()
"""Held while a model is measured: models measured at the same time would slow each other down."""
_RETIRE_SECONDS = 0.5
"""Time that a replaced model still accepts requests, for those that already refer to it."""
_DRAIN_EVERY_SECONDS = 0.01
_QUICK_INPUTS = 8
"""Maximum number of texts of a request that is tokenized in the event loop's thread."""
_LIGHT_CHARACTERS = 2048
"""Amount of text that is tokenized in about a millisecond."""
_UNPREPARED_SECONDS = 300.0
"""Maximum time to wait for a worker that warms up after another one could not."""
_PROBE_SECONDS = 1.0
"""Minimum time between two checks whether the provider still works."""


class UnavailableError(EngineryError):
    """The model cannot answer at the moment."""

    def __init__(self, message: str, *, do: str = "", retry_after_seconds: float = 1.0) -> None:
        super().__init__(message, do=do)
        self.retry_after_seconds = retry_after_seconds


class TooManyInputsError(InputError):
    """A request has too many inputs."""


def too_many_inputs(count: int, limit: int, unit: str = "inputs") -> TooManyInputsError:
    """Return the error of a request with too many inputs."""
    return TooManyInputsError(
        f"found {count} {unit}, expected at most {limit}.",
        do="Send them in several requests.",
    )


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The results of one request, in the order of its inputs, with its timings."""

    results: Any
    timings: Timings


class ServedModel(ABC):
    """One served artifact as the routes see it, from loading to closing."""

    def __init__(
        self,
        name: str,
        path: Path,
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: OnBatch | None = None,
    ) -> None:
        """Create the model without loading it.

        Args:
            name: name of the model.
            path: the artifact's directory.
            config: the options of the server.
            loop: the event loop of the requests.
            on_batch: called with the name for each batch that ran.
        """
        self.name, self.path = name, path
        self.state: State = "loading"
        self.reason = "the model is being loaded"
        """Why the model is not ready; empty if it is."""
        self._config, self._loop, self._on_batch = config, loop, on_batch
        self._files: ModelFiles | None = None
        self._requests = 0
        """Number of requests in progress."""
        self._pool = PreprocessPool(loop, max_inputs=config.queue_inputs, name=name)

    @property
    def is_loaded(self) -> bool:
        """True once the artifact is loaded."""
        return self._files is not None

    @property
    def backend(self) -> ModelFiles:
        """The loaded artifact; UnavailableError before it is loaded."""
        if self._files is None:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        return self._files

    @property
    @abstractmethod
    def scheduler(self) -> RowScheduler:
        """What runs rows; UnavailableError before the artifact is loaded."""

    def scheduler_of(self, task: RowTask) -> RowScheduler | GenerationScheduler:  # noqa: ARG002
        """Return what runs the rows of a task: the model's own, or `backend.tensors`."""
        return self.scheduler

    @property
    def is_serving(self) -> bool:
        """True if requests are accepted."""
        return self.state == "ready"

    @property
    @abstractmethod
    def queued_rows(self) -> int:
        """Number of inputs in the queues."""

    @abstractmethod
    def entries(self, task: RowTask, rows: Sequence[Row]) -> list[QueueEntry]:
        """Convert rows of a task to entries of the queue.

        Raises:
            ShapeError: no engine accepts a row.
        """

    @property
    def artifact(self) -> Artifact:
        return self.backend.artifact

    @property
    def task(self) -> Task | None:
        """The artifact's task; None if it is not supported, so that only raw tensors are."""
        return self.backend.task

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return the model's state, queue and, once loaded, properties, as JSON."""

    def _queue_limits(self) -> dict[str, Any]:
        config = self._config
        return {
            "max_inputs": config.queue_inputs,
            "max_tokens": config.queue_tokens,
            "max_wait": config.max_wait,
        }

    # -- inference ----------------------------------------------------------------------------

    async def infer(
        self,
        task: RowTask,
        inputs: Any,
        options: TaskOptions,
        timings: Timings | None = None,
    ) -> InferenceResult:
        """Run inference on the inputs of a request.

        Args:
            task: the model's own task, or `backend.tensors`.
            inputs: inputs of the task.
            options: options of the task.
            timings: timings and token counts of the request, which are set here; None for new ones.

        Raises:
            InputError, ShapeError: an input or an option is invalid.
            OverloadedError: too many requests are waiting.
            UnavailableError: the model is not ready, or its results are NaN or infinite.
        """
        if not self.is_serving:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        count, characters = count_inputs(inputs), count_characters(inputs)
        # With labels to choose from, each text is tokenized and run once for each of them.
        self._require_count(count * options.rows_per_input, "inputs")
        if not self._config.truncate and getattr(options, "truncate", True) is None:
            options = options.model_copy(update={"truncate": False})
        self._requests += 1
        try:
            started = time.perf_counter()
            share = options.rows_per_input
            cost = self._preprocess_cost(task, count * share, characters * share)
            if cost == "light":
                work = _without_panic(partial(task.preprocess, inputs, options))
            else:
                work = await self.in_thread(
                    partial(task.preprocess, inputs, options), inputs=count, cost=cost
                )
            timings = Timings() if timings is None else timings
            timings.tokenize_seconds = time.perf_counter() - started
            if len(work.rows) > count:
                self._require_count(len(work.rows), "windows of contexts")
            if work.decoded > _MAX_DECODED:
                raise TooManyInputsError(
                    f"the request asks for {work.decoded} fillings, expected at most "
                    f"{_MAX_DECODED}.",
                    do="Use a smaller top_k, or send the inputs in several requests.",
                )
            if work.numbers > _MAX_NUMBERS:
                raise TooManyInputsError(
                    f"the results would have up to {work.numbers} numbers, expected at most "
                    f"{_MAX_NUMBERS}.",
                    do="Send the inputs in several requests.",
                )
            entries = self.entries(task, work.rows)
            for row in work.rows:
                timings.tokens += row.tokens
                timings.truncated += row.truncated
            outputs = await self.scheduler_of(task).run(entries, timings) if entries else []
            if work.postprocess_cost == "light":
                results = task.postprocess(work, outputs, options)
            else:
                results = await self.in_thread(
                    partial(task.postprocess, work, outputs, options),
                    cost=work.postprocess_cost,
                )
        finally:
            self._requests -= 1
        if isinstance(task, Task) and not is_finite(results):
            raise UnavailableError(
                "the model's outputs are NaN or infinite.",
                do="They may overflow the model's precision; run `enginery validate` to check it.",
                retry_after_seconds=0.0,  # the same input would give the same outputs
            )
        return InferenceResult(results, timings)

    async def stream(
        self,
        task: Generate,
        prepare: Callable[[], ModelInputs],
        timings: Timings,
        inputs: Sequence[Any],
    ) -> AsyncGenerator[Progress]:
        """Generate the texts of a request; yield what each step gives. Close it, to end early.

        Args:
            task: the model's own task.
            prepare: prepares the inputs; called in a thread.
            timings: timings and token counts of the request, which are set here.
            inputs: the inputs, for their number and size.

        Raises:
            InputError: an input or an option is invalid.
            OverloadedError: too many requests are waiting.
            UnavailableError: the model is not ready, or a step has failed.
        """
        if not self.is_serving:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        scheduler = self.scheduler_of(task)
        if not isinstance(scheduler, GenerationScheduler):
            raise AssertionError("fronts do not serve models that generate text")
        self._require_count(len(inputs), "inputs")
        self._requests += 1
        try:
            started = time.perf_counter()
            cost = self._preprocess_cost(task, len(inputs), count_characters(inputs))
            work = await self.in_thread(prepare, inputs=len(inputs), cost=cost)
            timings.tokenize_seconds = time.perf_counter() - started
            timings.tokens = sum(row.tokens for row in work.rows)
            entries = self.entries(task, work.rows)
            async with contextlib.aclosing(scheduler.steps(entries, timings)) as steps:
                async for step in steps:
                    if step.done and work.postprocess_cost == "heavy":
                        post = partial(task.postprocess, work, [list(step.results)], None)
                        (results,) = await self.in_thread(post, cost="heavy")
                        yield replace(step, results=tuple(results))
                    else:
                        yield step
        finally:
            self._requests -= 1

    async def in_thread(
        self, work: Callable[[], Result], *, inputs: int = 0, cost: ProcessingCost
    ) -> Result:
        """Run work in a thread of the model's pool.

        Args:
            work: called in the thread.
            inputs: number of inputs that the work is for, which count towards the queue's limit.
            cost: the cost class of the work.

        Raises:
            OverloadedError: too many inputs are in preprocessing or in the queue.
        """
        return await self._pool.run(
            partial(_without_panic, work),
            inputs=inputs,
            waiting=self.queued_rows,
            short=cost != "heavy",
        )

    def _preprocess_cost(self, task: RowTask, count: int, characters: int) -> ProcessingCost:
        """Return the cost class of preprocessing a number of inputs with so many characters."""
        if not isinstance(task, Task):  # raw tensors
            return "light"
        if task.modality != "text" or characters > _LIGHT_CHARACTERS:
            return "heavy"
        # tokenizer.json is untrusted, so that only a tokenizer whose time is bounded may run in the
        # event loop's thread; see `quick_texts`.
        max_characters = self.backend.quick_characters
        is_quick = max_characters and count <= _QUICK_INPUTS and characters <= max_characters
        return "light" if is_quick else "medium"

    def _require_count(self, count: int, unit: str) -> None:
        if count > self._config.max_inputs:
            raise too_many_inputs(count, self._config.max_inputs, unit)

    # -- lifecycle ----------------------------------------------------------------------------

    @abstractmethod
    def load(self) -> None:
        """Open the artifact and make the model ready. Blocks: call it in a thread.

        Raises:
            EngineryError: the artifact cannot be loaded; `state` is `failed` and `reason` is set.
        """

    def check_health(self) -> None:
        """Set `state` to `stuck` or `failed` if a batch or text hangs or a worker has ended."""
        if self.state not in ("ready", "stuck"):
            return
        running, preprocessing = self.running_seconds(), self._pool.busy_seconds()
        if max(running, preprocessing) > self._config.stuck_after:
            self.state = "stuck"
            self.reason = f"a batch has been running for {running:.0f} s"
            if preprocessing > running:
                work = _PREPROCESSING[self.task.modality if self.task else "text"]
                self.reason = f"{work} has been running for {preprocessing:.0f} s"
        elif self.state == "stuck":
            self.state, self.reason = "ready", ""

    @abstractmethod
    def running_seconds(self) -> float:
        """Return how long the longest-running batch has been running, in seconds."""

    def refuse_all(self, error: EngineryError) -> None:
        """Raise an error in all waiting and running requests."""
        if self.is_loaded:
            self.scheduler.fail_all(error)
        self._pool.close()

    async def close(self, *, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        """Close the model; with `drain`, answer the requests in progress first."""
        if self.state == "stuck":
            timeout_seconds = 0.0  # do not wait for a batch that hangs
        ends = time.perf_counter() + timeout_seconds
        while drain and self.is_serving and (self._requests or self._pool.is_busy):
            if time.perf_counter() > ends:
                break
            await asyncio.sleep(_DRAIN_EVERY_SECONDS)
        if self.state != "failed":
            self.state, self.reason = "closed", "the model was closed"
        await self._close_sessions(drain=drain, timeout_seconds=timeout_seconds)
        self._pool.close()

    @abstractmethod
    async def _close_sessions(self, *, drain: bool, timeout_seconds: float) -> None:
        """Free what runs the model."""

    async def retire(self, *, timeout_seconds: float) -> None:
        """Close a model that was replaced, without losing a request."""
        await asyncio.sleep(_RETIRE_SECONDS)
        await self.close(timeout_seconds=timeout_seconds)


def _without_panic(work: Callable[[], Result]) -> Result:
    """Call `work`; raise RuntimeError for a panic, a BaseException that would end the server."""
    try:
        return work()
    except BaseException as error:
        if is_panic(error):
            raise RuntimeError(f"panic: {error}") from error
        raise


class LocalModel(ServedModel):
    """A model with its sessions, queues and workers in this process."""

    scheduler_type: ClassVar[type[BatchScheduler]] = BatchScheduler

    def __init__(
        self,
        name: str,
        path: Path,
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: OnBatch | None = None,
    ) -> None:
        super().__init__(name, path, config, loop, on_batch=on_batch)
        self._schedulers: list[BatchScheduler | GenerationScheduler] = []
        """What runs batches, of raw tensors at least; then what runs the task's rows, if they take
        many steps."""
        self._probed_at = 0.0

    @property
    def backend(self) -> ModelBackend:
        """The loaded artifact with its sessions; UnavailableError before it is loaded."""
        return cast("ModelBackend", super().backend)

    @property
    def scheduler(self) -> BatchScheduler:
        """The queue and workers; UnavailableError before the artifact is loaded."""
        if not self._schedulers:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        return cast("BatchScheduler", self._schedulers[0])

    def scheduler_of(self, task: RowTask) -> BatchScheduler | GenerationScheduler:
        """Return what runs the rows of a task; see `ServedModel.scheduler_of`."""
        return self.scheduler if task is self.backend.tensors else self._schedulers[-1]

    @property
    def queued_rows(self) -> int:
        """Number of inputs in the queues."""
        return sum(scheduler.queue.rows for scheduler in self._schedulers)

    def entries(self, task: RowTask, rows: Sequence[Row]) -> list[QueueEntry]:
        """Convert rows of a task to entries of the queue; see `ServedModel.entries`."""
        return self.backend.entries(task, rows)

    def info(self) -> dict[str, Any]:
        """Return the model's state, queue and, once loaded, properties, as JSON."""
        scheduler = self._schedulers[-1] if self._schedulers else None
        queue = scheduler.queue if scheduler else None
        properties = {
            "name": self.name,
            "state": self.state,
            "reason": self.reason,
            "queue": {
                "inputs": self.queued_rows + self._pool.inputs,
                "tokens": queue.tokens if queue else 0,
                "wait_seconds": round(queue.estimated_wait_seconds, 3) if queue else 0.0,
                **self._queue_limits(),
            },
        }
        if scheduler is not None:
            properties |= scheduler.info()
        return {**properties, **self.backend.info()} if self.is_loaded else properties

    def load(self) -> None:
        """Open the artifact, run it once, and start its workers; see `ServedModel.load`."""
        try:
            backend = ModelBackend.open(self.path, self._config, self._pool.encode_in_parallel)
            schedulers: list[BatchScheduler | GenerationScheduler] = []
            try:
                # A CUDA graph is replayed by the thread that has recorded it.
                in_worker = not backend.on_cpu and not backend.rows.task.runs_in_steps
                if not in_worker:
                    backend.warm_up()
                batches = self._open_batches(backend, prepare=in_worker)
                schedulers.append(batches)
                batches.wait_prepared()
                if isinstance(backend.rows, TextGenerator):
                    schedulers.append(self._open_generation(backend.rows))
            except BaseException:
                for scheduler in schedulers:
                    scheduler.close(drain=False)
                # A session must not be freed while a worker uses it.
                if all(scheduler.join(_UNPREPARED_SECONDS) for scheduler in schedulers):
                    backend.close()
                raise
        except EngineryError as error:
            self.state, self.reason = "failed", str(error)
            raise
        self._files, self._schedulers = backend, schedulers
        self.state, self.reason = "ready", ""
        # In the background while the first requests run; several models take turns.
        Thread(target=self._measure, name=f"enginery-measure-{self.name}", daemon=True).start()

    def _open_batches(self, backend: ModelBackend, *, prepare: bool) -> BatchScheduler:
        """Start the queue and the workers; with `prepare`, each worker warms the sessions up."""
        config = self._config
        queue = BatchQueue(
            backend.rules,
            max_rows=config.queue_inputs,
            max_tokens=config.queue_tokens,
            max_wait_seconds=config.max_wait,
        )
        workers = WorkerOptions(
            backend.workers, prepare=backend.prepare if prepare else None, name=self.name
        )
        return self.scheduler_type(
            queue, self._run_batch, self._loop, workers, on_batch=self._observe_batch
        )

    def _open_generation(self, generator: TextGenerator) -> GenerationScheduler:
        """Start the thread that generates."""
        return GenerationScheduler(
            generator,
            self._config,
            self._loop,
            explain=self._explain_failed_step,
            on_batch=lambda batch: self._on_batch(self.name, batch) if self._on_batch else None,
            name=self.name,
        )

    def check_health(self) -> None:
        """Set `state` to `stuck` or `failed` if a batch or text hangs or a worker has ended."""
        if self.state in ("ready", "stuck") and self._schedulers:
            if all(scheduler.alive for scheduler in self._schedulers):
                super().check_health()
            else:
                self.state, self.reason = "failed", "a worker thread has ended"

    def running_seconds(self) -> float:
        """Return how long the longest-running batch or step has been running, in seconds."""
        return max(scheduler.busy_seconds() for scheduler in self._schedulers)

    def refuse_all(self, error: EngineryError) -> None:
        """Raise an error in all waiting and running requests."""
        for scheduler in self._schedulers[1:]:
            scheduler.fail_all(error)
        super().refuse_all(error)

    async def _close_sessions(self, *, drain: bool, timeout_seconds: float) -> None:
        running = self._schedulers
        for scheduler in running:
            scheduler.close(drain=drain)
        ends = time.perf_counter() + timeout_seconds
        joined = [
            await self._loop.run_in_executor(
                None, scheduler.join, max(ends - time.perf_counter(), 0.0)
            )
            for scheduler in running
        ]
        if not all(joined):  # a session must not be freed while a batch runs
            self.refuse_all(UnavailableError(f"{self.name}: {self.reason}."))
        elif running:
            self.backend.close()

    def _run_batch(self, batch: Sequence[QueueEntry]) -> list[Any]:
        """Run a batch in a worker's thread; if it fails, check whether the provider still works."""
        try:
            outputs: list[Any] = batch[0].runner.run([entry.row for entry in batch])
            return outputs
        except EngineryError as error:
            if len(batch) > 1:
                raise  # its rows will run one by one
            raise self._explained(error) from error

    def _explain_failed_step(self, error: EngineryError, single_request: bool) -> EngineryError:
        """Return the error that the requests of a failed generation step receive.

        Args:
            error: what happened.
            single_request: True if all inputs of the step belong to one request.
        """
        explained = self._explained(error)
        if single_request or explained is not error:
            return explained
        return UnavailableError(
            f"generating several texts together failed: {error.message}",
            do="Send the request again.",
        )

    def _explained(self, error: EngineryError) -> EngineryError:
        """Return the error of a run, or another one if the provider no longer works."""
        now = time.perf_counter()
        if now - self._probed_at < _PROBE_SECONDS:
            return error  # the provider was checked just now
        self._probed_at = now
        try:
            self.backend.warm_up()
        except EngineryError as broken:
            # The input is not the cause: no input runs any more. A lost device stays lost.
            self.state = "failed"
            self.reason = f"the provider can no longer run the model: {broken.message}"
            return UnavailableError(f"{self.name}: {self.reason}")
        return error

    def _observe_batch(self, batch: BatchStatistics) -> None:
        """Update cost estimate, rules and metrics with a batch that ran."""
        if self.backend.observe_batch(batch):
            self._apply_rules()
        self.scheduler.queue.seconds_per_token = self.backend.seconds_per_token
        if self._on_batch:
            self._on_batch(self.name, batch)

    def _apply_rules(self) -> None:
        self.scheduler.queue.rules = self.backend.rules
        self.scheduler.queue.seconds_per_token = self.backend.seconds_per_token

    def _measure(self) -> None:
        """Measure the cost of batches and the placement of nodes, in a background thread."""
        with _MEASURING:
            try:
                self.backend.measure()
            except Exception:  # a bug; the model serves anyway
                _log.exception("%s could not be measured", self.name)
        self._apply_rules()
