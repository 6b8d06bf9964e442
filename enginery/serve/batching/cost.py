"""A linear model of the time that a batch takes: a fixed cost plus a cost per token.

>>> cost = fit_cost([(8, 0.0034), (96, 0.0224)])
>>> round(cost.fixed_seconds, 4), round(cost.seconds_per_token, 6)
(0.0017, 0.000216)

After a model is loaded, batches of two sizes are timed, and the line through their fastest runs is
the initial estimate. Later, every batch that serves requests updates the estimate. It determines
the maximum number of tokens of a batch, whether padding is cheaper than another batch, and how long
a new request would wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_CPU_TOKENS = 256
"""Maximum number of tokens of a batch on a CPU. Larger batches take longer per token, because their
activations no longer fit in the caches. Measured on two cores with all-MiniLM-L6-v2, see
benchmarks/results/figures.md."""
_MIN_TOKENS, _MAX_TOKENS = 8192, 16_384
"""Limits of the maximum on a GPU. Below a few thousand tokens its matrix multiplications are not
efficient yet, which a linear model does not see."""
_FIXED_SHARE = 0.1
"""Target share of the fixed cost in the time of a full batch."""
_MAX_DRIFT = 4.0
"""Maximum factor between the estimated and the initially measured `fixed_cost_tokens`."""
RUNS = 3
"""Number of timed runs per size."""


@dataclass(frozen=True)
class BatchCost:
    """The time of a batch: `fixed_seconds + seconds_per_token * tokens`, tokens with padding."""

    fixed_seconds: float
    seconds_per_token: float

    @property
    def fixed_cost_tokens(self) -> float:
        """The fixed cost in tokens: how many tokens take as long as the fixed part."""
        return self.fixed_seconds / self.seconds_per_token if self.seconds_per_token else 0.0


def fit_cost(samples: Sequence[tuple[int, float]]) -> BatchCost:
    """Fit a line through the fastest run of the smallest size and that of the largest size.

    The fastest run is the one least disturbed by other processes.

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


def measure_cost(run: Callable[[int], float], *, limit: int, large: int = 0) -> BatchCost:
    """Measure the cost of a batch from a short row and a longer one, or a batch.

    Args:
        run: runs a batch of a number of tokens; returns the seconds that it took.
        limit: maximum number of tokens of a row.
        large: number of tokens of a large batch; 0 for one row of 96 tokens.
    """
    small, large = min(8, limit), large or min(96, limit)
    run(large)  # warm-up: allocates memory
    return fit_cost([(tokens, run(tokens)) for _ in range(RUNS) for tokens in {small, large}])


class CostEstimator:
    """An online estimate of the batch cost, updated by every batch that runs. Thread-safe.

    It is a least-squares fit with exponential forgetting: each batch multiplies the weights of all
    earlier ones by `keep`. For such a fit the five sums of 1, x, y, x² and xy are sufficient, where
    x is a batch's tokens and y its seconds.
    """

    def __init__(self, measured: BatchCost, *, keep: float = 0.99) -> None:
        """Start from a measured cost, which counts as four batches of 8 and four of 96 tokens.

        Args:
            measured: the initial cost; without `seconds_per_token` the estimate starts empty.
            keep: factor for the weights of earlier batches.
        """
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
        """Add a batch that ran: its tokens, padding included, and its duration."""
        with self._lock:
            self.batches += 1
            self._add(float(tokens), seconds)

    def cost(self) -> BatchCost:
        """Return the current estimate.

        If all batches have the same size, or noise leads to a negative slope or fixed cost, the
        line goes through the origin and the mean.
        """
        with self._lock:
            count, x, y, xx, xy = self._sums
        spread = count * xx - x * x
        if not count or not x:
            return BatchCost(0.0, 0.0)
        if spread <= 1e-6 * count * xx:  # one size only: the fixed cost cannot be determined
            return BatchCost(0.0, y / x)
        slope = (count * xy - x * y) / spread
        fixed = (y - slope * x) / count
        if slope <= 0 or fixed < 0:
            return BatchCost(0.0, y / x)
        return BatchCost(fixed, slope)

    def fixed_cost_tokens(self) -> float:
        """Return the fixed cost of a batch in tokens.

        Batches of similar sizes determine it badly, so it stays within a factor of `_MAX_DRIFT` of
        the initially measured value.
        """
        estimate, measured = self.cost().fixed_cost_tokens, self._measured.fixed_cost_tokens
        if not measured:
            return estimate
        return min(max(estimate, measured / _MAX_DRIFT), measured * _MAX_DRIFT)

    def mean_seconds_per_token(self) -> float:
        """Return the mean time per token of recent batches, fixed cost included."""
        with self._lock:
            _, x, y, _, _ = self._sums
        return y / x if x else 0.0

    def _add(self, x: float, y: float) -> None:
        new = (1.0, x, y, x * x, x * y)
        self._sums = [self._keep * old + term for old, term in zip(self._sums, new, strict=True)]


def choose_max_tokens(cost: BatchCost, *, on_cpu: bool) -> tuple[int, str]:
    """Choose the maximum number of tokens of a batch; return it with an explanation.

    On a GPU larger batches are faster per token until the fixed cost no longer matters. With a
    fixed cost of f tokens, its share in a batch of n tokens is f / (f + n), which is `_FIXED_SHARE`
    at n = f * (1 - _FIXED_SHARE) / _FIXED_SHARE. The explanation leaves the cost out: every batch
    changes it, and /info has what it is now.
    """
    if on_cpu:
        return _CPU_TOKENS, (f"{_CPU_TOKENS} tokens: on a CPU larger batches take longer per token")
    target = int(cost.fixed_cost_tokens * (1 - _FIXED_SHARE) / _FIXED_SHARE)
    tokens = min(max(target, _MIN_TOKENS), _MAX_TOKENS)
    return tokens, (
        f"{tokens} tokens: from {target} tokens on the fixed cost is below {_FIXED_SHARE:.0%} of a "
        f"batch; limited to {_MIN_TOKENS} to {_MAX_TOKENS}"
    )
