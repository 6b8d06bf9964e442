"""Choose which waiting rows share the next batch.

>>> rules = BatchRules(max_tokens=256, max_rows=64, max_padding=0.1)
>>> choose_batch([8, 9, 9, 60, 64], oldest=3, max_rows=5, rules=rules)
(3, 5)

A row goes with neighbours in length, so that a batch is a range of the rows in the order of their
lengths, and holds little padding. Where the fixed cost of a batch is known, the range is the one of
the cheapest division of all waiting rows into batches; else, and with many waiting, it is that of
the nearest neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_PARTITIONED_ROWS = 128
"""The most waiting rows that are divided: more would take a millisecond, and neighbours are of one
length anyway."""


@dataclass(frozen=True)
class BatchRules:
    """The bounds of a batch."""

    max_tokens: int
    """After padding; one row alone may have more."""
    max_rows: int
    max_padding: float
    """As a share of the batch's tokens."""
    fixed_cost_tokens: float = 0.0
    """How many tokens cost as much as the fixed part of a batch: a division may have so much
    padding in a batch. 0 where it is not known."""
    equal_lengths: bool = False
    """Rows of different length cannot share a batch, because they cannot be padded."""
    max_rows_for_length: Callable[[int], int] | None = None
    """The most rows that an engine takes of a length; None without engines."""


def choose_batch(
    lengths: Sequence[int], *, oldest: int, max_rows: int, rules: BatchRules
) -> tuple[int, int]:
    """Return the half-open range of the batch that contains the oldest row.

    Args:
        lengths: tokens of each waiting row, ascending.
        oldest: the place of the row that must not wait any longer.
        max_rows: the most rows of the batch, whatever the rules allow.
        rules: the bounds.
    """
    max_rows = min(max_rows, rules.max_rows)
    if rules.fixed_cost_tokens and len(lengths) <= MAX_PARTITIONED_ROWS:
        for low, high in pairwise(partition_rows(lengths, max_rows, rules)):
            if low <= oldest < high:
                return low, high
    return _grow_from_oldest(lengths, oldest, max_rows, rules)


def partition_rows(lengths: Sequence[int], max_rows: int, rules: BatchRules) -> list[int]:
    """Return where the batches of the cheapest division begin, with the end behind them.

    A batch costs its tokens with their padding, and its fixed part. By dynamic programming over
    where the last batch begins.

    Args:
        lengths: tokens of each row, ascending.
        max_rows: the most rows of a batch.
        rules: the bounds.
    """
    fixed = rules.fixed_cost_tokens
    costs = [0.0]  # of the rows before each place
    begins = [0]  # where the last batch of those begins
    for end, longest in enumerate(lengths, 1):
        # A batch whose shortest would be cheaper alone is in no cheapest division.
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
                break  # what comes below adds at least as much as the mean so far
            found = costs[begin] + fixed + tokens
            if found <= cost:
                cost, best = found, begin
        costs.append(cost)
        begins.append(best)
    places = [len(lengths)]
    while places[-1]:
        places.append(begins[places[-1]])
    return places[::-1]


def _grow_from_oldest(
    lengths: Sequence[int], oldest: int, max_rows: int, rules: BatchRules
) -> tuple[int, int]:
    """Return the oldest with one nearest neighbour after the other, within the bounds."""
    low, high = oldest, oldest + 1
    real = longest = lengths[oldest]
    while high - low < max_rows:
        rows = high - low + 1
        # Padding that each neighbour adds: its own, or that of all the others up to it.
        below = longest - lengths[low - 1] if low > 0 else -1
        above = (lengths[high] - longest) * (rows - 1) if high < len(lengths) else -1
        for takes_below in (True, False) if 0 <= below <= above or above < 0 else (False, True):
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
    return tokens <= rules.max_tokens and padding <= rules.max_padding * tokens
