"""Commands that measure: bench, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.bench.config import BenchConfig
from enginery.cli.app import OUTPUT, Out, Output
from enginery.cli.app import application as app
from enginery.cli.results import result_json, show_result

_BENCH = BenchConfig()


@app.command
def bench(
    *models: Path,
    out: Out = "",
    config: Annotated[BenchConfig, Parameter(name="*")] = _BENCH,
    output: Output = OUTPUT,
) -> None:
    """Measure latency, throughput and memory, beside PyTorch, ONNX Runtime and Optimum.

    Parameters
    ----------
    models
        Artifacts' directories or .onnx files; several are compared with one another.
    out
        Where `reports/` goes; empty for the artifacts themselves.
    """
    from enginery.api import bench_model
    from enginery.core.options import options_dict

    console = output.console()
    result = bench_model(*models, out=out, progress=console, **options_dict(config))
    console.json(result_json("bench", result))
    show_result(console, "bench", result)


@app.command
def report(artifact: Path, *, output: Output = OUTPUT) -> None:
    """Make the report page of an artifact anew, from what it has.

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
