"""One artifact opened to be served: its session, its task, and how its rows are batched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

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
from enginery.runtime.tasks.task import Row, RowTask, Task
from enginery.runtime.tasks.tensors import Tensors
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.tokenizer import Encode
from enginery.serve.batching.cost import BatchCost, LiveCost, choose_tokens, measure_cost
from enginery.serve.batching.planner import BatchRules
from enginery.serve.batching.queue import QueueEntry
from enginery.serve.batching.scheduler import BatchStatistics
from enginery.serve.config import ServeConfig

ValidationStatus = Literal["passed", "failed", "none"]

_MAX_IMAGES_CPU = 8
"""Images of a batch on a CPU: they gain little from sharing, and wait for each other."""
_RULES_EVERY = 64
"""Batches, after which the rules follow what those cost."""


class ModelBackend:
    """A session with all that it needs to answer; closing frees it."""

    def __init__(
        self,
        artifact: Artifact,
        runner: OrtRunner,
        options: ServeConfig,
        spread: Callable[[Encode, list[Any]], list[Any]] | None = None,
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
            self.task = replace(self.task, tokenizer=replace(self.task.tokenizer, spread=spread))
        elif isinstance(self.task, ImageTask):
            self.task = replace(self.task, max_pixels=options.max_pixels)
        tasks: list[RowTask] = [self.tensors, *([self.task] if self.task else [])]
        self._batches = {type(task): BatchRunner(task, runner) for task in tasks}
        self.on_cpu = runner.providers[0].name == CPU
        self.workers = options.workers or (usable_cores() if self.on_cpu else 1)
        self.dim = 0
        """The size of vectors, once it has run."""
        self._cost = LiveCost(BatchCost(0.0, 0.0))
        self._explanation = ""
        self.placement: dict[str, Any] = self._known_placement()
        """Which provider runs how much, as `Placement.as_json`."""
        self.rules = self._rules()

    @classmethod
    def open(
        cls,
        path: Path,
        options: ServeConfig,
        spread: Callable[[Encode, list[Any]], list[Any]] | None = None,
    ) -> ModelBackend:
        """Open an artifact and its session.

        Args:
            path: the artifact's directory.
            options: of the server.
            spread: runs the tokenizing of a list of texts.

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
            return cls(artifact, runner, options, spread)
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

    def run(self, batch: Sequence[QueueEntry]) -> list[Any]:
        """Run a batch of rows of one key; return the graph's output for each."""
        outputs: list[Any] = batch[0].runner.run([entry.row for entry in batch])
        return outputs

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
                self.runner(self._made_up_feeds())
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
            self._cost = LiveCost(measure_cost(run, limit=self.limit))
        self.rules = self._rules()

    def learn(self, batch: BatchStatistics) -> bool:
        """Learn from a batch that ran; return whether the rules have changed."""
        cost = self._cost
        cost.add(batch.padded_tokens, batch.seconds)
        if cost.batches % _RULES_EVERY:
            return False
        self.rules = self._rules()
        return True

    def validation_status(self) -> ValidationStatus:
        """Return what `enginery validate` found; `none` where the artifact was not validated."""
        if self.artifact.failed():
            return "failed"
        return "passed" if self.artifact.manifest.verdict("validate") else "none"

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
        return self.run(self.entries(self.task, [self.task.probe(tokens)]))

    def _made_up_feeds(self, tokens: int = 16) -> dict[str, Any]:
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
            tokens, why = choose_tokens(self.cost, on_cpu=self.on_cpu)
        self._explanation = why
        rules = BatchRules(
            max_tokens=tokens, max_rows=options.batch_rows, max_padding=options.max_padding,
            fixed_tokens=self._cost.fixed_tokens(),
        )  # fmt: skip
        if self.task is not None:
            rules = replace(
                rules, equal_lengths=not self.task.can_pad,
                max_rows=min(rules.max_rows, fixed) if fixed else rules.max_rows,
            )  # fmt: skip
        if self.runner.profiles:
            # An engine's own maximum is what it was built for.
            rules = replace(
                rules, rows_at=lambda length: self.runner.most_rows(spec, (length,)) or 1
            )
        return rules
