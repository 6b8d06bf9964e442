"""What the tasks over texts share: tokenizing, padding, and outputs without their padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError
from enginery.core.manifest import GraphRecord
from enginery.core.model_files import ModelConfig
from enginery.runtime.tasks.task import (
    Arrays,
    InputField,
    ModelInputs,
    ProcessingCost,
    Row,
    Task,
    TaskOptions,
    require_outputs,
)
from enginery.runtime.tokenizer import TextTokenizer, TokenIds, check_texts

TEXT = (InputField("text"),)

_LIGHT_CHARACTERS = 2048
"""So much text should be tokenized in a millisecond."""
_LIGHT_TOKENS = 2000
"""Tokens whose scores are looked through in a millisecond."""


class TextOptions(TaskOptions):
    """Base of the options of a task over texts."""

    truncate: bool | None = None
    """Cut texts that are longer than the model takes, instead of refusing them; null for the
    server's default."""


@dataclass
class TextTask(Task):
    """A graph over tokens, with the model's tokenizer and config.json."""

    inputs: ClassVar[tuple[InputField, ...]] = TEXT
    Options: ClassVar[type[TaskOptions]] = TextOptions

    tokenizer: TextTokenizer
    config: ModelConfig

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> Self:
        """Read tokenizer and config.json beside a graph; see `Task.open`."""
        require_outputs(artifact.manifest.task, record, cls.graph_outputs)
        tokenizer = TextTokenizer.open(artifact.path)
        notes, settings = cls._read_settings(artifact, record)
        return cls(
            record=record,
            tokenizer=tokenizer,
            config=ModelConfig.read(artifact.path),
            notes=(f"texts are cut at {tokenizer.limit} tokens: {tokenizer.limit_source}", *notes),
            **settings,
        )

    @classmethod
    def _read_settings(
        cls, artifact: Artifact, record: GraphRecord
    ) -> tuple[list[str], dict[str, Any]]:
        """Read what else a task needs: notes, and fields of the class."""
        return [], {}

    def preprocess(self, inputs: Sequence[Any], options: Any) -> ModelInputs:
        """Return a row for each text."""
        check_texts(inputs)
        return ModelInputs(self.encode(inputs, options), inputs)

    def encode(
        self, texts: Sequence[str | tuple[str, str]], options: Any, *, offsets: bool = False
    ) -> list[Row]:
        """Return texts or pairs of texts as rows.

        Args:
            texts: what to tokenize.
            options: of the task; only `truncate` counts here.
            offsets: keep where in the text each token is.

        Raises:
            InputError: a text cannot be tokenized, or is too long and must not be cut.
        """
        return self.rows(self.tokenizer.encode(texts, offsets=offsets), options)

    def rows(self, encodings: Sequence[Any], options: Any) -> list[Row]:
        """Return encodings as rows; raise TooLongError for one that must not be cut and was."""
        rows = [Row(e, len(e), truncated=bool(e.overflowing)) for e in encodings]
        if options.truncate is False:
            for index, row in enumerate(rows):
                if row.truncated:
                    raise TooLongError(
                        f"input {index} has more than the {self.tokenizer.limit} tokens that the "
                        "model takes.",
                        do="Send a shorter text, or let it be cut with truncate.",
                    )
        return rows

    def collate(self, rows: Sequence[Row], width: int) -> Arrays:
        """Return token ids, mask and so on: (len(rows), tokens)."""
        encodings = [row.content for row in rows]
        return self.tokenizer.feeds(encodings, self.record.inputs, width=width)

    @property
    def can_pad(self) -> bool:
        """Whether there are a padding token and an attention mask."""
        return self.tokenizer.can_pad(self.record.inputs)

    def probe(self, tokens: int) -> Row:
        """Return a row of token ids from the middle of the vocabulary."""
        size = self.tokenizer.backend.get_vocab_size(with_added_tokens=True)
        return Row(TokenIds([size // 2] * tokens), tokens)

    def preprocess_cost(self, inputs: Sequence[Any]) -> ProcessingCost:
        """Return how long tokenizing takes: never light, because tokenizer.json may loop."""
        return "medium" if self.characters(inputs) <= _LIGHT_CHARACTERS else "heavy"

    def characters(self, inputs: Sequence[Any]) -> int:
        """Return the characters of texts and of pairs; token ids count as one each."""
        total = 0
        for item in inputs:
            if isinstance(item, tuple):
                total += sum(len(part) for part in item if isinstance(part, str))
            elif isinstance(item, str | list):
                total += len(item)
        return total

    def token_outputs(
        self, rows: Sequence[Row], outputs: Mapping[str, NDArray[Any]], name: str
    ) -> list[NDArray[Any]]:
        """Return an output for each row's own tokens, without padding: (tokens, …) each."""
        found = output_rows(outputs, name, rows, tokens=True)
        return [
            self.tokenizer.strip_padding(o, row.content) for o, row in zip(found, rows, strict=True)
        ]

    def scan_cost(self, work: ModelInputs) -> ProcessingCost:
        """Return how long it takes to look through the scores of every token."""
        return "light" if sum(row.tokens for row in work.rows) <= _LIGHT_TOKENS else "heavy"

    def sample_inputs(self, sentences: Sequence[str]) -> tuple[str, ...]:
        """Return the sentences as they are."""
        return tuple(sentences)


class TooLongError(InputError):
    """A text has more tokens than the model takes, and must not be cut."""


def output_rows(
    outputs: Mapping[str, NDArray[Any]], name: str, rows: Sequence[Row], *, tokens: bool = False
) -> NDArray[Any]:
    """Return an output that has a part for each row, and with `tokens` a place for each token.

    Raises:
        ArtifactError: it has not.
    """
    found = outputs[name]
    least = (len(rows), *([max((row.tokens for row in rows), default=0)] if tokens else []))
    if found.ndim < len(least) or any(a < b for a, b in zip(found.shape, least, strict=False)):
        raise ArtifactError(
            f"the graph gave {name} with the shape {found.shape} for {len(rows)} texts, "
            f"expected {' × '.join(map(str, least))} or more.",
            do="The graph does not keep to the dims that manifest.json names; export it again.",
        )
    return found


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Return the softmax over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))
