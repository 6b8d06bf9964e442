"""Compare one output with its reference, and decide whether it passes.

    >>> reference = np.float32([[1, -4, 2]])
    >>> limits = OutputLimits(NoiseFloor(1e-6, 1.0), Tolerance.for_precision("fp32"))
    >>> logits = TensorSpec("logits", "float32", ("batch", 3))
    >>> compare_output(logits, reference + np.float32(1e-7), reference, limits).passed
    True

The limit of the absolute error is scaled from the noise floor: the reference's own error at the
same precision on the same inputs. Arrays are read one row of the batch at a time, because an output
of a large profile takes gigabytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.precision import PRECISION_OF_DTYPE
from enginery.core.shapes import TensorSpec
from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.reports.validation import OutputMetrics
from enginery.validate.cases.padding import PaddingMask
from enginery.validate.metrics.differences import (
    ConstantError,
    Differences,
    argmax_disagreement,
    compute_differences,
    constant_error,
)

Array = NDArray[Any]


@dataclass(frozen=True)
class NoiseFloor:
    """Error of the reference at one precision against itself at a higher one."""

    max_abs: float
    cosine: float
    rms: float = math.inf
    """Root mean square of the error; infinite if it was not measured."""

    def wider(self, other: NoiseFloor) -> NoiseFloor:
        """Return the larger of two floors. On a small output, one may be exact by chance."""
        return NoiseFloor(
            max(self.max_abs, other.max_abs),
            min(self.cosine, other.cosine),
            max(self.rms, other.rms),
        )


@dataclass(frozen=True)
class OutputLimits:
    """What one output is judged by."""

    noise: NoiseFloor
    """The reference's own error at this precision."""
    tolerance: Tolerance | QuantizedTolerance
    """Derives the limits from the noise."""
    max_abs_error: float | None = None
    """Limit set by the user; replaces the derived one."""
    min_cosine: float | None = None
    """Limit set by the user; replaces the derived one."""


def compare_output(
    spec: TensorSpec,
    actual: Array,
    reference: Array,
    limits: OutputLimits,
    *,
    padding: PaddingMask | None = None,
    name: str = "PyTorch",
) -> OutputMetrics:
    """Compare one output with the reference.

    Args:
        spec: the output in the manifest.
        actual: the graph's output.
        reference: the reference's output.
        limits: noise floor and tolerance.
        padding: positions to compare; None for all.
        name: name of the reference in messages.
    """
    noise, tolerance = limits.noise, limits.tolerance
    if problem := _interface_problem(actual, reference, spec.dtype, tolerance.precision, name):
        return _unmeasured(spec.name, actual.shape, problem)
    differences = compute_differences(actual, reference, padding)
    # Scaled from the reference's own error at the same precision. The root mean square has a limit
    # of its own, because it varies less than the maximum.
    limit = tolerance.limit(noise_floor=noise.max_abs, largest=differences.largest)
    rms_limit = tolerance.rms_limit(noise_rms=noise.rms, rms=differences.rms)
    if limits.max_abs_error is not None:
        limit, rms_limit = limits.max_abs_error, math.inf
    constant_limits = limit, rms_limit
    if not math.isfinite(limit):
        # A quantized graph has no limit on the error, but its outputs must exceed rounding errors.
        rounding = Tolerance.for_precision(tolerance.precision)
        constant_limits = (
            rounding.limit(noise_floor=noise.max_abs, largest=differences.largest),
            rounding.rms_limit(noise_rms=noise.rms, rms=differences.rms),
        )
    cosine_limit = limits.min_cosine
    if cosine_limit is None:
        # Values near the noise point anywhere, so their direction says nothing.
        has_direction = differences.rms > 4 * noise.max_abs
        cosine_limit = tolerance.cosine_limit(noise_cosine=noise.cosine) if has_direction else -1.0
    agreement = 1.0
    if "logits" in spec.name and not differences.unequal and not differences.undefined:
        # Each of two logits may be off by the limit, so a closer pair may swap.
        margin = 2 * limit if math.isfinite(limit) else 0.0
        agreement = 1.0 - argmax_disagreement(actual, reference, padding, margin=margin)
    return OutputMetrics(
        output=spec.name,
        shape=actual.shape,
        max_abs=differences.max_abs,
        p99_abs=differences.p99_abs,
        max_rel=differences.max_abs / differences.largest if differences.largest else 0.0,
        cosine=differences.cosine,
        argmax_agreement=agreement,
        nonfinite=differences.unequal,
        noise_floor=noise.max_abs,
        limit=limit,
        cosine_limit=cosine_limit,
        rms_error=differences.rms_error,
        rms_limit=rms_limit,
        problem=_problem(differences, limit, rms_limit, cosine_limit, agreement, name),
        constant_ratio=_constant_ratio(constant_error(reference, padding), *constant_limits),
    )


def _constant_ratio(error: ConstantError, limit: float, rms_limit: float) -> float | None:
    """Return the error of the best constant as a multiple of the limit; None if unknown.

    Of the largest error and the root mean square, the larger multiple counts: each has a limit.
    """
    if math.isnan(error.max_abs) or (error.max_abs and not limit):  # no constant is equal
        return None
    # Below the smallest normal number, arithmetic has no relative accuracy.
    least = np.finfo(np.float32).tiny
    pairs = (error.max_abs, limit), (error.rms, rms_limit)
    return max(
        (e / bound for e, bound in pairs if bound >= least and not math.isnan(e)), default=0.0
    )


def noise_floor(narrow: Array, wide: Array, padding: PaddingMask | None) -> NoiseFloor:
    """Measure the noise floor: the reference at one precision against itself at a higher one."""
    differences = compute_differences(narrow, wide, padding)
    return NoiseFloor(differences.max_abs, differences.cosine, differences.rms_error)


def unmatched_output(output: str, actual: Array, name: str = "PyTorch") -> OutputMetrics:
    """Return the failure for an output that the reference of this name does not have."""
    return _unmeasured(output, actual.shape, f"{name} has no such output")


def _interface_problem(
    actual: Array, reference: Array, dtype: str, precision: str, name: str
) -> str:
    """Return the problem with shape or dtype, or an empty text."""
    if actual.shape != reference.shape:
        return f"shape {actual.shape}, expected {reference.shape} as in {name}"
    if actual.dtype.name != dtype:
        return f"dtype {actual.dtype.name}, expected {dtype} as in the manifest"
    expected = {reference.dtype.name}
    # PyTorch's outputs are float32; those of a source file may be float64. A graph may keep the
    # reference's inputs and outputs.
    if np.issubdtype(reference.dtype, np.floating):
        expected |= {"float32", *(n for n, p in PRECISION_OF_DTYPE.items() if p == precision)}
    if actual.dtype.name not in expected:
        return f"dtype {actual.dtype.name}, expected {' or '.join(sorted(expected))}"
    return ""


def _problem(
    differences: Differences,
    limit: float,
    rms_limit: float,
    cosine_limit: float,
    agreement: float,
    name: str,
) -> str:
    # What makes the later figures meaningless comes first.
    if differences.undefined:
        return f"{differences.undefined} elements are NaN in {name} itself"
    if differences.unequal:
        return f"{differences.unequal} elements are NaN or infinite on one side only"
    if differences.max_abs > limit:
        return f"largest error {differences.max_abs:.3g}, allowed {limit:.3g}"
    if differences.rms_error > rms_limit:
        return f"root mean square error {differences.rms_error:.3g}, allowed {rms_limit:.3g}"
    if differences.cosine < cosine_limit:
        return f"cosine {differences.cosine:.7f}, expected at least {cosine_limit:.7f}"
    if agreement < 1.0 and math.isfinite(limit):
        return f"the argmax differs in {1 - agreement:.2%} of rows"
    return ""


def _unmeasured(output: str, shape: tuple[int, ...], problem: str) -> OutputMetrics:
    nan = math.nan
    return OutputMetrics(output, shape, nan, nan, nan, nan, 0.0, 0, nan, nan, nan, problem)
