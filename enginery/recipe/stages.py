"""The stages that a recipe may have: their options and their order.

>>> problem_of_order([("export", ExportConfig()), ("export", ExportConfig())])
(1, 'export is there twice; it can only be the first stage.', 'Leave one out.')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from enginery.bench.config import BenchConfig
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.triton.options import TritonConfig
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.predict.config import PredictConfig
from enginery.publish.config import PublishConfig
from enginery.quantize.config import QuantizeConfig
from enginery.validate.config import ValidateConfig


@dataclass(frozen=True)
class LintStage:
    """For whom the graphs are looked through."""

    target: Literal["tensorrt", "cuda"] = "tensorrt"
    """Who is to run them."""


@dataclass(frozen=True)
class BenchStage(BenchConfig):
    """What is measured, beside what, how long, and where the reports go."""

    out: str = ""
    """A directory for `reports/`; empty for the artifact itself."""


@dataclass(frozen=True, kw_only=True)
class PredictStage(PredictConfig):
    """A file whose rows are answered, and where the answers go."""

    input: str
    """A CSV, TSV, JSONL, Parquet or text file, a folder of images, or `-` for standard input."""
    output: str
    """Where the answers go: a .parquet, .csv or .jsonl file."""


@dataclass(frozen=True, kw_only=True)
class PublishStage(PublishConfig):
    """Where the artifact is published, and what its card says."""

    url: str
    """The registry: `file:///path` or a plain path, `mlflow:/name`, `hf://org/name`,
    `oci://registry/name:tag`."""


@dataclass(frozen=True, kw_only=True)
class TritonStage(TritonConfig):
    """A model repository of NVIDIA Triton, and how Triton runs the model."""

    directory: str
    """The model repository; models of others in it stay as they are."""


@dataclass(frozen=True, kw_only=True)
class KserveStage(KserveConfig):
    """The manifest of a KServe InferenceService, and what it says."""

    directory: str
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
"""The options of each stage, named as those of its command."""

PATHS = (
    "cache_dir",
    "calibration",
    "data",
    "directory",
    "images",
    "input",
    "out",
    "output",
    "profiles_from",
    "ranges",
    "timing_cache",
)
"""Options that are paths: they start from the recipe's directory."""
OF_ONE_MODEL = {"export": ("task", "revision"), "validate": ("reference",)}
"""Options that say something about one model; another model takes their defaults."""
_REPEATABLE = ("lint", "predict", "publish", "export-triton", "export-kserve")
"""Stages that leave something of their own each time. Of the others an artifact has one result, and
each run would undo the one before."""

Named = tuple[str, Any]
"""A stage's name and its options."""


def problem_of_order(stages: Sequence[Named]) -> tuple[int, str, str] | None:
    """Return which stage cannot stand where it stands, why, and what to do; None where all can."""
    if stages[0][0] != "export":
        return 0, f"the first stage is '{stages[0][0]}', expected export.", "Begin with - export."
    made = _Made()
    for place, (stage, options) in enumerate(stages):
        problem = _repeated(stages[:place], stage, options) or _unfit(made, stage, options)
        if problem:
            return place, *problem
        if stage in ("export", "optimize", "quantize"):
            made = _Made(stage, *_left_by(stage, options), quantized=made.quantized)
        made.quantized |= stage == "quantize"
        made.validated |= stage == "validate"
        made.has_engine |= stage == "build" and options.flavor == "tensorrt"
    return None


@dataclass
class _Made:
    """What the stages so far have made."""

    by: str = ""
    """The stage that made the graph."""
    precision: str = ""
    target: str = ""
    quantized: bool = False
    validated: bool = False
    has_engine: bool = False
    """Of classic TensorRT, which Triton and KServe run."""


def _left_by(stage: str, options: Any) -> tuple[str, str]:
    """Return the precision of a stage's graph, and who it is for."""
    if stage == "export":
        return options.dtype, "onnx"
    if stage == "optimize":
        return options.precision, options.target
    return "fp32" if options.scheme == "dynamic" else options.residual, options.target


def _repeated(before: Sequence[Named], stage: str, options: Any) -> tuple[str, str] | None:
    if not before:
        return None
    if stage == "export":
        return "export is there twice; it can only be the first stage.", "Leave one out."
    if before[-1] == (stage, options) and stage in _REPEATABLE:
        return f"{stage} follows itself.", "Leave one out, or give it other options."
    if before[-1][0] == stage and stage not in _REPEATABLE:
        return f"{stage} follows itself.", "Put everything to check into one."
    return None


def _unfit(made: _Made, stage: str, options: Any) -> tuple[str, str] | None:
    """Return why a stage cannot take what it gets, and what to do."""
    found = f"{stage} follows {made.by}, which leaves {made.precision} for {made.target}; "
    if stage == "optimize" and made.precision != "fp32":
        return f"{found}optimize starts from fp32.", "Leave one of the two out."
    if stage == "quantize":
        if made.quantized:
            return "quantize is there twice, and quantizes once.", "Leave one out."
        targets = ("onnx", "cpu" if options.scheme == "dynamic" else "tensorrt")
        if made.precision != "fp32" or made.target not in targets:
            return (
                f"{found}quantize starts from fp32 for {' or '.join(targets)}.",
                f"Leave {made.by} out: quantize what export made.",
            )
    if stage == "build" and made.target in ("cuda", "cpu"):
        do = "Use optimize: {target: tensorrt}, or leave build out."
        return f"{found}TensorRT parses no graph for {made.target}.", do
    if stage == "publish" and not (made.validated or options.allow_unvalidated):
        return (
            f"publish follows {made.by} without a validation, and refuses what has none.",
            "Put - validate before it, or say allow_unvalidated: true.",
        )
    runs_engine = (stage == "export-triton" and options.needs_engine) or (
        stage == "export-kserve" and options.provider == "tensorrt"
    )
    if runs_engine and not made.has_engine:
        return (
            f"{stage} is to run an engine of classic TensorRT, and no stage builds one.",
            "Put - build: {flavor: tensorrt} before it, or name another provider.",
        )
    return None
