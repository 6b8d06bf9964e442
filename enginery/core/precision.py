"""Number types: their names, their rounding, and how far two runs of one model may differ.

>>> tolerance = Tolerance.for_precision("fp16")
>>> tolerance.limit(noise_floor=2e-3, largest=4.0)
0.04725
>>> tolerance.cosine_limit(noise_cosine=1 - 1e-6)
0.999936
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError, nearest

Precision = Literal["fp32", "fp16", "bf16"]

UNIT_ROUNDOFF: dict[str, float] = {
    # Half the gap between 1 and the next number: 2**-(significand bits). IEEE 754; bfloat16 has 8.
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    # A GPU's tensor cores round float32 factors to it, and sum in float32.
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
    """The unit roundoff of a precision; raises OptionError for an unknown one."""
    if precision not in UNIT_ROUNDOFF:
        raise OptionError(
            f"unknown precision '{precision}'{nearest(precision, UNIT_ROUNDOFF)}",
            do=f"Known: {', '.join(UNIT_ROUNDOFF)}.",
        )
    return UNIT_ROUNDOFF[precision]


@dataclass(frozen=True)
class Tolerance:
    """How far an output may lie from the reference.

    The limit on the absolute error of one output is

        floor_factor * noise_floor + roundoff_factor * u * largest

    where `noise_floor` is PyTorch's own error at this precision on the same inputs (against the
    next wider type), `u` the precision's unit roundoff and `largest` the output's largest
    magnitude. Two correct implementations add in different orders, so each is about one noise
    floor away from the exact result and they can be two apart; the factor leaves room for the
    largest of many elements and for slower but exact-enough kernels (a naive Fourier transform
    was seen at 6 floors, dense transformers at 1 to 3). The second term keeps the limit above
    zero where PyTorch happens to be exact.

    1 - cosine grows with the square of the relative error, so the cosine may fall short of 1 by
    the square of that factor times PyTorch's own shortfall.
    """

    precision: str
    floor_factor: float
    roundoff_factor: float
    min_cosine: float
    """What is enough however exact PyTorch happens to be."""

    @classmethod
    def for_precision(cls, precision: str) -> Tolerance:
        """The default tolerance of a precision."""
        factor = 16.0
        # Below 1e-7 a cosine says nothing that the largest error does not.
        shortfall = max((factor * roundoff(precision)) ** 2, 1e-7)
        return cls(precision, floor_factor=8.0, roundoff_factor=factor, min_cosine=1.0 - shortfall)

    def limit(self, *, noise_floor: float, largest: float) -> float:
        """The largest absolute error allowed."""
        unit = roundoff(self.precision)
        return self.floor_factor * noise_floor + self.roundoff_factor * unit * largest

    def cosine_limit(self, *, noise_cosine: float) -> float:
        """The smallest cosine allowed, where PyTorch's own at this precision is `noise_cosine`."""
        return min(self.min_cosine, 1.0 - self.floor_factor**2 * (1.0 - noise_cosine))


@dataclass(frozen=True)
class QuantizedTolerance:
    """How far one output of a quantized graph may lie from the reference, on any inputs.

    Quantization errs by steps of the activations' ranges, which PyTorch has not. No absolute error
    is too large, and the cosine says no more than that the output still points the same way; how
    near answers are on real inputs is for a budget over many of them to say.
    """

    precision: str
    """Of what is not quantized."""
    min_cosine: float = 0.5
    """Right INT8 graphs were seen at 0.74 and above on made-up inputs (tiny classifiers)."""

    def limit(self, *, noise_floor: float, largest: float) -> float:  # noqa: ARG002
        """The largest absolute error allowed: any."""
        return math.inf

    def cosine_limit(self, *, noise_cosine: float) -> float:  # noqa: ARG002
        """The smallest cosine allowed, whatever PyTorch's own at this precision is."""
        return self.min_cosine
