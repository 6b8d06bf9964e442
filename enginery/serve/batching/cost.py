"""What a batch costs: a fixed part, and a part for each token.

>>> cost = fit_cost([(8, 0.0034), (96, 0.0224)])
>>> round(cost.fixed_seconds, 4), round(cost.seconds_per_token, 6)
(0.0017, 0.000216)

Two sizes are run when a model is loaded, and a line goes through their quickest runs; from then on
the batches that run move it. From the line follows how many tokens a batch should have, and how
long a new request would wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_CPU_TOKENS = 256
"""On a CPU a batch of more tokens is slower a token: its activations leave the caches. Measured on
two cores with all-MiniLM-L6-v2: docs/benchmarks.md."""
_LEAST_TOKENS, _MOST_TOKENS = 256, 16_384
_FIXED_SHARE = 0.1
"""Of a batch's time that may be its fixed part."""
_MAX_DRIFT = 4.0
"""How far the fixed part in tokens may move from what was measured, either way."""
RUNS = 3


@dataclass(frozen=True)
class BatchCost:
    """A line through measured batches."""

    fixed_seconds: float
    seconds_per_token: float

    @property
    def fixed_cost_tokens(self) -> float:
        """Return how many tokens take as long as the fixed part."""
        return self.fixed_seconds / self.seconds_per_token if self.seconds_per_token else 0.0

    def __str__(self) -> str:
        if not self.seconds_per_token:
            return "nothing yet"
        fixed, each = self.fixed_seconds * 1e3, self.seconds_per_token * 1e3
        return f"{fixed:.2f} ms + {each:.3f} ms a token"


def fit_cost(samples: Sequence[tuple[int, float]]) -> BatchCost:
    """Fit a line through the quickest run of the smallest and of the largest size.

    Args:
        samples: tokens and seconds of each run.
    """
    quickest: dict[int, float] = {}
    for tokens, seconds in samples:
        quickest[tokens] = min(seconds, quickest.get(tokens, seconds))
    small, large = min(quickest), max(quickest)
    if small == large:
        return BatchCost(0.0, quickest[small] / max(small, 1))
    slope = max((quickest[large] - quickest[small]) / (large - small), 0.0)
    return BatchCost(max(quickest[small] - slope * small, 0.0), slope)


def measure_cost(run: Callable[[int], float], *, limit: int) -> BatchCost:
    """Measure a small and a larger row.

    Args:
        run: runs one row of so many tokens; returns the seconds that it took.
        limit: the most tokens that the model takes.
    """
    small, large = min(8, limit), min(96, limit)
    run(large)  # memory for it is allocated
    return fit_cost([(tokens, run(tokens)) for _ in range(RUNS) for tokens in {small, large}])


class CostEstimator:
    """A line through the batches that run, later ones weighing more. Thread-safe."""

    def __init__(self, measured: BatchCost, *, keep: float = 0.99) -> None:
        """Start from a measured line, which counts as a few batches of two sizes."""
        self._keep = keep
        self._measured = measured
        self._lock = threading.Lock()
        self._sums = [0.0] * 5
        self.batches = 0
        if measured.seconds_per_token:
            for tokens in (8.0, 96.0) * 4:
                seconds = measured.fixed_seconds + measured.seconds_per_token * tokens
                self._add(tokens, seconds)

    def add(self, tokens: int, seconds: float) -> None:
        """Add a batch that ran: its tokens with their padding, and how long it took."""
        with self._lock:
            self.batches += 1
            self._add(float(tokens), seconds)

    def cost(self) -> BatchCost:
        """Return the line now; a slope that noise has made negative counts as none."""
        with self._lock:
            count, x, y, xx, xy = self._sums
        spread = count * xx - x * x
        if not count or not x:
            return BatchCost(0.0, 0.0)
        if spread <= 1e-6 * count * xx:  # one size alone: nothing says what is fixed
            return BatchCost(0.0, y / x)
        slope = (count * xy - x * y) / spread
        fixed = (y - slope * x) / count
        if slope <= 0 or fixed < 0:
            return BatchCost(0.0, y / x)
        return BatchCost(fixed, slope)

    def fixed_cost_tokens(self) -> float:
        """Return how many tokens take as long as a batch's fixed part.

        Batches of nearly one size say little of it: it stays within four times what was measured.
        """
        found, measured = self.cost().fixed_cost_tokens, self._measured.fixed_cost_tokens
        if not measured:
            return found
        return min(max(found, measured / _MAX_DRIFT), measured * _MAX_DRIFT)

    def mean_seconds_per_token(self) -> float:
        """Return what a token has cost lately, its share of the fixed part included."""
        with self._lock:
            _, x, y, _, _ = self._sums
        return y / x if x else 0.0

    def _add(self, x: float, y: float) -> None:
        new = (1.0, x, y, x * x, x * y)
        self._sums = [self._keep * old + one for old, one in zip(self._sums, new, strict=True)]


def choose_max_tokens(cost: BatchCost, *, on_cpu: bool) -> tuple[int, str]:
    """Return how many tokens a batch should have at most, and why."""
    if on_cpu:
        return _CPU_TOKENS, (
            f"{_CPU_TOKENS} tokens: on a CPU larger batches are slower a token; measured {cost}"
        )
    wanted = int(cost.fixed_cost_tokens * (1 - _FIXED_SHARE) / _FIXED_SHARE)
    tokens = min(max(wanted, _LEAST_TOKENS), _MOST_TOKENS)
    return tokens, (
        f"{tokens} tokens: from {wanted} on the fixed part is below {_FIXED_SHARE:.0%}, within "
        f"{_LEAST_TOKENS} to {_MOST_TOKENS}; measured {cost}"
    )
