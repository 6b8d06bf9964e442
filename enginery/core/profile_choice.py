"""Which of an engine's profiles takes an input.

Takes profiles and the sizes of one input; leaves an index into them.

    >>> profiles = [Profile.parse("batch=1:8:32,sequence=64"), Profile.parse("batch=1,sequence=64")]
    >>> choose_profile(profiles, {"batch": 1, "sequence": 512})
    1

One rule, so that the same input always runs in the same profile: of those that cover it, the one
whose largest shape is the smallest. TensorRT tunes the kernels of a profile for its optimum alone,
and sizes its memory for the largest shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from enginery.core.errors import ShapeError, nearest
from enginery.core.shapes import DimRange, Profile


def choose_profile(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> int:
    """The index of the profile that takes an input of these sizes.

    Args:
        profiles: those of one engine, in its order.
        sizes: the size of each dynamic dim.

    Raises:
        ShapeError: no profile covers the sizes; the message names the nearest one and what does
            not fit it. Or a size is missing, or is of a dim that the profiles do not have.
    """
    if not profiles:
        raise ShapeError("there are no profiles to choose from.")
    known = profiles[0].dims
    for name in known:
        if name not in sizes:
            raise ShapeError(f"dim '{name}' has no size; sizes given: {_listed(sizes) or 'none'}.")
    for name in sizes:
        if name not in known:
            raise ShapeError(
                f"the profiles have no dim '{name}'{nearest(name, known)}",
                do=f"Their dims: {', '.join(known) or 'none'}.",
            )
    for index in preference(profiles):
        if all(r.min <= sizes[name] <= r.max for name, r in profiles[index].dims.items()):
            return index
    raise _outside(min(profiles, key=lambda profile: _distance(profile, sizes)), profiles, sizes)


def preference(profiles: Sequence[Profile]) -> list[int]:
    """Indices of the profiles in the order in which they are tried.

    The smallest largest shape comes first, by the product of all dims; then the fewest shapes; then
    the order given.
    """
    ranks = [(largest_volume(profile), shape_count(profile)) for profile in profiles]
    return sorted(range(len(profiles)), key=lambda index: (ranks[index], index))


def largest_volume(profile: Profile) -> int:
    """The product of a profile's largest sizes."""
    return math.prod(sizes.max for sizes in profile.dims.values())


def shape_count(profile: Profile) -> int:
    """How many shapes a profile covers."""
    return math.prod(sizes.max - sizes.min + 1 for sizes in profile.dims.values())


def _distance(profile: Profile, sizes: Mapping[str, int]) -> float:
    """How far the sizes are from the profile: the sum of the logarithms of what exceeds it."""
    return sum(
        abs(math.log(max(sizes[name], 1) / _end(r, sizes[name])))
        for name, r in profile.dims.items()
    )


def _end(sizes: DimRange, size: int) -> int:
    """The covered size that is nearest to `size`."""
    return min(max(size, sizes.min), sizes.max)


def _outside(profile: Profile, profiles: Sequence[Profile], sizes: Mapping[str, int]) -> ShapeError:
    found = []
    wider = dict(profile.dims)
    for name, r in profile.dims.items():
        size = sizes[name]
        if size > r.max:
            found.append(f"{name} {size} is above its maximum {r.max} by {size - r.max}")
        elif size < r.min:
            found.append(f"{name} {size} is below its minimum {r.min} by {r.min - size}")
        wider[name] = DimRange(min(r.min, max(size, 1)), r.opt, max(r.max, size))
    which = "the nearest profile" if len(profiles) > 1 else "the profile"
    return ShapeError(
        f"{_listed(sizes)} is outside {which} '{profile}': {'; '.join(found)}.",
        do=f"Split or pad the input to fit, or rebuild with --profile {Profile(wider)}",
    )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
