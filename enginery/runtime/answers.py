"""What a model answers, as plain values.

    >>> Classification((Label("angry", 0.9), Label("calm", 0.1))).to_dict()
    {'labels': [{'label': 'angry', 'score': 0.9}, {'label': 'calm', 'score': 0.1}]}

Character offsets count Python characters of the text that was given: `text[start:end]`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


class _Plain:
    """An answer that JSON can hold."""

    def to_dict(self) -> dict[str, Any]:
        """The answer as dicts, lists, strings and numbers."""
        plain: dict[str, Any] = _listed(asdict(self))  # type: ignore[call-overload]
        return plain


@dataclass(frozen=True)
class Label(_Plain):
    """One label and its score."""

    label: str
    score: float
    """A probability, or the raw value of a regression."""


@dataclass(frozen=True)
class Classification(_Plain):
    """Labels of one text or image, best first."""

    labels: tuple[Label, ...]

    @property
    def label(self) -> str:
        return self.labels[0].label

    @property
    def score(self) -> float:
        return self.labels[0].score


@dataclass(frozen=True)
class TokenSpan(_Plain):
    """A stretch of a text with one label: a person's name, a place."""

    label: str
    score: float
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class ContextAnswer(_Plain):
    """A part of the context that answers the question. Empty, at 0, where none does."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class Filling(_Plain):
    """One token in the place of one mask."""

    token: str
    token_id: int
    score: float
    sequence: str
    """The whole text with this token, as the tokenizer decodes it."""


@dataclass(frozen=True)
class MaskFillings(_Plain):
    """The best tokens for each mask of one text, in the order of the masks."""

    masks: tuple[tuple[Filling, ...], ...]


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON reads them back."""
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return value
