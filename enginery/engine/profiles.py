"""Shape profiles as they are written, checked against the graph before TensorRT sees them.

Takes `batch=1:8:32,sequence=8:128:512`, or TensorRT's own shapes; leaves profiles that name exactly
the graph's dynamic dims, in the graph's order.

    >>> profiles = read_profiles(["sequence=8:128:512,batch=1:8:32"], graph.inputs)
    >>> check_profiles(profiles, graph.inputs, {"sequence": 512}).warnings
    ()

TensorRT itself lets most mistakes through: unknown inputs, shapes of inputs that do not go
together, a maximum beyond the position embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginery.core.errors import ShapeError
from enginery.core.profile_choice import choose_profile
from enginery.core.shapes import Profile, TensorSpec, dim_terms, dynamic_dims, resolve_dim
from enginery.engine.profile_coverage import (
    check_all_used,
    overlaps,
    uncovered_combinations,
    uncovered_sizes,
)
from enginery.engine.tensorrt_shapes import profiles_from_shapes

__all__ = ["ProfileReport", "check_profiles", "choose_profile", "read_profiles"]

# `input_ids=1x8:4x64:8x128` and `input_ids:1x8`, which belong to neither notation.
_MIXED = re.compile(r"\s*(.+?)\s*[=:]\s*([0-9]+(?:x[0-9]+)+(?:\s*:\s*[0-9]+(?:x[0-9]+)+)*)\s*")


@dataclass(frozen=True)
class ProfileReport:
    """What is to be said of profiles that can be built."""

    warnings: tuple[str, ...]
    """Sizes between the profiles that none of them covers."""
    notes: tuple[str, ...]
    """Shapes that two profiles cover, with the one that takes them; combinations that none does."""


def read_profiles(
    profiles: Sequence[str],
    inputs: Sequence[TensorSpec],
    *,
    min_shapes: str = "",
    opt_shapes: str = "",
    max_shapes: str = "",
) -> list[Profile]:
    """Profiles from our notation, then those from TensorRT's; none for a graph of fixed shapes.

    Args:
        profiles: `batch=1:8:32,sequence=8:128:512`, one text a profile.
        inputs: those of the graph.
        min_shapes: `input_ids:1x8,attention_mask:1x8`, with `opt_shapes` and `max_shapes`; inputs
            named again begin another profile.
        opt_shapes: the same for the shapes to tune for.
        max_shapes: the same for the largest shapes.

    Raises:
        ShapeError: a text is in neither notation, or names other dims than the graph's.
    """
    read = [_named_dims(text, inputs) for text in profiles]
    if min_shapes or opt_shapes or max_shapes:
        read += profiles_from_shapes(min_shapes, opt_shapes, max_shapes, inputs)
    for profile in read:
        profile.check(inputs, {})
    names = dynamic_dims(inputs)
    # In one order and without fixed dims, equal profiles are equal texts and give one engine.
    return [Profile({name: p.dims[name] for name in names}) for p in read] if names else []


def check_profiles(
    profiles: Sequence[Profile], inputs: Sequence[TensorSpec], limits: Mapping[str, int]
) -> ProfileReport:
    """Checks profiles against the graph, the model's limits and one another.

    A profile may lie within another: it takes its own shapes, tuned for its own optimum (one text
    at a time beside full batches). One that would never be chosen is an error.

    Args:
        profiles: all those of one engine.
        inputs: those of the graph.
        limits: the largest size that the model allows for a dim, `{"sequence": 512}`. A sum with
            such a dim, or with its past (`past_sequence`), has the same limit.

    Raises:
        ShapeError: a profile does not fit the graph or the limits, none was given for a graph with
            dynamic dims, or one would never be chosen.
    """
    names = dynamic_dims(inputs)
    if names and not profiles:
        raise ShapeError(
            f"the graph has the dynamic dims {', '.join(names)} and no profile was given.",
            do=f"Give one, for example {','.join(f'{name}=1:8:32' for name in names)}.",
        )
    for profile in profiles:
        profile.check(inputs, limits)
        _check_sums(profile, inputs, limits)
    if not names:
        return ProfileReport((), ())
    check_all_used(profiles)
    return ProfileReport(
        tuple(uncovered_sizes(profiles)),
        (*overlaps(profiles), *uncovered_combinations(profiles)),
    )


def _check_sums(profile: Profile, inputs: Sequence[TensorSpec], limits: Mapping[str, int]) -> None:
    """Positions of what is new follow those of the past, so that both share the limit."""
    largest = {name: sizes.max for name, sizes in profile.dims.items()}
    for dim in dict.fromkeys(dim for spec in inputs for dim in spec.dims if isinstance(dim, str)):
        shared = [
            limits.get(term, limits.get(term.removeprefix("past_"))) for term in dim_terms(dim)
        ]
        limit = min((limit for limit in shared if limit is not None), default=None)
        total = resolve_dim(dim, largest)
        if limit is None or total <= limit:
            continue
        parts = "".join(str(largest.get(part, part)) for part in re.split(r"(\s*\+\s*)", dim))
        reached = str(total) if parts == str(total) else f"{parts} = {total}"
        raise ShapeError(
            f"profile '{profile}': {dim} goes up to {reached}, but the model's positions end at "
            f"{limit}.",
            do=f"Lower the maxima of {' and '.join(dim_terms(dim))}, so that {dim} is at most "
            f"{limit}.",
        )


def _named_dims(text: str, inputs: Sequence[TensorSpec]) -> Profile:
    """A profile in our notation; shapes in TensorRT's get an error with what was meant."""
    for part in text.split(","):
        if mixed := _MIXED.fullmatch(part):
            name, ends = mixed[1], [end.strip() for end in mixed[2].split(":")]
            raise ShapeError(
                f"profile '{text}': found '{part}', the shape of an input; expected "
                "name=min:opt:max of a dim.",
                do=_right_form(name, ends, inputs),
            )
    return Profile.parse(text)


def _right_form(name: str, ends: Sequence[str], inputs: Sequence[TensorSpec]) -> str:
    """How to write shapes of one input in either notation."""
    three = ends if len(ends) == 3 else [ends[0]] * 3
    low, opt, high = (f"{name}:{end}" for end in three)
    try:
        (meant,) = profiles_from_shapes(low, opt, high, inputs)
    except ShapeError:
        return "Name the graph's dims, as batch=1:8:32,sequence=8:128:512."
    return f"Write {meant}, or --min-shapes {low} --opt-shapes {opt} --max-shapes {high}."
