"""Which layers stay out of INT8, so that the answers stay near enough.

Takes a function that measures a mix; leaves the layers that were left out, each with its reason,
and the curve of accuracy against the share of INT8.

    >>> result = search_mix(names, weights, measure, budget)
    >>> list(result.left_out), result.accuracy.cosine
    (['/encoder/layer.0/output/dense/MatMul'], 0.9984)

All layers start in INT8. Where that is too far from FP32, each is switched off alone; then the most
harmful for each multiply-add are left out together, just as many as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from enginery.core.errors import CheckFailedError
from enginery.quantize.accuracy import Accuracy
from enginery.quantize.config import QuantizeConfig

_HEADROOM = 0.95
"""FP16 takes a little of the budget as well, so the search does not spend all of it."""

Measure = Callable[[Collection[str], bool], Accuracy]
"""Layers in INT8, and whether a part of the rows will do -> accuracy."""


@dataclass(frozen=True)
class Budget:
    """How far the answers may move."""

    min_cosine: float
    max_accuracy_drop: float
    reference_accuracy: float | None
    """Of the FP32 model on the labels; None without labels, and then the cosine is what counts."""

    @classmethod
    def of(cls, config: QuantizeConfig, reference_accuracy: float | None) -> Budget:
        """The options' budget; with labels it is one of accuracy."""
        return cls(config.min_cosine, config.max_accuracy_drop, reference_accuracy)

    def holds(self, found: Accuracy, *, headroom: float = 1.0) -> bool:
        """Whether the answers are near enough, with a part of the budget to spare."""
        return self.distance(found) <= headroom * self.allowed

    @property
    def allowed(self) -> float:
        return 1 - self.min_cosine if self.reference_accuracy is None else self.max_accuracy_drop

    def distance(self, found: Accuracy) -> float:
        """What the budget limits: 1 - cosine, or the fall in accuracy."""
        if self.reference_accuracy is None or found.label_accuracy is None:
            return 1 - found.cosine
        return self.reference_accuracy - found.label_accuracy

    def __str__(self) -> str:
        if self.reference_accuracy is None:
            return f"mean cosine of at least {self.min_cosine}"
        return f"accuracy of at least {self.reference_accuracy - self.max_accuracy_drop:.4f}"


@dataclass(frozen=True)
class CurvePoint:
    """One mix that was measured."""

    left_out: int
    int8_share: float
    accuracy: Accuracy


@dataclass(frozen=True)
class SearchResult:
    """The mix that was chosen."""

    left_out: dict[str, str]
    """Layer -> reason."""
    accuracy: Accuracy
    effects: dict[str, float]
    """Layer -> what 1 - cosine loses when it alone leaves INT8; empty where nothing had to."""
    curve: list[CurvePoint] = field(default_factory=list)


def search_mix(
    names: Sequence[str],
    weights: Mapping[str, float],
    measure: Measure,
    budget: Budget,
    *,
    advance: Callable[[], None] = lambda: None,
) -> SearchResult:
    """The largest INT8 mix in order of harm that holds the budget.

    Args:
        names: the layers that can be INT8.
        weights: their shares of the multiply-adds.
        measure: the accuracy of a mix.
        budget: what must hold.
        advance: called after each measurement.

    Raises:
        CheckFailedError: the budget holds for no mix with any INT8 in it.
    """
    curve: dict[int, CurvePoint] = {}

    def measured(left_out: Sequence[str]) -> Accuracy:
        found = measure(set(names) - set(left_out), False)
        share = sum(weights[name] for name in names if name not in left_out)
        curve[len(left_out)] = CurvePoint(len(left_out), share, found)
        advance()
        return found

    found = measured([])
    if budget.holds(found, headroom=_HEADROOM):
        return SearchResult({}, found, {}, list(curve.values()))
    effects = _effects(names, measure, advance)
    order = sorted(names, key=lambda name: effects[name] / max(weights[name], 1e-9), reverse=True)
    low, high = 0, 1
    while high < len(order) and not budget.holds(measured(order[:high]), headroom=_HEADROOM):
        low, high = high, 2 * high
    high = min(high, len(order))
    while high - low > 1:
        middle = (low + high) // 2
        if budget.holds(measured(order[:middle]), headroom=_HEADROOM):
            high = middle
        else:
            low = middle
    if high == len(order):
        best = max(curve.values(), key=lambda point: point.accuracy.cosine)
        raise CheckFailedError(
            f"no mix with INT8 in it keeps a {budget}: the best has a mean cosine of "
            f"{best.accuracy.cosine:.4f} with {best.int8_share:.0%} of the multiply-adds in INT8.",
            do="Lower the budget, or calibrate on inputs nearer to those that the model is for.",
        )
    chosen = order[:high]
    reasons = {
        name: f"left out of INT8 alone, it lowers 1 - cosine by {effects[name]:.2e}"
        for name in chosen
    }
    points = sorted(curve.values(), key=lambda point: point.left_out)
    return SearchResult(reasons, curve[high].accuracy, effects, points)


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
