"""Which shapes several profiles cover: those in none, those in two, and profiles never chosen.

    >>> profiles = [Profile.parse("sequence=1:16:32"), Profile.parse("sequence=64:128:256")]
    >>> uncovered_sizes(profiles)
    ['sequence 33 to 63 is in no profile: the ranges leave it out between 32 and 64.']

The ends of all ranges cut the space of shapes into boxes; in each box all shapes are covered by the
same profiles, so that what is said of a box is exact however large the ranges are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ShapeError
from enginery.core.profile_choice import largest_volume, preference, shape_count
from enginery.core.shapes import DimRange, Profile

_NONE = -1


def check_all_used(profiles: Sequence[Profile]) -> None:
    """Raises ShapeError where a profile covers no shape that it would be chosen for.

    Such a profile costs build time and memory, and its optimum is never of use.
    """
    for first, second in itertools.combinations(profiles, 2):
        if all(_ends(first.dims[name]) == _ends(second.dims[name]) for name in first.dims):
            raise ShapeError(
                f"profiles '{first}' and '{second}' cover the same shapes, so that the second is "
                "never chosen.",
                do="Leave one of them out.",
            )
    taken = _taken(profiles)
    for index, profile in enumerate(profiles):
        if index not in taken:
            others = np.unique(taken[_region(profile, _cuts(profiles))])
            names = " and ".join(f"'{profiles[other]}'" for other in others)
            raise ShapeError(
                f"profile '{profile}' is never chosen: every shape of it is in a smaller one, "
                f"{names}.",
                do="Leave it out.",
            )


def uncovered_sizes(profiles: Sequence[Profile]) -> list[str]:
    """For each dim, the sizes between the profiles' ranges that no profile has."""
    found = []
    for name in profiles[0].dims if profiles else ():
        ranges = sorted(_ends(profile.dims[name]) for profile in profiles)
        reached = ranges[0][1]
        for low, high in ranges[1:]:
            if low > reached + 1:
                missing = DimRange(reached + 1, reached + 1, low - 1)
                found.append(
                    f"{_named(name, missing)} is in no profile: the ranges leave it out between "
                    f"{reached} and {low}."
                )
            reached = max(reached, high)
    return found


def uncovered_combinations(profiles: Sequence[Profile]) -> list[str]:
    """The largest shapes that no profile covers though each of their sizes is in one, if any."""
    cuts = _cuts(profiles)
    free = _taken(profiles) == _NONE
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
        _named(name, DimRange(cut[start], cut[start], cut[end] - 1))
        for (name, cut), start, end in zip(cuts.items(), low, high, strict=True)
    ]
    return [f"no profile takes {' with '.join(sizes)}, though each of these sizes is in one."]


def overlaps(profiles: Sequence[Profile]) -> list[str]:
    """For each two profiles with shapes in common: which shapes, and which profile takes them."""
    order = preference(profiles)
    found = []
    for first, second in itertools.combinations(range(len(profiles)), 2):
        chosen, other = sorted((first, second), key=order.index)
        common = _common(profiles[chosen], profiles[other])
        if common is None:
            continue
        shapes = ", ".join(_named(name, sizes) for name, sizes in common.items())
        relation = "overlaps"
        if all(_ends(common[n]) == _ends(r) for n, r in profiles[chosen].dims.items()):
            relation = "lies within"
        found.append(
            f"profile '{profiles[chosen]}' {relation} '{profiles[other]}' and comes before it "
            f"for the shapes in both, {shapes}: {_reason(profiles[chosen], profiles[other])}."
        )
    return found


def _reason(chosen: Profile, other: Profile) -> str:
    if largest_volume(chosen) < largest_volume(other):
        return "its largest shape is the smaller"
    if shape_count(chosen) < shape_count(other):
        return "their largest shapes are of one size, and it has fewer shapes"
    return "both are of one size, and it was given first"


def _ends(sizes: DimRange) -> tuple[int, int]:
    return sizes.min, sizes.max


def _named(name: str, sizes: DimRange) -> str:
    return f"{name} {sizes.min}" if sizes.min == sizes.max else f"{name} {sizes.min} to {sizes.max}"


def _common(first: Profile, second: Profile) -> dict[str, DimRange] | None:
    common = {}
    for name, r in first.dims.items():
        low, high = max(r.min, second.dims[name].min), min(r.max, second.dims[name].max)
        if low > high:
            return None
        common[name] = DimRange(low, low, high)
    return common


def _cuts(profiles: Sequence[Profile]) -> dict[str, list[int]]:
    """For each dim, where the boxes begin, and the end of the last one."""
    return {
        name: sorted({cut for p in profiles for cut in (p.dims[name].min, p.dims[name].max + 1)})
        for name in profiles[0].dims
    }


def _taken(profiles: Sequence[Profile]) -> NDArray[np.int64]:
    """For each box, one axis a dim, the index of the profile that its shapes go to, or -1."""
    cuts = _cuts(profiles)
    taken = np.full([len(cut) - 1 for cut in cuts.values()], _NONE, dtype=np.int64)
    for index in reversed(preference(profiles)):
        taken[_region(profiles[index], cuts)] = index
    return taken


def _region(profile: Profile, cuts: dict[str, list[int]]) -> tuple[slice, ...]:
    return tuple(
        slice(cut.index(profile.dims[name].min), cut.index(profile.dims[name].max + 1))
        for name, cut in cuts.items()
    )


def _box(low: Sequence[int], high: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(low, high, strict=True))
