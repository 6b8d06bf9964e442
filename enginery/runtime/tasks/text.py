"""Base of the tasks on texts: tokenize, pad, and strip the padding from outputs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.tasks.task import (
    NO_LIMITS,
    Arrays,
    InputField,
    InputLimits,
    ModelInputs,
    ProcessingCost,
    Row,
    Task,
    TaskOptions,
    Unproved,
    output_rows,
    require_outputs,
)
from enginery.runtime.text.tokenizer import EQUAL_LENGTHS, TextTokenizer, TokenIds, check_texts

_log = logging.getLogger("enginery.runtime")

_LIGHT_TOKENS = 2000
"""Number of tokens whose scores are processed in about a millisecond."""


class TextOptions(TaskOptions):
    """Base of the options of tasks on texts."""

    truncate: bool | None = None
    """Truncate texts that are longer than the model takes (true) or raise an error (false); null
    for the server's default."""


class TooLongError(InputError):
    """A text has more tokens than the model takes, and truncation is off."""


@dataclass
class ComparedLengths:
    """The longest input that the artifact's validation has compared, and what is done beyond."""

    longest: int | None = None
    """Tokens; None if there is no such limit, or the artifact was not validated."""
    unproved: Unproved = "warn"
    _warned: bool = False

    @classmethod
    def of(cls, artifact: Artifact, unproved: Unproved) -> ComparedLengths:
        """Read the newest verdict of `validate`."""
        verdict = artifact.manifest.verdict("validate")
        return cls(verdict.longest if verdict else None, unproved)

    def notes(self, limit: int) -> list[str]:
        """Describe the lengths below a limit that were not compared."""
        if self.longest is None or limit <= self.longest:
            return []
        refused = "; longer ones are refused" if self.unproved == "refuse" else ""
        return [f"unproved beyond {self.longest} tokens: no longer text was compared{refused}"]

    def check(self, lengths: Iterable[int]) -> None:
        """Warn of a longer input, once, or raise TooLongError, as the option says.

        Args:
            lengths: tokens of each input, with those to generate.
        """
        if self.longest is None:
            return
        for index, tokens in enumerate(lengths):
            if tokens <= self.longest:
                continue
            if self.unproved == "refuse":
                raise TooLongError(
                    f"input {index} has {tokens} tokens, but validate has compared at most "
                    f"{self.longest}, and the option 'unproved' is refuse.",
                    do="Send a shorter text, or compare longer ones: enginery validate --effort "
                    "thorough, or --profile sequence=1:512:N.",
                )
            if not self._warned:
                self._warned = True
                _log.warning(
                    "an input has %d tokens, but validate has compared at most %d",
                    tokens,
                    self.longest,
                )


@dataclass
class TextTask(Task):
    """Base of tasks on texts: a graph with its tokenizer and config.json."""

    inputs: ClassVar[tuple[InputField, ...]] = (InputField("text", "The engine is warm."),)
    Options: ClassVar[type[TaskOptions]] = TextOptions

    tokenizer: TextTokenizer
    config: ModelConfig
    lengths: ComparedLengths = field(default_factory=ComparedLengths, kw_only=True)

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the tokenizer and config.json; see `RowTask.open`."""
        require_outputs(artifact.manifest.task, record, cls.graph_outputs)
        tokenizer = TextTokenizer.open(artifact.path).for_graph(record)
        notes, settings = cls._read_settings(artifact, record)
        lengths = ComparedLengths.of(artifact, limits.unproved)
        cut = "refused above" if tokenizer.refuses_longer else "truncated to"
        return cls(
            record=record,
            tokenizer=replace(tokenizer, parallel_encode=limits.parallel_encode),
            config=ModelConfig.read(artifact.path),
            lengths=lengths,
            notes=(
                f"texts are {cut} {tokenizer.limit} tokens: {tokenizer.limit_source}",
                *([] if tokenizer.pads else [EQUAL_LENGTHS]),
                *lengths.notes(tokenizer.limit),
                *notes,
            ),
            **settings,
        )

    @classmethod
    def _read_settings(
        cls, artifact: Artifact, record: GraphRecord
    ) -> tuple[list[str], dict[str, Any]]:
        """Read further settings of a task; return notes and values for the fields of the class."""
        return [], {}

    def preprocess(self, inputs: Sequence[Any], options: Any) -> ModelInputs:
        """Tokenize each text into one row."""
        check_texts(inputs)
        return ModelInputs(self.encode(inputs, options), inputs)

    def encode(
        self, texts: Sequence[str | tuple[str, str]], options: Any, *, offsets: bool = False
    ) -> list[Row]:
        """Tokenize texts or pairs of texts into rows.

        Args:
            texts: texts or pairs of texts.
            options: the task's options; only `truncate` is used.
            offsets: keep the character offsets of each token.

        Raises:
            InputError: a text cannot be tokenized, or is too long and `truncate` is False, or so
                long that the graph answers otherwise than the model.
        """
        return self.rows(self.tokenizer.encode(texts, offsets=offsets), options)

    def rows(self, encodings: Sequence[Any], options: Any) -> list[Row]:
        """Convert encodings to rows; raise TooLongError for a truncated one if that is off."""
        rows = [Row(e, len(e), truncated=bool(e.overflowing)) for e in encodings]
        # The model reads what its own limit leaves; a graph with a lower one must not cut more.
        must_fit = options.truncate is None and self.tokenizer.refuses_longer
        if options.truncate is False or must_fit:
            for index, row in enumerate(rows):
                if row.truncated:
                    reason = f": {self.tokenizer.limit_source}" if must_fit else ""
                    raise TooLongError(
                        f"input {index} is too long: expected at most {self.tokenizer.limit} "
                        f"tokens{reason}.",
                        do="Send a shorter text, or set truncate to true.",
                    )
        if self.lengths.longest is not None:
            self.lengths.check(row.tokens for row in rows)
        return rows

    def collate(self, rows: Sequence[Row], width: int) -> Arrays:
        """Return the graph's inputs (input_ids, attention_mask, …): (len(rows), tokens) each."""
        encodings = [row.content for row in rows]
        return self.tokenizer.feeds(encodings, self.record.inputs, width=width)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a text."""
        return self.tokenizer.limit

    @property
    def can_pad(self) -> bool:
        """True if the tokenizer has a padding token and the graph an attention mask."""
        return self.tokenizer.can_pad(self.record.inputs)

    def probe(self, tokens: int) -> Row:
        """Return a row of `tokens` token ids from the middle of the vocabulary."""
        size = self.tokenizer.vocabulary_size
        # Special tokens are mostly at the beginning or the end of a vocabulary.
        return Row(TokenIds([size // 2] * tokens), tokens)

    def token_outputs(
        self, rows: Sequence[Row], outputs: Mapping[str, NDArray[Any]], name: str
    ) -> list[NDArray[Any]]:
        """Return an output for each row, without padding: (tokens, …) each."""
        padded = output_rows(outputs, name, rows, tokens=True)
        return [
            self.tokenizer.strip_padding(output, row.content)
            for output, row in zip(padded, rows, strict=True)
        ]


def scan_cost(rows: Sequence[Row]) -> ProcessingCost:
    """Return the cost of going through the scores of every token."""
    return "light" if sum(row.tokens for row in rows) <= _LIGHT_TOKENS else "heavy"


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Return the softmax over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))
