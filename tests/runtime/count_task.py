"""A new task in one module and its method of `Model`, as a developer would add them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from enginery.runtime.model import Model
from enginery.runtime.tasks.results import Result
from enginery.runtime.tasks.task import Arrays, ModelInputs, Row
from enginery.runtime.tasks.text import TextOptions, TextTask


@dataclass(frozen=True)
class Counted(Result):
    """Counts of one text."""

    tokens: int
    vowels: int


class CountOptions(TextOptions):
    """Options of `count`."""

    vowels: str = "aeiou"
    """Letters that count as vowels."""


@dataclass
class Count(TextTask):
    """Count the tokens and vowels of texts."""

    verb = "count"
    purpose = "counts tokens and vowels"
    tasks = ("token-counting",)
    graph_outputs: ClassVar[Mapping[str, int]] = {"last_hidden_state": 3}
    result_type = Counted
    Options = CountOptions

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the number of vectors that the graph gave for each row's own tokens."""
        return [len(found) for found in self.token_outputs(rows, outputs, "last_hidden_state")]

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: CountOptions
    ) -> list[Counted]:
        """Return a `Counted` for each text."""
        return [
            Counted(tokens, sum(letter in options.vowels for letter in text))
            for text, tokens in zip(work.context, outputs, strict=True)
        ]

    def describe(self, result: Counted) -> str:
        """Return the number of tokens."""
        return f"{result.tokens} tokens"


def count(
    model: Model, texts: Sequence[str], *, truncate: bool | None = None, vowels: str = "aeiou"
) -> list[Counted]:
    """Count the tokens and vowels of texts; a method of `Model`."""
    counts: list[Counted] = model._run_task(
        "count", texts, {"truncate": truncate, "vowels": vowels}
    )
    return counts
