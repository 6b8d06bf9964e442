"""`enginery serve`: artifacts, named, behind one server.

Takes artifacts and options; leaves nothing on disk but the optimized graph in the store.

    status = serve_models(["build/minilm", "spam=build/classifier"], ServeConfig(port=8000))

The parent that starts the worker processes imports nothing heavy: see `server.py`.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from enginery.core.errors import ArtifactError, MissingPackageError, OptionError
from enginery.core.staging import MANIFEST
from enginery.serve.config import ServeConfig, check_options

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from enginery.serve.lifecycle import ProcessLifecycle

_PACKAGES = (
    "httptools", "orjson", "prometheus_client", "python_multipart", "starlette", "uvicorn",
)  # fmt: skip


def serve_models(
    artifacts: Sequence[str | Path],
    config: ServeConfig,
    *,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Serves until SIGTERM or SIGINT; the exit status, as `server.run` gives it.

    Args:
        artifacts: directories, each `path` or `name=path`; the name of a bare path is its last
            part.
        config: where to listen, how to batch, what to refuse.
        as_json: what is said on standard error is a JSON document a line.
        quiet: errors alone are said.

    Raises:
        OptionError: an option does not fit, or a name is there twice.
        ProviderError: no execution provider has a name that is asked for.
        ArtifactError: a directory is not an artifact.
        MissingPackageError: a package of the extra `serve` is not installed.
        EngineryError: the address cannot be listened on.
    """
    check_options(config)
    require_packages()
    paths = named_paths(artifacts)
    from enginery.runtime.provider_wish import parse_wishes
    from enginery.serve.http_sockets import bind
    from enginery.serve.keys import Keys
    from enginery.serve.server import log_config, run, uvicorn_config

    # What is wrong of these is said before anything is started; whether a provider can be had is
    # for the worker to see, which imports it.
    Keys.from_config(config, os.environ)
    parse_wishes(config.provider, config.provider_option, default="cpu")
    sockets = bind(config.host, config.port)
    options = uvicorn_config(
        functools.partial(worker_application, paths, config),
        config,
        log_config=log_config(as_json=as_json, quiet=quiet),
    )
    return run(options, sockets, config)


def worker_application(
    paths: Mapping[str, Path], config: ServeConfig, lifecycle: ProcessLifecycle
) -> Starlette:
    """Return the application of a worker process; its lifespan loads the models."""
    # Modules are no garbage, and until the models are loaded there is little else to look through.
    # `app.load` turns it on.
    gc.disable()
    # pydantic reads the metadata of all installed packages for plugins, which we have none of.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from enginery.serve.app import make_app

    return make_app(paths, config, lifecycle)


def named_paths(artifacts: Sequence[str | Path]) -> dict[str, Path]:
    """Artifacts' directories by the names under which they are served.

    Raises:
        OptionError: there is none, a name is there twice, or cannot stand in a path.
        ArtifactError: a directory is not an artifact.
    """
    if not artifacts:
        raise OptionError("no artifact is named.", do="enginery serve build/minilm")
    paths: dict[str, Path] = {}
    for given in artifacts:
        name, equals, rest = str(given).partition("=")
        path = Path(rest if equals else given)
        if not (path / MANIFEST).is_file():
            raise ArtifactError(
                f"{path} is not an artifact: it has no {MANIFEST}.",
                do="Make one: enginery export MODEL --out DIR",
            )
        if not equals:  # a link is called by its own name
            name = path.name if path.name not in ("", "..") else path.resolve().name
        if not name or not all(letter.isalnum() or letter in "._-" for letter in name):
            raise OptionError(
                f"'{name}' is no name for a model: letters, digits, '.', '_' and '-' are.",
                do=f"Name it: enginery serve model={path}",
            )
        if name in paths:
            raise OptionError(
                f"two artifacts are called '{name}': {paths[name]} and {path}.",
                do=f"Name one of them: other={path}",
            )
        paths[name] = path
    return paths


def require_packages() -> None:
    """Raises MissingPackageError unless the extra `serve` is installed."""
    from importlib.util import find_spec

    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingPackageError(package, extra="serve", purpose="Serving")
