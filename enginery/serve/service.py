"""`enginery serve`: artifacts, named, behind one server.

Takes artifacts and options; leaves nothing on disk but the optimized graph in the store.

    status = serve_models(["build/minilm", "spam=build/classifier"], ServeConfig(port=8000))

The parent that starts the worker processes imports nothing heavy: see `server.py`.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from enginery.core.errors import ArtifactError, MissingPackageError, OptionError
from enginery.core.staging import MANIFEST
from enginery.serve.config import ServeConfig, check_options

if TYPE_CHECKING:
    from enginery.serve.asgi import AsgiApp
    from enginery.serve.lifecycle import ProcessLifecycle
    from enginery.serve.messages import Application

_PACKAGES = ("httptools", "orjson", "prometheus_client", "python_multipart", "uvicorn")

_log = logging.getLogger("enginery.serve")


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
) -> AsgiApp:
    """Makes the application in a worker process; its lifespan loads the models."""
    # Modules are no garbage, and until the models are loaded there is little else to look through.
    # `ModelService.load` turns it on.
    gc.disable()
    # pydantic reads the metadata of all installed packages for plugins, which we have none of.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from enginery.serve.asgi import served_app

    return served_app(paths, config, lifecycle)


class ModelService:
    """The models with all that is around them."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        config: ServeConfig,
        *,
        replace: Callable[[str], None] | None = None,
    ) -> None:
        """Loads nothing yet; a loop is running.

        Args:
            paths: artifacts by name.
            config: the options of the server.
            replace: replaces the process where a model is stuck or its provider gone; None where
                somebody else minds it.
        """
        import asyncio

        from enginery.serve.access_log import AccessLog
        from enginery.serve.application import ServerApplication
        from enginery.serve.metrics import Metrics
        from enginery.serve.models import Models
        from enginery.serve.tracing import Tracing

        # Lists of texts are spread over threads by `readers`, a pool for each model. Those of
        # tokenizers are one pool for all: a text that does not come to an end holds up everybody.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.metrics = Metrics()
        self.models = Models(
            paths, config, asyncio.get_running_loop(), on_batch=self.metrics.batch,
            on_broken=replace,
        )  # fmt: skip
        self.metrics.watch_models(lambda: self.models)
        access_log = self._access_log = AccessLog.from_option(config.access_log)
        if access_log is not None:
            self.metrics.watch_dropped_lines(lambda: access_log.dropped)
        self._tracing = Tracing.from_environment()
        self.application: Application = ServerApplication(
            self.models, config, metrics=self.metrics, access_log=self._access_log,
            tracing=self._tracing,
        )  # fmt: skip

    async def load(self) -> None:
        """Loads the models; raises what `Models.load` raises."""
        import asyncio

        from enginery.serve.verdicts import verdict_warning, verdict_words

        await self.models.load()
        if not gc.isenabled():
            gc.freeze()  # what is there stays: no collection has to look through it again
            gc.enable()
        for model in self.models:
            first = model.info()["providers"][0]
            why = "" if first["reason"] == "asked for" else f" ({first['reason']})"
            _log.info(
                "ready: %s, %s, %s on %s%s, %s",
                model.name, model.task, model.artifact.manifest.precision, first["name"], why,
                verdict_words(model.artifact),
            )  # fmt: skip
            if warning := verdict_warning(model.name, model.artifact):
                _log.warning("%s", warning)
        # What writes metrics is imported here, beside the first requests, for the first scrape.
        asyncio.get_running_loop().run_in_executor(None, self.metrics.exposition)

    def drain(self) -> None:
        """Readiness is off from here on."""
        self.models.draining = True

    async def reload(self) -> None:
        """Opens the artifacts again from where they are, and says what happened to each."""
        from enginery.serve.verdicts import verdict_warning, verdict_words

        for name, happened in (await self.models.reload()).items():
            if not happened.swapped:
                _log.error("%s: %s", name, happened.text)
                continue
            artifact = self.models.get(name).artifact
            _log.info("%s: %s, %s", name, happened.text, verdict_words(artifact))
            if warning := verdict_warning(name, artifact):
                _log.warning("%s", warning)

    async def close(self) -> None:
        """Frees the models, and writes what is left of the log, though a model may be stuck."""
        try:
            await self.models.close()
        finally:
            if self._access_log is not None:
                self._access_log.close()
            if self._tracing is not None:
                self._tracing.close()


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
