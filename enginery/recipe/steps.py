"""The stages that a recipe may have: their options and their order.

>>> find_order_problem([Step("export", ExportConfig()), Step("export", ExportConfig())])
(1, 'export is named twice; it can only be the first stage.', 'Leave one out.')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from enginery.bench.config import BenchConfig
from enginery.core.errors import EngineryError, InputError, OptionError, nearest
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.providers import TENSORRT_PROVIDERS, resolve_provider
from enginery.deploy.triton.options import TritonConfig
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.predict.config import PredictConfig
from enginery.publish.config import PublishConfig
from enginery.quantize.config import QuantizeConfig
from enginery.runtime.tensorrt.options import FLAVORS
from enginery.validate.config import ValidateConfig


@dataclass(frozen=True)
class LintStage:
    """The runtime to check the graphs for."""

    target: Literal["tensorrt", "cuda"] = "tensorrt"
    """The runtime that will run the graphs."""


@dataclass(frozen=True)
class BenchStage(BenchConfig):
    """Options of a benchmark, and where its reports go."""

    out: str = ""
    """A directory for `reports/`; empty for the artifact itself."""


@dataclass(frozen=True, kw_only=True)
class PredictStage(PredictConfig):
    """Options of predict, with its input and output."""

    input: str
    """A CSV, TSV, JSONL, Parquet or text file, a folder of images
    or audio, or `-` for standard input."""
    out: str
    """The file of results: a .parquet, .csv or .jsonl file."""


@dataclass(frozen=True, kw_only=True)
class PublishStage(PublishConfig):
    """Options of publish, with the registry's address."""

    url: str
    """The registry: `file:///path` or a plain path, `mlflow:/name`, `hf://org/name`,
    `oci://registry/name:tag`."""
    variants: tuple[str, ...] = ()
    """Stages whose artifacts are published in the same folder, with the layout `hub`: [optimize,
    quantize]."""


@dataclass(frozen=True, kw_only=True)
class TritonStage(TritonConfig):
    """Options of export-triton, with the model repository."""

    out: str
    """The model repository; other models in it stay as they are."""


@dataclass(frozen=True, kw_only=True)
class KserveStage(KserveConfig):
    """Options of export-kserve, with the directory of the manifest."""

    out: str
    """Where inferenceservice.yaml goes."""


STAGES: dict[str, type] = {
    "export": ExportConfig,
    "optimize": OptimizeConfig,
    "quantize": QuantizeConfig,
    "build": BuildConfig,
    "validate": ValidateConfig,
    "lint": LintStage,
    "bench": BenchStage,
    "predict": PredictStage,
    "publish": PublishStage,
    "export-triton": TritonStage,
    "export-kserve": KserveStage,
}
"""The options of each stage, with the names of its command's options."""

ARTIFACT_STAGES = ("export", "optimize", "quantize", "build")
"""The stages that make an artifact. In a recipe each takes `out`, where a copy of it goes."""

PATHS = ("cache_dir", "data", "images", "input", "out")
"""Options that are paths, relative to the recipe's directory."""
MODEL_OPTIONS = {"export": ("task", "revision"), "validate": ("reference",)}
"""Options that depend on the model; with another model they have their defaults."""
_REPEATABLE = ("lint", "predict", "publish", "export-triton", "export-kserve")
"""Stages that may follow themselves. The others would replace their own result."""


@dataclass(frozen=True)
class Step:
    """One stage of a recipe with its options."""

    stage: str
    options: Any
    """An instance of the stage's class in `STAGES`."""
    source: str = ""
    """The stage whose artifact this one takes, `from` in the file; empty for the one before."""
    out: str = ""
    """Where a copy of the artifact goes that this stage makes; empty to keep it only in the
    store."""
    line: int = field(default=0, compare=False)
    """The line in the recipe; 0 for a step that was made in Python."""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """The line of each option in the recipe; 0 for one that was replaced since."""

    def line_of(self, error: EngineryError) -> int:
        """Return the line of the option that an error is about, or of the stage."""
        option = error.option
        if isinstance(error, InputError) and error.column:
            columns = (name for name in self.lines if name.endswith("column"))
            matching = (name for name in columns if getattr(self.options, name) == error.column)
            option = next(matching, option)
        return self.lines.get(option, self.line)


def find_order_problem(steps: Sequence[Step]) -> tuple[int, str, str] | None:
    """Return the first misplaced stage, why, and what to do; None if the order is valid."""
    if steps[0].stage != "export":
        return 0, f"the first stage is '{steps[0].stage}', expected export.", "Begin with - export."
    artifact = _PlannedArtifact()
    artifacts: dict[str, _PlannedArtifact] = {}
    for position, step in enumerate(steps):
        problem = _find_repetition(steps[:position], step) or _find_unknown_source(artifacts, step)
        artifact = artifacts.get(step.source, artifact)
        problem = problem or _find_mismatch(artifact, step.stage, step.options)
        if step.stage == "publish":
            problem = problem or _find_variant_problem(artifacts, step.options)
        if problem:
            return position, *problem
        if step.stage == "build":
            artifact = replace(artifact, engines=artifact.engines | {step.options.flavor})
        elif step.stage in ARTIFACT_STAGES:
            result = _result_of(step.stage, step.options)
            quantized = artifact.quantized or step.stage == "quantize"
            artifact = _PlannedArtifact(step.stage, *result, quantized=quantized)
        if step.stage in ARTIFACT_STAGES:
            artifacts[step.stage] = artifact
        artifact.validated |= step.stage == "validate"
    return None


@dataclass
class _PlannedArtifact:
    """What is known of an artifact before it is made."""

    stage: str = ""
    """The stage that made the graph."""
    precision: str = ""
    target: str = ""
    quantized: bool = False
    validated: bool = False
    engines: frozenset[str] = frozenset()
    """The flavors of its engines."""


def _result_of(stage: str, options: Any) -> tuple[str, str]:
    """Return the precision and the target of a stage's graph."""
    if stage == "export":
        return options.dtype, "onnx"
    if stage == "optimize":
        return options.resolved().precision, options.target
    return "fp8" if options.scheme == "fp8" else "int8", options.target


def _find_repetition(before: Sequence[Step], step: Step) -> tuple[str, str] | None:
    if not before:
        return None
    if step.stage == "export":
        return "export is named twice; it can only be the first stage.", "Leave one out."
    if before[-1].stage != step.stage:
        return None
    if before[-1] == step and step.stage in _REPEATABLE:
        return f"{step.stage} follows itself.", "Leave one out, or give it other options."
    if step.stage not in _REPEATABLE and not step.source:
        return f"{step.stage} follows itself.", "Put everything to check into one."
    return None


def _find_unknown_source(
    artifacts: Mapping[str, _PlannedArtifact], step: Step
) -> tuple[str, str] | None:
    if not step.source or step.source in artifacts:
        return None
    if not artifacts:
        return "export makes the first artifact, and takes none.", "Leave from out."
    if step.source in ARTIFACT_STAGES:
        return f"from: no {step.source} stands before it.", f"Known here: {', '.join(artifacts)}."
    known_stages = f"Stages that make an artifact: {', '.join(artifacts)}."
    return f"from: unknown stage '{step.source}'{nearest(step.source, artifacts)}", known_stages


def _find_mismatch(artifact: _PlannedArtifact, stage: str, options: Any) -> tuple[str, str] | None:
    """Return why a stage cannot take the result so far, and what to do; None if it can."""
    prefix = (
        f"{stage} follows {artifact.stage}, which leaves {artifact.precision} for "
        f"{artifact.target}; "
    )
    if stage == "optimize" and artifact.precision != "fp32":
        return f"{prefix}optimize starts from fp32.", _take_export(artifact)
    if stage == "quantize":
        if artifact.quantized:
            return "quantize is named twice.", "Leave one out."
        targets = ("onnx", "cpu" if options.scheme == "dynamic" else "tensorrt")
        if artifact.precision != "fp32" or artifact.target not in targets:
            return (
                f"{prefix}quantize starts from fp32 for {' or '.join(targets)}.",
                _take_export(artifact),
            )
    if stage == "build" and artifact.target in ("cuda", "cpu"):
        do = "Use optimize: {target: tensorrt}, or leave build out."
        return f"{prefix}TensorRT parses no graph for {artifact.target}.", do
    if stage == "publish" and not (artifact.validated or options.allow_failed):
        return (
            f"publish follows {artifact.stage} without a validation, which it requires.",
            "Put - validate before it, or set allow_failed: true.",
        )
    if stage in ("export-triton", "export-kserve"):
        return _find_provider_problem(artifact, stage, options)
    return None


def _find_variant_problem(
    artifacts: Mapping[str, _PlannedArtifact], options: Any
) -> tuple[str, str] | None:
    """Return why `publish` cannot take artifacts of other stages."""
    if options.variants and options.layout != "hub":
        return "publish has variants, which only the layout hub holds.", "Set layout: hub."
    for name in options.variants:
        if name not in artifacts:
            known_stages = f"Stages that make an artifact: {', '.join(artifacts)}."
            return f"variants: no {name} stands before it{nearest(name, artifacts)}", known_stages
        if not (artifacts[name].validated or options.allow_failed):
            return (
                f"publish takes what {name} made without a validation, which it requires.",
                f"Put - validate: {{from: {name}}} before it, or set allow_failed: true.",
            )
    return None


def _find_provider_problem(
    artifact: _PlannedArtifact, stage: str, options: Any
) -> tuple[str, str] | None:
    """Return why another server cannot run the result so far as the options say."""
    # The flavors of which one must have been built; Triton alone can build an engine itself.
    flavors: tuple[str, ...] = ()
    if stage == "export-triton" and (options.backend == "tensorrt" or options.engine):
        flavors = ("tensorrt",)
    else:
        try:
            provider = resolve_provider(
                options.provider, precision=artifact.precision, target=artifact.target
            )
        except OptionError as error:
            return error.message, error.do
        if stage == "export-kserve" and provider in TENSORRT_PROVIDERS:
            flavors = TENSORRT_PROVIDERS if options.provider == "auto" else (provider,)
    if flavors and artifact.engines.isdisjoint(flavors):
        titles = " or ".join(FLAVORS[flavor].title for flavor in flavors)
        return (
            f"{stage} requires an engine of {titles}, and no stage builds one.",
            f"Put - build: {{flavor: {flavors[0]}}} before it, or name another provider.",
        )
    return None


def _take_export(artifact: _PlannedArtifact) -> str:
    if artifact.stage == "export":
        return "Export fp32: leave dtype out."
    return f"Set from: export, or leave {artifact.stage} out."
