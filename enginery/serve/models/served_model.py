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
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal, TypeVar

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import EngineryError, InputError, ProviderError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import canonical_dim, dynamic_dims
from enginery.runtime.generation.batch import RunningBatch
from enginery.runtime.generation.generator import TextGenerator
from enginery.runtime.machine import usable_cores
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.known import CPU, CUDA
from enginery.runtime.providers.specification import parse_providers
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.audio import AudioTask
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.images import ImageTask
from enginery.runtime.tasks.task import (
    MediaTask,
    ProcessingCost,
    Row,
    RowTask,
    Task,
    TaskOptions,
)
from enginery.runtime.tasks.tensors import Tensors
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.text.tokenizer import Encode
from enginery.runtime.text.tokenizer_files import is_panic
from enginery.serve.batching.cost import BatchCost, CostEstimator, choose_max_tokens, measure_cost
from enginery.serve.batching.planner import BatchRules
from enginery.serve.batching.preprocess_pool import PreprocessPool
from enginery.serve.batching.queue import QueueEntry
from enginery.serve.batching.scheduler import BatchScheduler, BatchStatistics, Timings
from enginery.serve.config import ServeConfig
from enginery.serve.generation.jobs import GenerationJob, GenerationPlan, Progress
from enginery.serve.generation.scheduler import GenerationScheduler

_log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stuck", "failed", "closed"]
Result = TypeVar("Result")
OnBatch = Callable[[str, BatchStatistics], None]

_MAX_MEDIA_CPU = 8
"""Maximum batch size of images and audio on a CPU, where batches are hardly faster per input."""
_MAX_AUDIO_TOKENS = 4096
"""Maximum number of tokens of a batch of audio, 20 ms each, which bounds its memory."""
_MAX_DECODED = 20_000
"""Maximum number of texts that a request may have decoded. Each takes up to a millisecond, and
decoding cannot be cancelled."""
_PREPROCESSING = {
    "text": "tokenizing a text",
    "image": "decoding an image",
    "audio": "decoding audio",
}
_RULES_UPDATE_BATCHES = 64
"""Number of batches after which the batch rules are updated from the cost estimate."""
_MEASURING = Lock()
"""Held while a model is measured: models measured at the same time would slow each other down."""
_RETIRE_SECONDS = 0.5
"""Time that a replaced model still accepts requests, for those that already refer to it."""
_DRAIN_EVERY_SECONDS = 0.01
_PROBE_SECONDS = 1.0
"""Minimum time between two checks whether the provider still works."""


class UnavailableError(EngineryError):
    """The model cannot answer at the moment."""

    def __init__(self, message: str, *, do: str = "", retry_after_seconds: float = 1.0) -> None:
        super().__init__(message, do=do)
        self.retry_after_seconds = retry_after_seconds


class TooManyInputsError(InputError):
    """A request has too many inputs."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The results of one request, in the order of its inputs, with its timings."""

    results: Any
    timings: Timings


class ModelBackend:
    """A loaded artifact: session, task, cost estimate and batch rules. Closing frees it."""

    def __init__(
        self,
        artifact: Artifact,
        runner: OrtRunner,
        options: ServeConfig,
        parallel_encode: Callable[[Encode, list[Any]], list[Any]] | None = None,
        generator: TextGenerator | None = None,
    ) -> None:
        self.artifact, self.runner, self.options = artifact, runner, options
        self.generator = generator
        """What generates texts; None for other tasks."""
        self.plan = GenerationPlan(generator, options) if generator is not None else None
        """How requests for texts are prepared; None for other tasks."""
        self.config = ModelConfig.read(artifact.path)
        self.tensors = replace(Tensors.open(artifact, runner.record), profiles=runner.profiles)
        self.task: Task | None = None
        """The artifact's task; None if it is not supported, so that only raw tensors are."""
        definition = manifest_task(artifact.manifest, runner.record)
        if definition is not None:
            self.task = definition.open(artifact, runner.record)
        if isinstance(self.task, TextTask):
            self.task = replace(
                self.task, tokenizer=replace(self.task.tokenizer, parallel_encode=parallel_encode)
            )
        elif isinstance(self.task, ImageTask):
            self.task = replace(self.task, max_pixels=options.max_pixels)
        elif isinstance(self.task, AudioTask):
            self.task = replace(self.task, max_seconds=options.max_seconds)
        tasks: list[RowTask] = [self.tensors, *([self.task] if self.task else [])]
        self._batches = {type(task): BatchRunner(task, runner) for task in tasks}
        self.on_cpu = runner.providers[0].name == CPU
        several = self.on_cpu and generator is None
        self.workers = options.workers or (usable_cores() if several else 1)
        self.dim = 0
        """The size of vectors, known after the warm-up; 0 for other tasks."""
        self._cost = CostEstimator(BatchCost(0.0, 0.0))
        self._explanation = ""
        self.placement: dict[str, Any] = self._known_placement()
        """Which provider runs which share of the nodes, as `Placement.as_json`."""
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
            options: the options of the server.
            parallel_encode: runs the encoding of a list of texts, see `TextTokenizer`.

        Raises:
            ArtifactError: the directory is not an artifact, or a file is missing or malformed.
            RejectedArtifactError: the artifact's validation failed.
            ProviderError: the provider is unavailable.
            OptionError: an option of a provider is invalid.
        """
        artifact = Artifact.open(path)
        artifact.require_passed(allow_failed=options.allow_failed)
        providers = parse_providers(options.providers, options.provider_option, default="cpu")
        threads, on_cpu = options.threads, providers[0].full_name == CPU
        generates = artifact.manifest.task in TextGenerator.tasks
        workers = options.workers or usable_cores()
        adapts = not threads and on_cpu and workers > 1 and not generates
        if adapts:
            threads = 1

        def open_graph(file: str = "") -> OrtRunner:
            return OrtRunner(
                artifact,
                graph=file,
                providers=providers,
                allow_fallback=options.allow_fallback,
                threads=threads,
                lone_threads=workers if adapts else 0,
                shrink_arena=options.shrink_arena,
                keep_optimized=options.optimized_graph,
                # Spinning threads of several workers would take the cores from each other.
                spinning=threads == 1 or (on_cpu and workers == 1),
            )

        generator = None
        if generates:
            on_cuda = providers[0].full_name == CUDA
            generator = TextGenerator(artifact, open_graph, fixed_cache=on_cuda)
        runner = generator.runner if generator is not None else open_graph()
        try:
            return cls(artifact, runner, options, parallel_encode, generator)
        except BaseException:
            (generator or runner).close()
            raise

    @property
    def limit(self) -> int:
        """Maximum number of tokens of a text; 0 without a limit or a tokenizer."""
        if self.generator is not None:
            return self.generator.positions or 0
        return self.task.tokenizer.limit if isinstance(self.task, TextTask) else 0

    @property
    def cost(self) -> BatchCost:
        """The current estimate of the cost of a batch."""
        return self._cost.cost()

    @property
    def seconds_per_token(self) -> float:
        """Recent time per token of all workers together."""
        return self._cost.mean_seconds_per_token() / self.workers

    def entries(self, task: RowTask, rows: Sequence[Row]) -> list[QueueEntry]:
        """Convert rows of a task to entries of the queue.

        Raises:
            ShapeError: no engine accepts a row.
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
        """Run one inference, so that a model that reports "ready" is known to work.

        Raises:
            ProviderError: the inference fails.
        """
        self.runner.warm_up()
        try:
            if isinstance(self.task, TextTask):
                (output,) = self._run_probe(8)
                if self.task.verb == "embed":
                    self.dim = int(output.shape[0])
            elif self.generator is not None and self.plan is not None:
                self._generate_probe(self.generator, self.plan.probe())
            else:
                self.runner(self.synthetic_feeds())
        except InputError as error:
            raise ProviderError(f"{self.artifact.path} does not run: {error.message}") from error

    def measure(self) -> None:
        """Measure the cost of batches, update the rules, and read the placement of nodes."""
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

        # An engine may not accept these lengths.
        with contextlib.suppress(EngineryError), self.runner.loaded():
            self._cost = CostEstimator(measure_cost(run, limit=self.limit))
        self.rules = self._rules()

    def observe_batch(self, batch: BatchStatistics) -> bool:
        """Update the cost estimate with a batch that ran; return True if the rules changed."""
        cost = self._cost
        cost.add(batch.padded_tokens, batch.seconds)
        if cost.batches % _RULES_UPDATE_BATCHES:
            return False
        self.rules = self._rules()
        return True

    def info(self) -> dict[str, Any]:
        """Return the artifact's properties, its providers and its batch rules, as JSON."""
        manifest, cost = self.artifact.manifest, self.cost
        found: dict[str, Any] = {
            "task": manifest.task,
            "method": self.task.verb if self.task else "generate" if self.plan else "",
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
                "max_tokens": self.rules.max_tokens,
                "max_rows": self.rules.max_rows,
                "max_padding": self.rules.max_padding,
                "explanation": self._explanation,
                "fixed_seconds": cost.fixed_seconds,
                "seconds_per_token": cost.seconds_per_token,
            },
        }
        if self.limit:
            found["max_tokens"] = self.limit
        if self.task:
            found["notes"] = list(self.task.notes)
        if self.dim:
            found["dim"] = self.dim
        if self.plan is not None:
            found["generation"] = {
                "max_rows": self.options.generation_rows,
                "max_new_tokens": self.options.max_new_tokens,
            }
        return found

    def close(self) -> None:
        """Free the sessions."""
        (self.generator or self.runner).close()

    def _generate_probe(self, generator: TextGenerator, job: GenerationJob) -> None:
        """Generate two tokens for a made-up input."""
        batch = RunningBatch(generator.decoder)
        batch.add([job.search], generator.inputs.join([job.row]))
        while batch.searches:
            batch.step()
        if job.search.error is not None:
            raise job.search.error

    def _run_probe(self, tokens: int) -> list[Any]:
        """Run one synthetic text of a number of tokens."""
        if self.task is None:
            raise AssertionError("only texts are probed")
        return self._batches[type(self.task)].run([self.task.probe(tokens)])

    def synthetic_feeds(self, tokens: int = 16) -> dict[str, Any]:
        """Return made-up inputs of the graph: one row, of a number of tokens."""
        limits = FeedLimits.from_config(self.config, self.runner.record.sample_sizes)
        sizes = {
            name: limits.sizes.get(name, max(limits.min_sequence, tokens))
            for name in dynamic_dims(self.runner.record.inputs)
        }
        sizes |= {name: 1 for name in sizes if canonical_dim(name) == "batch"}
        if self.runner.profiles:
            sizes |= {name: dim.opt for name, dim in self.runner.profiles[0].dims.items()}
        return make_feeds(self.runner.record.inputs, sizes, limits, seed=0)

    def _known_placement(self) -> dict[str, Any]:
        """Return the placement if it is known without profiling a session, else an empty dict."""
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
        if isinstance(self.task, MediaTask):
            rows = min(options.batch_rows, _MAX_MEDIA_CPU if self.on_cpu else options.batch_rows)
            rows = min(rows, fixed or rows)
            tokens, what = rows, "images of one size"  # an image counts as one token
            if self.task.modality == "audio":
                tokens, what = options.batch_tokens or _MAX_AUDIO_TOKENS, "inputs of one length"
            self._explanation = f"{rows} {what}"
            return BatchRules(max_tokens=tokens, max_rows=rows, max_padding=0.0)
        tokens, why = options.batch_tokens, "set by --batch-tokens"
        if not tokens:
            tokens, why = choose_max_tokens(self.cost, on_cpu=self.on_cpu)
        self._explanation = why
        rules = BatchRules(
            max_tokens=tokens,
            max_rows=options.batch_rows,
            max_padding=options.max_padding,
            fixed_cost_tokens=self._cost.fixed_cost_tokens(),
        )
        if self.task is not None:
            rules = replace(
                rules,
                equal_lengths=not self.task.can_pad,
                max_rows=min(rules.max_rows, fixed) if fixed else rules.max_rows,
            )
        if self.runner.profiles:
            # An engine accepts at most the batch size that its profile allows.
            rules = replace(
                rules,
                max_rows_for_length=lambda length: self.runner.max_rows(spec, (length,)) or 1,
            )
        return rules


class ServedModel:
    """One served artifact, from loading to closing."""

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
        self._backend: ModelBackend | None = None
        self._scheduler: BatchScheduler | None = None
        self._generation: GenerationScheduler | None = None
        self._requests = 0
        """Number of requests in progress."""
        self._pool = PreprocessPool(loop, max_inputs=config.queue_inputs, name=name)
        self._probed_at = 0.0

    @property
    def is_loaded(self) -> bool:
        """True once the artifact is loaded."""
        return self._backend is not None

    @property
    def backend(self) -> ModelBackend:
        """The loaded artifact; UnavailableError before it is loaded."""
        if self._backend is None:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        return self._backend

    @property
    def scheduler(self) -> BatchScheduler:
        """The queue and workers; UnavailableError before the artifact is loaded."""
        if self._scheduler is None:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        return self._scheduler

    @property
    def artifact(self) -> Artifact:
        return self.backend.artifact

    @property
    def task(self) -> Task | None:
        """The artifact's task; None if it is not supported, so that only raw tensors are."""
        return self.backend.task

    @property
    def plan(self) -> GenerationPlan | None:
        """How requests for texts are prepared; None for tasks other than generating text."""
        return self.backend.plan

    @property
    def _waiting(self) -> int:
        """Number of inputs in the queues."""
        texts = self._generation.queue.rows if self._generation else 0
        return texts + (self._scheduler.queue.rows if self._scheduler else 0)

    def info(self) -> dict[str, Any]:
        """Return the model's state, queue and, once loaded, properties, as JSON."""
        used = self._generation or self._scheduler
        queue = used.queue if used else None
        found = {
            "name": self.name,
            "state": self.state,
            "reason": self.reason,
            "queue": {
                "inputs": self._waiting + self._pool.inputs,
                "tokens": queue.tokens if queue else 0,
                "wait_seconds": round(queue.estimated_wait_seconds, 3) if queue else 0.0,
                "max_inputs": self._config.queue_inputs,
                "max_tokens": self._config.queue_tokens,
                "max_wait": self._config.max_wait,
            },
        }
        if self._generation is not None:
            found["running"] = {"rows": self._generation.rows, "waiting": self._generation.waiting}
        return {**found, **self._backend.info()} if self._backend else found

    # -- inference ----------------------------------------------------------------------------

    async def infer(self, task: RowTask, inputs: Any, options: TaskOptions) -> InferenceResult:
        """Run inference on the inputs of a request.

        Args:
            task: the model's own task, or `backend.tensors`.
            inputs: inputs of the task.
            options: options of the task.

        Raises:
            InputError, ShapeError: an input or an option is invalid.
            OverloadedError: too many requests are waiting.
            UnavailableError: the model is not ready, or its results are NaN or infinite.
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
                    f"the request asks for {decoded} fillings, expected at most {_MAX_DECODED}.",
                    do="Use a smaller top_k, or send the inputs in several requests.",
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
                "the model's outputs are NaN or infinite.",
                do="They may overflow the model's precision; run `enginery validate` to check it.",
                retry_after_seconds=0.0,  # the same input would give the same outputs
            )
        return InferenceResult(results, timings)

    async def generate(
        self,
        prepare: Callable[[], list[GenerationJob]],
        timings: Timings,
        *,
        inputs: int,
        cost: ProcessingCost,
    ) -> AsyncGenerator[Progress]:
        """Generate the texts of a request; yield what each step gives. Close it, to end early.

        Args:
            prepare: prepares the inputs; called in a thread.
            timings: timings of the request, which are set here.
            inputs: number of inputs.
            cost: the cost class of preparing them.

        Raises:
            InputError: an input or an option is invalid.
            OverloadedError: too many requests are waiting.
            UnavailableError: the model is not ready, or a step has failed.
        """
        if self.state != "ready" or self._generation is None:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        self._require_count(inputs, "inputs")
        self._requests += 1
        try:
            started = time.perf_counter()
            jobs = await self.in_thread(prepare, inputs=inputs, cost=cost)
            timings.tokenize_seconds = time.perf_counter() - started
            timings.tokens = sum(job.prompt_tokens for job in jobs)
            async with contextlib.aclosing(self._generation.run(jobs, timings)) as steps:
                async for found in steps:
                    yield found
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
        try:
            return await self._pool.run(
                work, inputs=inputs, waiting=self._waiting, short=cost != "heavy"
            )
        except BaseException as error:
            if is_panic(error):  # a BaseException, which would end the server
                raise RuntimeError(f"panic: {error}") from error
            raise

    def _require_count(self, count: int, what: str) -> None:
        if count > self._config.max_inputs:
            raise TooManyInputsError(
                f"found {count} {what}, expected at most {self._config.max_inputs}.",
                do="Send them in several requests.",
            )

    # -- lifecycle ----------------------------------------------------------------------------

    def load(self) -> None:
        """Open the artifact, run it once, and start its workers. Blocks: call it in a thread.

        Raises:
            EngineryError: the artifact cannot be loaded; `state` is `failed` and `reason` is set.
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
            self._run_batch,
            backend.rules,
            self._loop,
            workers=backend.workers,
            max_rows=config.queue_inputs,
            max_tokens=config.queue_tokens,
            max_wait_seconds=config.max_wait,
            on_batch=self._observe_batch,
            name=self.name,
        )
        if backend.generator is not None:
            self._generation = GenerationScheduler(
                backend.generator,
                self._loop,
                max_rows=config.generation_rows,
                queue_rows=config.queue_inputs,
                queue_tokens=config.queue_tokens,
                max_wait_seconds=config.max_wait,
                explain=self._explain_failed_step,
                on_batch=lambda batch: self._on_batch(self.name, batch) if self._on_batch else None,
                name=self.name,
            )
        self.state, self.reason = "ready", ""
        # In the background while the first requests run; several models take turns.
        Thread(target=self._measure, name=f"enginery-measure-{self.name}", daemon=True).start()

    def check_health(self) -> None:
        """Set `state` to `stuck` or `failed` if a batch or text hangs or a worker has ended."""
        if self.state not in ("ready", "stuck") or self._scheduler is None:
            return
        generation = self._generation
        if not self._scheduler.workers.alive or (generation and not generation.alive):
            self.state, self.reason = "failed", "a worker thread has ended"
            return
        running, preprocessing = self._scheduler.workers.busy_seconds(), self._pool.busy_seconds()
        running = max(running, generation.busy_seconds() if generation else 0.0)
        if max(running, preprocessing) > self._config.stuck_after:
            self.state = "stuck"
            self.reason = f"a batch has been running for {running:.0f} s"
            if preprocessing > running:
                what = _PREPROCESSING[self.task.modality if self.task else "text"]
                self.reason = f"{what} has been running for {preprocessing:.0f} s"
        elif self.state == "stuck":
            self.state, self.reason = "ready", ""

    def refuse_all(self, error: EngineryError) -> None:
        """Raise an error in all waiting and running requests."""
        for each in (self._scheduler, self._generation):
            if each is not None:
                each.fail_all(error)
        self._pool.close()

    async def close(self, *, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        """Free the session; with `drain`, answer the requests in progress first."""
        if self.state == "stuck":
            timeout_seconds = 0.0  # do not wait for a batch that hangs
        ends = time.perf_counter() + timeout_seconds
        while drain and self.state == "ready" and (self._requests or self._pool.is_busy):
            if time.perf_counter() > ends:
                break
            await asyncio.sleep(_DRAIN_EVERY_SECONDS)
        if self.state != "failed":
            self.state, self.reason = "closed", "the model was closed"
        running = [each for each in (self._scheduler, self._generation) if each is not None]
        for each in running:
            each.close(drain=drain)
        ends = time.perf_counter() + timeout_seconds
        joined = [
            await self._loop.run_in_executor(None, each.join, max(ends - time.perf_counter(), 0.0))
            for each in running
        ]
        if not all(joined):  # a session must not be freed while a batch runs
            self.refuse_all(UnavailableError(f"{self.name}: {self.reason}."))
        elif running:
            self.backend.close()
        self._pool.close()

    async def retire(self, *, timeout_seconds: float) -> None:
        """Close a model that was replaced, without losing a request."""
        await asyncio.sleep(_RETIRE_SECONDS)
        await self.close(timeout_seconds=timeout_seconds)

    def _run_batch(self, batch: Sequence[QueueEntry]) -> list[Any]:
        """Run a batch in a worker's thread; if it fails, check whether the provider still works."""
        try:
            outputs: list[Any] = batch[0].runner.run([entry.row for entry in batch])
            return outputs
        except EngineryError as error:
            if len(batch) > 1:
                raise  # its rows will run one by one
            raise self._explained(error) from error

    def _explain_failed_step(self, error: EngineryError, one: bool) -> EngineryError:
        """Return what the requests of a failed step of generation get.

        Args:
            error: what happened.
            one: they are the inputs of one request.
        """
        found = self._explained(error)
        if one or found is not error:
            return found
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
