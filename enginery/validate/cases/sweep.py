"""Test cases of the validation: a sweep over shapes, and the corners of shape profiles.

A case generates its feeds on demand and always the same ones, so that PyTorch can be freed before
ONNX Runtime starts.

A shape profile is a box: one min:opt:max range per dim. An engine is checked at every corner of the
box (each combination of minima and maxima) and at the optimum, because kernels are chosen for the
optimum and errors show where sizes are extreme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits, Feeds, is_padding_mask, make_feeds
from enginery.core.shapes import Profile, canonical_dim, dynamic_dims

LONGEST = 1024
"""Longest sequence of the sweep: eager attention needs quadratic memory. Longer inputs are compared
only if a profile includes them."""


@dataclass(frozen=True)
class ValidationCase:
    """One set of inputs to compare on."""

    name: str
    kind: Literal["sweep", "profile", "real", "decoding", "generation"]
    make: Callable[[], Feeds]
    """Generates the feeds."""
    labels: tuple[int, ...] = ()
    """Class indices of the first rows; empty without labels."""
    decode: Literal["", "start", "resume"] = ""
    """A step of decoding: PyTorch starts a cache of its own, or resumes with it."""


def sweep_cases(
    record: GraphRecord, limits: FeedLimits, *, seed: int, longest_rows: int = 1
) -> list[ValidationCase]:
    """Return the cases one, small, odd, ragged (padded) and longest; equal sizes run once.

    Args:
        record: the graph.
        limits: limits on its inputs.
        seed: random seed for the inputs.
        longest_rows: number of rows of the longest case.
    """
    names = dynamic_dims(record.inputs)
    longest = min(limits.max_positions, LONGEST)
    steps = [
        ("one", 1, 1, 0),
        ("small", 2, 8, 0),
        ("odd", 3, 17, 1),
        ("ragged", 4, 24, 0),
        ("longest", longest_rows, longest, 0),
    ]
    if not any("sequence" in name for name in names):
        # Without a sequence dim, the largest input is a full batch.
        steps = [("one", 1, 0, 0), ("small", 2, 0, 0), ("odd", 3, 0, 1), ("largest", 8, 0, 0)]
        if any(is_padding_mask(spec) for spec in record.inputs):
            steps.append(("ragged", 4, 0, 0))
    seen = []
    cases = []
    # Fixed dims make several steps the same sizes.
    for name, batch, sequence, odd in steps:
        sizes = sweep_sizes(names, limits, batch=batch, sequence=sequence, odd=odd)
        ragged = name == "ragged"
        if (sizes, ragged) in seen:
            continue
        seen.append((sizes, ragged))
        make = partial(make_feeds, record.inputs, sizes, limits, seed=seed, ragged=ragged)
        cases.append(ValidationCase(name, "sweep", make))
    # A merged decoder has two branches, of which the other cases run only one.
    if any(spec.name == "use_cache_branch" for spec in record.inputs):
        sizes = sweep_sizes(names, limits, batch=2, sequence=8)
        cases.append(
            ValidationCase(
                "without past", "sweep", partial(_feeds_without_past, record, sizes, limits, seed)
            )
        )
    return cases


def profile_cases(
    record: GraphRecord, profiles: Sequence[Profile], limits: FeedLimits, *, seed: int
) -> list[ValidationCase]:
    """Return the cases for every corner and optimum of the profiles; shared corners run once.

    A corner with several rows runs twice if the graph has a padding mask: without padding, and with
    rows of different lengths.

    Raises:
        ShapeError: a profile does not fit the graph.
    """
    names = dynamic_dims(record.inputs)
    pads = any(is_padding_mask(spec) for spec in record.inputs)
    cases: dict[str, ValidationCase] = {}
    for profile in profiles:
        profile.check(record.inputs, limits.max_sizes)
        for corner in profile.corners():
            sizes = {name: corner[name] for name in names}
            label = ", ".join(f"{dim} {size}" for dim, size in sizes.items()) or "fixed"
            make = partial(make_feeds, record.inputs, sizes, limits, seed=seed)
            cases.setdefault(label, ValidationCase(label, "profile", make))
            # A single row has no longer one to be padded to.
            if pads and sizes.get("batch", 1) > 1:
                label = f"{label}, padded"
                case = ValidationCase(label, "profile", partial(make, ragged=True))
                cases.setdefault(label, case)
    return list(cases.values())


def sweep_sizes(
    names: Sequence[str], limits: FeedLimits, *, batch: int, sequence: int, odd: int = 0
) -> dict[str, int]:
    """Return a size for each dim of a graph.

    Args:
        names: names of the dims.
        limits: limits of the model.
        batch: number of rows.
        sequence: length in the model's unit: tokens, or audio frames. Past and present share the
            model's positions, so each gets half of a length that is too long for both.
        odd: number of steps to enlarge images by: 32 pixels in height, 64 in width.
    """
    past = [name for name in names if name.startswith("past_")]
    sizes: dict[str, int] = {}
    for name in names:
        natural = limits.sizes.get(canonical_dim(name))
        rows = limits.rows(name, batch)
        if rows is not None:
            sizes[name] = rows
        elif natural is not None:
            sizes[name] = natural + (64 if name == "width" else 32) * odd
        elif "sequence" in name:
            sizes[name] = _length(sequence, limits, shared=bool(past))
        else:
            sizes[name] = max(1, batch)
    return sizes


def _length(sequence: int, limits: FeedLimits, *, shared: bool) -> int:
    """Return a length in the model's unit: tokens, or audio samples, many of which make a frame."""
    length = min(sequence * limits.min_sequence, limits.max_positions)
    # Past and present share the positions.
    return max(1, length // 2) if shared and length > 1 else length


def _feeds_without_past(
    record: GraphRecord, sizes: dict[str, int], limits: FeedLimits, seed: int
) -> Feeds:
    feeds = make_feeds(record.inputs, sizes, limits, seed=seed)
    feeds["use_cache_branch"] = np.zeros(1, dtype=bool)
    return feeds
