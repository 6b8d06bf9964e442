"""Coverage of shape profiles: gaps between them, overlaps, and profiles that are never chosen.

    >>> profiles = [Profile.parse("sequence=1:16:32"), Profile.parse("sequence=64:128:256")]
    >>> describe_size_gaps(profiles)
    ['sequence 33 to 63 is in no profile: the ranges end at 32 and start again at 64.']

Checking every shape is impossible, because ranges are large and dims multiply. But the set of
profiles that contain a shape changes only at the ends of ranges. So the ends of all ranges in a dim
cut it into intervals, and the intervals of all dims cut the space of shapes into boxes. All shapes
in a box are in the same profiles: one lookup per box is exact. Two profiles over two dims give at
most nine boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ShapeError
from enginery.core.shapes import DimRange, Profile, largest_volume, preference_order, shape_count

_NONE = -1


def check_all_reachable(profiles: Sequence[Profile]) -> None:
    """Check that every profile is chosen for some shape; others only cost build time and memory.

    Raises:
        ShapeError: a profile is never chosen.
    """
    for first, second in itertools.combinations(profiles, 2):
        if all(
            _range_ends(first.dims[name]) == _range_ends(second.dims[name]) for name in first.dims
        ):
            raise ShapeError(
                f"profiles '{first}' and '{second}' cover the same shapes, so the second is never "
                "chosen.",
                do="Remove one of them.",
            )
    assigned = _assign_profiles(profiles)
    for index, profile in enumerate(profiles):
        if index not in assigned:
            others = np.unique(assigned[_region(profile, _boundaries(profiles))])
            names = " and ".join(f"'{profiles[other]}'" for other in others)
            raise ShapeError(
                f"profile '{profile}' is never chosen: all its shapes are in a smaller profile, "
                f"{names}.",
                do="Remove it.",
            )


def describe_size_gaps(profiles: Sequence[Profile]) -> list[str]:
    """Describe the sizes of each dim that lie between ranges and are in no profile."""
    if not profiles:
        return []
    gaps = []
    for name in profiles[0].dims:
        ranges = sorted(_range_ends(profile.dims[name]) for profile in profiles)
        reached = ranges[0][1]
        for low, high in ranges[1:]:
            if low > reached + 1:
                missing = DimRange(reached + 1, reached + 1, low - 1)
                gaps.append(
                    f"{_describe_range(name, missing)} is in no profile: the ranges end at "
                    f"{reached} and start again at {low}."
                )
            reached = max(reached, high)
    return gaps


def describe_uncovered_combinations(profiles: Sequence[Profile]) -> list[str]:
    """Describe the largest shapes in no profile, although each of their sizes is in one."""
    cuts = _boundaries(profiles)
    free = _assign_profiles(profiles) == _NONE
    for axis, name in enumerate(cuts):
        covered = [
            any(r.min <= cut <= r.max for r in (profile.dims[name] for profile in profiles))
            for cut in cuts[name][:-1]
        ]
        free &= np.expand_dims(np.array(covered), tuple(a for a in range(free.ndim) if a != axis))
    boxes = np.argwhere(free)
    if not len(boxes):
        return []
    low, high = boxes[-1].copy(), boxes[-1] + 1
    for axis in range(free.ndim):
        while low[axis] and free[_box([*low[:axis], low[axis] - 1, *low[axis + 1 :]], high)].all():
            low[axis] -= 1
    sizes = [
        _describe_range(name, DimRange(cut[start], cut[start], cut[end] - 1))
        for (name, cut), start, end in zip(cuts.items(), low, high, strict=True)
    ]
    return [f"no profile covers {' with '.join(sizes)}, although each of these sizes is in one."]


def describe_overlaps(profiles: Sequence[Profile]) -> list[str]:
    """Describe each pair of overlapping profiles: the common shapes, and which profile is used."""
    order = preference_order(profiles)
    overlaps = []
    for first, second in itertools.combinations(range(len(profiles)), 2):
        chosen, other = sorted((first, second), key=order.index)
        common = _intersection(profiles[chosen], profiles[other])
        if common is None:
            continue
        shapes = ", ".join(_describe_range(name, sizes) for name, sizes in common.items())
        relation = "overlaps"
        if all(_range_ends(common[n]) == _range_ends(r) for n, r in profiles[chosen].dims.items()):
            relation = "lies within"
        overlaps.append(
            f"profile '{profiles[chosen]}' {relation} '{profiles[other]}' and is used for the "
            f"shapes in both, {shapes}: {_describe_preference(profiles[chosen], profiles[other])}."
        )
    return overlaps


def _describe_preference(chosen: Profile, other: Profile) -> str:
    if largest_volume(chosen) < largest_volume(other):
        return "its largest shape is smaller"
    if shape_count(chosen) < shape_count(other):
        return "their largest shapes are equally large, and it has fewer shapes"
    return "both are equally large, and it was given first"


def _range_ends(sizes: DimRange) -> tuple[int, int]:
    return sizes.min, sizes.max


def _describe_range(name: str, sizes: DimRange) -> str:
    return f"{name} {sizes.min}" if sizes.min == sizes.max else f"{name} {sizes.min} to {sizes.max}"


def _intersection(first: Profile, second: Profile) -> dict[str, DimRange] | None:
    common = {}
    for name, r in first.dims.items():
        low, high = max(r.min, second.dims[name].min), min(r.max, second.dims[name].max)
        if low > high:
            return None
        common[name] = DimRange(low, low, high)
    return common


def _boundaries(profiles: Sequence[Profile]) -> dict[str, list[int]]:
    """Return for each dim where the boxes begin, and where the last one ends (exclusive)."""
    return {
        name: sorted({cut for p in profiles for cut in (p.dims[name].min, p.dims[name].max + 1)})
        for name in profiles[0].dims
    }


def _assign_profiles(profiles: Sequence[Profile]) -> NDArray[np.int64]:
    """Return the index of the profile used for each box, or -1; one axis per dim."""
    cuts = _boundaries(profiles)
    assigned = np.full([len(cut) - 1 for cut in cuts.values()], _NONE, dtype=np.int64)
    for index in reversed(preference_order(profiles)):
        assigned[_region(profiles[index], cuts)] = index
    return assigned


def _region(profile: Profile, cuts: dict[str, list[int]]) -> tuple[slice, ...]:
    return tuple(
        slice(cut.index(profile.dims[name].min), cut.index(profile.dims[name].max + 1))
        for name, cut in cuts.items()
    )


def _box(low: Sequence[int], high: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(low, high, strict=True))
