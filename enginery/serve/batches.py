"""Which of the inputs that wait share the next batch.

    >>> rules = BatchRules(max_tokens=256, max_rows=64, max_padding=0.1)
    >>> choose_batch([8, 9, 9, 60, 64], oldest=3, most=5, rules=rules)
    (3, 5)

An input goes with neighbours in length, so that a batch is a stretch of the inputs in the order of
their lengths, and holds little padding. Where it is known what a batch costs before its first
token, the stretch is the one of the cheapest division of all that wait into batches; else, and in a
crowd, it is that of the nearest neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

CROWD = 128
"""Inputs that wait beyond which nothing is divided: it would take a millisecond, and neighbours are
of one length anyway."""


@dataclass(frozen=True)
class BatchRules:
    """What bounds a batch."""

    max_tokens: int
    """After padding; one input alone may have more."""
    max_rows: int
    max_padding: float
    """As a share of the batch's tokens."""
    worth_tokens: float = 0.0
    """How many tokens cost what a batch costs before its first token: a division may have so much
    padding in a batch. 0 where it is not known."""
    equal_lengths: bool = False
    """Inputs of different length cannot share a batch, because they cannot be padded."""
    rows_at: Callable[[int], int] | None = None
    """The most rows that an engine takes of a length; None without engines."""


def choose_batch(
    lengths: Sequence[int], *, oldest: int, most: int, rules: BatchRules
) -> tuple[int, int]:
    """The first and the last-but-one place of the batch that takes the oldest input along.

    Args:
        lengths: tokens of each input that waits, ascending.
        oldest: the place of the one that is not to wait any longer.
        most: the most inputs of the batch, whatever the rules allow.
        rules: the bounds.
    """
    most = min(most, rules.max_rows)
    if rules.worth_tokens and len(lengths) <= CROWD:
        for low, high in pairwise(divide(lengths, most, rules)):
            if low <= oldest < high:
                return low, high
    return _with_nearest(lengths, oldest, most, rules)


def divide(lengths: Sequence[int], most: int, rules: BatchRules) -> list[int]:
    """The places where the cheapest division into batches begins a new one, with both ends.

    A batch costs its tokens with their padding, and what it is worth before its first token. By
    dynamic programming over where the last batch begins.

    Args:
        lengths: tokens of each input, ascending.
        most: the most inputs of a batch.
        rules: the bounds.
    """
    worth = rules.worth_tokens
    costs = [0.0]  # of the inputs before each place
    begins = [0]  # where the last batch of those begins
    for end, longest in enumerate(lengths, 1):
        # A batch whose shortest would be cheaper alone is in no cheapest division.
        shortest = longest if rules.equal_lengths else longest - worth
        rows = min(most, max(rules.max_tokens // max(longest, 1), 1))
        if rules.rows_at:
            rows = min(rows, max(rules.rows_at(longest), 1))
        cost, best, real = costs[end - 1] + worth + longest, end - 1, longest
        for begin in range(end - 2, max(end - rows, 0) - 1, -1):
            length = lengths[begin]
            if length < shortest:
                break
            real += length
            tokens = (end - begin) * longest
            padding = tokens - real
            if padding > worth and padding > rules.max_padding * tokens:
                break  # what comes below adds at least as much as the mean so far
            found = costs[begin] + worth + tokens
            if found <= cost:
                cost, best = found, begin
        costs.append(cost)
        begins.append(best)
    places = [len(lengths)]
    while places[-1]:
        places.append(begins[places[-1]])
    return places[::-1]


def _with_nearest(
    lengths: Sequence[int], oldest: int, most: int, rules: BatchRules
) -> tuple[int, int]:
    """The oldest with one nearest neighbour after the other, as long as the bounds allow it."""
    low, high = oldest, oldest + 1
    real = longest = lengths[oldest]
    while high - low < most:
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
    if rules.rows_at and rows > rules.rows_at(longest):
        return False
    return tokens <= rules.max_tokens and padding <= rules.max_padding * tokens
