"""Choose which waiting rows form the next batch.

>>> rules = BatchRules(max_tokens=256, max_rows=64, max_padding=0.1)
>>> choose_batch([8, 9, 9, 60, 64], oldest=3, max_rows=5, rules=rules)
(3, 5)

All rows of a batch are padded to the longest, so rows of similar length should share one. Waiting
rows are sorted by length, and a batch is a contiguous range of them that contains the oldest row.

There are two ways to choose the range. If the fixed cost of a batch is known, dynamic programming
finds the cheapest partition of all waiting rows into batches, and the batch of the oldest row is
the one that runs. This weighs padding against the cost of another batch. Otherwise, or if many rows
wait, the range grows greedily from the oldest row to its nearest neighbours in length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MAX_PARTITIONED_ROWS = 128
"""Maximum number of waiting rows for the dynamic programming. For more it would take longer than a
millisecond, and among so many rows the nearest neighbours have nearly the same length anyway."""


@dataclass(frozen=True)
class BatchRules:
    """The limits of a batch."""

    max_tokens: int
    """Maximum number of tokens after padding; a single row may have more."""
    max_rows: int
    max_padding: float
    """Maximum share of padding in the batch's tokens."""
    fixed_cost_tokens: float = 0.0
    """The fixed cost of a batch, in tokens. Padding that costs less than this is allowed beyond
    `max_padding`, because it saves a batch. 0 if unknown."""
    equal_lengths: bool = False
    """Only rows of equal length can share a batch, because the graph cannot pad."""
    max_rows_for_length: Callable[[int], int] | None = None
    """Returns the engine's maximum number of rows of a length; None without engines."""
    takes_waiting: bool = False
    """Take whatever waits if its padding costs less than another batch, or is within `max_padding`;
    of more rows, a power of two, to which batches are rounded up on a GPU. Choosing the cheapest
    partition would take longer than a batch does there."""


def choose_batch(
    lengths: Sequence[int], *, oldest: int, max_rows: int, rules: BatchRules
) -> tuple[int, int]:
    """Return the half-open range of the batch that contains the oldest row.

    Args:
        lengths: number of tokens of each waiting row, ascending.
        oldest: index of the row that is due first.
        max_rows: maximum number of rows, in addition to the limit in `rules`.
        rules: the limits of a batch.
    """
    max_rows = min(max_rows, rules.max_rows)
    if rules.takes_waiting:
        return _take_waiting(lengths, oldest, max_rows, rules)
    if rules.fixed_cost_tokens and len(lengths) <= MAX_PARTITIONED_ROWS:
        for low, high in pairwise(partition_rows(lengths, max_rows, rules)):
            if low <= oldest < high:
                return low, high
    return _grow_from_oldest(lengths, oldest, max_rows, rules)


def partition_rows(lengths: Sequence[int], max_rows: int, rules: BatchRules) -> list[int]:
    """Return the boundaries of the cheapest partition of rows into batches.

    A batch costs its tokens, padding included, plus the fixed cost. Let cost(end) be the minimum
    cost of the first `end` rows. Then

        cost(end) = min over begin of cost(begin) + fixed + (end - begin) * lengths[end - 1]

    because rows are in ascending order, so that the last row of a batch is its longest. Candidates
    for `begin` are tried downwards from `end - 1` as long as the batch keeps the rules.

    Args:
        lengths: number of tokens of each row, ascending.
        max_rows: maximum number of rows of a batch.
        rules: the limits of a batch.

    Returns:
        Ascending indices from 0 to `len(lengths)`; two successive ones are a batch's range.
    """
    fixed = rules.fixed_cost_tokens
    costs = [0.0]  # cost(end) for each end
    begins = [0]  # begin of the last batch for each end
    for end, longest in enumerate(lengths, 1):
        # A row so short that its padding costs more than a batch of its own never joins.
        shortest = longest if rules.equal_lengths else longest - fixed
        rows = min(max_rows, max(rules.max_tokens // max(longest, 1), 1))
        if rules.max_rows_for_length:
            rows = min(rows, max(rules.max_rows_for_length(longest), 1))
        cost, best, real = costs[end - 1] + fixed + longest, end - 1, longest
        for begin in range(end - 2, max(end - rows, 0) - 1, -1):
            length = lengths[begin]
            if length < shortest:
                break
            real += length
            tokens = (end - begin) * longest
            padding = tokens - real
            if padding > fixed and padding > rules.max_padding * tokens:
                break  # rows below are even shorter, and raise the share of padding further
            candidate = costs[begin] + fixed + tokens
            if candidate <= cost:
                cost, best = candidate, begin
        costs.append(cost)
        begins.append(best)
    boundaries = [len(lengths)]
    while boundaries[-1]:
        boundaries.append(begins[boundaries[-1]])
    return boundaries[::-1]


def _take_waiting(
    lengths: Sequence[int], oldest: int, max_rows: int, rules: BatchRules
) -> tuple[int, int]:
    """Return all rows if they fit a batch, else those nearest to the oldest, a power of two.

    The largest power of two is taken for which the rows up to the oldest, or those from it on, fit.
    """
    waiting = len(lengths)
    if waiting <= max_rows and _fits(waiting, sum(lengths), lengths[-1], rules):
        return 0, waiting
    first = max(oldest - max_rows, 0)
    candidates = [lengths[index] for index in range(first, min(oldest + max_rows, waiting))]
    sums = [0, *accumulate(candidates)]
    oldest_index = oldest - first
    rows = 1 << (min(max_rows, len(candidates)).bit_length() - 1)
    while rows > 1:
        for start in (oldest_index - rows + 1, oldest_index):
            low = min(max(start, 0), len(candidates) - rows)
            high = low + rows
            if _fits(rows, sums[high] - sums[low], candidates[high - 1], rules):
                return first + low, first + high
        rows //= 2
    return oldest, oldest + 1


def _grow_from_oldest(
    lengths: Sequence[int], oldest: int, max_rows: int, rules: BatchRules
) -> tuple[int, int]:
    """Return the range that grows from the oldest row to its nearest neighbours within the rules.

    Each step adds the neighbour, below or above, that adds less padding.
    """
    low, high = oldest, oldest + 1
    real = longest = lengths[oldest]
    while high - low < max_rows:
        rows = high - low + 1
        # Padding that a neighbour adds: a shorter row is padded itself; a longer row makes all
        # others padded to its length. -1 without a neighbour on that side.
        below = longest - lengths[low - 1] if low > 0 else -1
        above = (lengths[high] - longest) * (rows - 1) if high < len(lengths) else -1
        below_first = 0 <= below <= above or above < 0
        for takes_below in (below_first, not below_first):
            if (below if takes_below else above) < 0:
                continue
            length = lengths[low - 1] if takes_below else lengths[high]
            if _fits(rows, real + length, max(longest, length), rules):
                break
        else:
            break
        if takes_below:
            low -= 1
        else:
            high += 1
        real, longest = real + length, max(longest, length)
    return low, high


def _fits(rows: int, real: int, longest: int, rules: BatchRules) -> bool:
    tokens = rows * longest
    padding = tokens - real
    if rules.equal_lengths and padding:
        return False
    if rules.max_rows_for_length and rows > rules.max_rows_for_length(longest):
        return False
    allowed = rules.max_padding * tokens
    if rules.takes_waiting:
        allowed = max(allowed, rules.fixed_cost_tokens)
    return tokens <= rules.max_tokens and padding <= allowed
