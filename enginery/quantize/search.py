"""Sensitivity search: choose the layers that stay in floating point to meet an accuracy budget.

Measuring every combination of layers is impossible, so the search is greedy:

1. Measure the graph with all layers quantized. If it meets the budget, the search is done.
2. Measure the effect of each layer: the accuracy gained when only this layer is not quantized.
3. Sort the layers by effect per multiply-add. Leaving out the first layers in this order gains
   the most accuracy for the least quantized arithmetic.
4. Find the smallest number of layers to leave out: double it until the budget is met, then
   bisect. Accuracy is assumed to grow with that number. The result is measured in any case.
5. If that leaves out much, do the same with another effect: the accuracy lost when only this layer
   is quantized. Where all layers together are far off, what one of them costs hides behind the
   others: of a text detector, the first order kept 1 % of the multiply-adds and this one 36 %.
6. Measure the graph itself. If it misses the budget, the search may spend less of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from enginery.core.accuracy import AccuracyMetrics
from enginery.core.errors import CheckFailedError
from enginery.quantize.accuracy import HEADROOM, AccuracyBudget

_CONFIRMATIONS = 4
"""Largest number of graphs that are written and measured; each misses the budget by less."""
_ENOUGH = 0.8
"""Quantized share of the multiply-adds from which a second order of layers is not tried."""

Measure = Callable[[Collection[str], bool], AccuracyMetrics]
"""(names of the quantized layers, whether to measure on fewer rows) -> accuracy."""


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
    """Layer -> mean cosine that quantizing it costs, beside all other layers or by itself; empty if
    not measured."""
    curve: list[CurvePoint] = field(default_factory=list)
    """All measurements, from all layers quantized to the fewest."""


def search_mixed_precision(
    weights: Mapping[str, float],
    measure: Measure,
    budget: AccuracyBudget,
    *,
    curve: bool = False,
    confirm: Callable[[Collection[str]], AccuracyMetrics] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> SearchResult:
    """Choose the layers to leave out; see the module for the algorithm.

    Args:
        weights: layer that can be quantized -> its share of the multiply-adds, 0 to 1.
        measure: measures the accuracy of a combination.
        budget: the accuracy budget.
        curve: also measure combinations with fewer quantized layers, for the report.
        confirm: measures the graph itself with these layers quantized, in place of a simulation.
        advance: called after each measurement.

    Raises:
        CheckFailedError: no combination with a quantized layer meets the budget.
    """
    names = list(weights)

    def measure_point(left_out: Sequence[str]) -> CurvePoint:
        accuracy = measure(set(names) - set(left_out), False)
        advance()
        share = sum(weights[name] for name in names if name not in left_out)
        return CurvePoint(len(left_out), share, accuracy)

    # Step 1 of the module's algorithm.
    everything = measure_point([])
    met_by_all = budget.is_met_in_search(everything.accuracy)
    if met_by_all and confirm is not None:
        met_by_all = budget.is_met_by(confirm(set(names)))
    if met_by_all and not curve:
        return SearchResult({}, everything.accuracy, {}, [everything])
    orders: list[_Order] = []
    # Steps 2 to 5, the second order only where the first leaves out much.
    for kind in ("last", "first"):
        effects = _measure_effects(names, measure, everything_but=kind == "last", advance=advance)
        # A layer may have no multiply-adds at all.
        by_effect = sorted(names, key=lambda n: effects[n] / max(weights[n], 1e-9), reverse=True)
        order = _Order(kind, effects, by_effect, {0: everything}, measure_point, budget)
        # If the budget is missed with all layers, at least one has to be left out.
        order.find_fewest(0 if met_by_all else 1)
        orders.append(order)
        if order.share >= _ENOUGH:
            break
    # An order that never meets the budget has a share of 0.
    best = max(orders, key=lambda order: order.share)
    # Step 6.
    if confirm is not None and best.left_out:
        best.confirm(confirm)
    if best.left_out == len(names):
        points = [point for order in orders for point in order.points.values()]
        nearest = max(points, key=lambda point: budget.value(point.accuracy))
        raise CheckFailedError(
            f"no combination with a quantized layer meets the budget, a {budget}: the best has a "
            f"mean cosine of {nearest.accuracy.cosine:.8g} with {nearest.share:.0%} of the "
            "multiply-adds quantized.",
            do=f"{budget.remedy}, or calibrate on inputs closer to those the model is used for.",
        )
    if curve:
        for count in _powers_of_two(len(names)):
            best.point(count)
    ordered = sorted(best.points.values(), key=lambda point: point.left_out)
    return SearchResult(best.reasons(), best.point(best.left_out).accuracy, best.effects, ordered)


@dataclass
class _Order:
    """Layers in the order in which they are left out, and what was measured of it."""

    kind: str
    """`last`: effects in a graph with all other layers quantized; `first`: with no other."""
    effects: dict[str, float]
    names: Sequence[str]
    points: dict[int, CurvePoint]
    measure_point: Callable[[Sequence[str]], CurvePoint]
    budget: AccuracyBudget
    left_out: int = 0
    """The fewest layers to leave out; all of them if no combination meets the budget."""

    def point(self, count: int) -> CurvePoint:
        """Return the measurement without the first `count` layers."""
        if count not in self.points:
            self.points[count] = self.measure_point(self.names[:count])
        return self.points[count]

    def confirm(self, measure: Callable[[Collection[str]], AccuracyMetrics]) -> None:
        """Leave out more layers until the graph itself meets the budget."""
        for _ in range(_CONFIRMATIONS):
            if self.left_out >= len(self.names):
                return
            real = measure(set(self.names[self.left_out :]))
            if self.budget.is_met_by(real):
                return
            # The graph lost more than the simulation, so the simulation may lose less by that
            # ratio.
            spendable = self.budget.spendable * HEADROOM * self.budget.allowed
            spendable /= self.budget.loss(real)
            self.budget = replace(self.budget, spendable=spendable)
            self.find_fewest(self.left_out + 1, low=self.left_out)

    def find_fewest(self, high: int, *, low: int = 0) -> None:
        """Find the fewest layers to leave out.

        Args:
            high: the first number that is tried.
            low: a number that is not enough.
        """

        def is_enough(count: int) -> bool:
            return self.budget.is_met_in_search(self.point(count).accuracy)

        # Leaving out `low` layers is not enough, leaving out `high` is: double, then bisect.
        while high < len(self.names) and not is_enough(high):
            low, high = high, 2 * high
        high = min(high, len(self.names))
        while high - low > 1:
            middle = (low + high) // 2
            if is_enough(middle):
                high = middle
            else:
                low = middle
        self.left_out = high

    @property
    def share(self) -> float:
        """Quantized share of the multiply-adds; 0 if no combination meets the budget."""
        return self.points[self.left_out].share if self.left_out < len(self.names) else 0.0

    def reasons(self) -> dict[str, str]:
        """Return why each layer is left out."""
        words = {
            "last": "leaving it out raises the mean cosine by",
            "first": "quantized by itself it lowers the mean cosine by",
        }[self.kind]
        return {name: f"{words} {self.effects[name]:.2e}" for name in self.names[: self.left_out]}


def _powers_of_two(below: int) -> list[int]:
    """Return the powers of two below a number.

    >>> _powers_of_two(5)
    [1, 2, 4]
    """
    return [1 << exponent for exponent in range(below.bit_length()) if 1 << exponent < below]


def _measure_effects(
    names: Sequence[str], measure: Measure, *, everything_but: bool, advance: Callable[[], None]
) -> dict[str, float]:
    """Measure what each layer costs on a part of the rows: beside all others, or by itself.

    The cosine is used even if there are labels: the labels of a few rows do not tell layers apart.
    """
    everything = set(names) if everything_but else set()
    base = measure(everything, True).cosine
    advance()
    effects = {}
    for name in names:
        # The symmetric difference: all layers but this one, or this one alone.
        changed = measure(everything ^ {name}, True).cosine
        effects[name] = changed - base if everything_but else base - changed
        advance()
    return effects
