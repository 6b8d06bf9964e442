"""A model that answers requests: its session, its queue and its workers.

    >>> model = HostedModel("minilm", Path("build/minilm"), ServeConfig(), loop)
    >>> model.load()                                    # in a thread
    >>> reply = await model.embed(["The engine is warm."])
    >>> reply.values[0].shape, reply.timings.tokens
    ((384,), 7)

Inputs are tokenized when they arrive, wait in the queue for a free worker, and run with whatever
else of about their length waits. A request that is cancelled leaves the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Literal

from enginery.core.artifact import Artifact
from enginery.core.errors import EngineryError
from enginery.core.model_files import ModelConfig
from enginery.runtime.tokenizer import TextTokenizer
from enginery.serve.answers import Answers
from enginery.serve.config import ServeConfig
from enginery.serve.loaded import LoadedModel
from enginery.serve.readers import Made, Readers
from enginery.serve.refusals import UnavailableError
from enginery.serve.runs import Runs

_log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stuck", "failed", "closed"]

_MEASURING = Lock()
"""Models that are measured at the same time would measure each other."""
_RETIRE_SECONDS = 0.5
"""Until a model that was replaced takes nothing more: requests that have found it may be on their
way."""


class HostedModel(Answers):
    """One artifact, served."""

    def __init__(
        self,
        name: str,
        path: Path,
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: Callable[..., None] | None = None,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            name: as routes call it.
            path: the artifact's directory.
            config: how it is batched and what is refused.
            loop: where its coroutines run.
            on_batch: told of each batch: the name, `rows`, `tokens`, `padded_tokens`, `seconds`.
        """
        self.name, self.path = name, path
        self.state: State = "loading"
        self.reason = "the model is being loaded"
        self.options = config
        self._loop, self._on_batch = loop, on_batch
        self._loaded: LoadedModel | None = None
        self._runs: Runs | None = None
        self._calls, self._idle = 0, asyncio.Event()
        self._idle.set()
        self._readers = Readers(loop, most=config.queue_inputs, name=name)

    # -- what it is ---------------------------------------------------------------------------

    @property
    def loaded(self) -> LoadedModel:
        """The session and all that belongs to it; raises UnavailableError before it is there."""
        if self._loaded is None:
            raise UnavailableError(f"{self.name}: {self.reason}.", retry_after_seconds=1)
        return self._loaded

    @property
    def is_loaded(self) -> bool:
        """Whether there is anything to say of what it is."""
        return self._loaded is not None

    @property
    def runs(self) -> Runs:
        """Its queue and workers; raises UnavailableError before they are there."""
        if self._runs is None:
            raise UnavailableError(f"{self.name}: {self.reason}.", retry_after_seconds=1)
        return self._runs

    @property
    def artifact(self) -> Artifact:
        return self.loaded.artifact

    @property
    def record(self) -> Any:
        """The graph's record: inputs and outputs."""
        return self.loaded.runner.record

    @property
    def task(self) -> str:
        return self.loaded.artifact.manifest.task

    @property
    def method(self) -> str:
        return self.loaded.method

    @property
    def takes_images(self) -> bool:
        return self.loaded.images is not None

    @property
    def limit(self) -> int:
        return self.loaded.limit

    @property
    def dim(self) -> int:
        return self.loaded.dim

    @property
    def tokenizer(self) -> TextTokenizer | None:
        return self.loaded.texts.tokenizer if self.loaded.texts else None

    @property
    def config(self) -> ModelConfig:
        """The model's config.json."""
        return self.loaded.config

    @property
    def waiting(self) -> tuple[int, int]:
        """Inputs and tokens in the queue, and inputs that are still being read."""
        queue = self._runs.queue if self._runs else None
        return (queue.inputs + self._readers.inputs, queue.tokens) if queue else (0, 0)

    def info(self) -> dict[str, Any]:
        """What it is, where and how it runs, as JSON."""
        inputs, tokens = self.waiting
        found = {
            "name": self.name, "state": self.state, "reason": self.reason,
            "queue": {
                "inputs": inputs, "tokens": tokens,
                "max_inputs": self.options.queue_inputs, "max_tokens": self.options.queue_tokens,
            },
        }  # fmt: skip
        return {**found, **self._loaded.info()} if self._loaded else found

    # -- its life -----------------------------------------------------------------------------

    def load(self) -> None:
        """Opens the artifact, runs it once, and starts its workers. Blocks: for a thread.

        Raises:
            EngineryError: it cannot be loaded; `state` is then failed, and `reason` says why.
        """
        try:
            loaded = LoadedModel.open(self.path, self.options)
            try:
                loaded.warm_up()
            except BaseException:
                loaded.close()
                raise
        except EngineryError as error:
            self.state, self.reason = "failed", str(error)
            raise
        if loaded.texts is not None:
            tokenizer = loaded.texts.tokenizer
            loaded.texts.tokenizer = replace(tokenizer, spread=self._readers.spread)
        self._loaded = loaded
        self._runs = Runs(
            loaded, self._loop, name=self.name, max_inputs=self.options.queue_inputs,
            max_tokens=self.options.queue_tokens, on_gone=self._gone, on_batch=self._on_batch,
        )  # fmt: skip
        self.state, self.reason = "ready", ""
        # Beside the first requests, and of several models one after the other.
        Thread(target=self._calibrate, name=f"enginery-measure-{self.name}", daemon=True).start()

    def watch(self) -> None:
        """Looks whether a batch or a text is stuck, or a worker gone; `state` then says so."""
        if self.state not in ("ready", "stuck") or self._runs is None:
            return
        if not self._runs.workers.alive:
            self.state, self.reason = "failed", "a worker has ended"
            return
        busy, reading = self._runs.workers.busy_seconds(), self._readers.busy_seconds()
        if max(busy, reading) > self.options.stuck_after:
            self.state = "stuck"
            self.reason = f"a batch has been running for {busy:.0f} s"
            if reading > busy:
                what = "images have been decoded" if self.takes_images else "texts were tokenized"
                self.reason = f"a request's {what} for {reading:.0f} s, without coming to an end"
        elif self.state == "stuck":
            self.state, self.reason = "ready", ""

    async def close(self, *, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        """Answers what came before (with `drain`), then frees the session."""
        if self.state == "stuck":
            timeout_seconds = 0.0  # what does not end is not waited for
        if drain and self.state == "ready":
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        if self.state != "failed":
            self.state, self.reason = "closed", "the model was closed"
        if self._runs is not None:
            self._runs.close(drain=drain)
            join = self._runs.workers.join
            if await self._loop.run_in_executor(None, join, timeout_seconds):
                self.loaded.close()  # a session under a running batch must not be freed
        self._readers.close()

    async def retire(self, *, timeout_seconds: float) -> None:
        """Closes a model that another has taken the place of, and loses no request."""
        await asyncio.sleep(_RETIRE_SECONDS)
        await self.close(timeout_seconds=timeout_seconds)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """A request from its first input to its answer; closing waits for it."""
        if self.state != "ready":
            raise UnavailableError(f"{self.name}: {self.reason}.", retry_after_seconds=1)
        with self._counted():
            yield

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What closing waits for."""
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def read(
        self, inputs: int, read: Callable[[Event], Made], *, quick: bool = False
    ) -> Made:
        """What takes a while, in a thread; the inputs have their places in the queue meanwhile."""
        waiting = self.runs.queue.inputs
        with self._counted():
            return await self._readers.read(inputs, read, waiting=waiting, quick=quick)

    def _calibrate(self) -> None:
        """In a thread of its own: what a batch costs, and which provider runs what."""
        with _MEASURING:
            try:
                self.loaded.calibrate()
            except Exception:  # a bug; it answers all the same
                _log.exception("%s could not be measured", self.name)
        self.runs.follow()

    def _gone(self, reason: str) -> None:
        """In a worker's thread: nothing runs any more."""
        self.state, self.reason = "failed", reason
