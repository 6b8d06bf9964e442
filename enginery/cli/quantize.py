"""The command quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Out, Output
from enginery.cli.app import application as app
from enginery.quantize.config import QuantizeConfig

_DEFAULT = QuantizeConfig()


@app.command
def quantize(
    artifact: Path,
    out: Out = "",
    *,
    force: Flag = False,
    config: Annotated[QuantizeConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Quantize an artifact to INT8 or FP8 for TensorRT, or to INT8 for the CPU, within a budget.

    Parameters
    ----------
    artifact
        The directory of an FP32 artifact that no other stage has changed.
    out
        Where the new artifact goes; empty for the store.
    force
        Quantize even if there is a finished artifact.
    """
    from enginery.api import quantize_model
    from enginery.cli.render import show_new_artifact

    console = output.console()
    quantized = quantize_model(artifact, out=out, force=force, progress=console, config=config)
    show_new_artifact(console, quantized, "Quantized")
