import numpy as np
import pytest

from enginery.core.errors import OptionError
from enginery.core.precision import roundoff


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
