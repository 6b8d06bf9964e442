"""Split observed token lengths into buckets with the least padding.

    >>> split = bucket_lengths(np.array([5, 6, 7, 30, 31, 120]), 3, most=512)
    >>> [bucket.longest for bucket in split.buckets], split.padded, split.padded_by_one
    ([8, 32, 120], 208, 720)

The split is optimal for the data. Lengths are rounded up to a multiple of eight. The cost of a
split is the number of its padded tokens: the sum over its buckets of rows times the longest
length. Dynamic programming over the distinct lengths minimizes it: the best split into k buckets
is one last bucket, preceded by the best split of all shorter lengths into k - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError, OptionError

_TILE = 8
"""Buckets end at multiples of this. Kernels work in tiles: an end inside a tile saves nothing."""


@dataclass(frozen=True)
class Bucket:
    """A range of lengths that share a profile."""

    shortest: int
    """Lower end: one more than the previous bucket's longest; 1 in the first bucket."""
    longest: int
    """Upper end: rows are padded to it, and the profile is tuned for it."""
    rows: int
    """Number of rows."""
    tokens: int
    """Tokens of these rows, without padding."""

    @property
    def padded(self) -> int:
        """Tokens when each row is padded to `longest`."""
        return self.rows * self.longest

    @property
    def padding(self) -> float:
        """The share of the padded tokens that is padding, 0 to 1."""
        return 1 - self.tokens / self.padded


@dataclass(frozen=True)
class LengthBuckets:
    """Observed lengths, split into buckets.

    Profiles are tuned for a bucket's upper end, not for its median length: a batch is as long as
    the longest of its rows.
    """

    buckets: tuple[Bucket, ...]
    """Buckets in order of length, without gaps."""
    most: int
    """Maximum length of the model."""
    truncated: int
    """Number of longer rows; they count as `most` tokens."""
    lengths: tuple[int, ...]
    """Distinct observed lengths, truncated at `most`, in order."""
    counts: tuple[int, ...]
    """Number of rows with each of these lengths."""

    @property
    def rows(self) -> int:
        """Number of rows."""
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
        """Tokens of all rows, each padded to the longest of all."""
        return self.rows * self.buckets[-1].longest

    @property
    def padding(self) -> float:
        """The share of the padded tokens that is padding, 0 to 1."""
        return 1 - self.tokens / self.padded

    @property
    def ratio(self) -> float:
        """Padded tokens as a share of those with a single bucket, 0 to 1."""
        return self.padded / self.padded_by_one

    def __str__(self) -> str:
        ends = ", ".join(str(bucket.longest) for bucket in self.buckets)
        cut = f", {self.truncated} of them truncated at {self.most}" if self.truncated else ""
        return (
            f"{self.rows} rows of {self.lengths[0]} to {self.lengths[-1]} tokens{cut}; "
            f"{len(self.buckets)} bucket{'s' * (len(self.buckets) > 1)} up to {ends}: "
            f"{self.padding:.0%} padding, {self.ratio:.0%} of the tokens of a single bucket"
        )


def bucket_lengths(lengths: NDArray[np.integer[Any]], count: int, *, most: int) -> LengthBuckets:
    """Find the cheapest split of these lengths into at most `count` buckets.

    Args:
        lengths: integers (rows,), in tokens, in any order. Those above `most` count as `most`.
        count: maximum number of buckets; there are never more than distinct lengths.
        most: maximum length of the model, 1 or more.

    Raises:
        InputError: `lengths` is empty, negative, or not of integers.
        OptionError: `count` is below 1.
    """
    if count < 1:
        raise OptionError(f"option 'count' is {count}, expected 1 or more.", option="count")
    observed = np.asarray(lengths)
    if observed.ndim != 1 or not observed.size:
        raise InputError("there are no token lengths to split into buckets.")
    if observed.dtype.kind not in "iu" or observed.min() < 0:
        raise InputError(
            f"token lengths are {observed.dtype.name} from {observed.min()} on, expected integers "
            "of 0 or more."
        )
    cut = np.minimum(observed.astype(np.int64), most)
    # An empty text still takes one position of a batch.
    rounded = np.minimum(-(-np.maximum(cut, 1) // _TILE) * _TILE, most)
    boundaries, rows = np.unique(rounded, return_counts=True)
    ends = boundaries[_optimal_ends(boundaries, rows, count)]
    bucket_index = np.searchsorted(ends, rounded)
    buckets = tuple(
        Bucket(
            shortest=1 if index == 0 else int(ends[index - 1]) + 1,
            longest=int(end),
            rows=int((bucket_index == index).sum()),
            tokens=int(cut[bucket_index == index].sum()),
        )
        for index, end in enumerate(ends)
    )
    distinct, counts = np.unique(cut, return_counts=True)
    return LengthBuckets(
        buckets=buckets,
        most=most,
        truncated=int((observed > most).sum()),
        lengths=tuple(int(length) for length in distinct),
        counts=tuple(int(count) for count in counts),
    )


def _optimal_ends(lengths: NDArray[np.int64], rows: NDArray[np.int64], count: int) -> list[int]:
    """Return the ends of the cheapest buckets, as indices into the distinct lengths.

    With n distinct lengths, this takes O(count * n²) time and O(count * n) memory. If splits
    are equally cheap, the one whose last buckets begin earliest is chosen.

    Args:
        lengths: (n,), the distinct lengths, increasing.
        rows: (n,), number of rows of each length.
        count: maximum number of buckets.
    """
    distinct = len(lengths)
    # before[i] rows are shorter than length i, so a bucket i..j has before[j+1] - before[i] rows.
    before = np.concatenate([[0], np.cumsum(rows)])
    best = lengths * before[1:]  # best[j]: cost of all lengths up to j in one bucket
    begins = [np.zeros(distinct, dtype=np.int64)]
    # Each further bucket reduces the cost as long as there are lengths left for it.
    for used in range(1, min(count, distinct)):
        least, begin = best.copy(), np.zeros(distinct, dtype=np.int64)
        for j in range(used, distinct):
            # The last bucket is i..j, after the best split of shorter lengths into `used` buckets.
            total = best[used - 1 : j] + lengths[j] * (before[j + 1] - before[used : j + 1])
            choice = int(np.argmin(total))
            least[j], begin[j] = total[choice], choice + used
        best = least
        begins.append(begin)
    ends, end = [], distinct - 1
    for begin in reversed(begins):
        ends.append(end)
        end = int(begin[end]) - 1
    return ends[::-1]
