"""Named dims, tensor interfaces, shape profiles, and which profile runs an input.

>>> profile = Profile.parse("batch=1:8:32,sequence=8:128:512")
>>> profile.dims["sequence"].opt
128
>>> resolve_dim("past_sequence + sequence", {"past_sequence": 4, "sequence": 1})
5
>>> profiles = [Profile.parse("batch=1:8:32,sequence=64"), Profile.parse("batch=1,sequence=64")]
>>> choose_profile(profiles, {"batch": 1, "sequence": 64})
1
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from enginery.core.errors import CONTROL_CHARACTERS, ShapeError, nearest

_SIZE = re.compile(r"0*[0-9]{1,10}")
_EXAMPLE = "Write it as batch=1:8:32,sequence=8:128:512."
PAST = "past_"
"""Beginning of the name of a dim that counts the positions of a decoder's cache."""
_MAX_SIZE = 2**31 - 1  # TensorRT 10 and older hold a dim in 32 bits
_EXPECTED = f"expected a whole number from 1 to {_MAX_SIZE}."
_MAX_RANK = 32  # numpy 1 allows at most 32 dims, TensorRT at most 8
_MAX_NAME = 1024  # torch.export names output dims by sums and quotients with hundreds of characters
_SUM = re.compile(r"\s*\+\s*")
_WORDS = re.compile(r"\w+(\s+\w+)+")
_TERM_SIZE = re.compile(r"[0-9]{1,10}")  # ASCII digits: str.isdigit accepts "²" as well


def _require_name(name: str) -> str:
    if len(name) > _MAX_NAME or CONTROL_CHARACTERS.search(name):
        raise ValueError(
            f"{name[:40]!r} is not a valid name: expected up to {_MAX_NAME} characters and no "
            "control characters"
        )
    return name


def _require_sizes(name: str) -> str:
    if any(_is_size(term) and int(term) > _MAX_SIZE for term in _SUM.split(name)):
        raise ValueError(f"{name[:40]!r} has a size above {_MAX_SIZE}")
    return name


Name = Annotated[str, AfterValidator(_require_name)]
"""Name of a tensor, a dtype or a dim."""

DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "string",
    "complex64",
    "complex128",
    "int2",
    "int4",
    "uint2",
    "uint4",
    "float4e2m1",
    "float6e2m3",
    "float6e3m2",
    "float8e4m3fn",
    "float8e4m3fnuz",
    "float8e5m2",
    "float8e5m2fnuz",
    "float8e8m0",
    "fp4",
    "fp8",
    "e8m0",
)
"""Names of element types: numpy's, those of ONNX for what numpy lacks, and TensorRT's own."""


def one_of(*names: str) -> str:
    """Return a pattern that only these names match.

    A manifest comes from a stranger, and its texts appear in code, configurations and cards.
    """
    return f"^({'|'.join(map(re.escape, names))})$"


DType = Annotated[str, Field(pattern=one_of(*DTYPES))]

Dim = Annotated[int, Field(ge=0, le=_MAX_SIZE)] | Annotated[Name, AfterValidator(_require_sizes)]
"""A fixed size, a name, or a sum of names and sizes ("past_sequence + sequence").

pydantic checks these bounds when it reads a file; elsewhere the type is `int | str`.
"""

# Names of the axes in Optimum's exports, so that a profile may also name a dim that is fixed.
# Source: optimum.exporters.onnx.model_configs.
_TEXT_AXES = ("batch", "sequence")
INPUT_AXES = {
    "input_ids": _TEXT_AXES,
    "attention_mask": _TEXT_AXES,
    "token_type_ids": _TEXT_AXES,
    "position_ids": _TEXT_AXES,
    "pixel_values": ("batch", "channels", "height", "width"),
}


def canonical_dim(name: str) -> str:
    """Return the short name of a dim that Optimum names `batch_size` or `sequence_length`.

    >>> canonical_dim("past_sequence_length + sequence_length")
    'past_sequence + sequence'
    >>> canonical_dim("n_spectrums x reduction_factor")  # the vocoder of SpeechT5
    'n_spectrums_x_reduction_factor'
    """
    return " + ".join(_canonical_term(term) for term in _SUM.split(name.strip()))


def _canonical_term(term: str) -> str:
    if term == "num_channels":
        return "channels"
    name = "_".join(term.split()) if _WORDS.fullmatch(term) else term
    return re.sub(r"_(size|length)$", "", name)


def is_batch(dim: str) -> bool:
    """Return True for `batch`, and for the batches of a model that takes several.

    >>> is_batch("text_batch"), is_batch("point_batch"), is_batch("sequence")
    (True, False, False)
    """
    return dim in ("batch", "audio_batch", "image_batch", "text_batch", "total_batch")


def dim_terms(dim: Dim) -> list[str]:
    """Return the names in a dim: none for a fixed size, two for `a + b`."""
    if isinstance(dim, int):
        return []
    return [term for term in _SUM.split(dim) if not _is_size(term)]


def _is_size(term: str) -> bool:
    return bool(_TERM_SIZE.fullmatch(term))


def resolve_dim(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Return the size of a dim, given the sizes of its names.

    Raises:
        ShapeError: a name has no size.
    """
    if isinstance(dim, int):
        return dim
    total = 0
    for term in _SUM.split(dim):
        if _is_size(term):
            total += int(term)
        elif term in sizes:
            total += sizes[term]
        else:
            raise ShapeError(f"dim '{term}' has no size; sizes given: {dict(sizes)}.")
    return total


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph."""

    name: Name
    dtype: DType
    """One of `DTYPES`."""
    dims: Annotated[tuple[Dim, ...], Field(max_length=_MAX_RANK)]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the concrete shape; raise ShapeError if the size of a dim is missing."""
        return tuple(resolve_dim(dim, sizes) for dim in self.dims)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} ({', '.join(str(dim) for dim in self.dims)})"


def share_of_positions(dim: str, dims: Collection[str], positions: int) -> int:
    """Return the longest size of a dim: half of the positions if a cache needs the others.

    >>> share_of_positions("sequence", ["batch", "sequence", "past_sequence"], 512)
    256
    """
    shared = dim.startswith(PAST) or f"{PAST}{dim}" in dims
    return max(positions // 2, 1) if shared else positions


def dynamic_dims(specs: Iterable[TensorSpec]) -> list[str]:
    """Return the names of all dynamic dims, in order of appearance."""
    terms = (term for spec in specs for dim in spec.dims for term in dim_terms(dim))
    return list(dict.fromkeys(terms))


def fixed_dims(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Return the fixed sizes of known inputs, by the names of the axes in dynamic graphs.

    >>> fixed_dims([TensorSpec("input_ids", "int64", (8, "sequence"))])
    {'batch': 8}
    """
    inputs = tuple(specs)
    dynamic = dynamic_dims(inputs)
    sizes: dict[str, int] = {}
    for spec in inputs:
        for name, dim in zip(INPUT_AXES.get(spec.name, ()), spec.dims, strict=False):
            if isinstance(dim, int) and name not in dynamic:
                sizes.setdefault(name, dim)
    return sizes


@dataclass(frozen=True)
class DimRange:
    """Range of sizes of one dim, and the size that TensorRT optimizes for.

    Raises:
        ShapeError: not min <= opt <= max, or a size is out of range.
    """

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        for size in (self.min, self.opt, self.max):
            if not 0 <= size <= _MAX_SIZE:
                raise ShapeError(f"found size {size}, {_EXPECTED}")
        for low, high in (("min", "opt"), ("opt", "max")):
            if getattr(self, low) > getattr(self, high):
                raise ShapeError(
                    f"{low} {getattr(self, low)} is above {high} {getattr(self, high)}, "
                    "expected 1 <= min <= opt <= max."
                )

    @classmethod
    def parse(cls, text: str) -> DimRange:
        """Parse `min:opt:max`, or a single number for a fixed size.

        Raises:
            ShapeError: the notation is wrong, or see above.
        """
        numbers = [number.strip() for number in text.split(":")]
        for number in numbers:
            if not _SIZE.fullmatch(number):
                raise ShapeError(f"found size '{number}', {_EXPECTED}")
        if len(numbers) not in (1, 3):
            raise ShapeError(
                f"'{text}' has {len(numbers)} numbers, expected min:opt:max or one size."
            )
        low, opt, high = (int(number) for number in (numbers * 3 if len(numbers) == 1 else numbers))
        return cls(low, opt, high)

    def __str__(self) -> str:
        return str(self.opt) if self.min == self.max else f"{self.min}:{self.opt}:{self.max}"


@dataclass(frozen=True)
class Profile:
    """Ranges of the model's named dims: `batch=1:8:32,sequence=8:128:512`.

    The past of a decoder may be empty, `past_sequence=0:128:511`: then it runs prompts.

    Raises:
        ShapeError: another dim has the size 0.
    """

    dims: dict[str, DimRange]

    def __post_init__(self) -> None:
        for name, sizes in self.dims.items():
            if sizes.min == 0 and not name.startswith(PAST):
                raise ShapeError(f"profile '{self}': {name}: found size 0, {_EXPECTED}")

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Parse `name=min:opt:max` pairs; a single number is a fixed size.

        Optimum's names (`batch_size`) are converted to short ones (`batch`).

        Raises:
            ShapeError: the notation is wrong, or a size is out of range.
        """
        if not text.strip():
            raise ShapeError("a profile is empty, expected name=min:opt:max.", do=_EXAMPLE)
        dims: dict[str, DimRange] = {}
        for part in text.split(","):
            name, equals, sizes = part.partition("=")
            name = canonical_dim(name)
            if not equals or not name or not sizes.strip():
                raise ShapeError(
                    f"profile '{text}': found '{part}', expected name=min:opt:max or name=size.",
                    do=_EXAMPLE,
                )
            if name in dims:
                raise ShapeError(
                    f"profile '{text}': dim '{name}' is given twice.",
                    do="A profile has one range for each dim; give --profile again for another.",
                )
            try:
                dims[name] = DimRange.parse(sizes)
            except ShapeError as error:
                raise ShapeError(f"profile '{text}': {name}: {error.message}") from None
        return cls(dims)

    def check(self, inputs: Iterable[TensorSpec], limits: Mapping[str, int]) -> None:
        """Check that the profile has all dynamic dims of the inputs and no others.

        A fixed dim may be given with its own size.

        Args:
            inputs: inputs of the graph.
            limits: largest size of each dim that the model allows, from its position embeddings.

        Raises:
            ShapeError: a dim is missing, unknown, above its limit, or fixed at another size.
        """
        specs = tuple(inputs)
        dynamic, fixed = dynamic_dims(specs), fixed_dims(specs)
        for name, sizes in self.dims.items():
            if name in fixed:
                if {sizes.min, sizes.max} != {fixed[name]}:
                    raise ShapeError(
                        f"profile '{self}': {name} is fixed at {fixed[name]} in the graph, "
                        f"found {name}={sizes}.",
                        do=f"Leave {name} out, or export the model with a dynamic {name}.",
                    )
                continue
            if name not in dynamic:
                raise ShapeError(
                    f"profile '{self}': the model has no dynamic dim '{name}'"
                    f"{nearest(name, dynamic)}",
                    do=f"Its dynamic dims: {', '.join(dynamic)}."
                    if dynamic
                    else "All its shapes are fixed; leave the profile out.",
                )
            # Beyond it, an engine of TensorRT would read outside of the position embeddings.
            self._check_limit(name, limits)
        if missing := [name for name in dynamic if name not in self.dims]:
            names = ", ".join(f"'{name}'" for name in missing)
            raise ShapeError(
                f"profile '{self}' lacks the dim{'s' * (len(missing) > 1)} {names}.",
                do=f"Add {','.join(f'{name}=min:opt:max' for name in missing)}.",
            )

    def check_limits(self, limits: Mapping[str, int]) -> None:
        """Raise ShapeError if a dim exceeds what the model allows."""
        for name in self.dims:
            self._check_limit(name, limits)

    def _check_limit(self, name: str, limits: Mapping[str, int]) -> None:
        if name in limits and self.dims[name].max > limits[name]:
            raise ShapeError(
                f"profile '{self}': {name} goes up to {self.dims[name].max}, "
                f"but the model's positions end at {limits[name]}.",
                do=f"Lower the maximum of {name} to {limits[name]}.",
            )

    def corners(self) -> Iterator[dict[str, int]]:
        """Yield every combination of minimum and maximum sizes, then the optimum."""
        names = list(self.dims)
        ends = [dict.fromkeys((self.dims[name].min, self.dims[name].max)) for name in names]
        corners = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*ends)]
        optimum = {name: self.dims[name].opt for name in names}
        yield from corners
        if optimum not in corners:
            yield optimum

    def __str__(self) -> str:
        return ",".join(f"{name}={sizes}" for name, sizes in self.dims.items())


def enclosing_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the smallest profile that covers all of these, with the first one's optimum.

    >>> str(enclosing_profile([Profile.parse("batch=1:2:4"), Profile.parse("batch=8")]))
    'batch=1:2:8'
    """
    dims = {
        name: DimRange(
            min(profile.dims[name].min for profile in profiles),
            sizes.opt,
            max(profile.dims[name].max for profile in profiles),
        )
        for name, sizes in profiles[0].dims.items()
    }
    return Profile(dims)


def profile_shapes(inputs: Iterable[TensorSpec], profiles: Sequence[Profile]) -> dict[str, str]:
    """Return ONNX Runtime's options `trt_profile_{min,opt,max}_shapes`; none without profiles.

    Each further profile names the inputs again, as ParseProfileShapes of the providers expects.
    Inputs with a fixed shape are omitted.

    >>> inputs = [TensorSpec("x", "int64", ("batch", 8))]
    >>> profile_shapes(inputs, [Profile.parse("batch=1:2:4")])["trt_profile_max_shapes"]
    'x:4x8'

    Args:
        inputs: inputs of the graph.
        profiles: profiles with all its dynamic dims.
    """
    if not profiles:
        return {}
    dynamic = [spec for spec in inputs if any(dim_terms(dim) for dim in spec.dims)]
    shapes = {}
    for end in ("min", "opt", "max"):
        parts = []
        for profile in profiles:
            sizes = {name: getattr(range_, end) for name, range_ in profile.dims.items()}
            parts += [f"{spec.name}:{'x'.join(map(str, spec.shape(sizes)))}" for spec in dynamic]
        shapes[f"trt_profile_{end}_shapes"] = ",".join(parts)
    return shapes


def choose_profile(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> int:
    """Return the index of the profile that runs an input of these sizes.

    The same input always runs in the same profile: the one with the smallest maximum among those
    that cover the input. TensorRT selects a profile's kernels only for its optimum, and allocates
    memory for its maximum.

    Args:
        profiles: profiles of one engine, in its order.
        sizes: size of each dynamic dim.

    Raises:
        ShapeError: no profile covers the sizes (the message names the nearest one and the dims
            outside of it), a size is missing, or a dim is unknown.
    """
    if not profiles:
        raise ShapeError("there are no profiles to choose from.")
    dims = profiles[0].dims
    for name in dims:
        if name not in sizes:
            raise ShapeError(f"dim '{name}' has no size; sizes given: {_listed(sizes) or 'none'}.")
    for name in sizes:
        if name not in dims:
            raise ShapeError(
                f"the profiles have no dim '{name}'{nearest(name, dims)}",
                do=f"Their dims: {', '.join(dims) or 'none'}.",
            )
    for index in preference_order(profiles):
        if all(r.min <= sizes[name] <= r.max for name, r in profiles[index].dims.items()):
            return index
    raise _outside(min(profiles, key=lambda profile: _distance(profile, sizes)), profiles, sizes)


def preference_order(profiles: Sequence[Profile]) -> list[int]:
    """Return the indices of the profiles in the order of preference.

    The smallest maximum shape (product of all dims) comes first. Ties are decided by the smaller
    number of shapes, then by the given order.
    """
    ranks = [(largest_volume(profile), shape_count(profile)) for profile in profiles]
    return sorted(range(len(profiles)), key=lambda index: (ranks[index], index))


def largest_volume(profile: Profile) -> int:
    """Return the product of a profile's maximum sizes."""
    return math.prod(sizes.max for sizes in profile.dims.values())


def shape_count(profile: Profile) -> int:
    """Return the number of shapes that a profile covers."""
    return math.prod(sizes.max - sizes.min + 1 for sizes in profile.dims.values())


def _distance(profile: Profile, sizes: Mapping[str, int]) -> float:
    """Return the distance of sizes from a profile: the sum of |log(size / nearest size)|."""
    return sum(
        abs(math.log(max(sizes[name], 1) / _nearest_size(r, sizes[name])))
        for name, r in profile.dims.items()
    )


def _nearest_size(sizes: DimRange, size: int) -> int:
    """Return the covered size that is nearest to `size`."""
    return min(max(size, sizes.min), sizes.max)


def profiles_by_graph(
    graphs: Mapping[str, Sequence[TensorSpec]], texts: Iterable[str], limits: Mapping[str, int]
) -> dict[str, list[Profile]]:
    """Return the profiles that fit each graph.

    The graphs of one model (an encoder, a decoder) have different dims. A profile applies to those
    that it fits.

    Args:
        graphs: graph -> its inputs.
        texts: the profiles.
        limits: dim -> its largest size.

    Raises:
        ShapeError: a profile is malformed or fits no graph. The message is about the graph that
            shares most dims with it.
    """
    fitting: dict[str, list[Profile]] = {name: [] for name in graphs}
    for text in texts:
        profile = Profile.parse(text)
        problems: list[tuple[int, ShapeError]] = []
        for name, inputs in graphs.items():
            try:
                profile.check(inputs, limits)
                fitting[name].append(profile)
            except ShapeError as error:
                mismatches = len(set(dynamic_dims(inputs)) ^ set(profile.dims))
                problems.append((mismatches, error))
        if len(problems) == len(graphs):
            raise min(problems, key=lambda pair: pair[0])[1]
    return fitting


def _outside(profile: Profile, profiles: Sequence[Profile], sizes: Mapping[str, int]) -> ShapeError:
    problems = []
    wider = dict(profile.dims)
    for name, r in profile.dims.items():
        size = sizes[name]
        if size > r.max:
            problems.append(f"{name} {size} is above its maximum {r.max} by {size - r.max}")
        elif size < r.min:
            problems.append(f"{name} {size} is below its minimum {r.min} by {r.min - size}")
        wider[name] = DimRange(min(r.min, max(size, 1)), r.opt, max(r.max, size))
    which = "the nearest profile" if len(profiles) > 1 else "the profile"
    return ShapeError(
        f"{_listed(sizes)} is outside {which} '{profile}': {'; '.join(problems)}.",
        do=f"Split or pad the input to fit, or rebuild with --profile {Profile(wider)}",
    )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
