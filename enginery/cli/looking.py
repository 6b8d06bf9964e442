"""Commands that look: validate, lint, inspect, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.core.errors import CheckFailedError
from enginery.doctor.config import DoctorConfig
from enginery.validate.config import ValidateConfig

_DOCTOR = DoctorConfig()
_VALIDATE = ValidateConfig()


@app.command
def validate(
    artifact: Path,
    *,
    force: Flag = False,
    config: Annotated[ValidateConfig, Parameter(name="*")] = _VALIDATE,
    output: Output = OUTPUT,
) -> None:
    """Compare an artifact's outputs with PyTorch.

    Parameters
    ----------
    artifact
        The artifact's directory.
    force
        Validate although a verdict with the same options is there.
    """
    from enginery import show
    from enginery.core.options import options_dict
    from enginery.pipeline import validate_model

    console = output.console()
    report = validate_model(artifact, force=force, progress=console, **options_dict(config))
    console.json(show.report_json(report))
    # A person sees what is worst; a pipe, and -v, every case.
    every = console.verbose or not console.is_terminal
    for graph, rows in show.validation_tables(report, every=every).items():
        console.table(f"{graph} against PyTorch", rows)
    for line in show.report_lines(report):
        console.line(line)
    if not report.passed:
        raise CheckFailedError(f"{artifact} failed its validation: {report.summary}")


@app.command
def lint(
    model: Path,
    *,
    target: Literal["tensorrt", "cuda"] = "tensorrt",
    output: Output = OUTPUT,
) -> None:
    """Say what TensorRT or CUDA would not take of any ONNX model, and how to mend it.

    Parameters
    ----------
    model
        An .onnx file, whoever made it, or an artifact's directory.
    target
        Who is to run it.
    """
    from enginery.core.artifact import Artifact
    from enginery.passes.lint import lint_onnx

    console = output.console()
    paths = [model]
    if model.is_dir():
        opened = Artifact.open(model)
        paths = [opened.path / graph.file for graph in opened.manifest.graphs]
    reports = [lint_onnx(path, target=target) for path in paths]
    console.json({"graphs": [report.as_json() for report in reports]})
    for report in reports:
        console.table(report.path, report.rows())
        console.line(report.summary)
    for report in reports:
        report.require_passed()


@app.command
def inspect(artifact: Path, *, verify: Flag = False, output: Output = OUTPUT) -> None:
    """Show what an artifact is, how it was made, and what was found about it.

    Parameters
    ----------
    artifact
        The artifact's directory.
    verify
        Read every file again instead of trusting its size and times.
    """
    from enginery import show
    from enginery.core.artifact import Artifact

    console = output.console()
    opened = Artifact.open(artifact, verify=verify)
    console.json(show.artifact_json(opened))
    console.table(str(artifact), show.artifact_rows(opened))
    console.table("Inputs and outputs", show.interface_rows(opened))
    console.table("Made by", show.stage_rows(opened))
    console.table("Files", show.file_rows(opened))


@app.command
def doctor(
    *, config: Annotated[DoctorConfig, Parameter(name="*")] = _DOCTOR, output: Output = OUTPUT
) -> None:
    """Show what this machine can run, and what to install to run more."""
    from enginery.doctor.stage import examine

    console = output.console()
    report = examine(config, progress=console)
    console.json(report.as_json())
    for table in report.tables():
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        console.table(table.title, rows)
    if config.require:
        report.require(config.require)
