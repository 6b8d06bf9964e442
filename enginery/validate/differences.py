"""Element by element: two arrays of one shape, as the few numbers that a verdict needs.

>>> differences(np.float32([[1, 2]]), np.float32([[1, 2.5]]), None).max_abs
0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.validate.padding import Kept, rows_of

Array = NDArray[Any]

# Models mark what is masked with -inf or with the lowest number of a type: -3.4e38 in float32 and
# bfloat16, -65504 in float16. These are no magnitudes, and a limit scaled by one would allow all.
_FILL = 1e30
_LEAST_FILL = 1e4


@dataclass(frozen=True)
class Products:
    """Three sums over the elements of two arrays, which add up over many arrays."""

    dot: float = 0.0
    mine_squared: float = 0.0
    theirs_squared: float = 0.0

    def __add__(self, other: Products) -> Products:
        return Products(
            self.dot + other.dot,
            self.mine_squared + other.mine_squared,
            self.theirs_squared + other.theirs_squared,
        )

    @property
    def cosine(self) -> float:
        """1.0 for two arrays of zeros, and where there is nothing to compare."""
        norms = math.sqrt(self.mine_squared) * math.sqrt(self.theirs_squared)
        both_zero = self.mine_squared == self.theirs_squared == 0.0
        return self.dot / norms if norms else float(both_zero)


@dataclass(frozen=True)
class Differences:
    """What two arrays differ by, over their ordinary numbers."""

    max_abs: float
    p99_abs: float
    products: Products
    largest: float
    """The reference's largest magnitude."""
    rms: float
    """The reference's root mean square."""
    unequal: int
    """Elements that are NaN, infinite or a mask's filling on one side only."""
    undefined: int
    """Elements that are NaN in the reference."""

    @property
    def cosine(self) -> float:
        return self.products.cosine


def differences(actual: Array, reference: Array, kept: Kept | None) -> Differences:
    """Compares two arrays of one shape in float64, one row of the batch at a time."""
    errors = np.empty(actual.size, np.float32)
    filled = 0
    largest = 0.0
    products = Products()
    unequal = undefined = 0
    for mine_row, theirs_row in zip(rows_of(actual, kept), rows_of(reference, kept), strict=True):
        mine, theirs = mine_row.astype(np.float64), theirs_row.astype(np.float64)
        ordinary = np.isfinite(theirs) & (np.abs(theirs) < _FILL)
        comparable = ordinary & np.isfinite(mine)
        # The same filling: the same sign, and far out.
        alike = (np.sign(mine) == np.sign(theirs)) & (np.abs(mine) >= _LEAST_FILL)
        unequal += int(np.count_nonzero(~comparable & ~(~ordinary & alike)))
        undefined += int(np.count_nonzero(np.isnan(theirs)))
        mine, theirs = mine[comparable], theirs[comparable]
        errors[filled : filled + mine.size] = np.abs(mine - theirs)
        filled += mine.size
        largest = max(largest, float(np.abs(theirs).max(initial=0.0)))
        products += Products(float(mine @ theirs), float(mine @ mine), float(theirs @ theirs))
    every = errors[:filled]
    return Differences(
        max_abs=float(every.max(initial=0.0)),
        p99_abs=float(np.quantile(every, 0.99, overwrite_input=True)) if every.size else 0.0,
        products=products,
        largest=largest,
        rms=math.sqrt(products.theirs_squared / every.size) if every.size else 0.0,
        unequal=unequal,
        undefined=undefined,
    )


def disagreeing_scores(
    actual: Array, reference: Array, kept: Kept | None, *, margin: float
) -> float:
    """The share of rows of scores whose largest is another one, by more than `margin`.

    Scores lie along the last axis; along the first after the batch where each pixel has a class,
    and over all positions where each token has one score (question answering).
    """
    rows = wrong = 0
    for mine_row, theirs_row in zip(rows_of(actual, kept), rows_of(reference, kept), strict=True):
        mine, theirs = mine_row.astype(np.float64), theirs_row.astype(np.float64)
        if mine.ndim == 0 or mine.size == 0:
            continue
        axis = 0 if mine.ndim == 3 else -1
        chosen = mine.argmax(axis)
        of_chosen = np.take_along_axis(theirs, np.expand_dims(chosen, axis), axis).squeeze(axis)
        with np.errstate(invalid="ignore"):  # where every score is -inf
            gap = theirs.max(axis) - of_chosen
        rows += gap.size
        wrong += int(np.count_nonzero(gap > margin))
    return wrong / rows if rows else 0.0
