import math

import numpy as np
import pytest

from enginery.core.errors import OptionError
from enginery.core.precision import QuantizedTolerance, Tolerance, roundoff


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16", np.float16), ("fp32", np.float32), ("fp64", np.float64)]
)
def test_roundoff_is_half_the_gap_above_one(name, dtype):
    assert roundoff(name) == float(np.finfo(dtype).eps) / 2


def test_roundoff_of_bf16_has_eight_significand_bits():
    assert roundoff("bf16") == 2.0**-8


def test_unknown_precision_names_the_nearest():
    with pytest.raises(OptionError, match="unknown precision 'pf16'; did you mean"):
        roundoff("pf16")


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
