"""A model that answers requests: its backend, its queue and its workers.

Inputs are preprocessed when they arrive, wait in the queue for a free worker, and run with whatever
else of about their length waits. A request that is cancelled leaves the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal, TypeVar

from enginery.core.artifact import Artifact
from enginery.core.errors import EngineryError, InputError, ProviderError
from enginery.core.feeds import FeedLimits, make_feeds
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import canonical_dim, dynamic_dims
from enginery.runtime.machine import usable_cores
from enginery.runtime.ort import OrtRunner
from enginery.runtime.provider_names import CPU
from enginery.runtime.provider_wish import parse_wishes
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.images import ImageTask
from enginery.runtime.tasks.task import ProcessingCost, Row, RowTask, Task, TaskOptions
from enginery.runtime.tasks.tensors import Tensors
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.tokenizer import Encode
from enginery.runtime.tokenizer_files import is_panic
from enginery.serve.batching.cost import BatchCost, CostEstimator, choose_max_tokens, measure_cost
from enginery.serve.batching.planner import BatchRules
from enginery.serve.batching.preprocess_pool import PreprocessPool
from enginery.serve.batching.queue import QueueEntry
from enginery.serve.batching.scheduler import BatchScheduler, BatchStatistics, Timings
from enginery.serve.config import ServeConfig

_log = logging.getLogger(__name__)

ValidationStatus = Literal["passed", "failed", "none"]
State = Literal["loading", "ready", "stuck", "failed", "closed"]
Result = TypeVar("Result")
OnBatch = Callable[[str, BatchStatistics], None]

_MAX_IMAGES_CPU = 8
"""Images of a batch on a CPU: they gain little from sharing, and wait for each other."""
_MAX_DECODED = 20_000
"""Texts that a request may have decoded: each takes up to a millisecond, and nothing stops it."""
_RULES_UPDATE_BATCHES = 64
"""Batches, after which the rules follow what those cost."""
_MEASURING = Lock()
"""Models that are measured at the same time would measure each other."""
_RETIRE_SECONDS = 0.5
"""Until a model that was replaced takes nothing more: requests that have found it may be on their
way."""
_DRAIN_EVERY_SECONDS = 0.01
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


class ModelBackend:
    """A session with all that it needs to answer; closing frees it."""

    def __init__(
        self,
        artifact: Artifact,
        runner: OrtRunner,
        options: ServeConfig,
        parallel_encode: Callable[[Encode, list[Any]], list[Any]] | None = None,
    ) -> None:
        self.artifact, self.runner, self.options = artifact, runner, options
        self.config = ModelConfig.read(artifact.path)
        self.tensors = replace(Tensors.open(artifact, runner.record), profiles=runner.profiles)
        self.task: Task | None = None
        """How the artifact's task is answered; None where only tensors are."""
        definition = manifest_task(artifact.manifest, runner.record)
        if definition is not None:
            self.task = definition.open(artifact, runner.record)
        if isinstance(self.task, TextTask):
            self.task = replace(
                self.task, tokenizer=replace(self.task.tokenizer, parallel_encode=parallel_encode)
            )
        elif isinstance(self.task, ImageTask):
            self.task = replace(self.task, max_pixels=options.max_pixels)
        tasks: list[RowTask] = [self.tensors, *([self.task] if self.task else [])]
        self._batches = {type(task): BatchRunner(task, runner) for task in tasks}
        self.on_cpu = runner.providers[0].name == CPU
        self.workers = options.workers or (usable_cores() if self.on_cpu else 1)
        self.dim = 0
        """The size of vectors, once it has run."""
        self._cost = CostEstimator(BatchCost(0.0, 0.0))
        self._explanation = ""
        self.placement: dict[str, Any] = self._known_placement()
        """Which provider runs how much, as `Placement.as_json`."""
        self.rules = self._rules()

    @classmethod
    def open(
        cls,
        path: Path,
        options: ServeConfig,
        parallel_encode: Callable[[Encode, list[Any]], list[Any]] | None = None,
    ) -> ModelBackend:
        """Open an artifact and its session.

        Args:
            path: the artifact's directory.
            options: of the server.
            parallel_encode: runs the tokenizing of a list of texts.

        Raises:
            ArtifactError: not an artifact, or a file that answers cannot be made from.
            RejectedArtifactError: its validation failed.
            ProviderError: the provider cannot be had.
            OptionError: an option of a provider does not fit it.
        """
        artifact = Artifact.open(path)
        artifact.require_passed(allow_failed=options.allow_failed)
        providers = parse_wishes(options.provider, options.provider_option, default="cpu")
        threads, on_cpu = options.threads, providers[0].full_name == CPU
        alone = (options.workers or usable_cores()) == 1
        if not threads and on_cpu and not alone:
            threads = 1
        runner = OrtRunner(
            artifact, providers=providers, allow_fallback=options.allow_fallback, threads=threads,
            keep_optimized=options.optimized_graph,
            # Several workers' threads would take the cores from each other.
            spinning=threads == 1 or (on_cpu and alone),
        )  # fmt: skip
        try:
            return cls(artifact, runner, options, parallel_encode)
        except BaseException:
            runner.close()
            raise

    @property
    def limit(self) -> int:
        """Return the most tokens of a text; 0 without a tokenizer."""
        return self.task.tokenizer.limit if isinstance(self.task, TextTask) else 0

    @property
    def cost(self) -> BatchCost:
        """Return what batches cost now."""
        return self._cost.cost()

    @property
    def seconds_per_token(self) -> float:
        """Return how long all workers together take for a token, lately."""
        return self._cost.mean_seconds_per_token() / self.workers

    def entries(self, task: RowTask, rows: Sequence[Row]) -> list[QueueEntry]:
        """Return rows as entries of the queue.

        Raises:
            ShapeError: no engine takes a row.
        """
        batches = self._batches[type(task)]
        pads = bool(self.runner.profiles)
        return [
            QueueEntry(
                None,
                place,
                (type(task), task.batch_key(row)),
                batches.padded_length(row) if pads else row.tokens,
                row,
                batches,
                tokens=row.tokens,
            )
            for place, row in enumerate(rows)
        ]

    def warm_up(self) -> None:
        """Run one real inference, so that "ready" means that it answers.

        Raises:
            ProviderError: it does not run.
        """
        self.runner.warm_up()
        try:
            if isinstance(self.task, TextTask):
                (output,) = self._run_probe(8)
                if self.task.verb == "embed":
                    self.dim = int(output.shape[0])
            else:
                self.runner(self._synthetic_feeds())
        except InputError as error:
            raise ProviderError(f"{self.artifact.path} does not run: {error.message}") from error

    def measure(self) -> None:
        """Measure what batches cost, set the rules by it, and look where nodes run."""
        if not self.placement:
            try:
                self.placement = self.runner.placement().as_json()
            except EngineryError as error:
                self.placement = {"notes": [f"it cannot be read: {error.message}"]}
        if not isinstance(self.task, TextTask):
            return

        def run(tokens: int) -> float:
            started = time.perf_counter()
            self._run_probe(tokens)
            return time.perf_counter() - started

        with contextlib.suppress(EngineryError):  # engines that do not take these lengths
            self._cost = CostEstimator(measure_cost(run, limit=self.limit))
        self.rules = self._rules()

    def observe_batch(self, batch: BatchStatistics) -> bool:
        """Learn from a batch that ran; return whether the rules have changed."""
        cost = self._cost
        cost.add(batch.padded_tokens, batch.seconds)
        if cost.batches % _RULES_UPDATE_BATCHES:
            return False
        self.rules = self._rules()
        return True

    def validation_status(self) -> ValidationStatus:
        """Return what `enginery validate` found; `none` where the artifact was not validated."""
        if self.artifact.failed():
            return "failed"
        verdict = self.artifact.manifest.verdict("validate")
        is_of_this = verdict and verdict.fields.get("artifact") == self.artifact.content_sha256()
        return "passed" if is_of_this else "none"

    def info(self) -> dict[str, Any]:
        """Return what runs, where, and how it is batched, as JSON."""
        manifest, cost = self.artifact.manifest, self.cost
        found: dict[str, Any] = {
            "task": manifest.task,
            "method": self.task.verb if self.task else "",
            "source": manifest.source.id,
            "revision": manifest.source.revision,
            "content_sha256": self.artifact.content_sha256(),
            "precision": manifest.precision,
            "target": manifest.target,
            "provider": self.runner.providers[0].name,
            "providers": [asdict(provider) for provider in self.runner.providers],
            "engines": [
                {"name": engine.name, "key": engine.record.key, "profile": str(profile)}
                for engine, profile in zip(self.runner.engines, self.runner.profiles, strict=True)
            ],
            "placement": self.placement,
            "inputs": [str(spec) for spec in self.runner.record.inputs],
            "outputs": [str(spec) for spec in self.runner.record.outputs],
            "max_inputs": self.options.max_inputs,
            "workers": self.workers,
            "batching": {
                "max_tokens": self.rules.max_tokens, "max_rows": self.rules.max_rows,
                "max_padding": self.rules.max_padding, "explanation": self._explanation,
                "fixed_seconds": cost.fixed_seconds,
                "seconds_per_token": cost.seconds_per_token,
            },
        }  # fmt: skip
        if self.limit:
            found["max_tokens"] = self.limit
        if self.task:
            found["notes"] = list(self.task.notes)
        if self.dim:
            found["dim"] = self.dim
        return found

    def close(self) -> None:
        """Free the session."""
        self.runner.close()

    def _run_probe(self, tokens: int) -> list[Any]:
        """Run one made-up text of so many tokens."""
        if self.task is None:
            raise AssertionError("only texts are probed")
        return self._batches[type(self.task)].run([self.task.probe(tokens)])

    def _synthetic_feeds(self, tokens: int = 16) -> dict[str, Any]:
        limits = FeedLimits.from_config(self.config)
        sizes = {name: limits.sizes.get(name, max(limits.min_sequence, tokens))
                 for name in dynamic_dims(self.runner.record.inputs)}  # fmt: skip
        sizes |= {name: 1 for name in sizes if canonical_dim(name) == "batch"}
        if self.runner.profiles:
            sizes |= {name: dim.opt for name, dim in self.runner.profiles[0].dims.items()}
        return make_feeds(self.runner.record.inputs, sizes, limits, seed=0)

    def _known_placement(self) -> dict[str, Any]:
        """Return what is known without a session of its own; empty where one has to look."""
        if self.on_cpu:
            return {"providers": [{"name": CPU}], "notes": ["every node is on the CPU"]}
        if self.runner.engines:
            names = [{"name": provider.name} for provider in self.runner.providers[:1]]
            return {"providers": names, "notes": ["every node is in the engine"]}
        return {}

    def _rules(self) -> BatchRules:
        options, spec = self.options, self.runner.record.inputs[0]
        batches = self._batches[type(self.task or self.tensors)]
        fixed = batches.fixed_rows
        if isinstance(self.task, ImageTask):
            rows = min(options.batch_rows, _MAX_IMAGES_CPU if self.on_cpu else options.batch_rows)
            rows = min(rows, fixed or rows)
            self._explanation = f"{rows} images of one size"
            return BatchRules(max_tokens=rows, max_rows=rows, max_padding=0.0)
        tokens, why = options.batch_tokens, "as --batch-tokens says"
        if not tokens:
            tokens, why = choose_max_tokens(self.cost, on_cpu=self.on_cpu)
        self._explanation = why
        rules = BatchRules(
            max_tokens=tokens, max_rows=options.batch_rows, max_padding=options.max_padding,
            fixed_cost_tokens=self._cost.fixed_cost_tokens(),
        )  # fmt: skip
        if self.task is not None:
            rules = replace(
                rules, equal_lengths=not self.task.can_pad,
                max_rows=min(rules.max_rows, fixed) if fixed else rules.max_rows,
            )  # fmt: skip
        if self.runner.profiles:
            # An engine's own maximum is what it was built for.
            rules = replace(
                rules,
                max_rows_for_length=lambda length: self.runner.most_rows(spec, (length,)) or 1,
            )
        return rules


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
        self._requests = 0
        """How many are being answered."""
        self._pool = PreprocessPool(loop, max_inputs=config.queue_inputs, name=name)
        self._probed_at = 0.0

    @property
    def is_loaded(self) -> bool:
        """Return whether the artifact was opened."""
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
                "wait_seconds": round(queue.estimated_wait_seconds, 3) if queue else 0.0,
                "max_inputs": self._config.queue_inputs, "max_tokens": self._config.queue_tokens,
                "max_wait": self._config.max_wait,
            },
        }  # fmt: skip
        return {**found, **self._backend.info()} if self._backend else found

    # -- answering ----------------------------------------------------------------------------

    async def infer(self, task: RowTask, inputs: Any, options: TaskOptions) -> InferenceResult:
        """Answer inputs by a task of the model: its own, or `backend.tensors`.

        Args:
            task: what to do.
            inputs: as the task takes them.
            options: of the task.

        Raises:
            InputError, ShapeError: an input or an option cannot be used.
            OverloadedError: too much waits already.
            UnavailableError: the model cannot answer, or its results are NaN or infinite.
        """
        if self.state != "ready":
            raise UnavailableError(f"{self.name}: {self.reason}.")
        count = task.count(inputs)
        self._require_count(count, "inputs")
        if not self._config.truncate and getattr(options, "truncate", True) is None:
            options = options.model_copy(update={"truncate": False})
        self._requests += 1
        try:
            started = time.perf_counter()
            cost = task.preprocess_cost(inputs)
            if cost == "light":
                work = task.preprocess(inputs, options)
            else:
                work = await self.in_thread(
                    partial(task.preprocess, inputs, options), inputs=count, cost=cost
                )
            timings = Timings(tokenize_seconds=time.perf_counter() - started)
            if len(work.rows) > count:
                self._require_count(len(work.rows), "windows of contexts")
            if (decoded := task.count_decoded(work, options)) > _MAX_DECODED:
                raise TooManyInputsError(
                    f"the request asks for {decoded} fillings, expected {_MAX_DECODED} at most.",
                    do="Give a smaller top_k, or send the inputs in several requests.",
                )
            entries = self.backend.entries(task, work.rows)
            for row in work.rows:
                timings.tokens += row.tokens
                timings.truncated += row.truncated
            outputs = await self.scheduler.run(entries, timings) if entries else []
            cost = task.postprocess_cost(work, options)
            if cost == "light":
                results = task.postprocess(work, outputs, options)
            else:
                results = await self.in_thread(
                    partial(task.postprocess, work, outputs, options), cost=cost
                )
        finally:
            self._requests -= 1
        if isinstance(task, Task) and not all(map(task.is_finite, results)):
            raise UnavailableError(
                "the model's numbers are NaN or infinite.",
                do="Its precision cannot hold this input; `enginery validate` says more.",
                retry_after_seconds=0.0,  # the same input would give the same numbers
            )
        return InferenceResult(results, timings)

    async def in_thread(
        self, work: Callable[[], Result], *, inputs: int = 0, cost: ProcessingCost
    ) -> Result:
        """Run work in a thread of the model's own.

        Args:
            work: called in the thread.
            inputs: that it is for; they have their places in the queue meanwhile.
            cost: how long it may take.

        Raises:
            OverloadedError: too much is being preprocessed already.
        """
        try:
            return await self._pool.run(
                work, inputs=inputs, waiting=self.scheduler.queue.rows, short=cost != "heavy"
            )
        except BaseException as error:
            if is_panic(error):  # of Rust code: no Exception, which would end the server
                raise RuntimeError(f"panic: {error}") from error
            raise

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
            backend = ModelBackend.open(self.path, self._config, self._pool.encode_in_parallel)
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
            max_wait_seconds=config.max_wait, on_batch=self._observe_batch, name=self.name,
        )  # fmt: skip
        self.state, self.reason = "ready", ""
        # Beside the first requests, and of several models one after the other.
        Thread(target=self._measure, name=f"enginery-measure-{self.name}", daemon=True).start()

    def check_health(self) -> None:
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
        ends = time.perf_counter() + timeout_seconds
        while drain and self.state == "ready" and (self._requests or self._pool.is_busy):
            if time.perf_counter() > ends:
                break
            await asyncio.sleep(_DRAIN_EVERY_SECONDS)
        if self.state != "failed":
            self.state, self.reason = "closed", "the model was closed"
        if self._scheduler is not None:
            self._scheduler.close(drain=drain)
            join = self._scheduler.workers.join
            if await self._loop.run_in_executor(None, join, timeout_seconds):
                self.backend.close()
            else:  # a session under a running batch must not be freed
                self._scheduler.fail_all(UnavailableError(f"{self.name}: {self.reason}."))
        self._pool.close()

    async def retire(self, *, timeout_seconds: float) -> None:
        """Close a model that another has taken the place of, without losing a request."""
        await asyncio.sleep(_RETIRE_SECONDS)
        await self.close(timeout_seconds=timeout_seconds)

    def _run_batch(self, batch: Sequence[QueueEntry]) -> list[Any]:
        """Run a batch in a worker's thread; find out whether a failure is of the provider."""
        try:
            outputs: list[Any] = batch[0].runner.run([entry.row for entry in batch])
            return outputs
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

    def _observe_batch(self, batch: BatchStatistics) -> None:
        """Follow what batches cost."""
        if self.backend.observe_batch(batch):
            self._apply_rules()
        self.scheduler.queue.seconds_per_token = self.backend.seconds_per_token
        if self._on_batch:
            self._on_batch(self.name, batch)

    def _apply_rules(self) -> None:
        self.scheduler.queue.rules = self.backend.rules
        self.scheduler.queue.seconds_per_token = self.backend.seconds_per_token

    def _measure(self) -> None:
        """Measure what a batch costs and where nodes run; in a thread of its own."""
        with _MEASURING:
            try:
                self.backend.measure()
            except Exception:  # a bug; it answers all the same
                _log.exception("%s could not be measured", self.name)
        self._apply_rules()
