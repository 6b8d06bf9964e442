from dataclasses import replace

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.passes.qdq.scheme import INT8
from enginery.quantize.calibration.ranges import BINS, Histogram, choose_range

UINT8 = replace(INT8, unsigned=True)
GENERATOR = np.random.default_rng(0)
BELL = GENERATOR.normal(size=200_000).astype(np.float32)


def histogram(*batches):
    made = Histogram.empty(largest=max(float(np.abs(b).max()) for b in batches))
    for batch in batches:
        made.add(batch)
    return made


def symmetric_range(histogram, method, **options):
    return choose_range(
        histogram, method, lambda limit: ActivationQuantParams(limit / 127), INT8, **options
    )


def test_minmax_is_the_largest_magnitude():
    assert symmetric_range(histogram(np.float32([1, -3, 2])), "minmax") == 3


def test_percentile_clips_the_remaining_share():
    found = symmetric_range(histogram(BELL), "percentile", percentile=99)
    # 99 % of a standard normal distribution lie within 2.576 of its middle.
    assert found == pytest.approx(2.576, abs=0.03)


def test_percentile_100_is_minmax():
    made = histogram(BELL)
    assert symmetric_range(made, "percentile", percentile=100) == pytest.approx(made.largest)


def test_moving_average_is_not_set_by_one_outlier():
    calm = np.full(100, 1, np.float32)
    spike = np.full(100, 100, np.float32)
    found = symmetric_range(histogram(calm, calm, spike, *[calm] * 20), "moving-average")
    assert 1 < found < 10


@pytest.mark.parametrize("method", ["mse", "entropy"])
def test_a_lone_outlier_is_clipped(method):
    # 200,000 steps of a normal distribution are worth more than one value.
    made = histogram(np.append(BELL, np.float32(60)))
    assert 3 < symmetric_range(made, method) < 40


@pytest.mark.parametrize("method", ["mse", "entropy"])
def test_uniform_distribution_is_not_clipped(method):
    even = GENERATOR.uniform(-1, 1, 200_000).astype(np.float32)
    assert symmetric_range(histogram(even), method) == pytest.approx(1, abs=0.03)


def test_mse_minimizes_the_squared_rounding_error():
    values = np.append(BELL, GENERATOR.normal(scale=12, size=500).astype(np.float32))
    made = histogram(values)

    def error(top):
        step = top / 127
        return np.square(np.clip(np.rint(values / step), -127, 127) * step - values).mean()

    best = min(error(top) for top in np.linspace(1, made.largest, 200))
    assert error(symmetric_range(made, "mse")) < 1.05 * best


@pytest.mark.parametrize("sign", [1, -1])
def test_mse_minimizes_the_error_of_a_range_with_a_zero_point(sign):
    # All of uint8 is used for one sign, so the steps are half as wide, and less is clipped.
    tail = GENERATOR.normal(scale=12, size=500)
    values = sign * np.abs(np.append(BELL, tail)).astype(np.float32)
    made = histogram(values)

    def params_of(limit):
        return ActivationQuantParams.of_range(*sorted([0.0, sign * limit]))

    def error(limit):
        return np.square(params_of(limit).fake_quantize(values, UINT8) - values).mean()

    best = min(error(limit) for limit in np.linspace(1, made.largest, 200))
    found = choose_range(made, "mse", params_of, UINT8)
    assert error(found) < 1.05 * best
    assert found > 1.1 * symmetric_range(made, "mse")


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
