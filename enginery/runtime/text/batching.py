"""Group inputs of different lengths into batches of bounded size.

>>> plan_batches([3, 400, 5, 390], max_rows=2, max_tokens=4096)
[[1, 3], [2, 0]]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 32
MAX_TOKENS = 4096
"""Maximum number of padded tokens of a batch. On a CPU larger batches are no faster, but take more
memory."""


def plan_batches(
    lengths: Sequence[int],
    *,
    max_rows: int | Callable[[int], int] = MAX_ROWS,
    max_tokens: int = MAX_TOKENS,
    equal_lengths: bool = False,
    batch_cost: int = 0,
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
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    longest = np.asarray(lengths, np.int64)[order]
    count = len(order)
    least = np.zeros(count + 1, np.int64)  # cost of the inputs from this one on
    sizes = np.ones(count, np.int64)  # of the batch that begins with this input
    rows = np.arange(1, count + 1)
    equal = 0
    for first in range(count - 1, -1, -1):
        tokens = int(longest[first])
        equal = equal + 1 if first + 1 < count and longest[first + 1] == tokens else 1
        most = min(
            equal if equal_lengths else count - first,
            max_rows if isinstance(max_rows, int) else max_rows(tokens),
            max_tokens // max(tokens, 1),
        )
        most = max(most, 1)
        if not batch_cost:
            sizes[first] = most
            continue
        costs = least[first + 1 : first + 1 + most] + rows[:most] * tokens
        size = most - int(np.argmin(costs[::-1]))  # the largest batch of those that cost the same
        sizes[first], least[first] = size, costs[size - 1] + batch_cost
    batches, first = [], 0
    while first < count:
        batches.append(order[first : first + sizes[first]].tolist())
        first += int(sizes[first])
    return batches


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
