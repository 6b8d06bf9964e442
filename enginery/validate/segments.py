"""Compare the segments of an image with those of the reference.

Each of the reference's is paired with one of the same label that shares the most pixels. Where the
best two planes of a model are nearly equal, a pixel may belong to either one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHARE = 0.002
"""Of the pixels: borders between segments cross pixels whose planes are equal. 0.00001 was seen; a
mask that is shifted by half a pixel of the planes has 20 times the limit, or more."""
_FEW = 2
"""Pixels that may differ in the smallest image."""


@dataclass(frozen=True)
class Segments:
    """The segments of an image."""

    labels: Sequence[tuple[str, float | None]]
    """Label and score of each; None without one."""
    masks: NDArray[np.bool_]
    """(segments, height, width)"""


def compare_segments(
    segments: Segments, expected: Segments, *, score_error: float, tied: float
) -> tuple[float, str]:
    """Return the largest difference of two scores, and what differs too much; empty if nothing.

    Args:
        segments: the segments.
        expected: the reference's.
        score_error: how far a score may be from the reference's.
        tied: share of the pixels that may belong to several segments.
    """
    if len(segments.labels) and segments.masks.shape[1:] != expected.masks.shape[1:]:
        mine, theirs = segments.masks.shape[1:], expected.masks.shape[1:]
        return 0.0, f"masks have the size {mine}, the reference's {theirs}"
    pixels = int(np.prod(expected.masks.shape[1:]))
    allowed = 2 * ((_SHARE + tied) * pixels + _FEW)  # a pixel is lacking in one, and in another
    free = set(range(len(segments.labels)))
    largest, different = 0.0, 0
    for (label, score), mask in zip(expected.labels, expected.masks, strict=True):
        fitting = [
            index
            for index in free
            if segments.labels[index][0] == label
            and _score_difference(segments.labels[index][1], score) <= score_error
        ]
        if not fitting:
            different += int(mask.sum())
            continue
        differing_pixels = {index: int((segments.masks[index] != mask).sum()) for index in fitting}
        best = min(fitting, key=differing_pixels.__getitem__)
        free.remove(best)
        different += differing_pixels[best]
        largest = max(largest, _score_difference(segments.labels[best][1], score))
    different += sum(int(segments.masks[index].sum()) for index in free)
    if different <= allowed:
        return largest, ""
    share = different / max(pixels, 1)
    return largest, (
        f"segments differ in {share:.2%} of the pixels, {allowed / max(pixels, 1):.2%} allowed: "
        f"{_words(segments)}; the reference's: {_words(expected)}"
    )


def _score_difference(first: float | None, second: float | None) -> float:
    """Return the difference of two scores; infinity if only one side has a score."""
    if first is None or second is None:
        return 0.0 if first is second else float("inf")
    return abs(first - second)


def _words(segments: Segments) -> str:
    shares = segments.masks.mean(axis=(1, 2)) if len(segments.labels) else ()
    words = [
        f"{label} on {share:.1%}" for (label, _), share in zip(segments.labels, shares, strict=True)
    ]
    return ", ".join(words) or "none"


def as_segments(answer: Any, masks: Any) -> Segments:
    """Return segments from the plain values of a report."""
    labels = [(str(label), score) for label, score in answer]
    return Segments(labels, np.asarray(masks, dtype=bool))
