import math

from enginery.core.tolerance import QuantizedTolerance, Tolerance


def test_limit_grows_with_the_noise_floor_and_with_the_outputs_magnitude():
    tolerance = Tolerance.for_precision("fp16")
    limit = tolerance.limit(noise_floor=1e-3, largest=4.0)
    assert tolerance.limit(noise_floor=2e-3, largest=4.0) > limit
    assert tolerance.limit(noise_floor=1e-3, largest=8.0) > limit


def test_limit_stays_above_zero_where_pytorch_is_exact():
    assert Tolerance.for_precision("fp32").limit(noise_floor=0.0, largest=1.0) > 0


def test_limit_leaves_room_for_two_implementations_one_floor_off_each():
    assert Tolerance.for_precision("fp32").limit(noise_floor=1e-6, largest=0.0) >= 2e-6


def test_wider_types_are_held_to_more():
    tolerances = [Tolerance.for_precision(name) for name in ("fp32", "fp16", "bf16")]
    limits = [t.limit(noise_floor=0.0, largest=1.0) for t in tolerances]
    assert limits == sorted(limits)
    cosines = [t.min_cosine for t in tolerances]
    assert cosines == sorted(cosines, reverse=True)
    assert all(0.9 < cosine < 1 for cosine in cosines)


def test_quantized_outputs_have_a_direction_and_no_largest_error():
    tolerance = QuantizedTolerance("fp16")
    assert tolerance.limit(noise_floor=1e-3, largest=1.0) == math.inf
    assert tolerance.cosine_limit(noise_cosine=1.0) == tolerance.min_cosine == 0.5
