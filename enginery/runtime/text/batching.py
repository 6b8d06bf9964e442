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
) -> list[list[int]]:
    """Return the indices of the inputs of each batch, longest inputs first.

    Inputs are sorted by length, so that inputs of a batch are of similar length and need little
    padding. Then each batch takes the next input until a limit is reached. The longest inputs come
    first, so that a batch that does not fit in memory fails at once.

    Args:
        lengths: number of tokens of each input.
        max_rows: maximum batch size; a function of the length of the batch's longest input, or a
            number.
        max_tokens: maximum number of tokens of a batch after padding; a single input may have more.
        equal_lengths: only group inputs of equal length, because the graph cannot pad.
    """
    batches: list[list[int]] = []
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
