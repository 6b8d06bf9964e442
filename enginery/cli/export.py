"""The command export."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Out, Output
from enginery.cli.app import application as app
from enginery.export.config import ExportConfig

_DEFAULT = ExportConfig()


@app.command
def export(
    model: str,
    out: Out = "",
    *,
    force: Flag = False,
    config: Annotated[ExportConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Export a model to an ONNX artifact.

    Parameters
    ----------
    model
        A Hub id (org/name or org/name@revision), a directory, an .onnx file or package:NAME.
    out
        Where the artifact goes; empty for the store.
    force
        Export even if there is a finished artifact.
    """
    from enginery.api import export_model
    from enginery.cli.render import artifact_json, show_stages, stage_notes
    from enginery.reports.artifact import artifact_rows

    console = output.console()
    artifact = export_model(model, out=out, force=force, progress=console, config=config)
    console.json(artifact_json(artifact))
    console.table(f"Exported to {artifact.path}", artifact_rows(artifact))
    for note in stage_notes(artifact, "export"):
        console.line(f"note: {note}")
    if console.verbose:
        show_stages(console, artifact)
