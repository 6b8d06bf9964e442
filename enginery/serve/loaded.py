"""What a served model holds: the artifact, its session, its tokenizer, and how it is batched.

>>> loaded = LoadedModel.open(Path("build/minilm"), ServeConfig())
>>> loaded.warm_up()
>>> loaded.rules.max_tokens
256
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from enginery.core.artifact import Artifact
from enginery.core.errors import EngineryError, InputError, ProviderError
from enginery.core.feeds import FeedLimits, make_feeds
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import canonical_dim, dynamic_dims
from enginery.runtime.image_model import ImageModel
from enginery.runtime.machine import usable_cores
from enginery.runtime.ort import OrtRunner
from enginery.runtime.provider_names import CPU
from enginery.runtime.provider_wish import parse_wishes
from enginery.runtime.text_rows import TextRows
from enginery.runtime.tokenizer import TokenIds
from enginery.serve.batches import BatchRules
from enginery.serve.calibration import BatchCost, LiveCost, choose_tokens, measure_cost
from enginery.serve.config import ServeConfig
from enginery.serve.queue import Waiting
from enginery.serve.works import ImageWork, TensorWork, TextWork

METHODS = {
    "feature-extraction": "embed",
    "text-classification": "classify",
    "token-classification": "tag",
    "question-answering": "answer",
    "fill-mask": "fill",
    "image-classification": "classify_images",
}
_CPU_IMAGES = 8
"""Images of a batch on a CPU: they gain little from sharing, and wait for each other."""

_RULES_EVERY = 64
"""Batches, after which the rules follow what those cost."""


class LoadedModel:
    """A session with all that it needs to answer; closing frees it."""

    def __init__(self, artifact: Artifact, runner: OrtRunner, options: ServeConfig) -> None:
        self.artifact, self.runner, self.options = artifact, runner, options
        self.config = ModelConfig.read(artifact.path)
        self._limits = FeedLimits.from_config(self.config)
        task = artifact.manifest.task
        takes_pixels = any(spec.name == "pixel_values" for spec in runner.record.inputs)
        self.method = METHODS.get(task, "")
        """What answers the task; empty where only `infer` does."""
        if takes_pixels and self.method == "embed":
            self.method = "embed_images"
        self.texts: TextRows | None = None
        self.images: ImageModel | None = None
        if self.method and takes_pixels:
            self.images = ImageModel.open(artifact, runner)
        elif self.method:
            self.texts = TextRows.read(artifact, runner.record)
        self.on_cpu = runner.providers[0].name == CPU
        self.workers = options.workers or (usable_cores() if self.on_cpu else 1)
        self.tensors = TensorWork(runner, self.config)
        self._text_work = TextWork(self.texts, runner) if self.texts else None
        self._image_work = ImageWork(self.images) if self.images else None
        self.limit = self.texts.tokenizer.limit if self.texts else 0
        self.dim = 0
        """Of its vectors, once it has run."""
        self.live = LiveCost(BatchCost(0.0, 0.0))
        self.explanation = ""
        self.placement: dict[str, Any] = self._known_placement()
        """Which provider runs how much, as `Placement.as_json`."""
        self.rules = self._rules()

    @classmethod
    def open(cls, path: Path, options: ServeConfig) -> LoadedModel:
        """Opens the artifact and its session.

        Raises:
            ArtifactError: not an artifact, or a file that answers cannot be made from.
            RejectedArtifactError: its validation failed.
            ProviderError: the provider cannot be had.
            OptionError: an option of a provider does not fit it.
        """
        artifact = Artifact.open(path)
        artifact.require_passed(allow_failed=options.allow_failed)
        wish = parse_wishes(options.provider, options.provider_option, default="cpu")
        threads, on_cpu = options.threads, wish[0].full_name == CPU
        alone = (options.workers or usable_cores()) == 1
        if not threads and on_cpu and not alone:
            threads = 1
        runner = OrtRunner(
            artifact, providers=wish, allow_fallback=options.allow_fallback, threads=threads,
            keep_optimized=options.optimized_graph,
            # Several workers' threads would take the cores from each other.
            spinning=threads == 1 or (on_cpu and alone),
        )  # fmt: skip
        try:
            return cls(artifact, runner, options)
        except BaseException:
            runner.close()
            raise

    @property
    def text_work(self) -> TextWork:
        """How texts run; only for a model that takes them."""
        if self._text_work is None:
            raise AssertionError("the model takes no texts")
        return self._text_work

    def run(self, batch: Sequence[Waiting]) -> list[Any]:
        """A batch of inputs of one kind; raises what its work raises."""
        kind = batch[0].kind
        if kind == TextWork.kind:
            return self.text_work.run(batch)
        if self._image_work is not None and isinstance(kind, tuple) and kind[0] == "images":
            return self._image_work.run(batch)
        return self.tensors.run(batch)

    def warm_up(self) -> None:
        """One real inference, so that "ready" means that it answers.

        Raises:
            ProviderError: it does not run.
        """
        self.runner.warm_up()
        try:
            if self.texts is not None:
                answered = self._run_texts(8)[0]
                if self.method == "embed":
                    self.dim = int(answered.shape[0])
            else:
                self.runner(self._feeds())
        except InputError as error:
            raise ProviderError(f"{self.artifact.path} does not run: {error.message}") from error

    def calibrate(self) -> None:
        """Measures what batches cost, sets the rules by it, and looks where nodes run."""
        if not self.placement:
            try:
                self.placement = self.runner.placement().as_json()
            except EngineryError as error:
                self.placement = {"notes": [f"it cannot be read: {error.message}"]}
        if self.texts is None:
            return

        def run(tokens: int) -> float:
            started = time.perf_counter()
            self._run_texts(tokens)
            return time.perf_counter() - started

        with contextlib.suppress(EngineryError):  # engines that do not take these lengths
            self.live = LiveCost(measure_cost(run, limit=self.limit))
        self.rules = self._rules()

    def learn(self, tokens: int, seconds: float) -> bool:
        """A batch that ran; whether the rules were made anew by what is known now."""
        live = self.live
        live.add(tokens, seconds)
        if live.batches % _RULES_EVERY:
            return False
        self.rules = self._rules()
        return True

    def info(self) -> dict[str, Any]:
        """What runs, where, and how it is batched."""
        manifest, cost = self.artifact.manifest, self.live.cost()
        found: dict[str, Any] = {
            "task": manifest.task,
            "method": self.method,
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
                "max_padding": self.rules.max_padding, "explanation": self.explanation,
                "fixed_seconds": cost.fixed_seconds,
                "seconds_per_token": cost.seconds_per_token,
            },
        }  # fmt: skip
        if self.texts is not None:
            found |= {"max_tokens": self.limit, "notes": list(self.texts.notes)}
        if self.images is not None:
            found["notes"] = list(self.images.notes)
        if self.dim:
            found["dim"] = self.dim
        return found

    def close(self) -> None:
        """Frees the session."""
        self.runner.close()

    def _run_texts(self, tokens: int) -> list[Any]:
        """One made-up text of so many tokens."""
        work = self.text_work
        size = work.vocabulary
        encoding = TokenIds([size // 2] * tokens)
        return work.run([Waiting(None, 0, work.kind, work.padded_length(tokens), encoding)])

    def _feeds(self, tokens: int = 16) -> dict[str, Any]:
        limits = self._limits
        sizes = {name: limits.sizes.get(name, max(limits.min_sequence, tokens))
                 for name in dynamic_dims(self.runner.record.inputs)}  # fmt: skip
        sizes |= {name: 1 for name in sizes if canonical_dim(name) == "batch"}
        if self.runner.profiles:
            sizes |= {name: dim.opt for name, dim in self.runner.profiles[0].dims.items()}
        return make_feeds(self.runner.record.inputs, sizes, limits, seed=0)

    def _known_placement(self) -> dict[str, Any]:
        """What needs no session of its own to be known; empty where one has to look."""
        if self.on_cpu:
            return {"providers": [{"name": CPU}], "notes": ["every node is on the CPU"]}
        if self.runner.engines:
            names = [{"name": provider.name} for provider in self.runner.providers[:1]]
            return {"providers": names, "notes": ["every node is in the engine"]}
        return {}

    def _rules(self) -> BatchRules:
        options, spec = self.options, self.runner.record.inputs[0]
        cost = self.live.cost()
        if self.images is not None:
            rows = min(options.batch_rows, _CPU_IMAGES if self.on_cpu else options.batch_rows)
            if not self.runner.profiles:
                rows = min(rows, self.images.most_rows((3, 0, 0)))
            self.explanation = f"{rows} images of one size"
            return BatchRules(max_tokens=rows, max_rows=rows, max_padding=0.0, rows_at=None)
        tokens, why = options.batch_tokens, "as --batch-tokens says"
        if not tokens:
            tokens, why = choose_tokens(cost, on_cpu=self.on_cpu)
        self.explanation = why
        rules = BatchRules(
            max_tokens=tokens, max_rows=options.batch_rows, max_padding=options.max_padding,
            worth_tokens=self.live.worth_tokens(),
        )  # fmt: skip
        work = self._text_work
        if work is not None:
            fixed = work.most_rows
            rules = replace(
                rules, equal_lengths=not work.can_pad,
                max_rows=min(rules.max_rows, fixed) if fixed else rules.max_rows,
            )  # fmt: skip
        if self.runner.profiles:
            # An engine's own maximum is what it was built for.
            rules = replace(
                rules,
                rows_at=lambda length: self.runner.most_rows(spec, (length,)) or 1,
            )
        return rules
