from __future__ import annotations

import math
import random
from statistics import median

import pytest

from enginery.bench.measurement.statistics import (
    compare,
    latency,
    median_interval,
    percentile,
    rounds_needed,
)


def ratio(base, contender, smallest=0.02):
    return compare(base, contender, confidence=0.95, smallest=smallest)


@pytest.mark.parametrize(
    ("count", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (30, 10), (100, 40)]
)
def test_interval_has_the_ranks_of_the_published_table(count, rank):
    # Conover, table of the binomial distribution at 1/2: the largest k with P(B < k) <= 0.025.
    assert median_interval(list(range(1, count + 1))) == (rank, count - rank + 1)


@pytest.mark.parametrize(("confidence", "needed"), [(0.9, 5), (0.95, 6), (0.99, 8)])
def test_no_interval_of_too_few_values(confidence, needed):
    assert rounds_needed(confidence) == needed
    assert median_interval(list(range(needed - 1)), confidence=confidence) is None
    assert median_interval(list(range(needed)), confidence=confidence) is not None


@pytest.mark.parametrize("count", [6, 10, 25, 60])
@pytest.mark.parametrize("draw", ["lognormal", "bimodal"])
def test_interval_covers_the_median_as_often_as_it_says(count, draw):
    """Skewed as latencies are, and bimodal as those of a busy machine."""
    generator = random.Random(20240501)

    def value():
        if draw == "lognormal":
            return generator.lognormvariate(0, 0.5)
        return generator.gauss(1.0, 0.05) if generator.random() < 0.7 else generator.gauss(3, 0.1)

    true = median(value() for _ in range(200_001))
    covered = 0
    for _ in range(4000):
        low, high = median_interval([value() for _ in range(count)])
        covered += low <= true <= high
    # At least 95 %, and the order statistics next to these would give less: exact is at most 98 %.
    assert 0.94 <= covered / 4000 <= 0.99


def test_percentiles_are_numpys():
    import numpy as np

    generator = random.Random(1)
    values = [generator.expovariate(1) for _ in range(137)]
    for percent in (0, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_latency_of_known_times():
    found = latency([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert (found.runs, found.rounds, found.mean_ms, found.p50_ms) == (6, 2, 3.5, 3.5)
    assert found.median_ms == 3.5
    assert found.interval_ms is None
    assert found.half_width == math.inf


def test_p99_needs_a_hundred_runs():
    assert latency([[1.0] * 99]).p99_ms is None
    assert latency([[1.0] * 100]).p99_ms == 1.0


def test_drift_that_hits_both_leaves_the_ratio_alone():
    """The machine slows down by half over the rounds; paired ratios do not see it."""
    drift = [1 + index / 20 for index in range(20)]
    found = ratio([[3.0 * d] for d in drift], [[2.0 * d] for d in drift])
    assert found.speedup == pytest.approx(1.5)
    assert found.interval == (pytest.approx(1.5), pytest.approx(1.5))
    assert found.words == "1.50 times as fast (1.50 to 1.50)"


def test_difference_within_the_noise_is_called_none():
    generator = random.Random(3)
    base = [[generator.gauss(1.0, 0.1)] for _ in range(20)]
    contender = [[generator.gauss(0.99, 0.1)] for _ in range(20)]
    found = ratio(base, contender)
    assert not found.different
    assert found.words.startswith("no difference seen (0.")


def test_difference_smaller_than_asked_for_is_none():
    base, contender = [[1.01]] * 10, [[1.0]] * 10
    assert not ratio(base, contender).different
    assert ratio(base, contender, smallest=0.005).different


def test_slower_is_a_difference_too():
    found = ratio([[1.0]] * 10, [[4.0]] * 10)
    assert found.different
    assert found.words == "0.25 times as fast (0.25 to 0.25)"


def test_a_ratio_far_from_one_keeps_its_digits():
    assert ratio([[0.0042]] * 8, [[1.0]] * 8).words == "0.0042 times as fast (0.0042 to 0.0042)"
    assert ratio([[333.3]] * 8, [[1.0]] * 8).words.startswith("333.30 times")


def test_rounds_that_only_one_had_are_in_no_pair():
    found = ratio([[2.0]] * 6, [[1.0]] * 6 + [[100.0]] * 3)
    assert (found.speedup, found.interval) == (2.0, (2.0, 2.0))


def test_too_few_rounds_make_no_claim():
    found = ratio([[9.0]] * 5, [[1.0]] * 5)
    assert (found.interval, found.different) == (None, False)
    assert found.words == "too few rounds to say (5 of 6)"


def test_same_program_is_rarely_called_different():
    """The rate of false alarms, with the smallest difference at nothing."""
    generator = random.Random(5)
    alarms = 0
    for _ in range(1000):
        turns = [[[generator.lognormvariate(0, 0.2)] for _ in range(15)] for _ in range(2)]
        alarms += ratio(*turns, smallest=0.0).different
    assert alarms <= 60
