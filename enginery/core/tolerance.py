"""The tolerance of comparisons between outputs and their reference, by precision.

>>> tolerance = Tolerance.for_precision("fp16")
>>> tolerance.limit(noise_floor=2e-3, largest=4.0)
0.04725
>>> round(tolerance.cosine_limit(noise_cosine=1 - 1e-6), 6)
0.999936
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from enginery.core.precision import roundoff


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed difference between an output and its reference.

    The limit on the absolute error of one output is

        floor_factor * noise_floor + roundoff_factor * u * largest

    `noise_floor` is PyTorch's own error at this precision on the same inputs, measured against the
    next wider type; `u` is the unit roundoff of the precision; `largest` is the largest magnitude
    in the output. Two correct implementations add in different orders, so each is about one noise
    floor away from the exact result, and they can be two floors apart. The factor also allows for
    the maximum over many elements and for less accurate but valid kernels (a naive Fourier
    transform was measured at 6 floors, dense transformers at 1 to 3). The second term keeps the
    limit above zero if PyTorch happens to be exact.

    1 - cosine grows with the square of the relative error, so it may be `floor_factor` squared
    times that of PyTorch's own outputs.

    The root mean square of the error varies much less than its maximum. It has a limit of the same
    form, with `rms_factor` and the root mean square of the output. For FP16 graphs of eleven model
    types on the CPU, it was measured at 0.3 to 1.8 times PyTorch's own.
    """

    precision: str
    floor_factor: float
    roundoff_factor: float
    min_cosine: float
    """A cosine that always passes, however exact PyTorch happens to be."""
    rms_factor: float
    rms_roundoff_factor: float

    @classmethod
    def for_precision(cls, precision: str) -> Tolerance:
        """Return the default tolerance of a precision."""
        factor = 16.0
        # Below 1e-7, 1 - cosine adds nothing to the largest absolute error.
        shortfall = max((factor * roundoff(precision)) ** 2, 1e-7)
        low = precision in ("fp16", "bf16")
        return cls(
            precision,
            floor_factor=8.0,
            roundoff_factor=factor,
            min_cosine=1.0 - shortfall,
            # The noise floor of TF32 is that of FP32, so its own roundings have to be allowed for.
            rms_factor=3.0 if low else 8.0,
            rms_roundoff_factor=2.0 if low else factor,
        )

    def limit(self, *, noise_floor: float, largest: float) -> float:
        """Return the largest allowed absolute error."""
        unit = roundoff(self.precision)
        return self.floor_factor * noise_floor + self.roundoff_factor * unit * largest

    def rms_limit(self, *, noise_rms: float, rms: float) -> float:
        """Return the largest allowed root mean square of the error."""
        unit = roundoff(self.precision)
        return self.rms_factor * noise_rms + self.rms_roundoff_factor * unit * rms

    def cosine_limit(self, *, noise_cosine: float) -> float:
        """Return the smallest allowed cosine, given that of PyTorch at this precision."""
        return min(self.min_cosine, 1.0 - self.floor_factor**2 * (1.0 - noise_cosine))


MIN_MEAN_COSINE = 0.95
"""Minimum mean cosine of a quantized graph over real inputs, whatever its author measured."""


@dataclass(frozen=True)
class QuantizedTolerance:
    """The largest allowed difference for one output of a quantized graph, on any inputs.

    Quantization rounds activations to steps that PyTorch does not have. So there is no limit on
    the absolute error, and the cosine only has to show that the output points in a similar
    direction. The accuracy on real inputs is checked by a budget over many of them.
    """

    precision: str
    """Precision of the layers that are not quantized."""
    min_cosine: float = 0.5
    """Correct INT8 graphs of tiny classifiers were measured at 0.74 and above on random inputs."""

    def limit(self, *, noise_floor: float, largest: float) -> float:  # noqa: ARG002
        """Return infinity: there is no limit on the absolute error."""
        return math.inf

    def rms_limit(self, *, noise_rms: float, rms: float) -> float:  # noqa: ARG002
        """Return infinity: there is no limit on the absolute error."""
        return math.inf

    def cosine_limit(self, *, noise_cosine: float) -> float:  # noqa: ARG002
        """Return the smallest allowed cosine, which does not depend on PyTorch's."""
        return self.min_cosine
