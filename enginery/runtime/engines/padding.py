"""Compute the sizes of an input's dims, and the padding that it needs to fit an engine's profile.

>>> profiles = [Profile.parse("batch=2:8:32,sequence=8:64:128")]
>>> padded_sizes(profiles, {"batch": 1, "sequence": 5})
{'batch': 2, 'sequence': 8}
>>> max_rows(profiles, "batch", {"sequence": 100})
32

`core.shapes.choose_profile` then chooses the profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from enginery.core.errors import ShapeError
from enginery.core.shapes import (
    Profile,
    TensorSpec,
    canonical_dim,
    dim_terms,
    preference_order,
    resolve_dim,
)


def dim_sizes(inputs: Iterable[TensorSpec], arrays: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Return the sizes of the named dims of arrays, by the names in profiles.

    Raises:
        ShapeError: two inputs have different sizes of a dim, a fixed dim has another size, or a sum
            of dims (`past_sequence + sequence`) is wrong.
    """
    sizes: dict[str, int] = {}
    sums = []
    for spec in inputs:
        shape = arrays[spec.name].shape
        for dim, size in zip(spec.dims, shape, strict=True):
            if isinstance(dim, int):
                if dim not in (size, -1):
                    raise ShapeError(f"{spec.name}: found shape {shape}, expected {spec}.")
            elif "+" in dim:
                sums.append((spec.name, canonical_dim(dim), size))
            elif sizes.setdefault(canonical_dim(dim), size) != size:
                name = canonical_dim(dim)
                raise ShapeError(
                    f"{spec.name}: {name} is {size}, but {sizes[name]} in the inputs before it."
                )
    # A sum of dims can be checked only when all inputs have given the sizes of its terms.
    for name, dim, size in sums:
        if all(term in sizes for term in dim_terms(dim)) and resolve_dim(dim, sizes) != size:
            raise ShapeError(
                f"{name}: found {size} where {dim} is {resolve_dim(dim, sizes)} in the others."
            )
    return sizes


def padded_sizes(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes to pad an input to, so that it fits a profile with the least computation.

    A size below a profile's minimum is raised to it. If a size exceeds every maximum, the sizes
    are returned unchanged.
    """
    fitting = [
        profile
        for profile in (profiles[i] for i in preference_order(profiles))
        if _within(profile, sizes)
    ]
    raised = [
        {
            name: max(size, profile.dims[name].min) if name in profile.dims else size
            for name, size in sizes.items()
        }
        for profile in fitting
    ]
    return min(raised, key=lambda candidate: math.prod(candidate.values()), default=dict(sizes))


def max_rows(profiles: Sequence[Profile], rows: str, others: Mapping[str, int]) -> int:
    """Return the largest size of the dim `rows` in a profile that covers the other sizes.

    Return 0 if no profile covers them, or none has the dim.
    """
    fitting = [profile for profile in profiles if _within(profile, others)]
    return max((p.dims[rows].max for p in fitting if rows in p.dims), default=0)


def _within(profile: Profile, sizes: Mapping[str, int]) -> bool:
    """Return True if no size exceeds the profile's maximum."""
    return all(
        size <= profile.dims[name].max for name, size in sizes.items() if name in profile.dims
    )
