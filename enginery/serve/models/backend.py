"""A model's artifact as the server opens it: its files, and the sessions that run its graphs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, InputError, ProviderError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import Profile, canonical_dim, dynamic_dims
from enginery.runtime.machine import usable_cores
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.known import CPU, CUDA
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import parse_providers
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.embed import Embed
from enginery.runtime.tasks.generate import Generate
from enginery.runtime.tasks.task import (
    InputLimits,
    MediaTask,
    Row,
    RowTask,
    Task,
    UnreadableOutputsError,
)
from enginery.runtime.tasks.tensors import Tensors
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.tasks.text_generator import TextGenerator, open_rows
from enginery.runtime.tasks.views import task_views
from enginery.runtime.text.tokenizer import Encode
from enginery.serve.batching.cost import BatchCost, CostEstimator, choose_max_tokens, measure_cost
from enginery.serve.batching.planner import BatchRules
from enginery.serve.batching.queue import QueueEntry
from enginery.serve.batching.scheduler import BatchStatistics
from enginery.serve.config import ServeConfig
from enginery.serve.models.quick_texts import quick_characters

_log = logging.getLogger(__name__)

_MAX_MEDIA_CPU = 8
"""Maximum batch size of images and audio on a CPU, where batches are hardly faster per input."""
_MAX_AUDIO_TOKENS = 4096
"""Maximum number of tokens of a batch of audio, 20 ms each, which bounds its memory."""
_PROBE_TOKENS = 8
_MEASURED_TOKENS, _MEASURED_ROWS = 128, 32
"""Tokens of a row, and rows, of the large batch that is measured on a GPU."""
_RULES_UPDATE_BATCHES = 64
"""Number of batches after which the batch rules are updated from the cost estimate."""

ParallelEncode = Callable[[Encode, list[Any]], list[Any]]
"""Runs the encoding of a list of texts, see `TextTokenizer`."""


class ModelFiles:
    """An opened artifact without its sessions: all that preparing and answering requests takes."""

    def __init__(
        self,
        artifact: Artifact,
        record: GraphRecord,
        task: Task | None,
        options: ServeConfig,
        *,
        providers: Sequence[Provider],
        profiles: Sequence[Profile] = (),
    ) -> None:
        """Take an opened task.

        Args:
            artifact: the artifact.
            record: the graph that runs.
            task: the artifact's task; None if it is not supported, so that only raw tensors are.
            options: the options of the server.
            providers: what runs the graph, the first provider first.
            profiles: the profiles of the engines; empty without engines.

        Raises:
            ArtifactError: a file is missing or malformed.
        """
        self.artifact, self.record, self.options = artifact, record, options
        self.providers, self.profiles = providers, profiles
        self.on_cpu = providers[0].name == CPU
        self.config = ModelConfig.read(artifact.path)
        limits = InputLimits(unproved=options.unproved)
        self.tensors = replace(Tensors.open(artifact, record, limits), profiles=profiles)
        self.task = task
        self.views = {} if task is None else task_views(task, artifact)
        """Other results of the task's graph, by verb."""
        self.quick_characters = quick_characters(task)
        """Number of characters of the longest request whose texts need no thread; 0 for none."""
        self.dim = 0
        """The size of vectors, known after the warm-up; 0 for other tasks."""

    @property
    def limit(self) -> int:
        """Maximum number of tokens of an input; 0 without a limit or a tokenizer."""
        return self.task.max_tokens if self.task is not None else 0

    def synthetic_feeds(self, tokens: int = 16) -> dict[str, Any]:
        """Return made-up inputs of the graph: one row, of a number of tokens."""
        limits = FeedLimits.from_config(self.config, self.record.sample_sizes)
        sizes = {
            name: limits.sizes.get(name, max(limits.min_sequence, tokens))
            for name in dynamic_dims(self.record.inputs)
        }
        sizes |= {name: 1 for name in sizes if canonical_dim(name) == "batch"}
        if self.profiles:
            sizes |= {name: dim.opt for name, dim in self.profiles[0].dims.items()}
        return make_feeds(self.record.inputs, sizes, limits, seed=0)


def open_task(
    artifact: Artifact,
    record: GraphRecord,
    options: ServeConfig,
    parallel_encode: ParallelEncode | None = None,
) -> Task | None:
    """Open an artifact's task with the server's limits; None if it is not supported.

    Args:
        artifact: the artifact.
        record: the graph that runs.
        options: the options of the server.
        parallel_encode: runs the encoding of a list of texts.

    Raises:
        ArtifactError: a file is missing or malformed.
    """
    definition = manifest_task(artifact.manifest, record)
    if definition is None:
        return None
    limits = InputLimits(
        max_pixels=options.max_pixels,
        max_seconds=options.max_seconds,
        max_speech_seconds=options.max_speech_seconds,
        max_new_tokens=options.max_new_tokens,
        max_sequences=options.generation_rows,
        unproved=options.unproved,
        token_ids=options.token_ids,
        parallel_encode=parallel_encode,
    )
    try:
        return definition.open(artifact, record, limits)
    except UnreadableOutputsError as error:
        _log.warning("only tensors are served of a model: %s", error.message)
        return None


class ModelBackend(ModelFiles):
    """A loaded artifact: session, task, cost estimate and batch rules. Closing frees it."""

    def __init__(
        self,
        artifact: Artifact,
        rows: BatchRunner | TextGenerator,
        options: ServeConfig,
    ) -> None:
        """Take what runs the rows of the artifact's task, or those of raw tensors."""
        runner = rows.runner
        super().__init__(
            artifact,
            runner.record,
            rows.task if isinstance(rows.task, Task) else None,
            options,
            providers=runner.providers,
            profiles=runner.profiles,
        )
        self.runner, self.rows = runner, rows
        self._raw = BatchRunner(self.tensors, runner)
        self._batches = rows if isinstance(rows, BatchRunner) and self.task else self._raw
        """The batches that the rules are for: of raw tensors if the task's rows take many steps."""
        several = self.on_cpu and not rows.task.runs_in_steps
        self.workers = options.workers or (usable_cores() if several else 1)
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
        parallel_encode: ParallelEncode | None = None,
    ) -> ModelBackend:
        """Open an artifact and its session.

        Args:
            path: the artifact's directory.
            options: the options of the server.
            parallel_encode: runs the encoding of a list of texts.

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
        record = artifact.manifest.graphs[0]
        task: RowTask = open_task(artifact, record, options, parallel_encode) or Tensors.open(
            artifact, record
        )
        in_steps = task.runs_in_steps  # each step uses all cores
        workers = options.workers or usable_cores()
        adapts = not threads and on_cpu and workers > 1 and not in_steps
        if adapts:
            threads = 1

        runner_options = RunnerOptions(
            threads=threads,
            lone_threads=workers if adapts else 0,
            ladder=options.ladder and not in_steps,
            shrink_arena=options.shrink_arena,
            keep_optimized=options.optimized_graph,
            # Spinning threads of several workers would take the cores from each other.
            spinning=threads == 1 or (on_cpu and workers == 1),
        )

        def open_graph(file: str = "") -> OrtRunner:
            return OrtRunner(
                artifact,
                runner_options,
                graph=file,
                providers=providers,
                allow_fallback=options.allow_fallback,
            )

        rows = open_rows(task, open_graph, on_cuda=providers[0].full_name == CUDA)
        try:
            return cls(artifact, rows, options)
        except BaseException:
            rows.close()
            raise

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
        batches = self._raw if task is self.tensors else self.rows
        pads = self.runner.pads
        return [
            QueueEntry(
                None,
                index,
                batches.batch_key(row),
                batches.padded_length(row) if pads else row.tokens,
                row,
                batches,
                tokens=row.tokens,
            )
            for index, row in enumerate(rows)
        ]

    def warm_up(self) -> None:
        """Run one inference, so that a model that reports "ready" is known to work.

        Raises:
            ProviderError: the inference fails.
        """
        self.runner.warm_up()
        try:
            if not isinstance(self.task, TextTask | Generate):
                self.runner(self.synthetic_feeds())
                return
            output: Any
            (output,) = self.rows.run_stream([self.task.probe(_PROBE_TOKENS)])
            if isinstance(self.task, Embed):
                self.dim = self.task.kept_dimensions(int(output.shape[0]))
        except InputError as error:
            raise ProviderError(f"{self.artifact.path} does not run: {error.message}") from error

    def prepare(self) -> None:
        """Warm up and measure in the thread that will run the batches.

        On CUDA every rung of the ladder is recorded here, because a thread replays only its own
        CUDA graphs, and no request then waits for it.
        """
        self.warm_up()
        if self.options.warm_up and self.task is not None:
            self._batches.record_rungs(max_rows=self.options.batch_rows, longest=self.limit)
        self._measure_cost()

    def measure(self) -> None:
        """Measure the cost of batches, update the rules, and read the placement of nodes."""
        if not self.placement:
            try:
                self.placement = self.runner.placement().as_json()
            except EngineryError as error:
                self.placement = {"notes": [f"it cannot be read: {error.message}"]}
        if self.on_cpu:  # else it was measured by `prepare`
            self._measure_cost()

    def _measure_cost(self) -> None:
        if not isinstance(self.task, TextTask):
            return
        # On a GPU a row of any length takes about as long as any other; many rows do not.
        longest = min(_MEASURED_TOKENS, self.limit)
        large = 0 if self.on_cpu else longest * _MEASURED_ROWS

        def run(tokens: int) -> float:
            rows = -(-tokens // longest) if large else 1
            started = time.perf_counter()
            self._run_probe(tokens // rows, rows)
            return time.perf_counter() - started

        # An engine may not accept these lengths.
        with contextlib.suppress(EngineryError), self.runner.loaded():
            self._cost = CostEstimator(measure_cost(run, limit=self.limit, large=large))
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
        properties: dict[str, Any] = {
            "task": manifest.task,
            "method": self.task.verb if self.task else "",
            "source": manifest.source.id,
            "revision": manifest.source.revision,
            "content_sha256": self.artifact.content_sha256(),
            "precision": manifest.precision,
            "target": manifest.target,
            "provider": self.providers[0].name,
            "providers": [asdict(provider) for provider in self.providers],
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
        if (captures := self.runner.captures) is not None:
            properties["cuda_graphs"] = {
                "recorded": captures.recorded,
                "seconds": captures.seconds,
                "buffer_bytes": captures.buffer_bytes,
                "unrecorded_runs": captures.unrecorded_runs,
            }
        if self.limit:
            properties["max_tokens"] = self.limit
        if self.task:
            properties["notes"] = [*self.task.notes, *self.runner.notes]
        if self.dim:
            properties["dim"] = self.dim
        return properties

    def close(self) -> None:
        """Free the sessions."""
        self.rows.close()

    def _run_probe(self, tokens: int, rows: int = 1) -> list[Any]:
        """Run a batch of synthetic texts of a number of tokens each."""
        if not isinstance(self.task, TextTask):
            raise AssertionError("only texts are probed")
        return self._batches.run([self.task.probe(tokens)] * rows)

    def _known_placement(self) -> dict[str, Any]:
        """Return the placement if it is known without profiling a session, else an empty dict."""
        if self.on_cpu:
            return {"providers": [{"name": CPU}], "notes": ["every node is on the CPU"]}
        if self.runner.engines:
            names = [{"name": provider.name} for provider in self.providers[:1]]
            return {"providers": names, "notes": ["every node is in the engine"]}
        return {}

    def _rules(self) -> BatchRules:
        options, spec = self.options, self.runner.record.inputs[0]
        task, fixed = self._batches.task, self._batches.fixed_rows
        if isinstance(task, MediaTask):
            rows = min(options.batch_rows, _MAX_MEDIA_CPU if self.on_cpu else options.batch_rows)
            rows = min(rows, fixed or rows)
            tokens, unit = rows, "images of one size"  # an image counts as one token
            if task.modality == "audio":
                tokens, unit = options.batch_tokens or _MAX_AUDIO_TOKENS, "inputs of one length"
            self._explanation = f"{rows} {unit}"
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
            takes_waiting=not (self.on_cpu or self.profiles),
        )
        if isinstance(task, Task):
            rules = replace(
                rules,
                equal_lengths=not task.can_pad,
                max_rows=min(rules.max_rows, fixed) if fixed else rules.max_rows,
            )
        if self.runner.profiles:
            # An engine accepts at most the batch size that its profile allows.
            rules = replace(
                rules,
                max_rows_for_length=lambda length: self.runner.max_rows(spec, (length,)) or 1,
            )
        return rules
