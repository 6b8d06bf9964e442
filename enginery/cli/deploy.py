"""The commands for other servers: export-triton, export-kserve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Output
from enginery.cli.app import application as app
from enginery.cli.results import result_json, show_result
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.triton.options import TritonConfig

_TRITON = TritonConfig()


@app.command(name="export-triton")
def export_triton(
    artifact: Path,
    directory: Path,
    *,
    config: Annotated[TritonConfig, Parameter(name="*")] = _TRITON,
    output: Output = OUTPUT,
) -> None:
    """Make models of an artifact for NVIDIA Triton: texts in and answers out, or the graph alone.

    No Triton server has loaded them yet; their configurations fit its model_config.proto.

    Parameters
    ----------
    artifact
        The artifact's directory.
    directory
        The model repository; models of others in it stay as they are.
    """
    from enginery.api import export_triton as export
    from enginery.core.options import options_dict

    console = output.console()
    made = export(artifact, directory, progress=console, **options_dict(config))
    console.json(result_json("export-triton", made))
    show_result(console, "export-triton", made)


@app.command(name="export-kserve")
def export_kserve(
    artifact: Path,
    directory: Path,
    *,
    config: Annotated[KserveConfig, Parameter(name="*")],
    output: Output = OUTPUT,
) -> None:
    """Write the manifest of a KServe InferenceService: `enginery serve`, or Triton.

    No cluster has been given one yet; it fits the schema of KServe v0.20.0.

    Parameters
    ----------
    artifact
        The artifact's directory.
    directory
        Where inferenceservice.yaml goes.
    """
    from enginery.api import export_kserve as export
    from enginery.core.options import options_dict

    console = output.console()
    made = export(artifact, directory, progress=console, **options_dict(config))
    console.json(result_json("export-kserve", made))
    show_result(console, "export-kserve", made)
