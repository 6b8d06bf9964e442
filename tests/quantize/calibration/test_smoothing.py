import numpy as np
import pytest
import torch

from enginery.passes.qdq.layers import Layer
from enginery.passes.qdq.scales import ActivationQuantParams, fake_quantize_weight
from enginery.passes.qdq.scheme import FP8, INT8
from enginery.quantize.calibration.activation_statistics import ChannelMeans, ChannelStatistics
from enginery.quantize.calibration.smoothing import (
    choose_smoothing,
    mean_convolution_error,
    mean_output_error,
    simulate_layer,
    with_observed_range,
)

GENERATOR = np.random.default_rng(0)
K, N = 64, 48
WEIGHT = GENERATOR.normal(size=(K, N)).astype(np.float32)
LAYER = Layer("layer", "MatMul", "x", "w", "y", K, K, N, 1, "b", False, "", False, 1, "y")


def channels(rows):
    made = ChannelStatistics(K, seed=0)
    made.add(rows.astype(np.float32))
    return made


def outliers():
    """Return activations with two channels fifty times as large as the others."""
    return GENERATOR.normal(size=(400, K)) * np.where(np.arange(K) < 2, 50, 1)


def choose(rows, **options):
    defaults = {"strength": "search", "shift": True}
    return choose_smoothing(channels(rows), [(LAYER, WEIGHT)], INT8, **{**defaults, **options})


def test_outlier_channels_move_into_the_weights():
    rows = outliers()
    plain = choose(rows, strength="none", shift=False)
    smoothed = choose(rows)
    assert smoothed.strength > 0
    assert smoothed.error < plain.error / 5 or plain.error == 0
    assert smoothed.params.multiplier[:2].max() < smoothed.params.multiplier[2:].min()


def test_one_sided_activations_are_shifted():
    rows = np.abs(GENERATOR.normal(size=(400, K))) + 3
    centred = choose(rows, strength=0.5)
    assert centred.shifted
    assert centred.error < choose(rows, strength=0.5, shift=False).error / 2


def test_no_shift_when_turned_off():
    assert choose(np.abs(outliers()), shift=False).params.offset is None


def test_given_strength_is_used():
    assert choose(outliers(), strength=0.5, shift=False).strength == 0.5


def test_multiplier_and_offset_are_exact_in_fp16():
    params = choose(np.abs(outliers()) + 1).params
    for vector in (params.multiplier, params.offset):
        np.testing.assert_array_equal(vector, vector.astype(np.float16).astype(np.float32))


def test_channel_of_zeros_stays_finite():
    rows = outliers()
    rows[:, 5] = 0
    params = choose(rows).params
    assert np.isfinite(params.multiplier).all()
    assert params.multiplier.max() <= 2**10


def test_mean_output_error_corrects_the_bias():
    rows = (np.abs(outliers()) + 1).astype(np.float32)
    found = choose(rows, strength="none", shift=False)
    correction = mean_output_error(rows, LAYER, WEIGHT, found.params, INT8)
    left = rows @ WEIGHT - (simulate_layer(rows, LAYER, WEIGHT, found.params, INT8) + correction)
    np.testing.assert_allclose(left.mean(axis=0), 0, atol=1e-3)
    assert np.abs(correction).max() > 1e-3


def test_fake_quantized_rows_are_multiples_of_the_scale():
    rows = outliers().astype(np.float32)
    params = choose(rows, strength="none", shift=False).params
    steps = params.fake_quantize(rows, INT8) / params.scale
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
    assert np.abs(steps).max() == pytest.approx(127)


@pytest.mark.parametrize(("loud", "better"), [(1, INT8), (500, FP8)], ids=["even", "outliers"])
def test_fp8_suits_activations_of_many_magnitudes(loud, better):
    rows = GENERATOR.uniform(-1, 1, size=(400, K)) * np.where(np.arange(K) < 2, loud, 1)
    rows = rows.astype(np.float32)
    quiet = np.where(np.arange(K)[:, None] < 2, 0, WEIGHT).astype(np.float32)
    errors = {}
    for scheme in (INT8, FP8):
        params = with_observed_range(channels(rows), ActivationQuantParams(1.0), scheme)
        found = simulate_layer(rows, LAYER, quiet, params, scheme)
        errors[scheme] = np.linalg.norm(found - rows @ quiet)
    assert min(errors, key=errors.get) == better


@pytest.mark.parametrize(("kernel", "groups"), [(1, 1), (3, 1), (3, 2), (3, 6)])
def test_mean_convolution_error_corrects_the_bias(kernel, groups):
    generator = np.random.default_rng(0)
    images = np.abs(generator.normal(size=(3, 6, 8, 8))).astype(np.float32)
    weight = generator.normal(size=(12, 6 // groups, kernel, kernel)).astype(np.float32)
    size = weight[0].size
    layer = Layer(
        "c", "Conv", "x", "w", "y", size, 6 // groups, 12, 0, "b", False, "", False, 1, "y"
    )
    params = ActivationQuantParams(float(images.max()) / 200)  # clips some values
    means = ChannelMeans(np.zeros(6), np.zeros(6))
    for part in (images[:1], images[1:]):
        means.add(part, params, INT8)

    def convolve(values, kernels):
        pads = (kernel // 2,) * 4
        padded = torch.nn.functional.pad(torch.from_numpy(values), pads, mode="circular")
        return torch.conv2d(padded, torch.from_numpy(kernels), groups=groups).numpy()

    rounded = INT8.nearest(images / params.scale).astype(np.float32) * np.float32(params.scale)
    error = convolve(images, weight) - convolve(rounded, fake_quantize_weight(layer, weight, INT8))
    correction = mean_convolution_error(means, layer, weight, INT8)
    assert np.abs(correction).max() > 0.01
    np.testing.assert_allclose(correction, error.mean(axis=(0, 2, 3)), atol=1e-4)


@pytest.mark.parametrize(("low", "high"), [(-4.0, 1.0), (-1.0, 4.0)])
def test_a_symmetric_range_covers_the_larger_end(low, high):
    rows = np.zeros((2, K))
    rows[:, 0] = low, high
    params = with_observed_range(channels(rows), ActivationQuantParams(1.0), INT8)
    assert params.scale == pytest.approx(4.0 / INT8.largest)
