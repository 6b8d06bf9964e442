"""The stages that a recipe may have: their options and their order.

>>> find_order_problem([("export", ExportConfig()), ("export", ExportConfig())])
(1, 'export is named twice; it can only be the first stage.', 'Leave one out.')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from enginery.bench.config import BenchConfig
from enginery.core.errors import OptionError
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.providers import resolve_provider
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

    OLD_NAMES: ClassVar = {"output": "out"}

    input: str
    """A CSV, TSV, JSONL, Parquet or text file, a folder of images, or `-` for standard input."""
    out: str
    """The file of results: a .parquet, .csv or .jsonl file."""


@dataclass(frozen=True, kw_only=True)
class PublishStage(PublishConfig):
    """Options of publish, with the registry's address."""

    url: str
    """The registry: `file:///path` or a plain path, `mlflow:/name`, `hf://org/name`,
    `oci://registry/name:tag`."""


@dataclass(frozen=True, kw_only=True)
class TritonStage(TritonConfig):
    """Options of export-triton, with the model repository."""

    OLD_NAMES: ClassVar = {"directory": "out"}

    out: str
    """The model repository; other models in it stay as they are."""


@dataclass(frozen=True, kw_only=True)
class KserveStage(KserveConfig):
    """Options of export-kserve, with the directory of the manifest."""

    OLD_NAMES: ClassVar = {"directory": "out"}

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

PATHS = (
    "cache_dir",
    "data",
    "images",
    "input",
    "out",
    "ranges",
    "timing_cache",
)
"""Options that are paths, relative to the recipe's directory."""
MODEL_OPTIONS = {"export": ("task", "revision"), "validate": ("reference",)}
"""Options that depend on the model; with another model they have their defaults."""
_REPEATABLE = ("lint", "predict", "publish", "export-triton", "export-kserve")
"""Stages that may follow themselves. The others would replace their own result."""

NamedStage = tuple[str, Any]
"""A stage's name and its options."""


def find_order_problem(stages: Sequence[NamedStage]) -> tuple[int, str, str] | None:
    """Return the first misplaced stage, why, and what to do; None if the order is valid."""
    if stages[0][0] != "export":
        return 0, f"the first stage is '{stages[0][0]}', expected export.", "Begin with - export."
    made = _State()
    for place, (stage, options) in enumerate(stages):
        problem = _find_repetition(stages[:place], stage, options) or _find_mismatch(
            made, stage, options
        )
        if problem:
            return place, *problem
        if stage in ("export", "optimize", "quantize"):
            made = _State(stage, *_result_of(stage, options), quantized=made.quantized)
        made.quantized |= stage == "quantize"
        made.validated |= stage == "validate"
        made.has_engine |= stage == "build" and options.flavor == "tensorrt"
    return None


@dataclass
class _State:
    """The result of the stages so far."""

    by: str = ""
    """The stage that made the graph."""
    precision: str = ""
    target: str = ""
    quantized: bool = False
    validated: bool = False
    has_engine: bool = False
    """True if there is an engine of classic TensorRT, which Triton and KServe run."""


def _result_of(stage: str, options: Any) -> tuple[str, str]:
    """Return the precision and the target of a stage's graph."""
    if stage == "export":
        return options.dtype, "onnx"
    if stage == "optimize":
        return options.precision, options.target
    return "int8" if options.scheme == "dynamic" else options.scheme, options.target


def _find_repetition(
    before: Sequence[NamedStage], stage: str, options: Any
) -> tuple[str, str] | None:
    if not before:
        return None
    if stage == "export":
        return "export is named twice; it can only be the first stage.", "Leave one out."
    if before[-1] == (stage, options) and stage in _REPEATABLE:
        return f"{stage} follows itself.", "Leave one out, or give it other options."
    if before[-1][0] == stage and stage not in _REPEATABLE:
        return f"{stage} follows itself.", "Put everything to check into one."
    return None


def _find_mismatch(made: _State, stage: str, options: Any) -> tuple[str, str] | None:
    """Return why a stage cannot take the result so far, and what to do; None if it can."""
    found = f"{stage} follows {made.by}, which leaves {made.precision} for {made.target}; "
    if stage == "optimize" and made.precision != "fp32":
        return f"{found}optimize starts from fp32.", "Leave one of the two out."
    if stage == "quantize":
        if made.quantized:
            return "quantize is named twice.", "Leave one out."
        targets = ("onnx", "cpu" if options.scheme == "dynamic" else "tensorrt")
        if made.precision != "fp32" or made.target not in targets:
            return (
                f"{found}quantize starts from fp32 for {' or '.join(targets)}.",
                f"Leave {made.by} out: quantize what export made.",
            )
    if stage == "build" and made.target in ("cuda", "cpu"):
        do = "Use optimize: {target: tensorrt}, or leave build out."
        return f"{found}TensorRT parses no graph for {made.target}.", do
    if stage == "publish" and not (made.validated or options.allow_failed):
        return (
            f"publish follows {made.by} without a validation, which it requires.",
            "Put - validate before it, or set allow_failed: true.",
        )
    if stage in ("export-triton", "export-kserve"):
        return _find_provider_problem(made, stage, options)
    return None


def _find_provider_problem(made: _State, stage: str, options: Any) -> tuple[str, str] | None:
    """Return why another server cannot run the result so far as the options say."""
    runs_plan = stage == "export-triton" and (options.backend == "tensorrt" or options.engine)
    if not runs_plan:
        try:
            provider = resolve_provider(
                options.provider, precision=made.precision, target=made.target
            )
        except OptionError as error:
            return error.message, error.do
        # Triton can build the engine itself, `enginery serve` cannot.
        serves = stage == "export-kserve" and options.runtime == "enginery"
        runs_plan = serves and provider == "tensorrt"
    if runs_plan and not made.has_engine:
        return (
            f"{stage} requires an engine of classic TensorRT, and no stage builds one.",
            "Put - build: {flavor: tensorrt} before it, or name another provider.",
        )
    return None
