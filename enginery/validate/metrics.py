"""How far one output lies from its reference, in numbers.

    >>> metrics = measure("logits", actual, reference, dtype="float32", noise=NoiseFloor(1e-6, 1.0),
    ...                   tolerance=Tolerance.for_precision("fp32"))
    >>> metrics.passed
    True

Arrays are read one row of the batch at a time: an output of a large profile is gigabytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.precision import PRECISION_OF_DTYPE, QuantizedTolerance, Tolerance
from enginery.core.reports import OutputMetrics
from enginery.validate.differences import Differences, differences, disagreeing_scores
from enginery.validate.padding import Kept

Array = NDArray[Any]


@dataclass(frozen=True)
class NoiseFloor:
    """How far PyTorch at one precision is from PyTorch at the next wider one."""

    max_abs: float
    cosine: float

    def widest(self, other: NoiseFloor) -> NoiseFloor:
        """The larger of two. On an output of two numbers, PyTorch is now and then right by luck."""
        return NoiseFloor(max(self.max_abs, other.max_abs), min(self.cosine, other.cosine))


def measure(
    output: str,
    actual: Array,
    reference: Array,
    *,
    dtype: str,
    noise: NoiseFloor,
    tolerance: Tolerance | QuantizedTolerance,
    max_abs_error: float | None = None,
    min_cosine: float | None = None,
    kept: Kept | None = None,
) -> OutputMetrics:
    """Compares one output.

    Args:
        output: its name.
        actual: the graph's output.
        reference: PyTorch's.
        dtype: the dtype that the manifest promises.
        noise: PyTorch's own error at this precision.
        tolerance: how the limits follow from the noise.
        max_abs_error: a limit that the user set, instead.
        min_cosine: likewise.
        kept: what is no padding; None for everything.
    """
    if problem := _interface_problem(actual, reference, dtype, tolerance.precision):
        return _unmeasured(output, actual.shape, problem)
    found = differences(actual, reference, kept)
    limit = tolerance.limit(noise_floor=noise.max_abs, largest=found.largest)
    limit = limit if max_abs_error is None else max_abs_error
    cosine_limit = min_cosine
    if cosine_limit is None:
        has_direction = found.rms > 4 * noise.max_abs
        cosine_limit = tolerance.cosine_limit(noise_cosine=noise.cosine) if has_direction else -1.0
    agreement = 1.0
    if "logits" in output and not found.unequal and not found.undefined:
        margin = 2 * limit if math.isfinite(limit) else 0.0
        agreement = 1.0 - disagreeing_scores(actual, reference, kept, margin=margin)
    return OutputMetrics(
        output=output,
        shape=actual.shape,
        max_abs=found.max_abs,
        p99_abs=found.p99_abs,
        max_rel=found.max_abs / found.largest if found.largest else 0.0,
        cosine=found.cosine,
        argmax_agreement=agreement,
        nonfinite=found.unequal,
        noise_floor=noise.max_abs,
        limit=limit,
        cosine_limit=cosine_limit,
        problem=_problem(found, limit, cosine_limit, agreement),
    )


def noise_floor(narrow: Array, wide: Array, kept: Kept | None) -> NoiseFloor:
    """PyTorch at one precision against PyTorch at another, where both are finite."""
    found = differences(narrow, wide, kept)
    return NoiseFloor(found.max_abs, found.cosine)


def unmatched(output: str, actual: Array) -> OutputMetrics:
    """An output of the graph that PyTorch's model does not have in any case."""
    return _unmeasured(output, actual.shape, "PyTorch has no such output to compare with")


def _interface_problem(actual: Array, reference: Array, dtype: str, precision: str) -> str:
    """What is wrong before any number is looked at."""
    if actual.shape != reference.shape:
        return f"shape {actual.shape}, PyTorch has {reference.shape}"
    if actual.dtype.name != dtype:
        return f"dtype {actual.dtype.name}, the manifest says {dtype}"
    # The reference is float32 whatever the artifact is; a graph may keep float32 at its edges.
    floats = {"float32", *(n for n, p in PRECISION_OF_DTYPE.items() if p == precision)}
    expected = floats if np.issubdtype(reference.dtype, np.floating) else {reference.dtype.name}
    if actual.dtype.name not in expected:
        return f"dtype {actual.dtype.name}, expected {' or '.join(sorted(expected))}"
    return ""


def _problem(found: Differences, limit: float, cosine_limit: float, agreement: float) -> str:
    if found.undefined:
        return f"{found.undefined} elements are NaN in PyTorch itself"
    if found.unequal:
        return f"{found.unequal} elements are NaN or infinite on one side only"
    if found.max_abs > limit:
        return f"largest error {found.max_abs:.3g}, allowed {limit:.3g}"
    if found.cosine < cosine_limit:
        return f"cosine {found.cosine:.7f}, expected at least {cosine_limit:.7f}"
    if agreement < 1.0 and math.isfinite(limit):
        return f"the largest score is another one in {1 - agreement:.2%} of rows"
    return ""


def _unmeasured(output: str, shape: tuple[int, ...], problem: str) -> OutputMetrics:
    nan = math.nan
    return OutputMetrics(output, shape, nan, nan, nan, nan, 0.0, 0, nan, nan, nan, problem)
