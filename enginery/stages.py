"""Run the stages that make or mark artifacts, and reuse results that are finished.

    result = run_cached("org/name", ExportConfig(), out="build/name")
    result.artifact, result.worked

`run_cached` is the one wrapper around export, optimize, quantize and build: it computes the cache
key, takes the lock of that key, looks into the store, runs the stage if nothing is there, and
copies the artifact to `out`. `run_validate` does the same for a verdict.

A stage's module is imported when the stage runs. This process waits while a model is exported in a
child process, and its memory counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from enginery.core.artifact.artifact import REPORTS, Artifact, check_overwritable
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.inputs import InputFiles
from enginery.core.artifact.manifest import Verdict
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    OptionError,
    SourceError,
    os_errors_as,
)
from enginery.core.model.files import ModelConfig, module_kinds
from enginery.core.model.source import resolve_source
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import locked, make_directory, remove_leftovers, remove_temporary
from enginery.core.store.store import ARTIFACTS, Store
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig, check_options
from enginery.export.tasks import inferred_task, require_trained_task, task_name
from enginery.optimize.config import OptimizeConfig
from enginery.quantize.config import QuantizeConfig
from enginery.requirements import require_stages
from enginery.validate.config import ValidateConfig

if TYPE_CHECKING:
    from enginery.reports.base import StageOutput
    from enginery.reports.validation import ValidationReport

ArtifactConfig = ExportConfig | OptimizeConfig | QuantizeConfig | BuildConfig
"""The options of a stage that makes an artifact."""


@dataclass(frozen=True)
class StageResult:
    """The result of one stage of a run."""

    stage: str
    artifact: Artifact
    worked: bool
    """False if a finished result was reused."""
    seconds: float
    report: ValidationReport | None = None
    """Of validate."""
    output: StageOutput | None = None
    """Of a stage that makes no artifact."""
    problem: str = ""
    """The reason why a check failed that does not mark the artifact."""

    @property
    def passed(self) -> bool:
        """True unless the stage's check failed."""
        return not self.failure

    @property
    def failure(self) -> str:
        """The reason why the stage's check failed; empty if it passed, or checks nothing."""
        if self.problem:
            return self.problem
        verdict = self.artifact.manifest.verdict(self.stage)
        return "" if verdict is None or verdict.passed else verdict.summary


@dataclass(frozen=True)
class _Plan:
    """What a stage will make: its cache key, a readable name, and the function that makes it."""

    key: Fingerprint
    name: str
    make: Callable[[Path], Artifact]


def run_cached(
    source: Artifact | str,
    config: ArtifactConfig,
    *,
    out: str | Path = "",
    force: bool = False,
    calibration: Iterable[Any] | None = None,
    progress: Progress = SILENT,
) -> StageResult:
    """Run a stage that makes an artifact, or take the finished artifact from the store.

    Args:
        source: the artifact that the stage starts from; for export, what names the model.
        config: the stage's options, which also say which stage it is.
        out: where a copy of the artifact goes; empty to keep it only in the store.
        force: run the stage even if the store has its result.
        calibration: inputs for quantize that no file holds.
        progress: receives progress messages.

    Raises:
        EngineryError: the stage failed; see its `run`. Nothing is left then.
    """
    started = time.monotonic()
    remove_temporary()  # a stage that has nothing to do would not
    name = source if isinstance(source, str) else source.path
    with os_errors_as(EngineryError, f"{name} cannot be used"):
        if out:
            # An engine may be added to the artifact that it is built for.
            stays = isinstance(source, Artifact) and not isinstance(config, BuildConfig)
            check_out(Path(out), Path(name) if stays else None)
        plan: _Plan | None
        with InputFiles().recording():
            if isinstance(config, ExportConfig):
                plan = _plan_export(str(source), config, progress)
            else:
                artifact = cast("Artifact", source)
                artifact.check_files()
                artifact.require_passed(allow_failed=config.allow_failed)
                if isinstance(config, OptimizeConfig):
                    plan = _plan_optimize(artifact, config, progress)
                elif isinstance(config, QuantizeConfig):
                    plan = _plan_quantize(artifact, config, progress, calibration)
                else:
                    plan = _plan_build(artifact, config, progress, out=str(out), force=force)
        if plan is None:
            stage, result, worked = "build", artifact, False
        else:
            stage = plan.key.stage
            result, worked = Store().obtain(
                ARTIFACTS, plan.key, plan.name, plan.make, force=force, progress=progress
            )
        if out:
            result = deliver(result, Path(out), progress)
        return StageResult(stage, result, worked, time.monotonic() - started)


def check_out(out: Path, source: Path | None = None) -> None:
    """Raise an error if a copy of an artifact cannot go to `out`.

    Args:
        out: where the copy goes.
        source: the artifact that it is made from, if it must stay.

    Raises:
        OptionError: it is inside the store, whose entries belong to their cache keys; or it is
            `source`.
        ArtifactError: it has files that do not belong to an artifact.
    """
    store = Store().artifacts.resolve()
    if out.resolve().is_relative_to(store):
        raise OptionError(
            f"{out} is inside the store {store}, where artifacts belong to their cache keys.",
            do="Name a directory of your own: --out build/name",
            option="out",
        )
    if source is not None and out.resolve() == source.resolve():
        raise OptionError(
            f"{out} is the artifact that the stage starts from, which would be lost.",
            do="Name another directory.",
            option="out",
        )
    check_overwritable(out)


def _plan_export(model: str, config: ExportConfig, progress: Progress) -> _Plan:
    from enginery.export import stage as export

    is_file = model.lower().endswith(".onnx")  # which is imported, whatever it is for
    check_options(config, is_onnx=is_file)
    require_stages([("export", config)], is_onnx=is_file)
    task = config.task if is_file else task_name(config.task)
    if config.task == "zero-shot-classification":
        progress.say(
            f"export: {config.task} is a use of {task}: model.zero_shot(texts, labels), or "
            "candidate_labels of predict and serve"
        )
    source = resolve_source(
        model,
        revision=config.revision,
        allow_pickle=config.allow_pickle,
        cache_dir=config.cache_dir,
        progress=progress,
    )
    if not is_file:
        settings = ModelConfig.read(source.path, error=SourceError)
        if task == "auto":
            task = inferred_task(settings, module_kinds(source.path))
        else:
            require_trained_task(settings, task)
    config = replace(config, task=task)
    vocoder = export.resolve_vocoder(config)
    key = export.fingerprint(source, config, vocoder)
    return _Plan(
        key,
        source.name,
        lambda path: export.run(source, config, path, vocoder=vocoder, key=key, progress=progress),
    )


def _plan_optimize(artifact: Artifact, config: OptimizeConfig, progress: Progress) -> _Plan:
    require_stages([("optimize", config)])
    from enginery.optimize import stage as optimize

    key = optimize.fingerprint(artifact, config)
    return _Plan(
        key,
        artifact.manifest.source.name,
        lambda path: optimize.run(artifact, config, path, key=key, progress=progress),
    )


def _plan_quantize(
    artifact: Artifact,
    config: QuantizeConfig,
    progress: Progress,
    calibration: Iterable[Any] | None,
) -> _Plan:
    require_stages([("quantize", config)])
    from enginery.quantize import stage as quantize

    data = quantize.read_calibration(artifact, config, calibration)
    key = quantize.fingerprint(artifact, config, data)
    return _Plan(
        key,
        artifact.manifest.source.name,
        lambda path: quantize.run(artifact, config, path, data=data, key=key, progress=progress),
    )


def _plan_build(
    artifact: Artifact, config: BuildConfig, progress: Progress, *, out: str, force: bool
) -> _Plan | None:
    """Return None if the artifact has all requested engines, and so is itself the result."""
    require_stages([("build", config)])
    from enginery.engine import stage as build
    from enginery.engine.requests import resolve_requests

    requested = resolve_requests(artifact, config, force=force)
    if not force and build.find_finished(artifact, requested) is not None:
        progress.say(f"build: nothing to do, {artifact.name} has the engines")
        return None
    if lost := build.engines_lost(artifact, requested, Path(out)) if out else []:
        progress.say(
            f"build: engines of {out} that {artifact.name} does not have are replaced: "
            f"{', '.join(lost)}. To add to them, build from {out}."
        )
    key = build.fingerprint(artifact, config, requested)
    return _Plan(
        key,
        artifact.manifest.source.name,
        lambda path: build.run(
            artifact, config, path, requested=requested, key=key, progress=progress
        ),
    )


def run_validate(
    artifact: Artifact,
    config: ValidateConfig,
    *,
    force: bool = False,
    progress: Progress = SILENT,
) -> StageResult:
    """Validate an artifact, or take the verdict from an earlier validation that still holds.

    Raises:
        EngineryError: the comparison cannot be made; see `validate.stage.run`.
    """
    is_onnx = artifact.manifest.source.kind == "onnx"
    require_stages([("validate", config)], is_onnx=is_onnx)
    from enginery.validate import stage as validate

    started = time.monotonic()
    remove_temporary()
    with os_errors_as(EngineryError, f"{artifact.path} cannot be validated"):
        report = None if force else validate.find_finished(artifact, config)
        worked = report is None
        if report is None:
            progress.say(f"validate: {_why_validate(artifact, config, force=force)}")
            report = validate.run(artifact, config, progress=progress)
        else:
            verdict = "passed" if report.passed else "failed"
            progress.say(
                f"validate: nothing to do, {artifact.name} {verdict} with the same options"
            )
    seconds = time.monotonic() - started
    return StageResult(validate.STAGE, Artifact.open(artifact.path), worked, seconds, report)


def _why_validate(artifact: Artifact, config: ValidateConfig, *, force: bool) -> str:
    from enginery.validate import stage as validate

    verdict = artifact.manifest.verdict(validate.STAGE)
    if force:
        return "validating again because of --force"
    if verdict is None:
        return f"{artifact.name} has no verdict yet"
    changes = validate.fingerprint(artifact, config).changes(verdict.fields)
    return (
        f"validating again: {'; '.join(changes) or 'its report is missing or from another machine'}"
    )


def deliver(
    artifact: Artifact, out: Path, progress: Progress, *, checked: Sequence[str] = ()
) -> Artifact:
    """Copy an artifact to `out`, unless the same one is there, and return the copy.

    An artifact at `out` with the same model keeps verdicts that only it has. If both artifacts have
    a verdict from the same stage, the newer one stays. Verdicts from the stages in `checked`, which
    have just run, always replace those at `out`.
    """
    with (
        os_errors_as(ArtifactError, f"{out} cannot be written", do="Choose another --out."),
        ExitStack() as stack,
    ):
        parent = out.resolve().parent
        make_directory(parent)
        if os.access(parent, os.W_OK):  # else the same artifact may be there, and nothing to do
            waiting = f"waiting: another process writes {out}"
            stack.enter_context(locked(out, lambda: progress.say(waiting)))
        return _deliver(artifact, out, progress, checked)


def _deliver(artifact: Artifact, out: Path, progress: Progress, checked: Sequence[str]) -> Artifact:
    remove_leftovers(out.parent, out.name)  # a copy that is up to date is not written again
    try:
        present = Artifact.open(out)
    except ArtifactError:
        present = None
    same_model = present is not None and present.manifest.files == artifact.manifest.files
    verdicts = {verdict.stage: (verdict, artifact) for verdict in artifact.manifest.verdicts}
    if present is not None and same_model:
        for verdict in present.manifest.verdicts:
            mine = verdicts.get(verdict.stage)
            newer = mine is None or mine[0].finished <= verdict.finished
            if newer and verdict.stage not in checked:
                verdicts[verdict.stage] = (verdict, present)
    # Reports are read before the copy below replaces the directory that holds them.
    reports = {
        stage: _report_bytes(holder, verdict) for stage, (verdict, holder) in verdicts.items()
    }
    if present is None or not same_model or present.manifest.stages != artifact.manifest.stages:
        is_other = present is not None and not _is_earlier(present, artifact)
        replaced = f", in place of {_contents(present)}" if present and is_other else ""
        present = artifact.copy_to(out)
        progress.say(f"wrote {out}{replaced}")
    for stage, (verdict, _) in verdicts.items():
        if verdict not in present.manifest.verdicts:
            present = present.annotate(verdict, reports[stage])
    if "bench" in checked:
        measured = {
            name: (artifact.path / name).read_bytes()
            for name, record in artifact.manifest.reports.items()
            if name not in {verdict.report for verdict in artifact.manifest.verdicts}
            and present.manifest.reports.get(name) != record
        }
        present = present.annotate(reports=measured) if measured else present
    return present


def _is_earlier(earlier: Artifact, artifact: Artifact) -> bool:
    """Return True if an artifact is of the same model and task, after the same or fewer stages."""
    before, after = earlier.manifest, artifact.manifest
    stages = [record.stage for record in before.stages]
    return (before.source.name, before.task) == (after.source.name, after.task) and stages == [
        record.stage for record in after.stages[: len(stages)]
    ]


def _contents(artifact: Artifact) -> str:
    """Return the model, the task and the stages of an artifact, for a message."""
    manifest = artifact.manifest
    stages = ", ".join(record.stage for record in manifest.stages)
    return f"{manifest.source.name} for {manifest.task} ({stages})"


def _report_bytes(artifact: Artifact, verdict: Verdict) -> bytes | None:
    """Return a verdict's report; None if it was removed, because the verdict holds without it."""
    file = artifact.report(PurePosixPath(verdict.report).relative_to(REPORTS).as_posix())
    return file.read_bytes() if file else None
