"""The command validate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.core.errors import CheckFailedError
from enginery.validate.config import ValidateConfig

_DEFAULT = ValidateConfig()


@app.command
def validate(
    artifact: Path,
    *,
    force: Flag = False,
    config: Annotated[ValidateConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Compare an artifact's outputs with PyTorch, or with the .onnx file it was imported from.

    Parameters
    ----------
    artifact
        The artifact's directory.
    force
        Validate even if there is a verdict with the same options.
    """
    from enginery.api import validate_model
    from enginery.cli.render import show

    console = output.console()
    report = validate_model(artifact, force=force, progress=console, config=config)
    console.json(report.as_json())
    show(console, report.rows(every=console.verbose))
    if not report.passed:
        raise CheckFailedError(f"{artifact} failed its validation: {report.summary}")
