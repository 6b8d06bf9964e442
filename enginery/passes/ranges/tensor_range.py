"""The range of one tensor: its largest and smallest magnitudes and the moments of its rows.

    >>> array_range(np.float32([[0, 1e-3, -5]])).largest
    5.0

A `TensorRange` has a fixed size, however large the array is. `merge` combines the ranges of two
feeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SMALL_QUANTILE = 0.01
_SAMPLE = 1 << 16
# The FP64 copy of this many elements fits the cache of a CPU core.
_ROWS_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class TensorRange:
    """The range of one tensor over all feeds, without the values of attention masks."""

    largest: float
    """The largest magnitude."""
    smallest: float
    """The 1 % quantile of the nonzero magnitudes; 0 if all are zero."""
    row_variance: float
    """The largest variance of a row along the last axis, as a normalization computes it."""
    elements: int
    """The number of elements in the largest feed. With 0, the range is unknown."""
    nonfinite: bool = False
    """True if the tensor has NaN, or an infinity that does not come from a mask."""
    row_mean_square: float = 0.0
    """The largest mean of squares of a row along the last axis."""

    def merge(self, other: TensorRange) -> TensorRange:
        """Return the range over two feeds."""
        smalls = [value for value in (self.smallest, other.smallest) if value > 0]
        return TensorRange(
            max(self.largest, other.largest),
            min(smalls, default=0.0),
            max(self.row_variance, other.row_variance),
            max(self.elements, other.elements),
            self.nonfinite or other.nonfinite,
            max(self.row_mean_square, other.row_mean_square),
        )


def array_range(values: NDArray[Any], *, mask_floor: float = -math.inf) -> TensorRange:
    """Measure the range of one array; values at or below `mask_floor` count as masked."""
    array = np.asarray(values, np.float32)
    if array.size == 0:
        return TensorRange(0.0, 0.0, 0.0, 0)
    low, high = float(array.min()), float(array.max())
    counted, nonfinite = array, False
    # With a floor of -inf, -inf itself is a mask: Softmax turns it into 0.
    if not (math.isfinite(low) and math.isfinite(high) and low > np.float32(mask_floor)):
        counted = np.where(array <= np.float32(mask_floor), np.float32(0), array)
        nonfinite = not bool(np.isfinite(counted).all())
        if nonfinite:
            counted = np.nan_to_num(counted, nan=0.0, posinf=3.4e38, neginf=-3.4e38)
        low, high = float(counted.min()), float(counted.max())
    # A quantile sorts, so it is taken over an evenly spread sample.
    step = max(1, counted.size // _SAMPLE)
    sample = np.abs(counted.ravel()[::step])
    sample = sample[sample > 0]
    row_variance, row_mean_square = _row_moments(counted)
    return TensorRange(
        largest=max(abs(low), abs(high)),
        smallest=float(np.quantile(sample, _SMALL_QUANTILE)) if sample.size else 0.0,
        row_variance=row_variance,
        elements=int(array.size),
        nonfinite=nonfinite,
        row_mean_square=row_mean_square,
    )


def _row_moments(array: NDArray[Any]) -> tuple[float, float]:
    """Return the largest variance and the largest mean of squares of a row, computed in FP64."""
    width = array.shape[-1] if array.ndim else 1
    rows = array.reshape(-1, width)
    count = max(1, _ROWS_AT_ONCE // width)
    wide = np.empty((min(count, len(rows)), width))
    ones = np.ones(width)
    variance, mean_square = 0.0, 0.0
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        exact = wide[: len(part)]
        exact[...] = part
        mean = exact @ ones / width
        square = np.einsum("ij,ij->i", exact, exact) / width
        # mean(x²) - mean(x)² loses most digits where the mean is large, hence FP64.
        variance = max(variance, float((square - mean * mean).max()))
        mean_square = max(mean_square, float(square.max()))
    return variance, mean_square
