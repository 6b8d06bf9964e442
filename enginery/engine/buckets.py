"""Splits observed token lengths into buckets that need the least padding.

Takes the lengths of real texts, in tokens; leaves one bucket for each shape profile.

    >>> buckets = bucket_lengths(np.array([5, 6, 7, 30, 31, 120]), 3, most=512)
    >>> [bucket.longest for bucket in buckets.buckets], buckets.padded, buckets.padded_by_one
    ([8, 32, 120], 208, 720)

The split is exact for the data. Lengths are rounded up to a multiple of eight, the cost of a split
is the sum over its buckets of rows times the cost of their longest length, and dynamic programming
over the distinct lengths finds the least: the best split into k buckets ends with one bucket behind
the best split of all shorter lengths into k - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError, OptionError


@dataclass(frozen=True)
class Bucket:
    """Lengths that share a profile."""

    shortest: int
    """One more than the longest of the bucket before; 1 in the first."""
    longest: int
    """The upper boundary: rows are padded to it, and a profile is tuned for it."""
    rows: int
    tokens: int
    """Of the rows as they are, in this bucket."""

    @property
    def padded(self) -> int:
        """Tokens of the rows when each is padded to the longest."""
        return self.rows * self.longest

    @property
    def padding(self) -> float:
        """The share of the padded tokens that is padding, 0 to 1."""
        return 1 - self.tokens / self.padded


@dataclass(frozen=True)
class Buckets:
    """A split of observed lengths.

    The optimum to tune for is a bucket's upper boundary, not its median length: a batch is as long
    as the longest of its rows, and where shapes are kept few, rows are padded to the boundary.
    """

    buckets: tuple[Bucket, ...]
    """In order of length, without gaps."""
    most: int
    """The longest length that the model takes."""
    truncated: int
    """Rows that are longer than that; they count as `most` tokens."""
    lengths: tuple[int, ...]
    """The distinct lengths that were seen, cut at `most`, in order."""
    counts: tuple[int, ...]
    """How many rows have each of them."""

    @property
    def rows(self) -> int:
        """All rows."""
        return sum(self.counts)

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(bucket.tokens for bucket in self.buckets)

    @property
    def padded(self) -> int:
        """Tokens of all rows, each padded to the longest of its bucket."""
        return sum(bucket.padded for bucket in self.buckets)

    @property
    def padded_by_one(self) -> int:
        """The same with one bucket for everything."""
        return self.rows * self.buckets[-1].longest

    @property
    def padding(self) -> float:
        """The share of the padded tokens that is padding, 0 to 1."""
        return 1 - self.tokens / self.padded

    @property
    def ratio(self) -> float:
        """Padded tokens, as a part of those that one bucket needs; 0 to 1."""
        return self.padded / self.padded_by_one

    def __str__(self) -> str:
        ends = ", ".join(str(bucket.longest) for bucket in self.buckets)
        cut = f", {self.truncated} of them cut at {self.most}" if self.truncated else ""
        return (
            f"{self.rows} rows of {self.lengths[0]} to {self.lengths[-1]} tokens{cut}; "
            f"{len(self.buckets)} bucket{'s' * (len(self.buckets) > 1)} up to {ends}: "
            f"{self.padding:.0%} padding, {self.ratio:.0%} of the tokens of a single one"
        )


def bucket_lengths(
    lengths: NDArray[np.integer[Any]],
    count: int,
    *,
    most: int,
    multiple_of: int = 8,
    hidden_size: int = 0,
) -> Buckets:
    """The split into at most `count` buckets that costs least for these lengths.

    Args:
        lengths: (rows,), in tokens, in any order. Longer ones than `most` count as `most`.
        count: of buckets. Fewer come back where there are fewer distinct lengths.
        most: the longest length that the model takes.
        multiple_of: boundaries are multiples of this, or `most`: kernels work in tiles, and a
            boundary inside a tile saves nothing.
        hidden_size: 0 counts padded tokens. The model's width counts arithmetic: one row of s
            tokens costs s * (1 + s / (6 * hidden_size)), the second part being attention's.
            Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
            Clusters Using Megatron-LM", 2021, equation 2 without the vocabulary.

    Raises:
        InputError: there are no lengths, or one is negative or no whole number.
        OptionError: `count`, `most` or `multiple_of` is below 1, or `hidden_size` below 0.
    """
    least = {"count": 1, "most": 1, "multiple_of": 1, "hidden_size": 0}
    given = (count, most, multiple_of, hidden_size)
    for (name, low), value in zip(least.items(), given, strict=True):
        if value < low:
            raise OptionError(f"option '{name}' is {value}, expected {low} or more.")
    observed = np.asarray(lengths)
    if observed.ndim != 1 or not observed.size:
        raise InputError("there are no token lengths to make buckets of.")
    if observed.dtype.kind not in "iu" or observed.min() < 0:
        raise InputError(
            f"token lengths are {observed.dtype.name} from {observed.min()}, expected whole "
            "numbers of 0 or more."
        )
    cut = np.minimum(observed.astype(np.int64), most)
    # An empty text still is one position of a batch.
    rounded = np.minimum(-(-np.maximum(cut, 1) // multiple_of) * multiple_of, most)
    boundaries, rows = np.unique(rounded, return_counts=True)
    # As whole numbers, so that sums are exact: the cost above times 6 * hidden_size.
    costs = boundaries * (6 * hidden_size + boundaries) if hidden_size else boundaries
    ends = boundaries[_best_ends(costs, rows, count)]
    place = np.searchsorted(ends, rounded)
    buckets = tuple(
        Bucket(
            shortest=1 if index == 0 else int(ends[index - 1]) + 1,
            longest=int(end),
            rows=int((place == index).sum()),
            tokens=int(cut[place == index].sum()),
        )
        for index, end in enumerate(ends)
    )
    distinct, counts = np.unique(cut, return_counts=True)
    return Buckets(
        buckets=buckets,
        most=most,
        truncated=int((observed > most).sum()),
        lengths=tuple(int(length) for length in distinct),
        counts=tuple(int(count) for count in counts),
    )


def _best_ends(costs: NDArray[np.int64], rows: NDArray[np.int64], count: int) -> list[int]:
    """Where the buckets of the cheapest split end, as indices into the distinct lengths.

    Args:
        costs: (distinct,), of one row padded to each length, increasing.
        rows: (distinct,), how many rows have it.
        count: the most buckets.

    Time is count times the square of the distinct lengths, memory count times their number. Of
    several cheapest splits, the one whose last buckets begin earliest.
    """
    distinct = len(costs)
    # before[i] rows are shorter than the i-th length; a bucket over i..j has before[j+1]-before[i].
    before = np.concatenate([[0], np.cumsum(rows)])
    best = costs * before[1:]  # everything up to j in one bucket
    begins = [np.zeros(distinct, dtype=np.int64)]
    # Each bucket more saves something while there are lengths of its own for it.
    for used in range(1, min(count, distinct)):
        least, begin = best.copy(), np.zeros(distinct, dtype=np.int64)
        for j in range(used, distinct):
            # The last bucket is i..j, behind the best split of what is shorter into `used`.
            total = best[used - 1 : j] + costs[j] * (before[j + 1] - before[used : j + 1])
            choice = int(np.argmin(total))
            least[j], begin[j] = total[choice], choice + used
        best = least
        begins.append(begin)
    ends, end = [], distinct - 1
    for begin in reversed(begins):
        ends.append(end)
        end = int(begin[end]) - 1
    return ends[::-1]
