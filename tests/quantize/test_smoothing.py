import numpy as np
import pytest

from enginery.passes.layers import Layer
from enginery.passes.qdq import ActivationQuantParams
from enginery.passes.scheme import FP8, INT8
from enginery.quantize.calibration import Channels
from enginery.quantize.smoothing import (
    choose_smoothing,
    mean_error,
    quantized_output,
    rounded_rows,
    with_scale,
)

GENERATOR = np.random.default_rng(0)
K, N = 64, 48
WEIGHT = GENERATOR.normal(size=(K, N)).astype(np.float32)
LAYER = Layer("layer", "MatMul", "x", "w", "y", K, K, N, 1, "b", False, "")


def channels(rows):
    made = Channels(K, seed=0)
    made.add(rows.astype(np.float32))
    return made


def outliers():
    """Two channels fifty times as large as the others."""
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
    assert smoothed.ready.multiplier[:2].max() < smoothed.ready.multiplier[2:].min()


def test_one_sided_activations_are_centred():
    rows = np.abs(GENERATOR.normal(size=(400, K))) + 3
    centred = choose(rows, strength=0.5)
    assert centred.shifted
    assert centred.error < choose(rows, strength=0.5, shift=False).error / 2


def test_shift_is_not_tried_where_it_is_off():
    assert choose(np.abs(outliers()), shift=False).ready.offset is None


def test_a_given_strength_is_taken():
    assert choose(outliers(), strength=0.5, shift=False).strength == 0.5


def test_multiplier_and_offset_are_exact_in_fp16():
    ready = choose(np.abs(outliers()) + 1).ready
    for vector in (ready.multiplier, ready.offset):
        np.testing.assert_array_equal(vector, vector.astype(np.float16).astype(np.float32))


def test_a_channel_that_is_always_zero_stays_finite():
    rows = outliers()
    rows[:, 5] = 0
    ready = choose(rows).ready
    assert np.isfinite(ready.multiplier).all()
    assert ready.multiplier.max() <= 2**10


def test_the_mean_error_is_what_the_bias_lacks():
    rows = (np.abs(outliers()) + 1).astype(np.float32)
    found = choose(rows, strength="none", shift=False)
    correction = mean_error(rows, LAYER, WEIGHT, found.ready, INT8)
    left = rows @ WEIGHT - (quantized_output(rows, LAYER, WEIGHT, found.ready, INT8) + correction)
    np.testing.assert_allclose(left.mean(axis=0), 0, atol=1e-3)
    assert np.abs(correction).max() > 1e-3


def test_rounded_rows_lie_on_the_steps():
    rows = outliers().astype(np.float32)
    ready = choose(rows, strength="none", shift=False).ready
    steps = rounded_rows(rows, ready, INT8) / ready.scale
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
    assert np.abs(steps).max() == pytest.approx(127)


@pytest.mark.parametrize(("loud", "better"), [(1, INT8), (500, FP8)], ids=["even", "outliers"])
def test_fp8_is_for_activations_of_many_sizes(loud, better):
    rows = GENERATOR.uniform(-1, 1, size=(400, K)) * np.where(np.arange(K) < 2, loud, 1)
    rows = rows.astype(np.float32)
    quiet = np.where(np.arange(K)[:, None] < 2, 0, WEIGHT).astype(np.float32)
    errors = {}
    for scheme in (INT8, FP8):
        ready = with_scale(channels(rows), ActivationQuantParams(1.0), scheme)
        found = quantized_output(rows, LAYER, quiet, ready, scheme)
        errors[scheme] = np.linalg.norm(found - rows @ quiet)
    assert min(errors, key=errors.get) == better
