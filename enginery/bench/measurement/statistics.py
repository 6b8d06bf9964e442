"""Latency with confidence intervals, and ratios of two backends' latencies.

>>> median_interval([5.1, 5.0, 5.3, 5.2, 5.1, 5.4, 5.2, 5.1])
(5.0, 5.4)
>>> compare([[2.0, 2.1]] * 8, [[1.0, 1.0]] * 8, confidence=0.95, smallest=0.02).words
'2.05x as fast (2.05x to 2.05x)'

Intervals are computed over the medians of the turns. The single runs of a turn follow one another
directly, so they are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from enginery.core.accuracy import Interval
from enginery.reports.benchmark import Comparison, Latency, describe_ratio

Turns = Sequence[Sequence[float]]
"""Times of each turn's runs in ms."""

_RUNS_FOR_P99 = 100
"""With fewer runs the 99th percentile would be the slowest run."""


def latency(turns: Turns, *, confidence: float = 0.95) -> Latency:
    """Summarize the turns of one backend.

    Args:
        turns: times of each turn's runs in ms; at least one turn, none empty.
        confidence: confidence level of the interval.
    """
    every = [time for turn in turns for time in turn]
    medians = [median(turn) for turn in turns]
    p50, p90, p99 = map(float, np.percentile(every, (50, 90, 99)))
    return Latency(
        runs=len(every),
        rounds=len(turns),
        mean_ms=fmean(every),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99 if len(every) >= _RUNS_FOR_P99 else None,
        median_ms=median(medians),
        interval_ms=median_interval(medians, confidence=confidence),
    )


def compare(
    base: Turns,
    backend: Turns,
    *,
    confidence: float,
    smallest: float,
    names: tuple[str, str] = ("backend", "base"),
) -> Comparison:
    """Compare a backend with a base, paired by round.

    Args:
        base: times of the base's turns in ms.
        backend: times of the backend's turns in ms, starting with the same round. If one of the two
            has more turns, the last ones are ignored.
        confidence: confidence level of the interval.
        smallest: a ratio within this share of 1 counts as equal.
        names: names of the backend and of the base.

    Returns:
        The comparison, with its words from `describe_ratio`.
    """
    pairs = zip(base, backend, strict=False)
    ratios = [median(theirs) / median(ours) for theirs, ours in pairs]
    middle = median(ratios)
    interval = median_interval(ratios, confidence=confidence)
    if interval is None:
        problem = f"too few rounds for an interval ({len(ratios)} of {rounds_needed(confidence)})"
        return Comparison(*names, middle, None, False, problem)
    low, high = interval
    different = low > 1 + smallest or high < 1 / (1 + smallest)
    words = describe_ratio(middle, interval, different=different)
    return Comparison(*names, middle, interval, different, words)


def median_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval | None:
    """Return a confidence interval of the median, for any distribution of the values.

    For n independent values, the median lies between the k-th smallest and the k-th largest with
    probability 1 - 2 P(Binomial(n, 1/2) < k). The interval has the largest k for which this is at
    least `confidence`. Source: W. J. Conover, "Practical Nonparametric Statistics", 3rd ed., 3.2;
    H. A. David and H. N. Nagaraja, "Order Statistics", 3rd ed., 7.1.

    Returns:
        The interval; None for too few values, which are fewer than 6 at 95 %.
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
    """Return the smallest number of values for which `median_interval` returns an interval."""
    return max(1, math.ceil(1 - math.log2(1 - confidence)))
