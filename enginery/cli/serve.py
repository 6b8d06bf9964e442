"""The command that answers over HTTP: serve."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Output
from enginery.cli.app import application as app
from enginery.serve.config import ServeConfig

_SERVE = ServeConfig()


@app.command
def serve(
    *artifacts: str,
    config: Annotated[ServeConfig, Parameter(name="*")] = _SERVE,
    output: Output = OUTPUT,
) -> None:
    """Answer over HTTP: Open Inference Protocol, text-embeddings-inference, OpenAI embeddings.

    What happens is said on standard error, with --json as a JSON document a line; requests are
    logged to standard output.

    Parameters
    ----------
    artifacts
        Artifacts' directories, each PATH or NAME=PATH; a bare path is served by its last part.
    """
    from enginery.serve.server import serve_models

    status = serve_models(artifacts, config, as_json=output.json, quiet=output.quiet)
    if status:
        sys.exit(status)
