"""Inputs of unequal length into batches of bounded size, filled up to rows that a graph takes.

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
"""Padded tokens of one batch. Beyond some thousand a CPU gains nothing and memory grows."""


def plan_batches(
    lengths: Sequence[int],
    *,
    max_rows: int | Callable[[int], int] = MAX_ROWS,
    max_tokens: int = MAX_TOKENS,
    equal_lengths: bool = False,
) -> list[list[int]]:
    """Indices of the inputs of each batch, longest inputs first.

    Args:
        lengths: tokens of each input.
        max_rows: the most inputs of a batch; a function, by the tokens of its longest.
        max_tokens: the most tokens of a batch after padding; one input alone may have more.
        equal_lengths: never put different lengths together, where padding would be seen.
    """
    batches: list[list[int]] = []
    # The longest come first, so that a batch that does not fit in memory fails at once.
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches:
            batch = batches[-1]
            longest = lengths[batch[0]]
            most = max_rows if isinstance(max_rows, int) else max_rows(longest)
            fits = len(batch) < most and (len(batch) + 1) * longest <= max_tokens
            if fits and not (equal_lengths and lengths[index] != longest):
                batch.append(index)
                continue
        batches.append([index])
    return batches


def fill_rows(feeds: Mapping[str, NDArray[Any]], rows: int) -> dict[str, NDArray[Any]]:
    """Return the feeds with their last row repeated up to so many rows; never cut."""
    return {
        name: np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])
        if rows > len(array)
        else array
        for name, array in feeds.items()
    }


def first_rows(outputs: Mapping[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Return the outputs without the rows that only filled the batch; a scalar has none."""
    return {name: values[:count] if values.ndim else values for name, values in outputs.items()}
