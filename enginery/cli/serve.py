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
        the directory or of the source model. In place of a path also a model, as for `export`,
        which is exported and validated on its first use.
    """
    require_packages()  # before the server's modules are imported
    from enginery.first_use import names_model, open_or_make
    from enginery.serve.server import serve_models

    paths = []
    for artifact in artifacts:
        name, equals, path = artifact.partition("=")
        name, path = (name, path) if equals else ("", artifact)
        if names_model(path):
            path = str(open_or_make(path, progress=output.console()).path)
        paths.append(f"{name}{equals}{path}")
    status = serve_models(paths, config, as_json=output.json, quiet=output.quiet)
    if status:
        sys.exit(status)
