"""The commands export-triton and export-kserve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Output
from enginery.cli.app import application as app
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.triton.options import TritonConfig

_TRITON = TritonConfig()


@app.command(name="export-triton")
def export_triton(
    artifact: Path,
    out: Path,
    *,
    config: Annotated[TritonConfig, Parameter(name="*")] = _TRITON,
    output: Output = OUTPUT,
) -> None:
    """Write models for NVIDIA Triton: from texts to results, or only the graph.

    Parameters
    ----------
    artifact
        The artifact's directory.
    out
        The model repository; other models in it stay as they are.
    """
    from enginery.api import export_triton as export
    from enginery.cli.render import show

    console = output.console()
    exported = export(artifact, out, progress=console, config=config)
    console.json(exported.as_json())
    show(console, exported.rows())


@app.command(name="export-kserve")
def export_kserve(
    artifact: Path,
    out: Path,
    *,
    config: Annotated[KserveConfig, Parameter(name="*")],
    output: Output = OUTPUT,
) -> None:
    """Write the manifest of a KServe InferenceService that runs `enginery serve`.

    Parameters
    ----------
    artifact
        The artifact's directory.
    out
        Where inferenceservice.yaml goes.
    """
    from enginery.api import export_kserve as export
    from enginery.cli.render import show

    console = output.console()
    exported = export(artifact, out, progress=console, config=config)
    console.json(exported.as_json())
    show(console, exported.rows())
