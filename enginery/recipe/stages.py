"""The stages that a recipe may have: their options, their order, and what can be said of both.

>>> problem_of_order([("export", ExportConfig()), ("export", ExportConfig())])
(1, 'export is there twice; it can only be the first stage.', 'Leave one out.')

Nothing here opens a file: what needs one is in `checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from enginery.bench import config as bench
from enginery.core.errors import OptionError
from enginery.core.shapes import DimRange, Profile
from enginery.engine import config as engine
from enginery.export import config as export
from enginery.export.config import ExportConfig
from enginery.optimize import config as optimize
from enginery.optimize.config import OptimizeConfig
from enginery.predict.config import PredictConfig
from enginery.publish.config import PublishConfig
from enginery.publish.destination import scheme_of
from enginery.publish.kserve_options import KserveConfig
from enginery.publish.triton_options import TritonConfig
from enginery.quantize import config as quantize
from enginery.quantize.config import QuantizeConfig
from enginery.runtime.provider_wish import ProviderWish, parse_wishes
from enginery.runtime.run_fit import require_fit
from enginery.runtime.tensorrt_capability import CURRENT, resolve_capabilities
from enginery.runtime.tensorrt_options import RTX, check_options, flavor_named
from enginery.validate import config as validate
from enginery.validate.config import ValidateConfig


@dataclass(frozen=True)
class LintStage:
    """For whom the graphs are looked through."""

    target: Literal["tensorrt", "cuda"] = "tensorrt"
    """Who is to run them."""


@dataclass(frozen=True)
class BenchStage(bench.BenchConfig):
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
    "build": engine.BuildConfig,
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
    "cache_dir", "calibration", "data", "directory", "images", "input", "out", "output",
    "profiles_from", "ranges", "timing_cache",
)  # fmt: skip
"""Options that are paths: they start from the recipe's directory."""
OF_ONE_MODEL = {"export": ("task", "revision"), "validate": ("reference",)}
"""Options that say something about one model; another model takes their defaults."""
_REPEATABLE = ("lint", "predict", "publish", "export-triton", "export-kserve")
"""Stages that leave something of their own each time. Of the others an artifact has one result, and
each run would undo the one before."""

Named = tuple[str, Any]
"""A stage's name and its options."""


def bare(options: Any, kind: type) -> Any:
    """Return the options of the stage itself, as its command has them."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def check_stage(stage: str, options: Any) -> None:
    """Check what can be known of a stage's options without a file.

    What an options dataclass checks by itself is not repeated here.

    Raises:
        EngineryError: a value cannot be used, or several do not go together.
    """
    if check := _CHECKS.get(stage):
        check(options)
    if getattr(options, "provider", "") and hasattr(options, "provider_option"):
        wishes_of(options)
    for text in getattr(options, "profile", ()):
        Profile.parse(text)


def wishes_of(options: Any) -> tuple[ProviderWish, ...]:
    """Return the providers that a stage asks for, or the environment for it, else the CPU.

    Raises:
        EngineryError: there are no such providers or options, or they do not fit how it runs.
    """
    wishes = parse_wishes(options.provider, options.provider_option, default="cpu")
    ways = ("io_binding", "cuda_graph", "shrink_arena")
    require_fit(wishes, **{way: getattr(options, way) for way in ways if hasattr(options, way)})
    return wishes


def _check_quantize(options: QuantizeConfig) -> None:
    quantize.check_options(options)
    quantize.require_calibration(options)
    if capabilities := quantize.capabilities_of(options):
        resolve_capabilities(RTX, capabilities)


def _check_build(options: engine.BuildConfig) -> None:
    engine.check_config(options)
    flavor = flavor_named(options.flavor)
    check_options(flavor, options.options)
    if not flavor.needs_gpu and CURRENT not in options.capability:
        resolve_capabilities(flavor, options.capability)
    DimRange.parse(options.batch)


def _check_bench(options: BenchStage) -> None:
    bench.check_options(options)
    bench.read_sizes(options.batch, "batch")
    if options.sequence != bench.AUTO:
        bench.read_sizes(options.sequence, "sequence")
    for text in options.shape:
        bench.parse_shape(text)


def _check_predict(options: PredictStage) -> None:
    from enginery.predict.writing import output_format

    if not options.input:
        raise OptionError("option 'input' is empty.", do="Name a file, a folder of images, or -.")
    output_format(Path(options.output))


def _check_directory(options: TritonStage | KserveStage) -> None:
    if not options.directory:
        raise OptionError("option 'directory' is empty.", do="Name where the files go.")


def _check_publish(options: PublishStage) -> None:
    scheme_of(options.url)


_CHECKS: dict[str, Callable[[Any], None]] = {
    "export": export.check_options,
    "optimize": optimize.check_options,
    "quantize": _check_quantize,
    "build": _check_build,
    "validate": validate.check_options,
    "bench": _check_bench,
    "predict": _check_predict,
    "publish": _check_publish,
    "export-triton": _check_directory,
    "export-kserve": _check_directory,
}


def problem_of_order(stages: Sequence[Named]) -> tuple[int, str, str] | None:
    """Return which stage cannot stand where it stands, why, and what to do; None where all can."""
    if not stages:
        return -1, "stages: found none, expected export first.", "Add - export."
    if stages[0][0] != "export":
        return 0, f"the first stage is '{stages[0][0]}', expected export.", "Begin with - export."
    for place, (before, stage) in enumerate(pairwise(stages), start=1):
        if stage[0] == "export":
            return place, "export is there twice; it can only be the first stage.", "Leave one out."
        if stage[0] == before[0] and (stage[0] not in _REPEATABLE or stage[1] == before[1]):
            do = "Put everything to check into one."
            if stage[0] in _REPEATABLE:
                do = "Leave one out, or give it other options."
            return place, f"{stage[0]} follows itself.", do
    return next(_misplaced(stages), None)


def _misplaced(stages: Sequence[Named]) -> Iterator[tuple[int, str, str]]:
    """Follow what becomes of the graph, and find the stages that cannot take what they get."""
    precision, target, made_by = stages[0][1].dtype, "onnx", "export"
    validated = False
    flavors: set[str] = set()
    for place, (stage, options) in enumerate(stages):
        found = f"{stage} follows {made_by}, which leaves {precision} for {target}; "
        if stage == "optimize":
            if precision != "fp32":
                yield place, f"{found}optimize starts from fp32.", "Leave one of the two out."
            precision, target = options.precision, options.target
        elif stage == "quantize":
            targets = ("onnx", "cpu") if options.scheme == "dynamic" else ("onnx", "tensorrt")
            if "quantize" in (name for name, _ in stages[:place]):
                yield place, "quantize is there twice, and quantizes once.", "Leave one out."
            if precision != "fp32" or target not in targets:
                yield (
                    place,
                    f"{found}quantize starts from fp32 for {' or '.join(targets)}.",
                    f"Leave {made_by} out: quantize what export made.",
                )
            precision = "fp32" if options.scheme == "dynamic" else options.residual
            target = options.target
        elif stage == "build":
            if target in ("cuda", "cpu"):
                yield (
                    place,
                    f"{found}TensorRT parses no graph for {target}.",
                    "Use optimize: {target: tensorrt}, or leave build out.",
                )
            flavors.add(options.flavor)
        elif stage == "validate":
            validated = True
        elif stage == "publish" and not validated and not options.allow_unvalidated:
            yield (
                place,
                f"publish follows {made_by} without a validation, and refuses what has none.",
                "Put - validate before it, or say allow_unvalidated: true.",
            )
        elif stage == "export-triton" and options.needs_engine and "tensorrt" not in flavors:
            yield (
                place,
                "export-triton is to run an engine of classic TensorRT, and no stage builds one.",
                "Put - build: {flavor: tensorrt} before it, or leave provider and backend out.",
            )
        elif (
            stage == "export-kserve"
            and options.provider == "tensorrt"
            and "tensorrt" not in flavors
        ):
            yield (
                place,
                "export-kserve is to run on provider 'tensorrt', and no stage builds an engine.",
                "Put - build: {flavor: tensorrt} before it, or name another provider.",
            )
        if stage in ("export", "optimize", "quantize"):
            made_by, validated, flavors = stage, False, set()
