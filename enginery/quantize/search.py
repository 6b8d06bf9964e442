"""Sensitivity search: choose the layers that stay in floating point to meet an accuracy budget.

Measuring every combination of layers is impossible, so the search is greedy:

1. Measure the graph with all layers quantized. If it meets the budget, the search is done.
2. Measure the effect of each layer: the accuracy gained when only this layer is not quantized.
3. Sort the layers by effect per multiply-add. Leaving out the first layers in this order gains
   the most accuracy for the least quantized arithmetic.
4. Find the smallest number of layers to leave out: double it until the budget is met, then
   bisect. Accuracy is assumed to grow with that number. The result is measured in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from enginery.core.artifact.reports import AccuracyMetrics
from enginery.core.errors import CheckFailedError, OptionError
from enginery.quantize.config import QuantizeConfig, parse_accuracy_budget

HEADROOM = 0.95
"""Share of the budget that the search may spend; FP16 rounding needs some of it as well."""
_ROUNDING = 1e-12
"""In floating point, 1 - 0.99 is slightly more than 0.01."""

Measure = Callable[[Collection[str], bool], AccuracyMetrics]
"""(names of the quantized layers, whether to measure on fewer rows) -> accuracy."""


@dataclass(frozen=True)
class AccuracyBudget:
    """Accuracy that a quantized model may lose against FP32."""

    kind: Literal["cosine", "agreement", "accuracy", "boxes"]
    """`cosine`: mean cosine to FP32's outputs. `agreement`: share of answers with the same argmax
    as FP32. `accuracy`: share of correct labels. `boxes`: F1 of a detector's boxes to FP32's."""
    allowed: float
    """Largest loss: 0 to 1, or 0 to 2 for the cosine."""
    reference: float = 1.0
    """Value of the FP32 model."""

    @classmethod
    def of(cls, config: QuantizeConfig, reference: AccuracyMetrics) -> AccuracyBudget:
        """Return the budget that the options set.

        Args:
            config: the options.
            reference: accuracy of the FP32 model against itself and against the labels.

        Raises:
            OptionError: `accuracy_budget` is set, but the model has neither logits nor boxes.
        """
        if not config.accuracy_budget:
            return cls("cosine", 1 - config.min_cosine)
        allowed = parse_accuracy_budget(config.accuracy_budget)
        if reference.label_accuracy is not None:
            return cls("accuracy", allowed, reference.label_accuracy)
        if reference.box_f1 is not None:
            return cls("boxes", allowed)
        if reference.argmax_agreement is None:
            raise OptionError(
                "option 'accuracy_budget' is set, but the model has no output 'logits', and no "
                "boxes are found in its outputs, so its answers cannot be counted as right or "
                "wrong.",
                do="Set a minimum cosine instead: --min-cosine 0.998",
            )
        return cls("agreement", allowed)

    @staticmethod
    def notes(config: QuantizeConfig, rows: int) -> list[str]:
        """Return a note if there are too few held-out rows for the `accuracy_budget`."""
        allowed = parse_accuracy_budget(config.accuracy_budget) if config.accuracy_budget else 1.0
        if HEADROOM * allowed * rows >= 1:
            return []
        return [
            f"of {rows} held-out rows, one is {1 / rows:.2%}: with a budget of {allowed:.2%} no "
            f"answer may change; it takes {math.ceil(1 / (HEADROOM * allowed))} held-out rows, a "
            "quarter of --rows, or all of a file with fewer"
        ]

    def is_met_by(self, found: AccuracyMetrics, *, headroom: float = 1.0) -> bool:
        """Return True if the loss is at most `headroom` times the budget."""
        return self.reference - self.value(found) <= headroom * self.allowed + _ROUNDING

    def value(self, found: AccuracyMetrics) -> float:
        """Return the metric that the budget limits."""
        values = {
            "cosine": found.cosine,
            "agreement": found.argmax_agreement,
            "accuracy": found.label_accuracy,
            "boxes": found.box_f1,
        }
        value = values[self.kind]
        if value is None:
            raise AssertionError(f"the quantized graph has no {self.kind}, though FP32 has one")
        return value

    def __str__(self) -> str:
        least = self.reference - self.allowed
        words = {
            "cosine": f"mean cosine of at least {least:.10g}",
            "agreement": f"agreement with FP32's answers of at least {least:.2%}",
            "accuracy": f"accuracy of at least {least:.2%}",
            "boxes": f"F1 of the boxes to FP32's of at least {least:.2%}",
        }
        return words[self.kind]


@dataclass(frozen=True)
class CurvePoint:
    """One measured combination of quantized layers."""

    left_out: int
    """Number of layers that are not quantized."""
    share: float
    """Quantized share of the multiply-adds, 0 to 1."""
    accuracy: AccuracyMetrics


@dataclass(frozen=True)
class SearchResult:
    """The chosen combination of quantized layers."""

    left_out: dict[str, str]
    """Layers that are not quantized -> reason."""
    accuracy: AccuracyMetrics
    effects: dict[str, float]
    """Layer -> gain in mean cosine when only that layer is not quantized; empty if not measured."""
    curve: list[CurvePoint] = field(default_factory=list)
    """All measurements, from all layers quantized to the fewest."""


def search_mixed_precision(
    names: Sequence[str],
    weights: Mapping[str, float],
    measure: Measure,
    budget: AccuracyBudget,
    *,
    curve: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> SearchResult:
    """Choose the layers to leave out; see the module for the algorithm.

    Args:
        names: layers that can be quantized.
        weights: layer -> its share of the multiply-adds, 0 to 1.
        measure: measures the accuracy of a combination.
        budget: the accuracy budget.
        curve: also measure combinations with fewer quantized layers, for the report.
        advance: called after each measurement.

    Raises:
        CheckFailedError: no combination with a quantized layer meets the budget.
    """
    points: dict[int, CurvePoint] = {}

    def meets_budget(left_out: Sequence[str]) -> bool:
        count = len(left_out)
        if count not in points:
            found = measure(set(names) - set(left_out), False)
            share = sum(weights[name] for name in names if name not in left_out)
            points[count] = CurvePoint(count, share, found)
            advance()
        return budget.is_met_by(points[count].accuracy, headroom=HEADROOM)

    met_by_all = meets_budget([])
    if met_by_all and not curve:
        return SearchResult({}, points[0].accuracy, {}, [points[0]])
    effects = _measure_effects(names, measure, advance)
    order = sorted(names, key=lambda name: effects[name] / max(weights[name], 1e-9), reverse=True)
    # Leaving out `low` layers is not enough, leaving out `high` is: double, then bisect.
    low, high = 0, 0 if met_by_all else 1
    while high < len(order) and not meets_budget(order[:high]):
        low, high = high, 2 * high
    high = min(high, len(order))
    while high - low > 1:
        middle = (low + high) // 2
        if meets_budget(order[:middle]):
            high = middle
        else:
            low = middle
    if high == len(order):
        best = max(points.values(), key=lambda point: budget.value(point.accuracy))
        raise CheckFailedError(
            f"no combination with a quantized layer meets the budget, a {budget}: the best has a "
            f"mean cosine of {best.accuracy.cosine:.8g} with {best.share:.0%} of the multiply-adds "
            "quantized.",
            do="Lower the budget, or calibrate on inputs closer to those the model is used for.",
        )
    for count in _powers_of_two(len(order)) if curve else ():
        meets_budget(order[:count])
    reasons = {
        name: f"leaving it out raises the mean cosine by {effects[name]:.2e}"
        for name in order[:high]
    }
    ordered = sorted(points.values(), key=lambda point: point.left_out)
    return SearchResult(reasons, points[high].accuracy, effects, ordered)


def _powers_of_two(below: int) -> list[int]:
    """Return the powers of two below a number.

    >>> _powers_of_two(5)
    [1, 2, 4]
    """
    return [1 << exponent for exponent in range(below.bit_length()) if 1 << exponent < below]


def _measure_effects(
    names: Sequence[str], measure: Measure, advance: Callable[[], None]
) -> dict[str, float]:
    """Measure what each layer costs by itself, on a part of the rows.

    The cosine is used even if there are labels: the labels of a few rows do not tell layers apart.
    """
    everything = set(names)
    base = measure(everything, True).cosine
    advance()
    effects = {}
    for name in names:
        effects[name] = measure(everything - {name}, True).cosine - base
        advance()
    return effects
