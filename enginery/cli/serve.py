"""The command serve."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Output
from enginery.cli.app import application as app
from enginery.serve.config import ServeConfig, require_packages

_DEFAULT = ServeConfig()


@app.command
def serve(
    *artifacts: str,
    config: Annotated[ServeConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Serve artifacts over HTTP: Open Inference Protocol, text-embeddings-inference, OpenAI.

    Events are logged to standard error, with --json as one JSON document a line; requests are
    logged to standard output.

    Parameters
    ----------
    artifacts
        Artifacts' directories, each PATH or NAME=PATH; without a name, that of the publication, of
        the directory or of the source model.
    """
    require_packages()  # before the server's modules are imported
    from enginery.serve.server import serve_models

    status = serve_models(artifacts, config, as_json=output.json, quiet=output.quiet)
    if status:
        sys.exit(status)
