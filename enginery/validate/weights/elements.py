"""Compare the elements of a stored weight with the values that it should have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.passes.cast.low_precision import LOW_TYPES, cast_array
from enginery.validate.weights.stored import StoredWeight

Array = NDArray[Any]

_CHUNK = 1 << 22
"""Elements that are compared at a time, to bound the memory."""


def orientations(
    stored: tuple[int, ...], parameter: tuple[int, ...], transposed: bool | None
) -> list[str]:
    """Return how a weight may have to be turned: `as is`, `transposed`, `reshaped`.

    Args:
        stored: its shape in the graph.
        parameter: the shape of the parameter.
        transposed: whether a square matrix is transposed; None if both may be.
    """
    if len(parameter) == 2 and stored == parameter[::-1]:
        if stored != parameter:
            return ["transposed"]
        both = {True: ["transposed"], False: ["as is"], None: ["as is", "transposed"]}
        return both[transposed]
    return ["as is"] if stored == parameter else ["reshaped"]


def turn_array(array: Array, turned: str, shape: tuple[int, ...]) -> Array:
    """Return an array with the shape of the parameter."""
    return array.T if turned == "transposed" else array.reshape(shape)


def turn(stored: StoredWeight, turned: str, shape: tuple[int, ...]) -> StoredWeight:
    """Return a weight with the shape of the parameter."""
    tolerance = stored.tolerance
    if tolerance is not None:
        tolerance = turn_array(np.broadcast_to(tolerance, stored.values.shape), turned, shape)
    return replace(
        stored,
        raw=turn_array(stored.raw, turned, shape),
        values=turn_array(stored.values, turned, shape),
        tolerance=tolerance,
    )


def columns(stored: StoredWeight, start: int, stop: int) -> StoredWeight:
    """Return a range of the columns of a weight."""
    part = (..., slice(start, stop))
    tolerance = stored.tolerance
    if tolerance is not None:
        tolerance = np.broadcast_to(tolerance, stored.values.shape)[part]
    return replace(stored, raw=stored.raw[part], values=stored.values[part], tolerance=tolerance)


def mismatches(
    stored: StoredWeight, expected: Array, error: Array | None = None
) -> NDArray[np.bool_]:
    """Return which elements differ by more than their type explains.

    Args:
        stored: the weight, with the shape of `expected`.
        expected: the values that it should have.
        error: the largest rounding error of each of these values; None if they are exact.
    """
    wrong = np.zeros(expected.shape, np.bool_)
    if error is None and stored.tolerance is None and np.array_equal(stored.raw, expected):
        return wrong
    if not expected.ndim:
        return _mismatches(stored, expected, error)
    rows = max(1, _CHUNK * len(expected) // max(1, expected.size))
    for start in range(0, len(expected), rows):
        part = slice(start, start + rows)
        tolerance = None if stored.tolerance is None else stored.tolerance[part]
        some = replace(
            stored, raw=stored.raw[part], values=stored.values[part], tolerance=tolerance
        )
        wrong[part] = _mismatches(some, expected[part], None if error is None else error[part])
    return wrong


def _mismatches(stored: StoredWeight, expected: Array, error: Array | None) -> NDArray[np.bool_]:
    slack = np.float32(0) if error is None else error
    with np.errstate(invalid="ignore", over="ignore"):
        if stored.tolerance is not None:
            return _beyond(stored.values - expected, stored.tolerance + slack)
        if stored.precision in LOW_TYPES and expected.dtype.kind == "f":
            # An exporter rounds to infinity and zero, `optimize` to the last finite number.
            rounded = cast_array(expected, LOW_TYPES[stored.precision])
            equal = _equal(stored.raw, rounded) | _equal(
                stored.raw, expected.astype(stored.raw.dtype)
            )
            if error is not None:
                # With an error, a value between two numbers may be rounded to either.
                step = np.spacing(np.abs(rounded)).astype(np.float32)
                equal |= np.abs(stored.values - expected) <= step + slack
            return ~equal
        if error is None:
            return ~_equal(stored.raw, expected)
        return _beyond(stored.values - expected, slack)


def _beyond(difference: Array, limit: Any) -> NDArray[np.bool_]:
    return np.asarray(~(np.abs(difference) <= limit), np.bool_)  # NaN is beyond every limit


def _equal(actual: Array, expected: Array) -> NDArray[np.bool_]:
    # V is the kind of ml_dtypes' types, such as bfloat16.
    both_nan = np.isnan(actual) & np.isnan(expected) if actual.dtype.kind in "fV" else False
    return np.asarray((actual == expected) | both_nan, np.bool_)


def explain(actual: StoredWeight, expected: Array) -> str:
    """Return how an exporter changed a weight before it stored it: `folded`, `scaled`, or ''.

    Modules may scale a weight by channel (weight standardization) or add 1 to it (Gemma's norms),
    and exporters compute that in advance. A weight that is not changed in most of its channels, or
    by the same factor in all, is damaged, not explained.
    """
    values, wide = actual.values.astype(np.float64), expected.astype(np.float64)
    # 2**-8 is BF16's unit roundoff, and more than FP16's.
    slack: Array = np.abs(values) * (2.0**-8 if actual.precision in LOW_TYPES else 2.0**-20)
    if actual.tolerance is not None:
        slack = slack + actual.tolerance
    # Gemma's norms multiply by 1 + weight.
    if wide.ndim == 1:
        return "folded" if np.all(np.abs(values - (1.0 + wide)) <= slack + 2.0**-22) else ""
    flat, other = wide.reshape(len(wide), -1), values.reshape(len(wide), -1)
    # Only convolutions standardize weights, and two elements lie on a line in any case.
    if wide.ndim < 3 or flat.shape[1] < 3:
        return ""
    mean, other_mean = flat.mean(1, keepdims=True), other.mean(1, keepdims=True)
    norm = ((flat - mean) ** 2).sum(1, keepdims=True)
    if not np.all(norm):
        return ""
    # By least squares, a line for each channel: stored = slope * (parameter - its mean) + its own
    # mean. A standardized weight lies on it, a damaged one does not.
    slope = ((flat - mean) * (other - other_mean)).sum(1, keepdims=True) / norm
    # Standardization divides each channel by its own deviation, so the slopes differ.
    if np.count_nonzero(np.abs(slope - np.median(slope)) < 1e-4) * 2 > len(slope):
        return ""
    fit = (flat - mean) * slope + other_mean
    limit = slack.reshape(fit.shape) + 1e-5 * np.abs(other).max()
    return "scaled" if np.all(np.abs(other - fit) <= limit) else ""
