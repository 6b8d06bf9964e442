"""All models of a server: found by name, reloaded without losing a request, watched.

>>> models = Models({"minilm": Path("build/minilm")}, ServeConfig(), loop)
>>> await models.load()
>>> models.get("minilm").state
'ready'
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from enginery.core.errors import EngineryError, nearest
from enginery.serve.config import ServeConfig
from enginery.serve.hosted import HostedModel
from enginery.serve.refusals import InvalidInputError, NotFoundError, UnavailableError

_log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0


class Models:
    """The models of one server, in the order they were given."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: Callable[..., None] | None = None,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            paths: artifacts' directories by the names that routes call them.
            config: the options of the server.
            loop: where requests are answered.
            on_batch: told of each batch, as `HostedModel` says.
            on_broken: told in words of a model whose batch does not end, or whose provider is gone.
        """
        self.draining = False
        self._config, self._loop = config, loop
        self._on_batch, self._on_broken = on_batch, on_broken
        self._models = {name: self._new(name, path) for name, path in paths.items()}
        self._watching: asyncio.Task[None] | None = None
        self._reloading = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    @property
    def ready(self) -> bool:
        """Whether every model answers and the server is to go on."""
        return not self.draining and all(model.state == "ready" for model in self)

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(list(self._models.values()))

    def get(self, name: str) -> HostedModel:
        """The model of that name.

        Raises:
            NotFoundError: there is none.
        """
        if name in self._models:
            return self._models[name]
        raise NotFoundError(
            f"there is no model '{name}'{nearest(name, self._models)}",
            do=f"Models: {', '.join(self._models)}.",
        )

    def only(self, name: str = "") -> HostedModel:
        """The model of that name; without a name the only one.

        Raises:
            NotFoundError: there is none of that name.
            InvalidInputError: there are several, and no name was given.
        """
        if name:
            return self.get(name)
        if len(self._models) > 1:
            raise InvalidInputError(
                f"the server has {len(self._models)} models, and none was named.",
                do=f"Name one of {', '.join(self._models)}.",
            )
        return next(iter(self._models.values()))

    async def load(self) -> None:
        """Loads all models, side by side.

        Raises:
            EngineryError: one cannot be loaded; the others are closed.
        """
        threads = ThreadPoolExecutor(len(self._models) or 1, thread_name_prefix="enginery-load")
        try:
            loading = [self._loop.run_in_executor(threads, model.load) for model in self]
            found = await asyncio.gather(*loading, return_exceptions=True)
        finally:
            threads.shutdown(wait=False)
        for failed in found:
            if isinstance(failed, BaseException):
                raise failed
        self._watching = self._loop.create_task(self._watch())

    async def reload(self, name: str = "") -> dict[str, str]:
        """Opens artifacts again from where they are, and swaps those that load.

        Requests that wait are answered by what they were sent to; new ones go to the new model as
        soon as it is ready. What cannot be loaded changes nothing.

        Returns:
            For each model what happened to it.

        Raises:
            NotFoundError: there is no model of that name.
            UnavailableError: the server is about to end, or reloads already.
        """
        if self.draining:
            raise UnavailableError("the server is about to end.")
        if self._reloading.locked():
            raise UnavailableError("models are being reloaded.", retry_after_seconds=1)
        names = (self.get(name).name,) if name else self.names
        async with self._reloading:
            return {name: await self._reload(name) for name in names}

    async def _reload(self, name: str) -> str:
        old = self._models[name]
        new = self._new(name, old.path)
        try:
            await self._loop.run_in_executor(None, new.load)
        except EngineryError as error:
            await new.close(drain=False)
            _log.error("%s was not reloaded: %s", name, error)
            return f"not reloaded: {error}"
        if self.draining:
            await new.close(drain=False)
            return "not reloaded: the server is about to end"
        self._models[name] = new
        closing = self._loop.create_task(old.close(timeout_seconds=self._config.grace))
        _CLOSING.add(closing)
        closing.add_done_callback(_CLOSING.discard)
        before, now = _content(old), _content(new)
        return "reloaded, of the same content" if before == now else f"reloaded: {before} → {now}"

    async def close(self) -> None:
        """Answers what waits, and frees everything."""
        self.draining = True
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(model.close(timeout_seconds=self._config.grace) for model in self))

    async def _watch(self) -> None:
        told: set[str] = set()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for model in self:
                model.watch()
                if model.state not in ("stuck", "failed"):
                    told.discard(model.name)
                elif model.name not in told:
                    told.add(model.name)
                    _log.error("%s is %s: %s", model.name, model.state, model.reason)
                    if self._on_broken:
                        self._on_broken(f"{model.name}: {model.reason}")

    def _new(self, name: str, path: Path) -> HostedModel:
        return HostedModel(name, path, self._config, self._loop, on_batch=self._on_batch)


_CLOSING: set[asyncio.Task[None]] = set()
"""Models that answer their last requests; a task that nobody holds may be collected."""


def _content(model: HostedModel) -> str:
    return model.artifact.content_sha256()[:12]
