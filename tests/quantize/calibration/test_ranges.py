import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.passes.qdq.scheme import INT8
from enginery.quantize.calibration.ranges import BINS, Histogram, choose_range

GENERATOR = np.random.default_rng(0)
BELL = GENERATOR.normal(size=200_000).astype(np.float32)


def histogram(*batches):
    made = Histogram.empty(largest=max(float(np.abs(b).max()) for b in batches))
    for batch in batches:
        made.add(batch)
    return made


def test_minmax_is_the_largest_magnitude():
    assert choose_range(histogram(np.float32([1, -3, 2])), "minmax", INT8) == 3


def test_percentile_clips_the_remaining_share():
    found = choose_range(histogram(BELL), "percentile", INT8, percentile=99)
    # 99 % of a standard normal distribution lie within 2.576 of its middle.
    assert found == pytest.approx(2.576, abs=0.03)


def test_percentile_100_is_minmax():
    made = histogram(BELL)
    found = choose_range(made, "percentile", INT8, percentile=100)
    assert found == pytest.approx(made.largest)


def test_entropy_clips_a_lone_outlier():
    # 200,000 steps of a normal distribution are worth more than one value.
    made = histogram(np.append(BELL, np.float32(60)))
    assert 3 < choose_range(made, "entropy", INT8) < 40


def test_uniform_distribution_is_not_clipped():
    even = GENERATOR.uniform(-1, 1, 200_000).astype(np.float32)
    assert choose_range(histogram(even), "entropy", INT8) == pytest.approx(1, abs=0.03)


def test_histogram_has_a_fixed_size():
    made = Histogram.empty(largest=5)
    for _ in range(20):
        made.add(BELL)
    assert made.counts.shape == (BINS,)
    assert made.counts.sum() == 20 * len(BELL)


def test_values_beyond_the_edge_are_counted_in_the_last_bin():
    made = Histogram.empty(largest=1)
    made.add(np.float32([7]))
    assert made.counts[-1] == 1


def test_activation_that_is_not_finite_is_an_error():
    with pytest.raises(InputError, match="NaN or infinite"):
        Histogram.empty(largest=float("nan"))
