"""Accuracy on labels: intervals against published values, and changed rows."""

import math

import pytest

from enginery.core.accuracy import measure_accuracy, paired_interval, wilson_interval


@pytest.mark.parametrize(
    ("right", "rows", "interval"),
    [  # Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0000, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_interval_of_an_accuracy_is_wilsons(right, rows, interval):
    assert wilson_interval(right, rows) == pytest.approx(interval, abs=5e-5)
    high, low = (1 - end for end in interval)
    assert wilson_interval(rows - right, rows) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("counts", "interval"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 2635, method 10
        ((36, 12, 2, 0), (0.0569, 0.3404)),
        # Altman et al., Statistics with Confidence (2000), page 52
        ((14, 5, 0, 22), (0.011, 0.226)),
    ],
)
def test_interval_of_a_paired_difference_is_newcombes(counts, interval):
    both, first, second, neither = counts
    found = paired_interval(both=both, first=first, second=second, neither=neither)
    assert found == pytest.approx(interval, abs=5e-4)
    low, high = paired_interval(both=both, first=second, second=first, neither=neither)
    assert (-high, -low) == pytest.approx(found)


def test_pairs_narrow_the_interval_of_a_difference():
    """85 of 100 and 84 of 100 right, on nearly the same rows or on independent ones."""
    low, high = paired_interval(both=84, first=1, second=0, neither=15)
    assert low < 0.01 < high
    one, other = wilson_interval(85, 100), wilson_interval(84, 100)
    independent = math.hypot(one[1] - one[0], other[1] - other[0])
    assert high - low < independent / 2


@pytest.mark.parametrize("right", [0, 7])
def test_interval_without_any_difference_contains_zero(right):
    low, high = paired_interval(both=right, first=0, second=0, neither=7 - right)
    assert low <= 0 <= high
    assert high - low < 2


def test_rows_that_change_are_counted():
    expected, found = [True, True, True, False, False], [True, False, False, True, False]
    metrics = measure_accuracy("label", {"PyTorch": expected, "this artifact": found})
    assert [(each.name, each.right, each.rows) for each in metrics.accuracies] == [
        ("PyTorch", 3, 5),
        ("this artifact", 2, 5),
    ]
    (change,) = metrics.changes
    assert (change.name, change.base) == ("this artifact", "PyTorch")
    assert (change.broken, change.repaired) == (2, 1)
    assert change.difference == pytest.approx(-0.2)
    assert change.interval[0] < -0.2 < change.interval[1]
    assert metrics.rows()[1]["right → wrong"] == "2"
    assert metrics.rows()[0]["accuracy"] == "60.0 % (23.1 to 88.2 %)"
