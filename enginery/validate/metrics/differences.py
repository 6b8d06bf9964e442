"""Elementwise differences between two arrays of the same shape.

>>> compute_differences(np.float32([[1, 2]]), np.float32([[1, 2.5]]), None).max_abs
0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.validate.cases.padding import PaddingMask, iterate_rows

Array = NDArray[Any]

# Models fill masked positions with -inf or with the lowest number of a dtype: -3.4e38 in float32
# and bfloat16, -65504 in float16. Such fill values are not compared as numbers: a limit scaled by
# one of them would let everything pass.
_FILL = 1e30
_LEAST_FILL = 1e4


@dataclass(frozen=True)
class CosineSums:
    """The three sums that a cosine needs. They can be added up over many arrays."""

    dot: float = 0.0
    actual_squared: float = 0.0
    reference_squared: float = 0.0

    def __add__(self, other: CosineSums) -> CosineSums:
        return CosineSums(
            self.dot + other.dot,
            self.actual_squared + other.actual_squared,
            self.reference_squared + other.reference_squared,
        )

    @property
    def cosine(self) -> float:
        """Cosine; 1.0 for two arrays of zeros and for empty ones."""
        norms = math.sqrt(self.actual_squared) * math.sqrt(self.reference_squared)
        both_zero = self.actual_squared == self.reference_squared == 0.0
        return self.dot / norms if norms else float(both_zero)


@dataclass(frozen=True)
class Differences:
    """Differences between two arrays, over elements that are finite and are not fill values."""

    max_abs: float
    p99_abs: float
    rms_error: float
    """Root mean square of the differences."""
    products: CosineSums
    largest: float
    """Largest magnitude of the reference."""
    rms: float
    """Root mean square of the reference."""
    unequal: int
    """Number of elements that are NaN, infinite or a fill value on one side only."""
    undefined: int
    """Number of elements that are NaN in the reference."""

    @property
    def cosine(self) -> float:
        return self.products.cosine


def compute_differences(
    actual: Array, reference: Array, padding: PaddingMask | None
) -> Differences:
    """Compare two arrays of the same shape in float64, one row of the batch at a time."""
    # A quantile takes all errors at once; as FP32, they take half the memory.
    errors = np.empty(actual.size, np.float32)
    filled = 0
    largest = 0.0
    products = CosineSums()
    unequal = undefined = 0
    # By row, because an output of a large profile takes gigabytes.
    for mine_row, theirs_row in zip(
        iterate_rows(actual, padding), iterate_rows(reference, padding), strict=True
    ):
        mine = mine_row.astype(np.float64).ravel()
        theirs = theirs_row.astype(np.float64).ravel()
        ordinary = np.abs(theirs) < _FILL  # false for NaN
        comparable = ordinary & np.isfinite(mine)
        if not comparable.all():
            # The same fill value: the same sign and a large magnitude.
            alike = (np.sign(mine) == np.sign(theirs)) & (np.abs(mine) >= _LEAST_FILL)
            unequal += int(np.count_nonzero(~comparable & ~(~ordinary & alike)))
            undefined += int(np.count_nonzero(np.isnan(theirs)))
            mine, theirs = mine[comparable], theirs[comparable]
        errors[filled : filled + mine.size] = np.abs(mine - theirs)
        filled += mine.size
        largest = max(largest, float(np.abs(theirs).max(initial=0.0)))
        products += CosineSums(float(mine @ theirs), float(mine @ mine), float(theirs @ theirs))
    every = errors[:filled]
    squared = float(np.square(every, dtype=np.float64).sum())
    return Differences(
        max_abs=float(every.max(initial=0.0)),
        p99_abs=float(np.quantile(every, 0.99, overwrite_input=True)) if every.size else 0.0,
        rms_error=math.sqrt(squared / every.size) if every.size else 0.0,
        products=products,
        largest=largest,
        rms=math.sqrt(products.reference_squared / every.size) if every.size else 0.0,
        unequal=unequal,
        undefined=undefined,
    )


@dataclass(frozen=True)
class ConstantError:
    """Smallest errors of a constant that is repeated for every row; NaN if unknown.

    No constant has smaller ones. The two come from different constants: the middle of the lowest
    and the highest value of each element, and their mean.
    """

    max_abs: float = math.nan
    rms: float = math.nan


def constant_error(reference: Array, padding: PaddingMask | None = None) -> ConstantError:
    """Return the errors of the best constant that is repeated for every row of the batch.

    If there is one row, its positions (all axes but the last) count as rows. NaN if there is only
    one position, or if the reference has no ordinary floats. With padding, whose positions have no
    limit, the root mean square is unknown.
    """
    if reference.ndim < 2 or not np.issubdtype(reference.dtype, np.floating) or not reference.size:
        return ConstantError()
    rows = reference if len(reference) > 1 else reference.reshape(-1, reference.shape[-1])
    if len(rows) < 2:
        return ConstantError()
    lowest, highest = np.array(rows[0]), np.array(rows[0])
    for row in rows[1:]:
        np.minimum(lowest, row, out=lowest)
        np.maximum(highest, row, out=highest)
    ordinary = np.isfinite(lowest) & np.isfinite(highest)
    ordinary &= np.maximum(np.abs(lowest), np.abs(highest)) < _FILL
    if not ordinary.any():
        return ConstantError()
    max_abs = float((highest[ordinary].astype(np.float64) - lowest[ordinary]).max()) / 2
    if padding is not None:
        return ConstantError(max_abs)
    mean = sum(row[ordinary].astype(np.float64) for row in rows) / len(rows)
    squared = sum(float(np.square(row[ordinary] - mean).sum()) for row in rows)
    # Elements that are not ordinary count as equal, so that this is a lower bound.
    return ConstantError(max_abs, math.sqrt(squared / reference.size))


def argmax_disagreement(
    actual: Array, reference: Array, padding: PaddingMask | None, *, margin: float
) -> float:
    """Return the share of rows in which another class is chosen, 0 to 1.

    A row counts only if the reference scores that class more than `margin` below its best one.

    Classes are on the last axis; for segmentation, (batch, classes, height, width), on axis 1.
    With one score per token (question answering), the argmax is over all positions.
    """
    rows = wrong = 0
    for mine_row, theirs_row in zip(
        iterate_rows(actual, padding), iterate_rows(reference, padding), strict=True
    ):
        mine, theirs = mine_row.astype(np.float64), theirs_row.astype(np.float64)
        if mine.ndim == 0 or mine.size == 0:
            continue
        # A row of a segmentation is (classes, height, width).
        axis = 0 if mine.ndim == 3 else -1
        chosen = mine.argmax(axis)
        of_chosen = np.take_along_axis(theirs, np.expand_dims(chosen, axis), axis).squeeze(axis)
        with np.errstate(invalid="ignore"):  # where every score is -inf
            gap = theirs.max(axis) - of_chosen
        rows += gap.size
        wrong += int(np.count_nonzero(gap > margin))
    return wrong / rows if rows else 0.0
