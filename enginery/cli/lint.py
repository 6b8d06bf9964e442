"""The command lint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from enginery.cli.app import OUTPUT, Output
from enginery.cli.app import application as app


@app.command
def lint(
    model: Path,
    *,
    target: Literal["tensorrt", "cuda"] = "tensorrt",
    output: Output = OUTPUT,
) -> None:
    """Check any ONNX model for what TensorRT or CUDA would reject, and say how to fix it.

    Parameters
    ----------
    model
        An .onnx file from any tool, or an artifact's directory.
    target
        The runtime to check for.
    """
    from enginery.api import lint_model
    from enginery.cli.render import show
    from enginery.passes.lint.findings import LintReports

    console = output.console()
    reports = LintReports(lint_model(model, target=target))
    console.json(reports.as_json())
    show(console, reports.rows())
    for report in reports:
        report.require_passed()
