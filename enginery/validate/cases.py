"""The inputs that an artifact is compared on.

    >>> [case.name for case in sweep_cases(graph, limits, seed=0)]
    ['one', 'small', 'odd', 'ragged', 'longest']

The shape sweep goes from the smallest input to the longest; profiles add their corners. A case
makes its feeds when asked, always the same, so that each runner can be gone before the next starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from enginery.core.errors import ShapeError
from enginery.core.feeds import FeedLimits, Feeds, is_padding_mask, make_feeds
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
    """One, small, odd, ragged (padded) and longest; a size that is the same twice runs once."""
    names = dynamic_dims(record.inputs)
    longest = min(limits.max_positions, LONGEST)
    rows = 2 if longest <= 512 else 1
    steps = [("one", 1, 1, 0), ("small", 2, 8, 0), ("odd", 3, 17, 1), ("ragged", 4, 24, 0),
             ("longest", rows, longest, 0)]  # fmt: skip
    if not any("sequence" in name for name in names):
        # Without a sequence there is nothing to be long; a full batch is the largest.
        steps = [("one", 1, 0, 0), ("small", 2, 0, 0), ("odd", 3, 0, 1), ("largest", 8, 0, 0)]
        if any(is_padding_mask(spec) for spec in record.inputs):
            steps.append(("ragged", 4, 0, 0))
    seen = []
    cases = []
    for name, batch, sequence, odd in steps:
        sizes = _sizes(names, limits, batch, sequence, odd)
        ragged = name == "ragged"
        if (sizes, ragged) in seen:
            continue
        seen.append((sizes, ragged))
        make = partial(make_feeds, record.inputs, sizes, limits, seed=seed, ragged=ragged)
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
    names = dynamic_dims(record.inputs)
    cases: dict[str, Case] = {}
    for profile in profiles:
        profile.check(record.inputs, _largest_sizes(names, limits))
        for corner in profile.corners():
            sizes = {name: corner[name] for name in names}
            label = ", ".join(f"{dim} {size}" for dim, size in sizes.items()) or "fixed"
            make = partial(make_feeds, record.inputs, sizes, limits, seed=seed)
            cases.setdefault(label, Case(label, "profile", make))
    return list(cases.values())


def profiles_by_graph(
    graphs: Sequence[GraphRecord], texts: Sequence[str], limits: FeedLimits
) -> dict[str, list[Profile]]:
    """Which profiles each graph runs, by its file.

    The graphs of one model (an encoder, decoders) have different dims: a profile is for those
    that it fits.

    Raises:
        ShapeError: a profile is not one, or fits no graph; the message is of the graph whose
            dims it names most of.
    """
    found: dict[str, list[Profile]] = {graph.file: [] for graph in graphs}
    for text in texts:
        profile = Profile.parse(text)
        problems: list[tuple[int, ShapeError]] = []
        for graph in graphs:
            names = dynamic_dims(graph.inputs)
            try:
                profile.check(graph.inputs, _largest_sizes(names, limits))
                found[graph.file].append(profile)
            except ShapeError as error:
                strangers = len(set(names) ^ set(profile.dims))
                problems.append((strangers, error))
        if len(problems) == len(graphs):
            raise min(problems, key=lambda pair: pair[0])[1]
    return found


def _largest_sizes(names: Sequence[str], limits: FeedLimits) -> dict[str, int]:
    if limits.hard_limit is None:
        return {}
    return {name: limits.hard_limit for name in names if name == "sequence"}


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
