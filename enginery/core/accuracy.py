"""Accuracy beside a reference and on labelled rows, with confidence intervals.

>>> low, high = wilson_interval(81, 263)
>>> round(low, 4), round(high, 4)
(0.2553, 0.3662)
>>> [low, high] = paired_interval(both=36, first=12, second=2, neither=0)
>>> round(low, 4), round(high, 4)
(0.0569, 0.3404)

Both are examples of Newcombe's papers, see below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, Any, Self

from pydantic import BeforeValidator

from enginery.core.artifact.manifest import Count
from enginery.core.table import NOTHING, Row

CONFIDENCE = 0.95


def _null_is_nan(value: Any) -> Any:
    return math.nan if value is None else value


Number = Annotated[float, BeforeValidator(_null_is_nan)]
"""A float that may be NaN (not measured) or infinite (no limit)."""
Interval = tuple[float, float]
"""(lower end, upper end)."""


@dataclass(frozen=True)
class AccuracyMetrics:
    """Accuracy of one graph relative to a reference, on held-out rows."""

    rows: Count
    cosine: float
    """Mean over rows; with several outputs, the lowest of their means."""
    worst_cosine: float
    """Lowest cosine of any row."""
    neighbour_agreement: float | None
    """Share of embeddings whose nearest neighbour is the same; None for other models."""
    argmax_agreement: float | None
    """Share of positions with the same argmax; None for embeddings."""
    label_accuracy: float | None
    """Share of rows whose argmax is the correct label; None without labels."""
    deviation: float | None = field(default=None, kw_only=True)
    """Standard deviation of the cosine over rows; None for one row."""
    box_f1: float | None = field(default=None, kw_only=True)
    """F1 of a detector's boxes, those of the reference being the right ones; None for other models
    and if neither finds any."""


@dataclass(frozen=True)
class LayerError:
    """Error of one quantized layer's output against the layer in FP32, on the same inputs."""

    rows: Count
    error: Number
    """Mean over rows of the length of the difference by the length of the FP32 output."""
    deviation: Number | None
    """Standard deviation over rows; None for one row."""

    @classmethod
    def of(cls, errors: Sequence[float]) -> Self:
        """Return the error of a layer from those of its rows."""
        if not errors:
            return cls(0, math.nan, None)
        mean = math.fsum(errors) / len(errors)
        if len(errors) == 1 or not math.isfinite(mean):
            return cls(len(errors), mean, None)
        squares = math.fsum((error - mean) ** 2 for error in errors)
        return cls(len(errors), mean, math.sqrt(squares / (len(errors) - 1)))


@dataclass(frozen=True)
class LabelAccuracy:
    """How many labelled rows a classifier has right."""

    name: str
    """`PyTorch`, `this artifact`, or an artifact of a benchmark."""
    right: Count
    rows: Count
    interval: Interval
    """Confidence interval of the accuracy, at 95 %."""

    @property
    def accuracy(self) -> float:
        """Share of rows, 0 to 1."""
        return self.right / self.rows if self.rows else math.nan

    def describe(self) -> str:
        """Return `91.4 % (88.7 to 93.5 %)`."""
        low, high = self.interval
        return f"{100 * self.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"


@dataclass(frozen=True)
class AccuracyChange:
    """The rows that one classifier has right and another one has not."""

    name: str
    base: str
    broken: Count
    """Rows that the base has right and this one wrong."""
    repaired: Count
    """Rows that the base has wrong and this one right."""
    difference: float
    """Accuracy less that of the base."""
    interval: Interval
    """Confidence interval of the difference, at 95 %."""

    def describe(self) -> str:
        """Return `-0.4 % (-1.7 to 0.9 %)`."""
        low, high = self.interval
        return f"{100 * self.difference:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f} %)"


@dataclass(frozen=True)
class LabelMetrics:
    """Accuracy of several classifiers on the same labelled rows."""

    column: str
    """The column of the labels."""
    accuracies: list[LabelAccuracy]
    changes: list[AccuracyChange]
    """Changes from the first of the classifiers to each other one."""

    def rows(self) -> list[Row]:
        """Return a row for each classifier."""
        changes = {change.name: change for change in self.changes}
        rows = []
        for accuracy in self.accuracies:
            change = changes.get(accuracy.name)
            rows.append(
                {
                    "model": accuracy.name,
                    "rows": str(accuracy.rows),
                    "accuracy": accuracy.describe(),
                    "difference": change.describe() if change else NOTHING,
                    "right → wrong": str(change.broken) if change else NOTHING,
                    "wrong → right": str(change.repaired) if change else NOTHING,
                }
            )
        return rows


def measure_accuracy(column: str, right: Mapping[str, Sequence[bool]]) -> LabelMetrics:
    """Return the accuracy of several classifiers on the same rows, and how the first one's changes.

    Args:
        column: the column of the labels.
        right: name of a classifier -> whether its answer is the label, for each row.
    """
    (base, expected), *compared = right.items()
    return LabelMetrics(
        column=column,
        accuracies=[
            LabelAccuracy(name, sum(rows), len(rows), wilson_interval(sum(rows), len(rows)))
            for name, rows in right.items()
        ],
        changes=[_change(name, rows, base, expected) for name, rows in compared],
    )


def _change(name: str, rows: Sequence[bool], base: str, expected: Sequence[bool]) -> AccuracyChange:
    pairs = list(zip(rows, expected, strict=True))
    both_right, repaired = pairs.count((True, True)), pairs.count((True, False))
    broken, neither = pairs.count((False, True)), pairs.count((False, False))
    return AccuracyChange(
        name=name,
        base=base,
        broken=broken,
        repaired=repaired,
        difference=(repaired - broken) / len(pairs),
        interval=paired_interval(both=both_right, first=repaired, second=broken, neither=neither),
    )


def wilson_interval(right: int, rows: int) -> Interval:
    """Return Wilson's score interval of a proportion, at a confidence level of 95 %.

    It holds for few rows and for proportions near 0 and 1. Source: E. B. Wilson, JASA 22 (1927)
    209; R. G. Newcombe, Statistics in Medicine 17 (1998) 857, method 3.
    """
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = right / rows
    middle = share + z**2 / (2 * rows)
    half = z * math.sqrt(share * (1 - share) / rows + z**2 / (4 * rows**2))
    scale = 1 + z**2 / rows
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def paired_interval(*, both: int, first: int, second: int, neither: int) -> Interval:
    """Return the interval of the difference between two proportions of the same rows, at 95 %.

    Two classifiers mostly agree, so that the difference is known far better than either accuracy.
    Source: R. G. Newcombe, Statistics in Medicine 17 (1998) 2635, method 10.

    Args:
        both: rows that both have right.
        first: rows that only the first has right.
        second: rows that only the second has right.
        neither: rows that neither has right.
    """
    rows = both + first + second + neither
    first_rate, second_rate = (both + first) / rows, (both + second) / rows
    low_first, high_first = wilson_interval(both + first, rows)
    low_second, high_second = wilson_interval(both + second, rows)
    excess = both * neither - first * second
    # The correlation of the two, with a correction for continuity.
    corrected = max(excess - rows / 2, 0) if excess > 0 else excess
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    phi = corrected / math.sqrt(margins) if margins else 0.0

    def combine(margin: float, opposite: float) -> float:
        return math.sqrt(max(0.0, margin**2 - 2 * phi * margin * opposite + opposite**2))

    difference = first_rate - second_rate
    return (
        difference - combine(first_rate - low_first, high_second - second_rate),
        difference + combine(high_first - first_rate, second_rate - low_second),
    )
