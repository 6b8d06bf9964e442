"""The models of one server: found by name, reloaded without losing a request, watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from enginery.core.errors import EngineryError, InputError, nearest
from enginery.serve.config import ServeConfig
from enginery.serve.models.served_model import OnBatch, ServedModel, UnavailableError

_log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
_DRAIN_SECONDS = 30.0
"""For a model that was replaced to answer what it has, whatever --grace says."""

Result = TypeVar("Result")


class UnknownModelError(EngineryError):
    """There is no model of that name."""


class ModelChoiceError(InputError):
    """No model was named, and not exactly one can answer."""


@dataclass(frozen=True)
class ReloadResult:
    """What happened to a model that was to be reloaded."""

    swapped: bool
    """Whether the new one has taken its place; else it goes on as it was."""
    message: str


class ModelRegistry:
    """The models of one server, in the order they were given."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: OnBatch | None = None,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            paths: artifacts' directories by the names that routes call them.
            config: the options of the server.
            loop: where requests are answered.
            on_batch: called with the name of a model and each batch that ran.
            on_broken: called with the reason when a batch does not end or a provider is gone.
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
        """Whether every model answers and the server does not drain."""
        return not self.draining and all(model.state == "ready" for model in self)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def get(self, name: str) -> ServedModel:
        """Return the model of that name; raise UnknownModelError where there is none."""
        if name in self._models:
            return self._models[name]
        raise UnknownModelError(
            f"there is no model '{name}'{nearest(name, self._models)}",
            do=f"Models: {', '.join(self._models)}.",
        )

    def select(
        self, name: str = "", fits: Callable[[ServedModel], bool] | None = None
    ) -> ServedModel:
        """Return the model of that name; without a name the only one that fits.

        Args:
            name: as routes call it; empty for none.
            fits: whether a model can answer; None where every one can.

        Raises:
            UnknownModelError: there is none of that name.
            ModelChoiceError: no name was given, and not exactly one of several fits.
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
            tasks = ", ".join(f"{model.name} ({model.artifact.manifest.task})" for model in several)
            raise ModelChoiceError(
                f"none of the server's {len(several)} models answers this route.",
                do=f"Models: {tasks}.",
            )
        can = " that can answer" if fits is not None else ""
        raise ModelChoiceError(
            f"the server has {len(found)} models{can}, and none was named.",
            do=f"Name one of {', '.join(model.name for model in found)}.",
        )

    async def load(self) -> None:
        """Load all models, side by side.

        Raises:
            EngineryError: one cannot be loaded.
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

    async def reload(self, name: str = "") -> dict[str, ReloadResult]:
        """Open artifacts again from where they are, and swap those that load.

        Requests that wait are answered by the model that they were sent to; new ones go to the new
        model as soon as it is ready. A model that cannot be loaded changes nothing.

        Args:
            name: of one model; empty for all.

        Returns:
            What happened to each model.

        Raises:
            UnknownModelError: there is no model of that name.
            UnavailableError: the server is about to end, or loads or reloads already.
        """
        if self.draining:
            raise UnavailableError("the server is about to end.")
        if self._reloading.locked():
            raise UnavailableError("models are being reloaded.")
        names = (self.get(name).name,) if name else self.names
        for each in names:
            if self._models[each].state == "loading":
                raise UnavailableError(f"{each} is still being loaded.")
        # A client that has gone must not leave a model half swapped.
        return await asyncio.shield(self._spawn(self._reload_all(names)))

    async def _reload_all(self, names: Sequence[str]) -> dict[str, ReloadResult]:
        async with self._reloading:
            return {name: await self._reload(name) for name in names}

    async def _reload(self, name: str) -> ReloadResult:
        old = self._models[name]
        before = _content_prefix(old)
        new = self._new(name, old.path)
        try:
            await self._loop.run_in_executor(None, new.load)
        except EngineryError as error:
            await new.close(drain=False)
            return ReloadResult(swapped=False, message=f"not reloaded: {error}")
        except BaseException:
            await new.close(drain=False)
            raise
        if self.draining:
            await new.close(drain=False)
            return ReloadResult(swapped=False, message="not reloaded: the server is about to end")
        self._models[name] = new
        self._spawn(old.retire(timeout_seconds=max(self._config.grace, _DRAIN_SECONDS)))
        now = _content_prefix(new)
        same = before == now
        return ReloadResult(
            swapped=True,
            message="reloaded, of the same content" if same else f"reloaded: {before} → {now}",
        )

    def _spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a task of the server's own, which is held until it ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def begin_drain(self) -> None:
        """Turn readiness off: the server is about to end."""
        self.draining = True

    def refuse_all(self) -> None:
        """Answer everything that waits or runs with 503: the process is about to end."""
        for model in self:
            model.refuse_all(UnavailableError(f"{model.name} is restarted."))

    async def close(self) -> None:
        """Answer what waits, and free everything."""
        self.draining = True
        if self._watching is not None:
            self._watching.cancel()
        closing = (model.close(timeout_seconds=self._config.grace) for model in self)
        await asyncio.gather(*closing, *self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        reported: set[str] = set()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for model in self:
                model.check_health()
                if model.state not in ("stuck", "failed"):
                    reported.discard(model.name)
                elif model.name not in reported:
                    reported.add(model.name)
                    _log.error("%s is %s: %s", model.name, model.state, model.reason)
                    if self._on_broken:
                        self._on_broken(f"{model.name}: {model.reason}")

    def _new(self, name: str, path: Path) -> ServedModel:
        return ServedModel(name, path, self._config, self._loop, on_batch=self._on_batch)


def _content_prefix(model: ServedModel) -> str:
    """Return the artifact's content by its first digits."""
    return model.artifact.content_sha256()[:12] if model.is_loaded else "nothing"
