"""Scale the planes of a segmentation to an image's size, and find the best one at each pixel.

A model gives a plane of scores for each label, a few pixels high. At the size of a photo all planes
together take gigabytes, so they are scaled strip by strip, and only those that can be the best one
somewhere in the strip.

>>> planes = np.array([[[-4.0, 4.0]], [[1.0, 1.0]]], np.float32)
>>> best_planes(planes, (1, 4)).tolist()
[[1, 1, 0, 0]]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_STRIP_PIXELS = 1 << 18
"""Pixels of a strip: 1 MiB of FP32, which stays in a core's cache."""

Plane = NDArray[np.float32]
Size = tuple[int, int]
"""Height and width."""


def best_planes(planes: Plane, size: Size) -> NDArray[np.int32]:
    """Return the index of the plane with the highest value at each pixel: (height, width).

    Args:
        planes: float32 (planes, rows, columns), finite.
        size: height and width of the result.
    """
    best = np.zeros(size, np.int32)
    scaling = _Scaling.of(planes.shape[1:], size)
    for strip in scaling.strips():
        rows = planes[:, scaling.source_rows(strip)]
        highest: Plane | None = None
        for index in _candidates(rows):
            values = scaling.scale(planes[index], strip)
            if highest is None:
                highest, best[strip] = values, index
                continue
            # Of equal values the first one stays, as in torch.argmax.
            is_higher = values > highest
            best[strip][is_higher] = index
            np.maximum(highest, values, out=highest)
    return best


def count_at_least(plane: Plane, size: Size, threshold: float) -> int:
    """Return how many pixels of a plane (rows, columns) have this value or more at a size."""
    scaling = _Scaling.of(plane.shape, size)
    return sum(
        int(np.count_nonzero(scaling.scale(plane, strip) >= threshold))
        for strip in scaling.strips()
    )


def scale_plane(plane: Plane, size: Size) -> Plane:
    """Return a plane (rows, columns) at a size, as `torch.nn.functional.interpolate` does.

    That is bilinear, without `align_corners` and without antialiasing.
    """
    return _Scaling.of(plane.shape, size).scale(plane, slice(0, size[0]))


def _candidates(rows: Plane) -> list[int]:
    """Return the planes that can be the best one between some of their pixels.

    A value between four pixels is between the lowest and the highest of them.
    """
    right = np.concatenate([rows[..., 1:], rows[..., -1:]], axis=2)
    low, high = np.minimum(rows, right), np.maximum(rows, right)
    below = [np.concatenate([edge[:, 1:], edge[:, -1:]], axis=1) for edge in (low, high)]
    low, high = np.minimum(low, below[0]), np.maximum(high, below[1])
    can_win = (high >= low.max(axis=0)).any(axis=(1, 2))
    return [int(index) for index in np.flatnonzero(can_win)]


@dataclass(frozen=True)
class _Axis:
    """For each pixel of the result the two pixels that it lies between."""

    low: NDArray[np.intp]
    high: NDArray[np.intp]
    weight: NDArray[np.float32]
    """Of `high`; that of `low` is the rest of 1."""

    @classmethod
    def of(cls, before: int, after: int) -> _Axis:
        # In float32 as in torch, where a position may be on the other side of a pixel.
        half, scale = np.float32(0.5), np.float32(before) / np.float32(after)
        positions = (np.arange(after, dtype=np.float32) + half) * scale - half
        positions = np.maximum(positions, np.float32(0))
        low = np.minimum(positions.astype(np.intp), before - 1)
        high = np.minimum(low + 1, before - 1)
        return cls(low, high, positions - low.astype(np.float32))


@dataclass(frozen=True)
class _Scaling:
    """How planes of one size are scaled to another one."""

    vertical: _Axis
    horizontal: _Axis

    @classmethod
    def of(cls, before: tuple[int, ...], after: Size) -> _Scaling:
        return cls(_Axis.of(before[0], after[0]), _Axis.of(before[1], after[1]))

    def strips(self) -> Iterator[slice]:
        """Yield the rows of the result in strips."""
        height, width = len(self.vertical.low), len(self.horizontal.low)
        step = max(_STRIP_PIXELS // width, 1)
        for first in range(0, height, step):
            yield slice(first, min(first + step, height))

    def source_rows(self, strip: slice) -> slice:
        """Return the rows of a plane that a strip is made of."""
        return slice(
            int(self.vertical.low[strip.start]), int(self.vertical.high[strip.stop - 1]) + 1
        )

    def scale(self, plane: Plane, strip: slice) -> Plane:
        """Return a strip of the result: (rows of the strip, columns)."""
        source = self.source_rows(strip)
        rows, horizontal, vertical = plane[source], self.horizontal, self.vertical
        right = horizontal.weight
        wide = rows[:, horizontal.low] * (1 - right) + rows[:, horizontal.high] * right
        lower = vertical.weight[strip, None]
        above = wide[vertical.low[strip] - source.start]
        below = wide[vertical.high[strip] - source.start]
        return np.asarray(above * (1 - lower) + below * lower)
