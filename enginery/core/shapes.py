"""Named dims, tensor interfaces and shape profiles.

>>> profile = Profile.parse("batch=1:8:32,sequence=8:128:512")
>>> profile.dims["sequence"].opt
128
>>> resolve_dim("past_sequence + sequence", {"past_sequence": 4, "sequence": 1})
5
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from enginery.core.errors import ShapeError, nearest

Dim = int | str
"""A fixed size, a name, or a sum of names and sizes ("past_sequence + sequence")."""

_SUM = re.compile(r"\s*\+\s*")
_SIZE = re.compile(r"\s*[0-9]{1,10}\s*")
_MAX_SIZE = 2**31 - 1  # TensorRT 10 and older hold a dim in 32 bits
_TENSORRT = re.compile(r"^[^=,]+:[0-9]{1,10}(x[0-9]{1,10})*$")  # `input:0:1x8` is input:0


def canonical_dim(name: str) -> str:
    """The name a person would use for a dim that Optimum names `batch_size` or `sequence_length`.

    >>> canonical_dim("past_sequence_length + sequence_length")
    'past_sequence + sequence'
    """
    terms = (
        "channels" if term == "num_channels" else re.sub(r"_(size|length)$", "", term)
        for term in _SUM.split(name.strip())
    )
    return " + ".join(terms)


def dim_terms(dim: Dim) -> list[str]:
    """The names that a dim depends on: none for a fixed size, two for `a + b`."""
    if isinstance(dim, int):
        return []
    return [term for term in _SUM.split(dim) if not term.isdigit()]


def resolve_dim(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of `dim` where each name has the size given.

    Raises:
        ShapeError: a name has no size.
    """
    if isinstance(dim, int):
        return dim
    total = 0
    for term in _SUM.split(dim):
        if term.isdigit():
            total += int(term)
        elif term in sizes:
            total += sizes[term]
        else:
            raise ShapeError(f"dim '{term}' has no size; sizes given: {dict(sizes)}.")
    return total


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph."""

    name: str
    dtype: str
    """As numpy names it (`int64`, `float32`), and `bfloat16`."""
    dims: tuple[Dim, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The concrete shape for the sizes given; raises ShapeError where one is missing."""
        return tuple(resolve_dim(dim, sizes) for dim in self.dims)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} ({', '.join(str(dim) for dim in self.dims)})"


def dynamic_dims(specs: Iterable[TensorSpec]) -> list[str]:
    """The names of all dynamic dims, in order of appearance, each once."""
    terms = (term for spec in specs for dim in spec.dims for term in dim_terms(dim))
    return list(dict.fromkeys(terms))


@dataclass(frozen=True)
class DimRange:
    """The sizes of one dim that a profile covers, and the one to tune for."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return str(self.opt) if self.min == self.max else f"{self.min}:{self.opt}:{self.max}"


@dataclass(frozen=True)
class Profile:
    """Ranges of the model's named dims: `batch=1:8:32,sequence=8:128:512`."""

    dims: dict[str, DimRange]

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Reads `name=min:opt:max` pairs; a single number is a fixed dim.

        Optimum's names (`batch_size`) are taken for ours (`batch`).

        Raises:
            ShapeError: the notation is wrong, or not 1 <= min <= opt <= max.
        """
        dims: dict[str, DimRange] = {}
        for part in text.split(","):
            name, equals, sizes = part.partition("=")
            name = canonical_dim(name)
            numbers = sizes.split(":")
            if not equals or not name or not all(map(_SIZE.fullmatch, numbers)):
                raise ShapeError(
                    f"profile '{text}': found '{part}', expected name=min:opt:max or name=size.",
                    do="Write it as batch=1:8:32,sequence=8:128:512.",
                )
            if len(numbers) not in (1, 3):
                raise ShapeError(
                    f"profile '{text}': '{part}' has {len(numbers)} numbers, expected 1 or 3."
                )
            if name in dims:
                raise ShapeError(f"profile '{text}': dim '{name}' is given twice.")
            low, opt, high = (int(n) for n in (numbers * 3 if len(numbers) == 1 else numbers))
            if not 1 <= low <= opt <= high <= _MAX_SIZE:
                raise ShapeError(
                    f"profile '{text}': {name} is {low}:{opt}:{high}, "
                    f"expected 1 <= min <= opt <= max <= {_MAX_SIZE}."
                )
            dims[name] = DimRange(low, opt, high)
        return cls(dims)

    @classmethod
    def parse_tensorrt(
        cls, minimum: str, optimum: str, maximum: str, inputs: Iterable[TensorSpec]
    ) -> Profile:
        """Reads TensorRT's own notation, `input_ids:1x1,attention_mask:1x1`, for min, opt and max.

        Raises:
            ShapeError: an input is unknown, a rank differs, or inputs disagree about a shared dim.
        """
        specs = {spec.name: spec for spec in inputs}
        corners = [_sizes_from_tensorrt(text, specs) for text in (minimum, optimum, maximum)]
        names = list(dict.fromkeys(name for corner in corners for name in corner))
        missing = [n for n in names if any(n not in corner for corner in corners)]
        if missing:
            raise ShapeError(f"dim '{missing[0]}' is not given in all of min, opt and max shapes.")
        if not names:
            return cls({})
        pairs = (f"{n}={corners[0][n]}:{corners[1][n]}:{corners[2][n]}" for n in names)
        return cls.parse(",".join(pairs))

    def check(self, inputs: Iterable[TensorSpec], limits: Mapping[str, int]) -> None:
        """Raises ShapeError unless the profile covers exactly the dynamic dims of `inputs`.

        `limits` are the largest sizes that the model allows (its position embeddings, say).
        """
        known = dynamic_dims(inputs)
        for name, sizes in self.dims.items():
            if name not in known:
                raise ShapeError(
                    f"profile '{self}': the model has no dynamic dim '{name}'"
                    f"{nearest(name, known)}",
                    do=f"Its dynamic dims: {', '.join(known) or 'none'}.",
                )
            if name in limits and sizes.max > limits[name]:
                raise ShapeError(
                    f"profile '{self}': {name} goes up to {sizes.max}, "
                    f"but the model's positions end at {limits[name]}.",
                    do=f"Lower the maximum of {name} to {limits[name]}.",
                )
        if missing := [name for name in known if name not in self.dims]:
            raise ShapeError(
                f"profile '{self}' lacks the dim '{missing[0]}'.",
                do=f"Add {missing[0]}=min:opt:max.",
            )

    def corners(self) -> Iterator[dict[str, int]]:
        """Every combination of minimum and maximum sizes, then the optimum; each once."""
        names = list(self.dims)
        ends = [dict.fromkeys((self.dims[name].min, self.dims[name].max)) for name in names]
        corners = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*ends)]
        optimum = {name: self.dims[name].opt for name in names}
        yield from corners
        if optimum not in corners:
            yield optimum

    def __str__(self) -> str:
        return ",".join(f"{name}={sizes}" for name, sizes in self.dims.items())


def _sizes_from_tensorrt(text: str, specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Named sizes from `input_ids:1x8,attention_mask:1x8`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        if not _TENSORRT.match(part.strip()):
            raise ShapeError(f"shapes '{text}': found '{part}', expected input:AxBxC.")
        name, _, shape = part.strip().rpartition(":")
        if name not in specs:
            raise ShapeError(
                f"shapes '{text}': the model has no input '{name}'{nearest(name, specs)}"
            )
        numbers = [int(n) for n in shape.split("x")]
        dims = specs[name].dims
        if len(numbers) != len(dims):
            raise ShapeError(f"{specs[name]} has {len(dims)} dims, found {shape}.")
        for dim, size in zip(dims, numbers, strict=True):
            if isinstance(dim, int) and dim != size:
                raise ShapeError(f"{specs[name]}: dim {dim} is fixed, found {size}.")
            if len(dim_terms(dim)) == 1 and "+" not in str(dim):
                known = sizes.setdefault(str(dim), size)
                if known != size:
                    raise ShapeError(
                        f"shapes '{text}': {dim} is {known} for one input and {size} for {name}."
                    )
    # Sums are checked last, when every plain name has its size.
    for part in text.split(","):
        name, _, shape = part.strip().rpartition(":")
        if specs[name].shape(sizes) != tuple(int(n) for n in shape.split("x")):
            raise ShapeError(
                f"shapes '{text}': {name} is {shape}, but {specs[name]} "
                f"makes it {'x'.join(str(n) for n in specs[name].shape(sizes))}."
            )
    return sizes
