"""Describe how a weight differs from the reference's, and what that means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.reports.weights import WeightDifference
from enginery.validate.weights.stored import StoredWeight, is_table

Array = NDArray[Any]


def describe_difference(
    graph: str, actual: StoredWeight, name: str, expected: Array, wrong: Array, *, holds: str = ""
) -> WeightDifference:
    """Return a difference with its place, its size and its meaning.

    Args:
        graph: file name of the graph.
        actual: the weight, with the parameter's shape.
        name: the parameter that it should be.
        expected: the values that it should have.
        wrong: which elements differ.
        holds: the parameter whose values it has instead; empty if there is none.
    """
    values = actual.values.astype(np.float64)
    wide = expected.astype(np.float64)
    count = int(np.count_nonzero(wrong))
    # The difference of two infinities is NaN, and a warning that says nothing.
    with np.errstate(invalid="ignore"):
        error = np.abs(values - wide)[wrong]
    largest = float(error.max()) if np.all(np.isfinite(error)) else float("inf")
    rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))
    cosine = _cosine(values[rows], wide[rows])
    if count == 1:
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        where = f"element {list(index)} is {values[index]:g}, expected {wide[index]:g}"
    elif len(rows) == 1:
        where = f"row {rows[0]} of {len(wrong)} differs" if wide.ndim > 1 else "it differs"
    else:
        where = f"{count} of {wrong.size} elements in {len(rows)} of {len(wrong)} rows differ"
    meaning = _meaning(actual, values, wide, wrong, holds)
    problem = f"{where}: cosine {cosine:.4f}, largest difference {largest:.2g}"
    return WeightDifference(
        graph=graph,
        weight=actual.name,
        parameter=name,
        elements=int(wrong.size),
        differing=count,
        max_abs=largest,
        cosine=cosine,
        problem=f"{problem}; {meaning}" if meaning else problem,
        factor=_factor(values, wide) if not is_table(actual) else math.nan,
    )


def _meaning(actual: StoredWeight, values: Array, wide: Array, wrong: Array, holds: str) -> str:
    """Return what the differences mean; empty if unknown."""
    if holds:
        return f"it has the values of {holds}"
    if np.any(~np.isfinite(values[wrong])):
        return "it has values that are not finite"
    if values.ndim == 2 and values.shape[0] == values.shape[1] and np.allclose(values.T, wide):
        return "it is transposed"
    if not np.any(values[wrong]):
        return "they are zero"
    if actual.precision == "fp32" and np.array_equal(values, wide.astype(np.float16)):
        return "it was rounded to FP16"
    ratio = _factor(values[wrong], wide[wrong])
    return "" if math.isnan(ratio) else f"they are {ratio:.4g} times as large"


def _factor(values: Array, wide: Array) -> float:
    """Return the number that all expected values are multiplied by; NaN if there is none."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Least squares: <v, w> / <w, w>, where w may be zero.
        ratio = float((values * wide).sum() / max((wide**2).sum(), 1e-300))
        is_multiple = np.allclose(values, ratio * wide, rtol=1e-3, atol=1e-6 * np.abs(wide).max())
    return ratio if is_multiple else math.nan


def _cosine(actual: Array, expected: Array) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        norms = float(np.linalg.norm(actual) * np.linalg.norm(expected))
        dot = float(np.sum(actual * expected))
    if not np.isfinite(norms) or not np.isfinite(dot):
        return float("nan")
    return dot / norms if norms else float(not np.any(actual) and not np.any(expected))
