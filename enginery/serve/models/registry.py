"""The registry of the server's models: lookup by name, reload without downtime, health checks."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from enginery.core.errors import EngineryError, InputError, nearest
from enginery.serve.config import ServeConfig
from enginery.serve.models.served_model import (
    LocalModel,
    OnBatch,
    ServedModel,
    UnavailableError,
)

_log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
_DRAIN_SECONDS = 30.0
"""Minimum time for a replaced model to answer its waiting requests, even if --grace is shorter."""

Result = TypeVar("Result")


class UnknownModelError(EngineryError):
    """No model has this name."""


class ModelChoiceError(InputError):
    """The request names no model, and not exactly one model fits."""


@dataclass(frozen=True)
class ReloadResult:
    """The result of reloading a model."""

    swapped: bool
    """True if the new model has replaced the old one; else the old one still serves."""
    message: str


class ModelRegistry:
    """The models of one server, in the order of the command line."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: OnBatch | None = None,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        """Create the registry without loading anything.

        Args:
            paths: directories of artifacts, by model name.
            config: the options of the server.
            loop: the event loop of the requests.
            on_batch: called with the model's name for each batch that ran.
            on_broken: called with the reason if a model is stuck or its provider has failed.
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
        """True if every model is ready and the server is not draining."""
        return not self.draining and all(model.state == "ready" for model in self)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def get(self, name: str) -> ServedModel:
        """Return the model of this name, or whose source has this id or ends with this name.

        Raises:
            UnknownModelError: there is none.
        """
        if name in self._models:
            return self._models[name]
        for model in self._models.values():
            if not model.is_loaded:
                continue  # its source is not known yet
            source = model.artifact.manifest.source
            if name in (source.id, source.name):
                return model
        raise UnknownModelError(
            f"there is no model {name[:200]!r}{nearest(name[:200], self._models)}",
            do=f"Models: {', '.join(self._models)}.",
        )

    def select(
        self,
        name: str = "",
        fits: Callable[[ServedModel], bool] | None = None,
        tasks: Collection[str] = (),
    ) -> ServedModel:
        """Return the model of a name or, without a name, the only model that fits.

        Args:
            name: name of the model; empty for none.
            fits: returns True if a model supports the request; None if every model does.
            tasks: the tasks of models that fit, for the error.

        Raises:
            UnknownModelError: no model has this name.
            ModelChoiceError: there is no name, and not exactly one of several models fits.
            UnavailableError: one of several models is loading, so its task is not known yet.
        """
        if name:
            return self.get(name)
        several = fitting = list(self._models.values())
        if fits is not None and len(several) > 1:
            fitting = [model for model in several if fits(model)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            models = ", ".join(f"{m.name} ({m.artifact.manifest.task})" for m in several)
            wanted = f", expected one exported for {' or '.join(tasks)}" if tasks else ""
            raise ModelChoiceError(
                f"none of the server's {len(several)} models supports this route{wanted}.",
                do=f"Models: {models}.",
            )
        can = " for this route" if fits is not None else ""
        raise ModelChoiceError(
            f"the server has {len(fitting)} models{can}, but the request names none.",
            do=f"Name one of {', '.join(model.name for model in fitting)}.",
        )

    async def load(self) -> None:
        """Load all models in parallel.

        Raises:
            EngineryError: a model cannot be loaded.
        """
        threads = ThreadPoolExecutor(len(self._models) or 1, thread_name_prefix="enginery-load")
        try:
            loading = [self._loop.run_in_executor(threads, model.load) for model in self]
            results = await asyncio.gather(*loading, return_exceptions=True)
        finally:
            threads.shutdown(wait=False)
        for failed in results:
            if isinstance(failed, BaseException):
                raise failed
        self._watching = self._loop.create_task(self._watch())

    async def refresh(self) -> None:
        """Bring the figures of `ServedModel.info` up to date, if another process has them."""

    async def reload(self, name: str = "") -> dict[str, ReloadResult]:
        """Load artifacts again from their directories, and replace the models that load.

        The old model answers the requests that wait for it; new requests go to the new model as
        soon as it is ready. If an artifact cannot be loaded, the old model keeps serving.

        Args:
            name: name of one model; empty for all.

        Returns:
            The result for each model, by name.

        Raises:
            UnknownModelError: no model has this name.
            UnavailableError: the server is shutting down, or is loading or reloading models.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down.")
        if self._reloading.locked():
            raise UnavailableError("models are already being reloaded.")
        names = (self.get(name).name,) if name else self.names
        for model_name in names:
            if self._models[model_name].state == "loading":
                raise UnavailableError(f"{model_name} is still being loaded.")
        # Shielded, so that a client's disconnect does not interrupt a replacement.
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
            return ReloadResult(swapped=False, message="not reloaded: the server is shutting down")
        self._models[name] = new
        self._spawn(self._retire_model(old))
        now = _content_prefix(new)
        same = before == now
        return ReloadResult(
            swapped=True,
            message="reloaded, content unchanged" if same else f"reloaded: {before} → {now}",
        )

    async def _retire_model(self, old: ServedModel) -> None:
        """Close a model that was replaced, and give its memory back."""
        await old.retire(timeout_seconds=max(self._config.grace, _DRAIN_SECONDS))
        del old
        await self._loop.run_in_executor(None, free_memory)

    def _spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a background task, and keep a reference to it until it ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def begin_drain(self) -> None:
        """Report that the server is not ready, because it shuts down."""
        self.draining = True

    def refuse_all(self) -> None:
        """Answer all waiting and running requests with 503, because the process exits."""
        for model in self:
            model.refuse_all(UnavailableError(f"model '{model.name}' is being restarted."))

    async def close(self) -> None:
        """Answer the waiting requests, then free all models."""
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
        return LocalModel(name, path, self._config, self._loop, on_batch=self._on_batch)


def free_memory() -> None:
    """Give the memory of what was closed back to the system.

    A model and what serves it refer to each other, and Python's collector, which comes rarely in a
    server, would leave tokenizers of many reloads in memory. glibc keeps the freed memory of each
    thread for that thread.
    """
    gc.collect()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _content_prefix(model: ServedModel) -> str:
    """Return the first digits of the artifact's content hash."""
    return model.artifact.content_sha256()[:12] if model.is_loaded else "nothing"
