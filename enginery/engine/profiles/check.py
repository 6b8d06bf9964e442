"""Read shape profiles and check them against the graph before TensorRT sees them.

Profiles are written as `batch=1:8:32,sequence=8:128:512`, or as TensorRT's own shapes. The result
names exactly the graph's dynamic dims, in the graph's order.

TensorRT itself accepts most mistakes: unknown inputs, inputs whose shapes contradict each other,
a maximum beyond the model's position embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginery.core.errors import ShapeError
from enginery.core.shapes import (
    Profile,
    TensorSpec,
    choose_profile,
    dim_terms,
    dynamic_dims,
    resolve_dim,
)
from enginery.engine.profiles.coverage import (
    check_all_reachable,
    describe_overlaps,
    describe_size_gaps,
    describe_uncovered_combinations,
)
from enginery.engine.profiles.tensorrt_notation import profiles_from_shapes

__all__ = ["ProfileReport", "check_profiles", "choose_profile", "read_profiles"]

# `input_ids=1x8:4x64:8x128` and `input_ids:1x8`: mixtures of the two notations.
_MIXED = re.compile(r"\s*(.+?)\s*[=:]\s*([0-9]+(?:x[0-9]+)+(?:\s*:\s*[0-9]+(?:x[0-9]+)+)*)\s*")


@dataclass(frozen=True)
class ProfileReport:
    """Warnings and notes about valid profiles."""

    warnings: tuple[str, ...]
    """Sizes between the profiles that none of them covers."""
    notes: tuple[str, ...]
    """Shapes in two profiles, with the one that is used; combinations of sizes in no profile."""


def read_profiles(
    profiles: Sequence[str],
    inputs: Sequence[TensorSpec],
    *,
    min_shapes: str = "",
    opt_shapes: str = "",
    max_shapes: str = "",
) -> list[Profile]:
    """Read profiles in this package's notation, then those in TensorRT's.

    Args:
        profiles: texts such as `batch=1:8:32,sequence=8:128:512`, one per profile.
        inputs: the graph's inputs.
        min_shapes: minimum shapes in TensorRT's notation, such as
            `input_ids:1x8,attention_mask:1x8`. Naming the inputs again starts another profile.
        opt_shapes: optimum shapes, which the engine is tuned for.
        max_shapes: maximum shapes.

    Returns:
        The profiles; none for a graph with fixed shapes.

    Raises:
        ShapeError: a text is in neither notation, or its dims are not the graph's.
    """
    read = [_parse_named_dims(text, inputs) for text in profiles]
    if min_shapes or opt_shapes or max_shapes:
        read += profiles_from_shapes(min_shapes, opt_shapes, max_shapes, inputs)
    for profile in read:
        profile.check(inputs, {})
    names = dynamic_dims(inputs)
    # With one order and without fixed dims, equal profiles are equal texts and share an engine.
    return [Profile({name: p.dims[name] for name in names}) for p in read] if names else []


def check_profiles(
    profiles: Sequence[Profile], inputs: Sequence[TensorSpec], limits: Mapping[str, int]
) -> ProfileReport:
    """Check profiles against the graph, the model's limits and each other.

    A profile may lie within another and then serves its own shapes with its own optimum, for
    example single texts beside full batches. A profile that is never chosen is an error.

    Args:
        profiles: all profiles of the graph.
        inputs: the graph's inputs.
        limits: maximum size of a dim, such as `{"sequence": 512}`. A sum with that dim or its past
            (`past_sequence`) has the same limit.

    Raises:
        ShapeError: a profile does not fit the graph or the limits or is never chosen, or a graph
            with dynamic dims has no profile.
    """
    names = dynamic_dims(inputs)
    if names and not profiles:
        raise ShapeError(
            f"the graph has the dynamic dims {', '.join(names)}, but no profile was given.",
            do=f"Add one, for example --profile {','.join(f'{name}=1:8:32' for name in names)}.",
        )
    for profile in profiles:
        profile.check(inputs, limits)
        _check_sums(profile, inputs, limits)
    if not names:
        return ProfileReport((), ())
    check_all_reachable(profiles)
    return ProfileReport(
        tuple(describe_size_gaps(profiles)),
        (*describe_overlaps(profiles), *describe_uncovered_combinations(profiles)),
    )


def _check_sums(profile: Profile, inputs: Sequence[TensorSpec], limits: Mapping[str, int]) -> None:
    """Check dims that are sums: new positions follow those of the past and share their limit."""
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


def _parse_named_dims(text: str, inputs: Sequence[TensorSpec]) -> Profile:
    """Parse a profile. Shapes of inputs raise an error that suggests the correct notation."""
    for part in text.split(","):
        if mixed := _MIXED.fullmatch(part):
            name, ends = mixed[1], [end.strip() for end in mixed[2].split(":")]
            raise ShapeError(
                f"profile '{text}': found the input shape '{part}', expected name=min:opt:max of a "
                "dim.",
                do=_suggest_notation(name, ends, inputs),
            )
    return Profile.parse(text)


def _suggest_notation(name: str, ends: Sequence[str], inputs: Sequence[TensorSpec]) -> str:
    """Suggest how to write the shapes of one input in either notation."""
    three = ends if len(ends) == 3 else [ends[0]] * 3
    low, opt, high = (f"{name}:{end}" for end in three)
    try:
        (meant,) = profiles_from_shapes(low, opt, high, inputs)
    except ShapeError:
        return "Name the graph's dims, for example batch=1:8:32,sequence=8:128:512."
    return f"Write {meant}, or --min-shapes {low} --opt-shapes {opt} --max-shapes {high}."
