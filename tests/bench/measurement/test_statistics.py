from __future__ import annotations

import math
import random
from statistics import median

import pytest

from enginery.bench.measurement.statistics import (
    compare,
    latency,
    median_interval,
    rounds_needed,
)


def ratio(base, backend, smallest=0.02):
    return compare(base, backend, confidence=0.95, smallest=smallest)


@pytest.mark.parametrize(
    ("count", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (30, 10), (100, 40)]
)
def test_interval_has_the_ranks_of_conovers_table(count, rank):
    # Conover, table of the binomial distribution at 1/2: the largest k with P(B < k) <= 0.025.
    assert median_interval(list(range(1, count + 1))) == (rank, count - rank + 1)


@pytest.mark.parametrize(("confidence", "needed"), [(0.9, 5), (0.95, 6), (0.99, 8)])
def test_too_few_values_have_no_interval(confidence, needed):
    assert rounds_needed(confidence) == needed
    assert median_interval(list(range(needed - 1)), confidence=confidence) is None
    assert median_interval(list(range(needed)), confidence=confidence) is not None


@pytest.mark.more
@pytest.mark.parametrize("count", [6, 10, 25, 60])
@pytest.mark.parametrize("draw", ["lognormal", "bimodal"])
def test_interval_contains_the_median_at_the_confidence_level(count, draw):
    """Latencies are skewed; on a busy machine they are bimodal."""
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
    # The exact probability is between 95 % and 98 %; the next order statistics are below 95 %.
    assert 0.94 <= covered / 4000 <= 0.99


def test_latency_of_known_times():
    found = latency([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert (found.runs, found.rounds, found.mean_ms, found.p50_ms) == (6, 2, 3.5, 3.5)
    assert found.median_ms == 3.5
    assert found.interval_ms is None
    assert found.half_width == math.inf


def test_p99_needs_a_hundred_runs():
    assert latency([[1.0] * 99]).p99_ms is None
    assert latency([[1.0] * 100]).p99_ms == 1.0


def test_drift_does_not_change_the_ratio():
    """The machine slows down by half over the rounds."""
    drift = [1 + index / 20 for index in range(20)]
    found = ratio([[3.0 * d] for d in drift], [[2.0 * d] for d in drift])
    assert found.speedup == pytest.approx(1.5)
    assert found.interval == (pytest.approx(1.5), pytest.approx(1.5))
    assert found.words == "1.50x as fast (1.50x to 1.50x)"


def test_difference_within_the_noise_is_no_difference():
    generator = random.Random(3)
    base = [[generator.gauss(1.0, 0.1)] for _ in range(20)]
    backend = [[generator.gauss(0.99, 0.1)] for _ in range(20)]
    found = ratio(base, backend)
    assert not found.different
    assert found.words.startswith("no difference seen (0.")


def test_difference_below_the_smallest_is_no_difference():
    base, backend = [[1.01]] * 10, [[1.0]] * 10
    assert not ratio(base, backend).different
    assert ratio(base, backend, smallest=0.005).different


def test_ratio_is_unclear_if_its_interval_is_wider():
    steady = [[1.0]] * 8
    found = ratio([[1.0], [9.0]] * 4, steady)
    assert found.words == "unclear (1.00x to 9.00x)"
    faster = ratio([[2.0], [9.0]] * 4, steady)
    assert faster.different
    assert faster.words == "faster, unclear by how much (2.00x to 9.00x)"
    slower = ratio(steady, [[2.0], [9.0]] * 4)
    assert slower.words == "slower, unclear by how much (0.11x to 0.50x)"
    assert ratio([[1.8], [2.2]] * 4, steady).words == "2.00x as fast (1.80x to 2.20x)"


def test_speedup_is_told_from_either_side():
    found = ratio([[2.0]] * 8, [[1.0]] * 8)
    assert found.speedup_of("backend") == (2.0, (2.0, 2.0))
    assert found.speedup_of("base") == (0.5, (0.5, 0.5))


def test_slower_backend_is_a_difference():
    found = ratio([[1.0]] * 10, [[4.0]] * 10)
    assert found.different
    assert found.words == "0.25x as fast (0.25x to 0.25x)"


def test_small_and_large_ratios_keep_their_digits():
    assert ratio([[0.0042]] * 8, [[1.0]] * 8).words == "0.0042x as fast (0.0042x to 0.0042x)"
    assert ratio([[333.3]] * 8, [[1.0]] * 8).words.startswith("333.30x as fast")


def test_rounds_of_only_one_backend_are_ignored():
    found = ratio([[2.0]] * 6, [[1.0]] * 6 + [[100.0]] * 3)
    assert (found.speedup, found.interval) == (2.0, (2.0, 2.0))


def test_too_few_rounds_have_no_verdict():
    found = ratio([[9.0]] * 5, [[1.0]] * 5)
    assert (found.interval, found.different) == (None, False)
    assert found.words == "too few rounds for an interval (5 of 6)"


def test_equal_programs_rarely_differ():
    """Count false alarms with a smallest difference of 0."""
    generator = random.Random(5)
    alarms = 0
    for _ in range(1000):
        turns = [[[generator.lognormvariate(0, 0.2)] for _ in range(15)] for _ in range(2)]
        alarms += ratio(*turns, smallest=0.0).different
    assert alarms <= 60
