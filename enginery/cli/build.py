"""The command build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Out, Output
from enginery.cli.app import application as app
from enginery.engine.config import BuildConfig

_DEFAULT = BuildConfig()


@app.command
def build(
    artifact: Path,
    out: Out = "",
    *,
    force: Flag = False,
    config: Annotated[BuildConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Build TensorRT engines of an artifact's graphs, for the given GPUs and shapes.

    TensorRT for RTX needs no GPU for that.

    Parameters
    ----------
    artifact
        The artifact's directory.
    out
        Where the artifact with the engines goes; the artifact's own directory adds them to it.
        Empty for the store.
    force
        Build even if there are finished engines.
    """
    from enginery.api import build_engine
    from enginery.cli.render import artifact_json, open_engines, stage_notes
    from enginery.reports.engines import built_engine, engine_rows

    console = output.console()
    built = build_engine(artifact, out=out, force=force, progress=console, config=config)
    engines = open_engines(built)
    console.json(artifact_json(built, engines))
    rows = engine_rows([built_engine(engine) for engine in engines])
    console.table(f"Engines in {built.path}", rows)
    for note in stage_notes(built, "build"):
        console.line(f"note: {note}")
