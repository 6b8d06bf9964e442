"""Accuracy on labelled rows, with confidence intervals.

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
from statistics import NormalDist

from enginery.core.artifact.reports import (
    AccuracyChange,
    Interval,
    LabelAccuracy,
    LabelMetrics,
)

CONFIDENCE = 0.95


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
