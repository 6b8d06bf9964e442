"""Which layers stay as they are, so that the answers stay near enough.

Takes a function that measures a mix; leaves the layers that were left out, each with its reason,
and the curve of accuracy against the quantized share.

    >>> result = search_mix(names, weights, measure, budget)
    >>> list(result.left_out), result.accuracy.cosine
    (['/encoder/layer.0/output/dense/MatMul'], 0.9984)

All layers start quantized. Where that is too far from FP32, each is switched off alone; then the
most harmful for each multiply-add are left out together, just as many as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from enginery.core.errors import CheckFailedError, OptionError
from enginery.core.reports import Accuracy
from enginery.quantize.config import QuantizeConfig, lost_accuracy

HEADROOM = 0.95
"""FP16 takes a little of the budget as well, so the search does not spend all of it."""
_ROUNDING = 1e-12
"""1 - 0.99 is a little more than 0.01."""

Measure = Callable[[Collection[str], bool], Accuracy]
"""Quantized layers, and whether a part of the rows will do -> accuracy."""


@dataclass(frozen=True)
class Budget:
    """How far the answers may move."""

    kind: Literal["cosine", "agreement", "accuracy"]
    """To FP32's answers: their mean cosine, or how many have the same largest score. To labels: how
    many are right."""
    allowed: float
    """How much of it may be lost, 0 to 1; to 2 for the cosine."""
    reference: float = 1.0
    """What FP32 has of it."""

    @classmethod
    def of(cls, config: QuantizeConfig, reference: Accuracy) -> Budget:
        """The options' budget, with what the FP32 model has against itself and the labels.

        Raises:
            OptionError: a budget in accuracy is asked for, and the model's answers are neither
                right nor wrong.
        """
        if not config.accuracy_budget:
            return cls("cosine", 1 - config.min_cosine)
        allowed = lost_accuracy(config.accuracy_budget)
        if reference.label_accuracy is not None:
            return cls("accuracy", allowed, reference.label_accuracy)
        if reference.argmax_agreement is None:
            raise OptionError(
                "option 'accuracy_budget' is given, but the model gives no logits: its answers are "
                "neither right nor wrong.",
                do="Say how near they stay instead: --min-cosine 0.998",
            )
        return cls("agreement", allowed)

    def holds(self, found: Accuracy, *, headroom: float = 1.0) -> bool:
        """Whether the answers are near enough, with a part of the budget to spare."""
        return self.reference - self.value(found) <= headroom * self.allowed + _ROUNDING

    def value(self, found: Accuracy) -> float:
        """What the budget is about."""
        values = {
            "cosine": found.cosine,
            "agreement": found.argmax_agreement,
            "accuracy": found.label_accuracy,
        }
        value = values[self.kind]
        if value is None:
            raise AssertionError(f"every mix has the {self.kind} that FP32 has")
        return value

    def __str__(self) -> str:
        least = self.reference - self.allowed
        words = {
            "cosine": f"mean cosine of at least {least:.10g}",
            "agreement": f"agreement with FP32's answers of at least {least:.2%}",
            "accuracy": f"accuracy of at least {least:.2%}",
        }
        return words[self.kind]


@dataclass(frozen=True)
class CurvePoint:
    """One mix that was measured."""

    left_out: int
    share: float
    """The quantized part of the multiply-adds, 0 to 1."""
    accuracy: Accuracy


@dataclass(frozen=True)
class SearchResult:
    """The mix that was chosen."""

    left_out: dict[str, str]
    """Layer -> reason."""
    accuracy: Accuracy
    effects: dict[str, float]
    """Layer -> what the cosine gains when it alone is left out; empty where it was not measured."""
    curve: list[CurvePoint] = field(default_factory=list)
    """From all quantized to the fewest that were measured."""


def search_mix(
    names: Sequence[str],
    weights: Mapping[str, float],
    measure: Measure,
    budget: Budget,
    *,
    curve: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> SearchResult:
    """The largest quantized mix in order of harm that holds the budget.

    Args:
        names: the layers that can be quantized.
        weights: their shares of the multiply-adds.
        measure: the accuracy of a mix.
        budget: what must hold.
        curve: measure mixes of fewer layers too, though the answer does not need them.
        advance: called after each measurement.

    Raises:
        CheckFailedError: the budget holds for no mix with any layer quantized.
    """
    points: dict[int, CurvePoint] = {}

    def holds(left_out: Sequence[str]) -> bool:
        count = len(left_out)
        if count not in points:
            found = measure(set(names) - set(left_out), False)
            share = sum(weights[name] for name in names if name not in left_out)
            points[count] = CurvePoint(count, share, found)
            advance()
        return budget.holds(points[count].accuracy, headroom=HEADROOM)

    enough = holds([])
    if enough and not curve:
        return SearchResult({}, points[0].accuracy, {}, [points[0]])
    effects = _effects(names, measure, advance)
    order = sorted(names, key=lambda name: effects[name] / max(weights[name], 1e-9), reverse=True)
    low, high = 0, 1
    if enough:
        high = 0
    while high < len(order) and not holds(order[:high]):
        low, high = high, 2 * high
    high = min(high, len(order))
    while high - low > 1:
        middle = (low + high) // 2
        if holds(order[:middle]):
            high = middle
        else:
            low = middle
    if high == len(order):
        best = max(points.values(), key=lambda point: budget.value(point.accuracy))
        raise CheckFailedError(
            f"no mix with a quantized layer keeps a {budget}: the best has a mean cosine of "
            f"{best.accuracy.cosine:.8g} with {best.share:.0%} of the multiply-adds quantized.",
            do="Lower the budget, or calibrate on inputs nearer to those that the model is for.",
        )
    for count in _powers(len(order)) if curve else ():
        holds(order[:count])
    reasons = {
        name: f"left out alone, it raises the mean cosine by {effects[name]:.2e}"
        for name in order[:high]
    }
    ordered = sorted(points.values(), key=lambda point: point.left_out)
    return SearchResult(reasons, points[high].accuracy, effects, ordered)


def _powers(below: int) -> list[int]:
    """1, 2, 4, … below a number."""
    return [1 << exponent for exponent in range(below.bit_length()) if 1 << exponent < below]


def _effects(
    names: Sequence[str], measure: Measure, advance: Callable[[], None]
) -> dict[str, float]:
    """What each layer alone costs, measured on a part of the rows.

    By cosine even where labels are given: a few rows' labels do not tell layers apart.
    """
    everything = set(names)
    base = measure(everything, True).cosine
    advance()
    effects = {}
    for name in names:
        effects[name] = measure(everything - {name}, True).cosine - base
        advance()
    return effects
