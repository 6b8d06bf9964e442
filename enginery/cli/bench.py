"""The commands bench and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.bench.config import BenchConfig
from enginery.cli.app import OUTPUT, Out, Output
from enginery.cli.app import application as app

_DEFAULT = BenchConfig()


@app.command
def bench(
    *models: Path,
    out: Out = "",
    config: Annotated[BenchConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Measure latency, throughput and memory, and compare with PyTorch, ONNX Runtime and Optimum.

    Parameters
    ----------
    models
        Artifacts' directories or .onnx files; several are compared with one another.
    out
        Where `reports/` goes; empty for the artifacts themselves.
    """
    from enginery.api import bench_model
    from enginery.cli.render import show_output

    console = output.console()
    result = bench_model(*models, out=out, progress=console, config=config)
    console.json(result.as_json())
    show_output(console, result)


@app.command
def report(artifact: Path, *, output: Output = OUTPUT) -> None:
    """Write the report page of an artifact again, from the reports that it has.

    Parameters
    ----------
    artifact
        The artifact's directory.
    """
    from enginery.bench.report.page import write_report

    console = output.console()
    page = write_report(artifact)
    console.json({"page": str(page)})
    console.line(f"wrote {page}")
