"""The command doctor."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Output
from enginery.cli.app import application as app
from enginery.doctor.config import DoctorConfig

_DEFAULT = DoctorConfig()


@app.command
def doctor(
    *, config: Annotated[DoctorConfig, Parameter(name="*")] = _DEFAULT, output: Output = OUTPUT
) -> None:
    """Show what this machine can run, and what to install to run more."""
    from enginery.cli.render import show
    from enginery.doctor.stage import examine

    console = output.console()
    report = examine(config, progress=console)
    console.json(report.as_json())
    show(console, report.tables())
    if config.require:
        report.require(config.require)
