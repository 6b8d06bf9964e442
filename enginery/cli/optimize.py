"""The command optimize."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Out, Output
from enginery.cli.app import application as app
from enginery.core.errors import CheckFailedError
from enginery.optimize.config import OptimizeConfig

_DEFAULT = OptimizeConfig()


@app.command
def optimize(
    artifact: Path,
    out: Out = "",
    *,
    force: Flag = False,
    config: Annotated[OptimizeConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Optimize an artifact for CUDA, TensorRT or the CPU: fusions, FP16 or BF16.

    Parameters
    ----------
    artifact
        The directory of an FP32 artifact.
    out
        Where the new artifact goes; empty for the store.
    force
        Optimize even if there is a finished artifact.
    """
    from enginery.api import optimize_model
    from enginery.cli.render import show_new_artifact

    console = output.console()
    optimized = optimize_model(artifact, out=out, force=force, progress=console, config=config)
    show_new_artifact(console, optimized, "Optimized")
    verdict = optimized.manifest.verdict("optimize")
    if verdict and not verdict.passed:
        raise CheckFailedError(f"{optimized.path}: {verdict.summary}")
