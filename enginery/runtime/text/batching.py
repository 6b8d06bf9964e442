"""Group inputs of different lengths into batches of bounded size.

>>> plan_batches([3, 400, 5, 390], max_rows=2, max_tokens=4096)
[[1, 3], [2, 0]]
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 32
MAX_TOKENS = 4096
"""Maximum number of padded tokens of a batch. On a CPU larger batches are no faster, but take more
memory."""


GPU_MAX_ROWS = 256
GPU_MAX_TOKENS = 8192
"""Maximum number of padded tokens of a batch on a GPU. MiniLM in FP16 embedded texts of 33 tokens
on an H200 fastest with 128 rows, padded to 32 or 48 tokens: 1.2 times as fast as with 64."""
_MANY_BATCHES = 4
"""Number of full batches from which on the smaller rungs are not tried."""
GPU_BATCH_COST = 1024
"""Tokens that take as long as starting one more batch on a GPU: a run of MiniLM takes 0.25 ms there
at least, and 0.19 µs for each token."""


@dataclass(frozen=True)
class Rungs:
    """The sizes that a batch is padded to, smallest first; a larger batch is not padded."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    """Sizes of the sequence."""


def plan_batches(
    lengths: Sequence[int] | NDArray[Any],
    *,
    max_rows: int | Callable[[int], int] = MAX_ROWS,
    max_tokens: int = MAX_TOKENS,
    equal_lengths: bool = False,
    batch_cost: int = 0,
    rungs: Rungs | None = None,
) -> list[list[int]]:
    """Return the indices of the inputs of each batch, longest inputs first.

    Inputs are sorted by length, so that inputs of a batch are of similar length and need little
    padding. Each batch is as large as the limits allow or, with `batch_cost`, the batches are those
    with the least sum of padded tokens and costs. The longest inputs come first, so that a batch
    that does not fit in memory fails at once.

    Args:
        lengths: number of tokens of each input.
        max_rows: maximum batch size; a function of the length of the batch's longest input, or a
            number.
        max_tokens: maximum number of tokens of a batch after padding; a single input may have more.
        equal_lengths: only group inputs of equal length, because the graph cannot pad.
        batch_cost: number of tokens that take as long as starting one more batch; 0 for the
            largest batches.
        rungs: sizes that batches are padded to; None for the batch's own. Not for `equal_lengths`.
    """
    if len(lengths) < 2:
        return [[0]] if len(lengths) else []
    # Stable, so that texts of one length stay in the order of the input.
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    longest = np.asarray(lengths, np.int64)[order]
    # searchsorted needs ascending numbers.
    ascending = -longest

    def size_limit(tokens: int) -> int:
        rows = max_rows if isinstance(max_rows, int) else max_rows(tokens)
        return max(min(rows, max_tokens // max(tokens, 1)), 1)

    def largest_size(first: int, tokens: int) -> int:
        end = len(order)
        if equal_lengths:
            end = int(np.searchsorted(ascending, -tokens, side="right"))
        return min(size_limit(tokens), end - first)

    if rungs is not None and not equal_lengths:
        sizes = _sizes_on_rungs(longest, size_limit, rungs, batch_cost)
    elif batch_cost:
        sizes = _cheapest_sizes(longest, largest_size, batch_cost)
    else:
        sizes = _largest_sizes(longest, largest_size)
    ends = np.cumsum(sizes)
    return [order[end - size : end].tolist() for size, end in zip(sizes, ends, strict=True)]


_LargestSize = Callable[[int, int], int]
"""Returns the maximum size of the batch that begins with an input, from its index and length."""


def _largest_sizes(longest: NDArray[np.int64], largest_size: _LargestSize) -> list[int]:
    """Return the sizes of the largest batches of inputs that are sorted by length."""
    sizes: list[int] = []
    first = 0
    while first < len(longest):
        sizes.append(largest_size(first, int(longest[first])))
        first += sizes[-1]
    return sizes


def _cheapest_sizes(
    longest: NDArray[np.int64], largest_size: _LargestSize, batch_cost: int
) -> list[int]:
    """Return the sizes of the batches with the least sum of padded tokens and costs."""
    count = len(longest)
    least = np.zeros(count + 1, np.int64)  # cost of the inputs from this one on
    best = np.ones(count, np.int64)  # size of the batch that begins with this input
    rows = np.arange(1, count + 1)
    # From the shortest input to the longest: `least` is known for all that follow, so each input
    # tries every size of the batch that it begins, at once.
    for first in range(count - 1, -1, -1):
        tokens = int(longest[first])
        largest = largest_size(first, tokens)
        # A batch is padded to its first input, which is the longest.
        costs = least[first + 1 : first + 1 + largest] + rows[:largest] * tokens
        # The largest batch of those that cost the same.
        size = largest - int(np.argmin(costs[::-1]))
        best[first], least[first] = size, costs[size - 1] + batch_cost
    sizes: list[int] = []
    first = 0
    while first < count:
        sizes.append(int(best[first]))
        first += sizes[-1]
    return sizes


def _sizes_on_rungs(
    longest: NDArray[np.int64], size_limit: Callable[[int], int], rungs: Rungs, batch_cost: int
) -> list[int]:
    """Return the sizes of the batches with the least sum of padded tokens and costs, on rungs.

    A batch takes as many rows as its rung has, because fewer would cost the same. Of many inputs,
    small rungs are not tried: each that is new takes tens of milliseconds to record.
    """
    count = len(longest)
    # The smallest batches to try as a share of the limit, within the inputs and at their end.
    shares = (2, 8) if count >= _MANY_BATCHES * size_limit(int(longest[-1])) else (8, sys.maxsize)
    costs: list[float] = [0.0] + [math.inf] * count  # of the inputs before this one
    sizes = [0] * (count + 1)  # size of the batch that ends before this input
    start_cost = batch_cost or 1 / (count + 1)  # of those with equal padding, the fewest batches
    # From the longest input to the shortest: each number of inputs that can be reached exactly by
    # rungs keeps its cheapest batches.
    for first in range(count):
        if costs[first] == math.inf:
            continue
        width = _round_up(int(longest[first]), rungs.tokens)
        limit, remaining = size_limit(width), count - first
        lowest = limit // shares[remaining < limit]
        fitting = [rows for rows in rungs.rows if lowest <= rows <= limit]
        for rows in fitting or [limit]:
            size = min(rows, remaining)
            cost = costs[first] + rows * width + start_cost
            if cost <= costs[first + size]:  # of equal ones, the last batch is the smaller one
                costs[first + size], sizes[first + size] = cost, size
    planned: list[int] = []
    end = count
    while end:
        planned.append(sizes[end])
        end -= sizes[end]
    return planned[::-1]


def _round_up(size: int, rungs: Sequence[int]) -> int:
    """Return the smallest rung that is at least `size`; `size` beyond the largest one."""
    index = bisect_left(rungs, size)
    return rungs[index] if index < len(rungs) else size


def fill_rows(feeds: Mapping[str, NDArray[Any]], rows: int) -> dict[str, NDArray[Any]]:
    """Pad feeds to `rows` rows by repeating their last row; return larger ones unchanged."""
    return {
        name: np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])
        if rows > len(array)
        else array
        for name, array in feeds.items()
    }


def first_rows(outputs: Mapping[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Return the first `count` rows of each output; return scalars unchanged."""
    return {name: values[:count] if values.ndim else values for name, values in outputs.items()}
