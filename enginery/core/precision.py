"""Precisions: their names and their unit roundoff.

>>> roundoff("bf16") == 2**-8
True
"""

from __future__ import annotations

from enginery.core.errors import OptionError, nearest

UNIT_ROUNDOFF: dict[str, float] = {
    # Half the gap between 1 and the next number, 2**-(significand bits). Source: IEEE 754; bfloat16
    # has 8 bits.
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    # Tensor cores round float32 factors to TF32 and accumulate in float32.
    "tf32": 2.0**-11,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
}

PRECISION_OF_DTYPE: dict[str, str] = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}


def roundoff(precision: str) -> float:
    """Return the unit roundoff of a precision; raise OptionError if it is unknown."""
    if precision not in UNIT_ROUNDOFF:
        raise OptionError(
            f"unknown precision '{precision}'{nearest(precision, UNIT_ROUNDOFF)}",
            do=f"Known: {', '.join(UNIT_ROUNDOFF)}.",
        )
    return UNIT_ROUNDOFF[precision]
