"""Profiles in TensorRT's notation: every input's minimum, optimum and maximum shape.

    >>> from enginery.core.shapes import TensorSpec
    >>> inputs = [TensorSpec(name="input_ids", dtype="int64", dims=("batch", "sequence"))]
    >>> shapes = ("input_ids:1x8", "input_ids:8x128", "input_ids:32x512")
    >>> [str(profile) for profile in profiles_from_shapes(*shapes, inputs)]
    ['batch=1:8:32,sequence=8:128:512']

Several profiles are written as in ONNX Runtime's `trt_profile_min_shapes` and
`nv_profile_min_shapes`: the inputs are named again, `input_ids:1x8,input_ids:1x64`. Names may be in
single quotes, as in trtexec, which requires them for names with a colon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from enginery.core.errors import ShapeError, nearest
from enginery.core.shapes import DimRange, Profile, TensorSpec, dim_terms, resolve_dim

_ENTRY = re.compile(r"'?([^=,']+)'?:([0-9]{1,10}(?:x[0-9]{1,10})*)")  # `input:0:1x8` is input:0

Shapes = dict[str, tuple[int, ...]]


def profiles_from_shapes(
    minimum: str, optimum: str, maximum: str, inputs: Iterable[TensorSpec]
) -> list[Profile]:
    """Return the profiles that the three texts describe, in the graph's named dims.

    An input may be omitted if others determine its dims.

    Raises:
        ShapeError: a text is missing or names other inputs than the others, an input is unknown, a
            rank or a fixed size is wrong, inputs contradict each other, or 1 <= min <= opt <= max
            does not hold.
    """
    specs = {spec.name: spec for spec in inputs}
    texts = {"min": minimum, "opt": optimum, "max": maximum}
    absent = [end for end, text in texts.items() if not text.strip()]
    if absent:
        present = " and ".join(end for end in texts if end not in absent)
        raise ShapeError(
            f"{' and '.join(absent)} shapes are missing; found {present or 'no'} shapes.",
            do="Set all three: --min-shapes, --opt-shapes and --max-shapes.",
        )
    parsed = {end: _profile_shapes(f"{end} shapes '{text}'", text) for end, text in texts.items()}
    counts = {end: len(groups) for end, groups in parsed.items()}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{count} in {end} shapes" for end, count in counts.items())
        raise ShapeError(
            f"the numbers of profiles differ: {numbers}.",
            do="Name every input once per profile in all three.",
        )
    corners = {
        end: [_solve_dims(f"{end} shapes '{texts[end]}'", group, specs) for group in groups]
        for end, groups in parsed.items()
    }
    return [
        _profile(*sizes)
        for sizes in zip(corners["min"], corners["opt"], corners["max"], strict=True)
    ]


def _profile(low: dict[str, int], opt: dict[str, int], high: dict[str, int]) -> Profile:
    dims = {}
    for name in dict.fromkeys([*low, *opt, *high]):
        ends = {"min": low, "opt": opt, "max": high}
        if absent := [end for end, sizes in ends.items() if name not in sizes]:
            raise ShapeError(
                f"dim '{name}' has no size in {' and '.join(absent)} shapes, but has one in the "
                "others.",
                do="Name the same inputs in all three.",
            )
        try:
            dims[name] = DimRange(low[name], opt[name], high[name])
        except ShapeError as error:
            raise ShapeError(
                f"min, opt and max shapes give {name} {low[name]}:{opt[name]}:{high[name]}: "
                f"{error.message}"
            ) from None
    return Profile(dims)


def _profile_shapes(where: str, text: str) -> list[Shapes]:
    """Return input name -> shape per profile; a repeated name belongs to the next profile."""
    groups: list[Shapes] = []
    mentions: dict[str, int] = {}
    for part in text.split(","):
        entry = _ENTRY.fullmatch(part.strip())
        if not entry:
            raise ShapeError(
                f"{where}: found '{part}', expected input:AxBxC.",
                do="Write it as input_ids:1x8,attention_mask:1x8.",
            )
        name, shape = entry.groups()
        index = mentions.get(name, 0)
        mentions[name] = index + 1
        if index == len(groups):
            groups.append({})
        groups[index][name] = tuple(int(size) for size in shape.split("x"))
    for name, count in mentions.items():
        if count != len(groups):
            raise ShapeError(
                f"{where}: '{name}' is named for {count} of {len(groups)} profiles.",
                do="Name every input in each profile: a repeated input starts another profile.",
            )
    return groups


def _solve_dims(where: str, shapes: Shapes, specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Solve for the sizes of the named dims that give the inputs these shapes."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in specs:
            raise ShapeError(
                f"{where}: the model has no input '{name}'{nearest(name, specs)}",
                do=f"Its inputs: {', '.join(specs)}.",
            )
        dims = specs[name].dims
        if len(shape) != len(dims):
            raise ShapeError(
                f"{where}: {name} has {len(shape)} dims, expected {len(dims)}: {specs[name]}."
            )
        for dim, size in zip(dims, shape, strict=True):
            if isinstance(dim, int) and dim != size:
                raise ShapeError(
                    f"{where}: {name} has the size {size}, but {specs[name]} is fixed at {dim}."
                )
            if (
                isinstance(dim, str)
                and dim_terms(dim) == [dim]
                and sizes.setdefault(dim, size) != size
            ):
                raise ShapeError(
                    f"{where}: {dim} is {sizes[dim]} for one input, but {size} for {name}.",
                    do="Use the same size for inputs that share a dim.",
                )
    _solve_sums(shapes, specs, sizes)
    for name, shape in shapes.items():
        if specs[name].shape(sizes) != shape:
            raise ShapeError(
                f"{where}: {name} is {_format_shape(shape)}, but {specs[name]} makes it "
                f"{_format_shape(specs[name].shape(sizes))}."
            )
    return sizes


def _solve_sums(shapes: Shapes, specs: Mapping[str, TensorSpec], sizes: dict[str, int]) -> None:
    """Add dims that occur only in sums: `past + sequence` is 6, `sequence` is 2, so `past` is 4."""
    for name, shape in shapes.items():
        for dim, size in zip(specs[name].dims, shape, strict=True):
            unknown = [term for term in dim_terms(dim) if term not in sizes]
            if len(unknown) == 1:
                remainder = size - resolve_dim(dim, {**sizes, unknown[0]: 0})
                if remainder >= 1:
                    sizes[unknown[0]] = remainder


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
