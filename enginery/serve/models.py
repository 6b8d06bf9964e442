"""All models of a server: found by name, reloaded without losing a request, watched.

>>> models = Models({"minilm": Path("build/minilm")}, ServeConfig(), loop)
>>> await models.load()
>>> models.get("minilm").state
'ready'
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from enginery.core.errors import EngineryError, nearest
from enginery.serve.config import ServeConfig
from enginery.serve.hosted import HostedModel
from enginery.serve.refusals import InvalidInputError, NotFoundError, UnavailableError

_log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0

Made = TypeVar("Made")


@dataclass(frozen=True)
class Reloaded:
    """What happened to a model that was to be reloaded."""

    swapped: bool
    text: str

    def __str__(self) -> str:
        return self.text


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
        self._tasks: set[asyncio.Task[Any]] = set()

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

    def only(
        self, name: str = "", fits: Callable[[HostedModel], bool] | None = None
    ) -> HostedModel:
        """The model of that name; without a name the only one, or of several the only that fits.

        Args:
            name: as routes call it.
            fits: whether a model can answer; None where every one can.

        Raises:
            NotFoundError: there is none of that name.
            InvalidInputError: no name was given, and several fit, or of several none.
            UnavailableError: one of several is being loaded: whether it fits is not known yet.
        """
        if name:
            return self.get(name)
        several = found = list(self._models.values())
        if fits is not None and len(several) > 1:
            found = [model for model in several if fits(model)]
        if len(found) == 1:
            return found[0]
        if not found:
            tasks = ", ".join(f"{model.name} ({model.task})" for model in several)
            raise InvalidInputError(
                f"none of the server's {len(several)} models answers this route.",
                do=f"Models: {tasks}.",
            )
        can = " that can answer" if fits is not None else ""
        raise InvalidInputError(
            f"the server has {len(found)} models{can}, and none was named.",
            do=f"Name one of {', '.join(model.name for model in found)}.",
        )

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

    async def reload(self, name: str = "") -> dict[str, Reloaded]:
        """Opens artifacts again from where they are, and swaps those that load.

        Requests that wait are answered by what they were sent to; new ones go to the new model as
        soon as it is ready. What cannot be loaded changes nothing.

        Returns:
            For each model what happened to it.

        Raises:
            NotFoundError: there is no model of that name.
            UnavailableError: the server is about to end, or loads or reloads already.
        """
        if self.draining:
            raise UnavailableError("the server is about to end.")
        if self._reloading.locked():
            raise UnavailableError("models are being reloaded.", retry_after_seconds=1)
        names = (self.get(name).name,) if name else self.names
        for each in names:
            if self._models[each].state == "loading":
                raise UnavailableError(f"{each} is still being loaded.", retry_after_seconds=1)
        # A client that has gone must not leave a model half swapped.
        return await asyncio.shield(self._begin(self._reload_all(names)))

    async def _reload_all(self, names: Sequence[str]) -> dict[str, Reloaded]:
        async with self._reloading:
            return {name: await self._reload(name) for name in names}

    async def _reload(self, name: str) -> Reloaded:
        old = self._models[name]
        before = _content(old)
        new = self._new(name, old.path)
        try:
            await self._loop.run_in_executor(None, new.load)
        except EngineryError as error:
            await new.close(drain=False)
            return Reloaded(swapped=False, text=f"not reloaded: {error}")
        except BaseException:
            await new.close(drain=False)
            raise
        if self.draining:
            await new.close(drain=False)
            return Reloaded(swapped=False, text="not reloaded: the server is about to end")
        self._models[name] = new
        self._begin(old.retire(timeout_seconds=self._config.grace))
        now = _content(new)
        same = before == now
        return Reloaded(
            swapped=True,
            text="reloaded, of the same content" if same else f"reloaded: {before} → {now}",
        )

    def _begin(self, work: Coroutine[Any, Any, Made]) -> asyncio.Task[Made]:
        """A task of the server's own, which is held until it ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Answers what waits, and frees everything."""
        self.draining = True
        if self._watching is not None:
            self._watching.cancel()
        closing = (model.close(timeout_seconds=self._config.grace) for model in self)
        await asyncio.gather(*closing, *self._tasks, return_exceptions=True)

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


def _content(model: HostedModel) -> str:
    """The artifact's content by its first digits; empty where it could not be loaded."""
    return model.artifact.content_sha256()[:12] if model.is_loaded else "nothing"
