"""Times as numbers with their uncertainty, and two contenders' times as a ratio with its own.

>>> median_interval([5.1, 5.0, 5.3, 5.2, 5.1, 5.4, 5.2, 5.1])
(5.0, 5.4)
>>> compare([[2.0, 2.1]] * 8, [[1.0, 1.0]] * 8, confidence=0.95, smallest=0.02).words
'2.05 times as fast (2.05 to 2.05)'

Contenders take turns, a round of turns after another, so that a drift of the machine hits all of
them. The median of each turn is one value; intervals are over turns, not over the single runs in
them, which follow one another and are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from enginery.core.artifact.reports import Comparison, Interval, Latency

Turns = Sequence[Sequence[float]]
"""Times in ms of each turn's runs."""

_RUNS_FOR_P99 = 100
"""With fewer runs the 99th percentile is the slowest one, whatever that was."""


def latency(turns: Turns, *, confidence: float = 0.95) -> Latency:
    """What the turns of one contender say.

    Args:
        turns: the times of each turn's runs, in ms; at least one turn, none empty.
        confidence: of the interval.
    """
    every = [time for turn in turns for time in turn]
    medians = [median(turn) for turn in turns]
    return Latency(
        runs=len(every),
        rounds=len(turns),
        mean_ms=fmean(every),
        p50_ms=percentile(every, 50),
        p90_ms=percentile(every, 90),
        p99_ms=percentile(every, 99) if len(every) >= _RUNS_FOR_P99 else None,
        median_ms=median(medians),
        interval_ms=median_interval(medians, confidence=confidence),
    )


def compare(
    base: Turns,
    contender: Turns,
    *,
    confidence: float,
    smallest: float,
    names: tuple[str, str] = ("contender", "base"),
) -> Comparison:
    """The contender beside the base, paired by round.

    Args:
        base: the base's turns, in ms.
        contender: the contender's, from the same first round on. Where one has more, because the
            other sat the last rounds out, those are in no pair.
        confidence: of the interval.
        smallest: a ratio within this share of 1 is no difference.
        names: the contender's and the base's.
    """
    pairs = zip(base, contender, strict=False)
    ratios = [median(theirs) / median(ours) for theirs, ours in pairs]
    middle = median(ratios)
    interval = median_interval(ratios, confidence=confidence)
    if interval is None:
        few = f"too few rounds to say ({len(ratios)} of {rounds_needed(confidence)})"
        return Comparison(*names, middle, None, False, few)
    low, high = interval
    different = low > 1 + smallest or high < 1 / (1 + smallest)
    span = f"({_ratio(low)} to {_ratio(high)})"
    words = f"{_ratio(middle)} times as fast {span}" if different else f"no difference seen {span}"
    return Comparison(*names, middle, interval, different, words)


def _ratio(value: float) -> str:
    """Three decimals near 1, where two would hide on which side it is; 0.0042 and not 0.00."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:.3f}" if abs(value - 1) < 0.1 else f"{value:.2f}"


def median_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval | None:
    """A distribution-free confidence interval of the median, from two order statistics.

    The k-th smallest and the k-th largest of n independent values hold the median between them
    with the probability 1 - 2 P(Binomial(n, 1/2) < k), whatever the distribution; the largest k
    that keeps the confidence is taken. Source: W. J. Conover, "Practical Nonparametric
    Statistics", 3rd ed., 3.2; H. A. David and H. N. Nagaraja, "Order Statistics", 3rd ed., 7.1.

    Returns:
        The interval, or None where even the extremes do not reach the confidence: fewer than 6
        values for 95 %.
    """
    count = len(values)
    outside = (1 - confidence) / 2
    tail, k = 0.0, 0
    while k < count / 2:
        tail += math.comb(count, k) / 2**count
        if tail > outside:
            break
        k += 1
    if k == 0:
        return None
    ordered = sorted(values)
    return ordered[k - 1], ordered[count - k]


def rounds_needed(confidence: float) -> int:
    """The fewest values that `median_interval` makes an interval of."""
    return max(1, math.ceil(1 - math.log2(1 - confidence)))


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linear between neighbours.

    Source: R. J. Hyndman and Y. Fan, "Sample Quantiles in Statistical Packages", 1996, type 7;
    numpy's default.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
