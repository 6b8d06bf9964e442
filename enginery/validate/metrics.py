"""How far one output lies from its reference, in numbers.

>>> measure(actual, reference, floor=1e-6, tolerance=Tolerance.for_precision("fp32")).passed
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.precision import Tolerance

Array = NDArray[Any]


@dataclass(frozen=True)
class OutputMetrics:
    """One output of one case against PyTorch."""

    output: str
    shape: tuple[int, ...]
    max_abs: float
    p99_abs: float
    max_rel: float
    """Largest error relative to the reference's largest magnitude."""
    cosine: float
    argmax_agreement: float
    """Share of rows with the same largest element; near ties, closer than the limit, count as
    agreement. 1.0 for outputs that are not scores."""
    nonfinite: int
    """Elements that are NaN or infinite here and finite in the reference."""
    noise_floor: float
    """PyTorch's own largest error at this precision on the same inputs."""
    limit: float
    """The largest absolute error that passes."""
    problem: str
    """Why it fails, in words; empty when it passes."""

    @property
    def passed(self) -> bool:
        return not self.problem

    @property
    def badness(self) -> float:
        """For ranking: the error in units of its limit; infinite where shapes differ."""
        if not math.isfinite(self.max_abs) or self.nonfinite:
            return math.inf
        return self.max_abs / self.limit if self.limit else math.inf


def measure(
    output: str,
    actual: Array,
    reference: Array,
    *,
    dtype: str,
    floor: float,
    tolerance: Tolerance,
    max_abs_error: float | None,
    valid: NDArray[np.bool_] | None,
) -> OutputMetrics:
    """Compares one output.

    Args:
        output: its name.
        actual: the graph's output.
        reference: PyTorch's, of the same shape.
        dtype: the dtype that the manifest promises.
        floor: PyTorch's own largest error at this precision.
        tolerance: how the limit follows from the floor.
        max_abs_error: a limit that the user set, instead.
        valid: bool (batch, sequence), False where the input is padding. Padding is not compared:
            fused kernels may leave anything there.
    """
    if actual.shape != reference.shape:
        problem = f"shape {actual.shape}, PyTorch has {reference.shape}"
        return _failed(output, actual.shape, problem)
    if actual.dtype.name != dtype:
        return _failed(output, actual.shape, f"dtype {actual.dtype.name}, expected {dtype}")
    kept = _valid_rows(actual, valid)
    mine, theirs = kept.astype(np.float64), _valid_rows(reference, valid).astype(np.float64)
    finite = np.isfinite(theirs)
    nonfinite = int(np.count_nonzero(~np.isfinite(mine) & finite))
    both = finite & np.isfinite(mine)
    error = np.abs(mine - theirs)[both]
    largest = float(np.abs(theirs[finite]).max(initial=0.0))
    derived = tolerance.limit(noise_floor=floor, largest=largest)
    limit = derived if max_abs_error is None else max_abs_error
    max_abs = float(error.max(initial=0.0))
    cosine = _cosine(mine[both], theirs[both])
    agreement = _argmax_agreement(output, actual, reference, valid, derived)
    return OutputMetrics(
        output=output,
        shape=actual.shape,
        max_abs=max_abs,
        p99_abs=float(np.quantile(error, 0.99)) if error.size else 0.0,
        max_rel=max_abs / largest if largest else 0.0,
        cosine=cosine,
        argmax_agreement=agreement,
        nonfinite=nonfinite,
        noise_floor=floor,
        limit=limit,
        problem=_problem(nonfinite, max_abs, limit, cosine, tolerance, agreement),
    )


def noise_floor(narrow: Array, wide: Array, valid: NDArray[np.bool_] | None) -> float:
    """The largest error between PyTorch at one precision and at the next wider one."""
    a = _valid_rows(narrow, valid).astype(np.float64)
    b = _valid_rows(wide, valid).astype(np.float64)
    both = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(a - b)[both].max(initial=0.0))


def _problem(
    nonfinite: int,
    max_abs: float,
    limit: float,
    cosine: float,
    tolerance: Tolerance,
    agreement: float,
) -> str:
    if nonfinite:
        return f"{nonfinite} elements are NaN or infinite, PyTorch's are finite"
    if max_abs > limit:
        return f"largest error {max_abs:.3g}, allowed {limit:.3g}"
    if cosine < tolerance.min_cosine:
        return f"cosine {cosine:.7f}, expected at least {tolerance.min_cosine:.7f}"
    if agreement < 1.0:
        return f"the largest score is another one in {1 - agreement:.2%} of rows"
    return ""


def _failed(output: str, shape: tuple[int, ...], problem: str) -> OutputMetrics:
    nan = math.nan
    return OutputMetrics(
        output, shape, math.inf, math.inf, math.inf, nan, 0.0, 0, nan, nan, problem
    )


def _valid_rows(array: Array, valid: NDArray[np.bool_] | None) -> Array:
    if valid is not None and array.shape[:2] == valid.shape:
        return array[valid]
    return array


def _cosine(a: Array, b: Array) -> float:
    """1.0 for two vectors of zeros: they are equal."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.dot(a, b)) / norms if norms else float(np.array_equal(a, b))


def _argmax_agreement(
    output: str,
    actual: Array,
    reference: Array,
    valid: NDArray[np.bool_] | None,
    limit: float,
) -> float:
    if "logits" not in output or actual.ndim < 2 or actual.shape[-1] < 2:
        return 1.0
    mine, theirs = actual.astype(np.float64), reference.astype(np.float64)
    if valid is not None and actual.shape == valid.shape:  # a score a token: question answering
        mine, theirs = (np.where(valid, scores, -np.inf) for scores in (mine, theirs))
    else:
        mine, theirs = _valid_rows(mine, valid), _valid_rows(theirs, valid)
    if np.isnan(mine).any() or np.isnan(theirs).any():
        return 1.0  # already counted as non-finite
    rows, expected = (x.reshape(-1, x.shape[-1]) for x in (mine, theirs))
    chosen = rows.argmax(-1)
    # The reference's score of what was chosen, against its best: a tie within the error allowed.
    gap = expected.max(-1) - expected[np.arange(len(rows)), chosen]
    return float(np.mean(gap <= 2 * limit)) if len(rows) else 1.0
