"""The inputs that an artifact is compared on.

    >>> [case.name for case in sweep_cases(graph, limits, seed=0)]
    ['one', 'small', 'odd', 'ragged', 'longest']

The shape sweep goes from the smallest input to the longest; profiles add their corners. A case
makes its feeds when asked, always the same, so that each runner can be gone before the next starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.manifest import GraphRecord
from enginery.core.shapes import Profile, canonical_dim, dynamic_dims

LONGEST = 1024
"""Eager attention is quadratic: longer inputs are compared only where a profile asks for them."""


@dataclass(frozen=True)
class Case:
    """One set of feeds."""

    name: str
    kind: Literal["sweep", "profile", "real"]
    make: Callable[[], Feeds]


def sweep_cases(record: GraphRecord, limits: FeedLimits, *, seed: int) -> list[Case]:
    """One, small, odd, ragged (padded) and longest."""
    names = dynamic_dims(record.inputs)
    longest = min(limits.max_positions, LONGEST)
    rows = 2 if longest <= 512 else 1
    steps = [("one", 1, 1, 0), ("small", 2, 8, 0), ("odd", 3, 17, 1), ("ragged", 4, 24, 0),
             ("longest", rows, longest, 0)]  # fmt: skip
    if not any("sequence" in name for name in names):
        steps = [("one", 1, 0, 0), ("small", 2, 0, 0), ("odd", 3, 0, 1)]
    cases = []
    for name, batch, sequence, odd in steps:
        sizes = _sizes(names, limits, batch, sequence, odd)
        make = partial(make_feeds, record.inputs, sizes, limits, seed=seed, ragged=name == "ragged")
        cases.append(Case(name, "sweep", make))
    if any(spec.name == "use_cache_branch" for spec in record.inputs):
        sizes = _sizes(names, limits, 2, 8, 0)
        cases.append(Case("without past", "sweep", partial(_no_past, record, sizes, limits, seed)))
    return cases


def profile_cases(
    record: GraphRecord, profiles: Sequence[Profile], limits: FeedLimits, *, seed: int
) -> list[Case]:
    """Every corner of every profile, and its optimum; a corner shared by two runs once.

    Raises:
        ShapeError: a profile does not fit the graph.
    """
    known = {n: limits.max_positions for n in dynamic_dims(record.inputs) if n == "sequence"}
    cases: dict[str, Case] = {}
    for profile in profiles:
        profile.check(record.inputs, known)
        for sizes in profile.corners():
            name = ", ".join(f"{dim} {size}" for dim, size in sizes.items())
            make = partial(make_feeds, record.inputs, sizes, limits, seed=seed)
            cases.setdefault(name, Case(name, "profile", make))
    return list(cases.values())


def parse_profiles(texts: Iterable[str]) -> list[Profile]:
    """Profiles from `batch=1:8:32,sequence=8:128:512`; raises ShapeError."""
    return [Profile.parse(text) for text in texts]


def valid_positions(feeds: Feeds) -> NDArray[np.bool_] | None:
    """Which positions are no padding, bool (batch, sequence); None where there is no mask."""
    mask = feeds.get("attention_mask", feeds.get("decoder_attention_mask"))
    ids = feeds.get("input_ids")
    if mask is None or mask.ndim != 2 or (ids is not None and ids.shape != mask.shape):
        return None
    return np.asarray(mask != 0)


def _sizes(
    names: list[str], limits: FeedLimits, batch: int, sequence: int, odd: int
) -> dict[str, int]:
    past = [name for name in names if name.startswith("past_")]
    sizes: dict[str, int] = {}
    for name in names:
        natural = limits.sizes.get(canonical_dim(name))
        if name == "batch":
            sizes[name] = batch
        elif natural is not None:
            sizes[name] = natural + 32 * odd
        elif "sequence" in name:
            sizes[name] = _length(sequence, limits, shared=bool(past))
        else:
            sizes[name] = max(1, batch)
    return sizes


def _length(sequence: int, limits: FeedLimits, *, shared: bool) -> int:
    """A sequence in the model's own unit: tokens, or samples where one frame takes many."""
    length = min(sequence * limits.min_sequence, limits.max_positions)
    # Past and present share the positions.
    return max(1, length // 2) if shared and length > 1 else length


def _no_past(record: GraphRecord, sizes: dict[str, int], limits: FeedLimits, seed: int) -> Feeds:
    feeds = make_feeds(record.inputs, sizes, limits, seed=seed)
    feeds["use_cache_branch"] = np.zeros(1, dtype=bool)
    return feeds
