"""Which of the inputs that wait share the next batch.

    >>> rules = BatchRules(max_tokens=256, max_rows=64, max_padding=0.1)
    >>> choose_batch([8, 9, 9, 60, 64], oldest=3, most=5, rules=rules)
    (3, 5)

An input goes with its nearest neighbours in length, so that a batch is a stretch of the inputs in
the order of their lengths, and holds little padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

CROWD = 64
"""Inputs that wait from which on a batch's fixed cost is worth more than the bound on padding."""


@dataclass(frozen=True)
class BatchRules:
    """What bounds a batch."""

    max_tokens: int
    """After padding; one input alone may have more."""
    max_rows: int
    max_padding: float
    """As a share of the batch's tokens."""
    worth_tokens: float = 0.0
    """How many tokens cost what a batch costs before its first token: with many inputs waiting,
    so much padding is cheaper than another batch."""
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
    low, high = oldest, oldest + 1
    real = longest = lengths[oldest]
    most = min(most, rules.max_rows)
    spare = rules.worth_tokens if len(lengths) >= CROWD else 0.0
    while high - low < most:
        rows = high - low + 1
        # Padding that each neighbour adds: its own, or that of all the others up to it.
        below = longest - lengths[low - 1] if low > 0 else -1
        above = (lengths[high] - longest) * (rows - 1) if high < len(lengths) else -1
        for takes_below in (True, False) if 0 <= below <= above or above < 0 else (False, True):
            if (below if takes_below else above) < 0:
                continue
            length = lengths[low - 1] if takes_below else lengths[high]
            if _fits(rows, real + length, max(longest, length), spare, rules):
                break
        else:
            break
        if takes_below:
            low -= 1
        else:
            high += 1
        real, longest = real + length, max(longest, length)
    return low, high


def _fits(rows: int, real: int, longest: int, spare: float, rules: BatchRules) -> bool:
    tokens = rows * longest
    padding = tokens - real
    if rules.equal_lengths and padding:
        return False
    if rules.rows_at and rows > rules.rows_at(longest):
        return False
    return tokens <= rules.max_tokens and padding <= max(rules.max_padding * tokens, spare)
