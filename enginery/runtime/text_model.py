"""Texts through a graph, in batches, and what its outputs say of them.

    >>> texts = TextModel.open(artifact, runner)
    >>> texts.classify(["The pump runs again."], top_k=1)[0].label
    'glad'

Inputs are sorted by length into batches; answers come in the order of the inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.runtime.answers import Classification, ContextAnswer, MaskFillings, TokenSpan
from enginery.runtime.batching import MAX_ROWS, MAX_TOKENS, plan_batches
from enginery.runtime.classification import Activation, Aggregation
from enginery.runtime.ort import OrtRunner, Outputs
from enginery.runtime.text_rows import SENTENCE_OUTPUT, TOKEN_OUTPUTS, Asked, TextRows


@dataclass
class TextModel(TextRows):
    """A graph over tokens, with its tokenizer and the model's own settings."""

    runner: OrtRunner = field(kw_only=True)

    @classmethod
    def open(cls, artifact: Artifact, runner: OrtRunner) -> Self:
        """Reads the model's files beside the graph; raises what `TextRows.read` raises."""
        return cls.read(artifact, runner.record, runner=runner)

    def embed(self, texts: Sequence[str], *, prompt_name: str) -> NDArray[np.float32]:
        """float32 (len(texts), dim)."""
        rows = self._answers(self.ask_embed(texts, prompt_name=prompt_name))
        return np.stack(rows) if rows else np.empty((0, self._dim()), np.float32)

    def classify(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        top_k: int,
        activation: Activation,
    ) -> list[Classification]:
        """One classification a text or a pair of texts."""
        found: list[Classification] = self._answers(
            self.ask_classify(texts, top_k=top_k, activation=activation)
        )
        return found

    def tag(self, texts: Sequence[str], *, aggregation: Aggregation) -> list[list[TokenSpan]]:
        """The labelled stretches of each text."""
        found: list[list[TokenSpan]] = self._answers(self.ask_tag(texts, aggregation=aggregation))
        return found

    def answer(
        self, pairs: Sequence[tuple[str, str]], *, top_k: int, max_tokens: int, allow_none: bool
    ) -> list[list[ContextAnswer]]:
        """The best answers to each (question, context)."""
        found: list[list[ContextAnswer]] = self._answers(
            self.ask_answer(pairs, top_k=top_k, max_tokens=max_tokens, allow_none=allow_none)
        )
        return found

    def fill(self, texts: Sequence[str], *, top_k: int) -> list[MaskFillings]:
        """The best tokens for each mask of each text."""
        found: list[MaskFillings] = self._answers(self.ask_fill(texts, top_k=top_k))
        return found

    def _answers(self, asked: Asked) -> Any:
        rows: list[Any] = [None] * len(asked.encodings)
        for batch, feeds, outputs in self._run(asked.encodings):
            prompts = [asked.prompt_tokens[i] for i in batch] if asked.prompt_tokens else []
            encodings = [asked.encodings[index] for index in batch]
            found = self.rows(encodings, feeds, outputs, prompt_tokens=prompts)
            for index, row in zip(batch, found, strict=True):
                rows[index] = row
        return asked.finish(rows)

    def _run(
        self, encodings: Sequence[Any]
    ) -> Iterator[tuple[list[int], dict[str, NDArray[Any]], Outputs]]:
        """The graph over all encodings: indices, feeds and outputs of each batch."""
        inputs = self.runner.record.inputs
        fixed = next((s.dims[0] for s in inputs if isinstance(s.dims[0], int)), 0)
        lengths = [len(encoding) for encoding in encodings]
        for batch in plan_batches(
            lengths,
            max_rows=fixed or (self._most_rows if self.runner.profiles else MAX_ROWS),
            max_tokens=sys.maxsize if self.runner.profiles else MAX_TOKENS,
            equal_lengths=not self.tokenizer.can_pad(inputs),
        ):
            longest = max(lengths[index] for index in batch)
            rows, width = self.runner.padded_shape(inputs[0], (len(batch), max(longest, 1)))
            feeds = self.tokenizer.feeds([encodings[i] for i in batch], inputs, width=width)
            outputs = self.runner(fill_rows(feeds, fixed or rows))
            yield batch, feeds, first_rows(outputs, len(batch))

    def _most_rows(self, tokens: int) -> int:
        """The most texts of a batch whose longest has so many tokens, by the engines' profiles."""
        return self.runner.most_rows(self.runner.record.inputs[0], (tokens,)) or 1

    def _dim(self) -> int:
        """The size of a vector where the graph says it; 0 where it does not."""
        wanted = (SENTENCE_OUTPUT, *TOKEN_OUTPUTS)
        dims = [s.dims[-1] for s in self.runner.record.outputs if s.name in wanted]
        modes = len(self.pooling.modes) if self.pooling else 1
        return dims[0] * modes if dims and isinstance(dims[0], int) else 0


def fill_rows(feeds: dict[str, NDArray[Any]], rows: int) -> dict[str, NDArray[Any]]:
    """The feeds with their last row repeated up to a batch that the graph takes; never cut."""
    return {
        name: np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])
        if rows > len(array)
        else array
        for name, array in feeds.items()
    }


def first_rows(outputs: Outputs, count: int) -> Outputs:
    """Return the outputs without the rows that only filled the batch; a scalar has none."""
    return {name: values[:count] if values.ndim else values for name, values in outputs.items()}
