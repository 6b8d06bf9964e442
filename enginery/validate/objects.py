"""Compare the objects that a detector finds with those of the reference.

Objects have no names: each of the reference's is paired with one of the same label in the same
place. Of all queries, those with a near tie between two labels may have either one, and where only
the best scores are returned, the last ones may be others that are as good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_PIXEL = 1.0
"""What a side differs by if it is close to a whole number and both sides cut the fraction off."""

Object = Mapping[str, Any]
"""`label`, `score` and `box`, of which the sides are in pixels."""


@dataclass(frozen=True)
class ObjectLimits:
    """How far objects may be from the reference's."""

    score: float
    box: float
    """Of a side, as a share of the largest coordinate."""
    ties: int
    """Number of queries whose best two labels are nearly equal."""


def compare_objects(
    objects: Sequence[Object], expected: Sequence[Object], limits: ObjectLimits
) -> tuple[float, str]:
    """Return the largest difference of two scores, and why that is too much; empty if it is not."""
    largest, unpaired = 0.0, []
    free = np.ones(len(objects), dtype=bool)
    boxes, scores = _boxes(objects), np.array([item["score"] for item in objects], float)
    labels = np.array([item["label"] for item in objects], dtype=object)
    theirs = _boxes(expected)
    pixels = _PIXEL + limits.box * float(np.abs(theirs).max(initial=0.0))
    for item, box in zip(expected, theirs, strict=True):
        near = free & (labels == item["label"]) & (np.abs(boxes - box).max(axis=1) <= pixels)
        distances = np.where(near, np.abs(scores - item["score"]), np.inf)
        if not len(distances) or not distances.min() <= limits.score:  # true for NaN
            unpaired.append(item)
            continue
        best = int(distances.argmin())
        free[best] = False
        largest = max(largest, float(distances[best]))
    extra = [item for item, is_free in zip(objects, free, strict=True) if is_free]
    # What one side lacks may be as good as the last one that it has.
    missing = [item for item in unpaired if not _is_last(item, objects, limits)]
    surplus = [item for item in extra if not _is_last(item, expected, limits)]
    if max(len(missing), len(surplus)) <= limits.ties and len(objects) == len(expected):
        return largest, ""
    if len(objects) != len(expected):
        return largest, f"{len(objects)} objects are found, by the reference {len(expected)}"
    which, item = ("it lacks the", missing[0]) if missing else ("the reference has no", surplus[0])
    sides = ", ".join(str(item["box"][side]) for side in _SIDES)
    return largest, f"{which} {item['label']} at ({sides}) with the score {item['score']:.4g}"


def _boxes(objects: Sequence[Object]) -> NDArray[np.float64]:
    """Return the sides of each object: (objects, 4)."""
    sides = [[item["box"][side] for side in _SIDES] for item in objects]
    return np.array(sides, np.float64).reshape(-1, len(_SIDES))


def _is_last(item: Object, others: Sequence[Object], limits: ObjectLimits) -> bool:
    """Return True if an object scores no more than the last of others, within the limits."""
    last = min((other["score"] for other in others), default=1.0)
    return bool(item["score"] <= last + 2 * limits.score)
