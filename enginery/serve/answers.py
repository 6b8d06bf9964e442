"""What a hosted model answers: texts, pairs, images and tensors, each task in its own way.

    >>> reply = await model.embed(["The engine is warm."])
    >>> reply.values[0].shape, reply.timings.tokens
    ((384,), 7)

Inputs are tokenized when they arrive, in a thread; so is what takes longer than a millisecond of
the answers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.runtime.classification import Activation, Aggregation
from enginery.runtime.question_answering import MAX_ANSWER_TOKENS
from enginery.runtime.text_rows import Asked, TextRows
from enginery.serve.config import ServeConfig
from enginery.serve.loaded import LoadedModel
from enginery.serve.queue import Waiting
from enginery.serve.readers import Made
from enginery.serve.refusals import InvalidInputError, TooLargeError
from enginery.serve.replies import Reply, Timings
from enginery.serve.runs import Runs

_QUICK_LETTERS = 2048
"""So much text should be tokenized in a millisecond, and does not wait for more than that."""
_EFFORT_AT_ONCE = 2000
"""Tokens that answers are looked for in, beyond which that is done in a thread."""
_MOST_FILLINGS = 1000


class Answers(ABC):
    """The coroutines of a hosted model; every one raises `EngineryError`."""

    name: str
    options: ServeConfig

    @property
    @abstractmethod
    def loaded(self) -> LoadedModel:
        """The session and all that belongs to it."""

    @property
    @abstractmethod
    def runs(self) -> Runs:
        """Its queue and workers."""

    @abstractmethod
    def under_way(self) -> AbstractContextManager[None]:
        """A request from its first input to its answer; closing waits for it."""

    @abstractmethod
    async def read(
        self, inputs: int, read: Callable[[Event], Made], *, quick: bool = False
    ) -> Made:
        """What takes a while, or might, in a thread."""

    async def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt_name: str = "",
        normalize: bool | None = None,
        truncate: bool | None = None,
    ) -> Reply:
        """Vectors of texts or token ids: float32 (dim,) each.

        With `normalize` they are of length 1, without as they were pooled; None as the model says.
        """
        rows = self._texts("embed")

        def ask() -> Asked:
            return rows.ask_embed(texts, prompt_name=prompt_name, normalize=normalize)

        return await self._answer(texts, ask, truncate)

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
            texts, lambda: rows.ask_tag(texts, aggregation=aggregation), truncate, effort=1
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

        return await self._answer(pairs, ask, truncate=True, windows=True, effort=1)

    async def fill(
        self, texts: Sequence[str], *, top_k: int = 5, truncate: bool | None = None
    ) -> Reply:
        """Tokens for the masks: a `MaskFillings` each."""
        rows = self._texts("fill")
        if top_k > _MOST_FILLINGS:
            raise InvalidInputError(f"top_k is {top_k}, expected at most {_MOST_FILLINGS}.")

        def ask() -> Asked:
            return rows.ask_fill(texts, top_k=top_k)

        return await self._answer(texts, ask, truncate, effort=top_k or 1000, decodes=True)

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
        with self.under_way():
            parts = work.rows(feeds)
            first = next(iter(feeds.values()))
            self._require_count(max(len(parts), first.shape[0] if first.ndim else 1))
            kind, items = work.kind(feeds), []
            for place, part in enumerate(parts):
                # An image is one thing to run, however many pixels it has.
                size = max(int(array.size) for array in part.values())
                tokens = 1 if self.loaded.images is not None else size
                items.append(Waiting(None, place, kind, tokens, part, tokens=tokens))
            timings = Timings(tokens=sum(item.tokens for item in items))
            found = await self.runs.run(items, timings)
        if len(found) == 1:
            return Reply(found[0], timings)
        names = list(found[0])
        return Reply(
            {name: np.concatenate([row[name] for row in found]) for name in names}, timings
        )

    async def _answer(
        self,
        inputs: Sequence[Any],
        ask: Callable[[], Asked],
        truncate: bool | None,
        *,
        windows: bool = False,
        effort: int = 0,
        decodes: bool = False,
    ) -> Reply:
        """The answers to texts.

        Args:
            inputs: what was sent.
            ask: tokenizes it.
            truncate: whether what is too long is cut; None for the server's default.
            windows: whether what is too long has further rows.
            effort: how much each token takes to make answers of.
            decodes: whether token ids become text for it, by rules of tokenizer.json that may never
                come to an end.
        """
        self._require_count(len(inputs))
        with self.under_way():
            started = time.perf_counter()
            quick = _letters(inputs) <= _QUICK_LETTERS
            asked = await self.read(len(inputs), lambda _: ask(), quick=quick)
            timings = Timings(tokenize_seconds=time.perf_counter() - started)
            self._require_count(len(asked.encodings), "windows of contexts" if windows else "")
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
            rows = await self.runs.run(items, timings) if items else []
            quick = effort * timings.tokens <= _EFFORT_AT_ONCE
            if decodes or not quick:
                values = await self.read(0, lambda _: asked.finish(rows), quick=quick)
            else:
                values = asked.finish(rows)
        return Reply(values, timings)

    async def _pictures(self, method: str, images: Sequence[bytes]) -> Reply:
        model = self.loaded.images
        if model is None or self.loaded.method != method:
            raise self._wrong(method)
        self._require_count(len(images))
        most = self.options.max_pixels

        def read(gone: Event) -> list[NDArray[Any]]:
            pixels = []
            for index, image in enumerate(images):
                if gone.is_set():
                    break
                pixels.append(model.pixels(image, index, max_pixels=most))
            return pixels

        with self.under_way():
            started = time.perf_counter()
            pixels = await self.read(len(images), read)
            timings = Timings(tokenize_seconds=time.perf_counter() - started)
            items = [
                Waiting(None, place, ("images", array.shape), 1, array, tokens=1)
                for place, array in enumerate(pixels)
            ]
            return Reply(await self.runs.run(items, timings) if items else [], timings)

    def _texts(self, method: str) -> TextRows:
        texts = self.loaded.texts
        if texts is None or self.loaded.method != method:
            raise self._wrong(method)
        return texts

    def _wrong(self, method: str) -> InvalidInputError:
        can = f"it answers {self.loaded.method}" if self.loaded.method else "it takes tensors alone"
        return InvalidInputError(
            f"{self.name} does {self.loaded.artifact.manifest.task} and not {method}; {can}."
        )

    def _require_count(self, inputs: int, what: str = "") -> None:
        if inputs > self.options.max_inputs:
            raise TooLargeError(
                f"found {inputs} {what or 'inputs'}, at most {self.options.max_inputs} are taken "
                "at once.",
                do="Send them in several requests.",
            )

    def _require_uncut(self, place: int, *, truncate: bool | None) -> None:
        if not (self.options.truncate if truncate is None else truncate):
            raise TooLargeError(
                f"input {place} has more than the {self.loaded.limit} tokens that the model takes.",
                do="Send a shorter text, or let it be cut with truncate.",
            )


def _letters(inputs: Sequence[Any]) -> int:
    """Letters of texts and of pairs, and token ids."""
    if isinstance(inputs, str | bytes):
        return 0
    return sum(
        sum(len(part) for part in item if isinstance(part, str)) if isinstance(item, tuple)
        else len(item) if isinstance(item, str | list)
        else 0
        for item in inputs
    )  # fmt: skip
