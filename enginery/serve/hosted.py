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
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import EngineryError
from enginery.runtime.classification import Activation, Aggregation
from enginery.runtime.question_answering import MAX_ANSWER_TOKENS
from enginery.runtime.text_rows import Asked, TextRows
from enginery.runtime.tokenizer import TextTokenizer
from enginery.serve.config import ServeConfig
from enginery.serve.loaded import LoadedModel
from enginery.serve.queue import BatchQueue, Waiting
from enginery.serve.refusals import InvalidInputError, TooLargeError, UnavailableError
from enginery.serve.replies import Reply, Timings
from enginery.serve.workers import Done, Workers

State = Literal["loading", "ready", "stuck", "failed", "closed"]

_LETTERS_AT_ONCE = 16_384
"""More text than this is tokenized in a thread: some milliseconds, in which others are answered."""


class _Pending:
    """A request whose inputs wait or run."""

    __slots__ = ("arrived", "done", "future", "inference_seconds", "started", "values")

    def __init__(self, future: asyncio.Future[None], inputs: int, arrived: float) -> None:
        self.future = future
        self.values: list[Any] = [None] * inputs
        self.done = 0
        self.arrived = arrived
        self.started = arrived
        self.inference_seconds = 0.0


class HostedModel:
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
            on_batch: told of each batch, in a worker's thread: the name, `rows`, `tokens`,
                `padded_tokens`, `seconds`.
        """
        self.name, self.path = name, path
        self.state: State = "loading"
        self.reason = "the model is being loaded"
        self.options = config
        self._loop, self._on_batch = loop, on_batch
        self._loaded: LoadedModel | None = None
        self._queue: BatchQueue | None = None
        self._workers: Workers | None = None
        # Tokenizing of large requests and decoding of images, beside the event loop.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix=f"enginery-read-{name}")

    # -- what it is ---------------------------------------------------------------------------

    @property
    def loaded(self) -> LoadedModel:
        """The session and all that belongs to it; raises UnavailableError before it is there."""
        if self._loaded is None:
            raise UnavailableError(f"{self.name}: {self.reason}.", retry_after_seconds=1)
        return self._loaded

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
    def config(self) -> Mapping[str, Any]:
        """The model's config.json."""
        return self.loaded.config

    @property
    def waiting(self) -> tuple[int, int]:
        """Inputs and tokens in the queue."""
        queue = self._queue
        return (queue.inputs, queue.tokens) if queue else (0, 0)

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
        self._queue = BatchQueue(
            loaded.rules,
            max_inputs=self.options.queue_inputs,
            max_tokens=self.options.queue_tokens,
        )
        self._loaded = loaded
        self._workers = Workers(
            self._queue, self._run_batch, self._finished, count=loaded.workers,
            first=self._calibrate, name=self.name,
        )  # fmt: skip
        self.state, self.reason = "ready", ""

    def watch(self) -> None:
        """Looks whether a batch is stuck, or the provider gone; `state` then says so."""
        if self.state not in ("ready", "stuck") or self._workers is None:
            return
        busy = self._workers.busy_seconds()
        if busy > self.options.stuck_after:
            self.state = "stuck"
            self.reason = f"a batch has been running for {busy:.0f} s"
        elif self.state == "stuck":
            self.state, self.reason = "ready", ""

    async def close(self, *, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        """Answers what waits (with `drain`), then frees the session."""
        if self.state != "failed":
            self.state, self.reason = "closed", "the model was closed"
        if self._queue is not None:
            for item in self._queue.close(drain=drain):
                self._fail(item.request, UnavailableError(f"{self.name} is being closed."))
        if self._workers is not None:
            ended = await self._loop.run_in_executor(None, self._workers.join, timeout_seconds)
            if ended and self._loaded is not None:
                self._loaded.close()  # a session under a running batch must not be freed
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- what it answers ----------------------------------------------------------------------

    async def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt_name: str = "",
        truncate: bool | None = None,
    ) -> Reply:
        """Vectors of texts or token ids: float32 (dim,) each."""
        rows = self._texts("embed")
        return await self._answer(
            texts, lambda: rows.ask_embed(texts, prompt_name=prompt_name), truncate
        )

    async def classify(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        top_k: int = 0,
        activation: Activation = "auto",
        truncate: bool | None = None,
    ) -> Reply:
        """Labels of texts or pairs: a `Classification` each."""
        rows = self._texts("classify")
        return await self._answer(
            texts, lambda: rows.ask_classify(texts, top_k=top_k, activation=activation), truncate
        )

    async def tag(
        self,
        texts: Sequence[str],
        *,
        aggregation: Aggregation = "simple",
        truncate: bool | None = None,
    ) -> Reply:
        """Labelled stretches: a list of `TokenSpan` each."""
        rows = self._texts("tag")
        return await self._answer(
            texts, lambda: rows.ask_tag(texts, aggregation=aggregation), truncate
        )

    async def answer(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        top_k: int = 1,
        max_tokens: int = MAX_ANSWER_TOKENS,
        allow_none: bool = False,
    ) -> Reply:
        """Answers to (question, context): a list of `ContextAnswer` each.

        A long context is read in windows, so that nothing is cut.
        """
        rows = self._texts("answer")

        def ask() -> Asked:
            return rows.ask_answer(pairs, top_k=top_k, max_tokens=max_tokens, allow_none=allow_none)

        return await self._answer(pairs, ask, truncate=True, windows=True)

    async def fill(
        self, texts: Sequence[str], *, top_k: int = 5, truncate: bool | None = None
    ) -> Reply:
        """Tokens for the masks: a `MaskFillings` each."""
        rows = self._texts("fill")
        return await self._answer(texts, lambda: rows.ask_fill(texts, top_k=top_k), truncate)

    async def classify_images(
        self, images: Sequence[bytes], *, top_k: int = 0, activation: Activation = "auto"
    ) -> Reply:
        """Labels of images, each the bytes of a file: a `Classification` each."""
        reply = await self._pictures("classify_images", images)
        model = self.loaded.images
        if model is not None:
            reply.values = model.labels(reply.values, top_k=top_k, activation=activation)
        return reply

    async def embed_images(self, images: Sequence[bytes]) -> Reply:
        """Vectors of images, each the bytes of a file: float32 (dim,) each."""
        return await self._pictures("embed_images", images)

    async def infer(self, feeds: dict[str, NDArray[Any]]) -> Reply:
        """The graph's outputs for its own inputs: arrays by name."""
        work = self.loaded.tensors
        work.check(feeds)
        tokens = max(int(array.size) for array in feeds.values())
        first = next(iter(feeds.values()))
        self._require_count(first.shape[0] if first.ndim else 1)
        item = Waiting(None, 0, work.kind(feeds), tokens, feeds, tokens=tokens)
        timings = Timings(tokens=tokens)
        values = await self._run([item], timings)
        return Reply(values[0], timings)

    async def _answer(
        self,
        inputs: Sequence[Any],
        ask: Callable[[], Asked],
        truncate: bool | None,
        *,
        windows: bool = False,
    ) -> Reply:
        self._require_count(len(inputs))
        started = time.perf_counter()
        if _letters(inputs) > _LETTERS_AT_ONCE:
            asked = await self._loop.run_in_executor(self._threads, ask)
        else:
            asked = ask()
        timings = Timings(tokenize_seconds=time.perf_counter() - started)
        work, items = self.loaded.text_work, []
        for place, (encoding, prompt_tokens) in enumerate(asked.parts()):
            tokens = len(encoding)
            if encoding.overflowing and not windows:
                self._require_uncut(place, truncate=truncate)
                timings.truncated += 1
            items.append(
                Waiting(
                    None, place, work.kind, work.padded_length(tokens), encoding,
                    prompt_tokens=prompt_tokens, tokens=tokens,
                )
            )  # fmt: skip
            timings.tokens += tokens
        rows = await self._run(items, timings) if items else []
        return Reply(asked.finish(rows), timings)

    async def _pictures(self, method: str, images: Sequence[bytes]) -> Reply:
        model = self.loaded.images
        if model is None or self.method != method:
            raise self._wrong(method)
        self._require_count(len(images))
        started = time.perf_counter()

        def read() -> list[NDArray[Any]]:
            return [model.pixels(image, index) for index, image in enumerate(images)]

        pixels = await self._loop.run_in_executor(self._threads, read)
        timings = Timings(tokenize_seconds=time.perf_counter() - started)
        items = [
            Waiting(None, place, ("images", array.shape), 1, array, tokens=1)
            for place, array in enumerate(pixels)
        ]
        return Reply(await self._run(items, timings) if items else [], timings)

    # -- waiting and running ------------------------------------------------------------------

    async def _run(self, items: Sequence[Waiting], timings: Timings) -> list[Any]:
        """What the graph says of each input; raises the first error among them."""
        queue = self._queue
        if queue is None or self.state != "ready":
            raise UnavailableError(f"{self.name}: {self.reason}.", retry_after_seconds=1)
        now = time.perf_counter()
        pending = _Pending(self._loop.create_future(), len(items), now)
        for item in items:
            item.request = pending
        queue.put(items, now=now)
        try:
            await pending.future
        except asyncio.CancelledError:
            queue.cancel(pending)
            raise
        timings.queue_seconds = pending.started - pending.arrived
        timings.inference_seconds = pending.inference_seconds
        return pending.values

    def _run_batch(self, batch: Sequence[Waiting]) -> list[Any]:
        """In a worker's thread: what the graph says of each input of a batch."""
        try:
            return self.loaded.run(batch)
        except EngineryError:
            if len(batch) > 1:
                raise  # its inputs will be run one by one
            try:
                self.loaded.warm_up()
            except EngineryError as error:
                # Not this input: nothing runs any more. A device that was lost stays lost.
                self.state = "failed"
                self.reason = f"the provider no longer runs the model: {error.message}"
                raise UnavailableError(f"{self.name}: {self.reason}") from error
            raise

    def _finished(self, done: Done) -> None:
        """In a worker's thread: hands a batch over to the event loop."""
        if self._on_batch:
            lengths = [item.length for item in done.batch]
            self._on_batch(
                self.name, rows=len(lengths), tokens=sum(item.tokens for item in done.batch),
                padded_tokens=max(lengths) * len(lengths), seconds=done.seconds,
            )  # fmt: skip
        try:
            self._loop.call_soon_threadsafe(self._deliver, done)
        except RuntimeError:  # the loop was closed: nobody waits for an answer any more
            return

    def _deliver(self, done: Done) -> None:
        for item, value in zip(done.batch, done.values, strict=True):
            pending: _Pending = item.request
            if pending.future.done():
                continue
            if isinstance(value, BaseException):
                pending.future.set_exception(value)
                if self._queue is not None and len(pending.values) > 1:
                    self._queue.cancel(pending)
                continue
            pending.values[item.place] = value
            pending.done += 1
            pending.started = max(pending.started, done.started)
            pending.inference_seconds = max(pending.inference_seconds, done.seconds)
            if pending.done == len(pending.values):
                pending.future.set_result(None)

    def _fail(self, pending: _Pending, error: EngineryError) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)

    def _calibrate(self) -> None:
        """In a worker's thread, before it takes batches: what a batch costs."""
        if self._loaded is not None and self._queue is not None:
            self._loaded.calibrate()
            self._queue.rules = self._loaded.rules
            self._queue.seconds_per_token = (
                self._loaded.cost.seconds_per_token / self._loaded.workers
            )

    # -- refusals -----------------------------------------------------------------------------

    def _texts(self, method: str) -> TextRows:
        texts = self.loaded.texts
        if texts is None or self.method != method:
            raise self._wrong(method)
        return texts

    def _wrong(self, method: str) -> InvalidInputError:
        can = f"it answers {self.method}" if self.method else "it takes tensors alone"
        return InvalidInputError(f"{self.name} does {self.task} and not {method}; {can}.")

    def _require_count(self, inputs: int) -> None:
        if inputs > self.options.max_inputs:
            raise TooLargeError(
                f"found {inputs} inputs, at most {self.options.max_inputs} are taken at once.",
                do="Send them in several requests.",
            )

    def _require_uncut(self, place: int, *, truncate: bool | None) -> None:
        if not (self.options.truncate if truncate is None else truncate):
            raise TooLargeError(
                f"input {place} has more than {self.limit} tokens, which is what the model takes.",
                do="Send a shorter text, or let it be cut with truncate.",
            )


def _letters(inputs: Sequence[Any]) -> int:
    if isinstance(inputs, str | bytes):
        return 0
    return sum(
        len(item) if isinstance(item, str) else sum(map(len, item)) if _is_pair(item) else 0
        for item in inputs
    )


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and all(isinstance(part, str) for part in item)
