"""The shapes that are measured, and the inputs that are made up for them.

>>> [str(case) for case in sweep([subject], BenchConfig(batch="1,8", sequence="16,128"))]
['batch 1, sequence 16', 'batch 1, sequence 128', 'batch 8, sequence 16', 'batch 8, sequence 128']
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginery.bench.config import AUTO, BenchConfig, parse_shape, read_sizes
from enginery.bench.target import Subject
from enginery.core.errors import OptionError, ShapeError, nearest
from enginery.core.model.feeds import Feeds, make_feeds
from enginery.core.shapes import canonical_dim, dim_terms, dynamic_dims, fixed_dims, resolve_dim

_SEQUENCES = (16, 128, 512)


@dataclass(frozen=True)
class Case:
    """One shape: the size of each dynamic dim."""

    sizes: Mapping[str, int]

    def feeds(self, subject: Subject, *, seed: int) -> Feeds:
        """Made-up inputs of this shape; raises ShapeError where an input cannot be made up."""
        return make_feeds(subject.record.inputs, self.sizes, subject.limits, seed=seed)

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items()) or "fixed shapes"


def sweep(subjects: Sequence[Subject], config: BenchConfig) -> list[Case]:
    """Every shape that the options ask for, each once; all subjects take it.

    Raises:
        OptionError: the graph has no sequence, or no dim of a name.
        ShapeError: a dim has no size, or the shape is beyond the model's positions.
    """
    first = subjects[0]
    names = dynamic_dims(first.record.inputs)
    for other in subjects[1:]:
        found = dynamic_dims(other.record.inputs)
        if set(found) != set(names):
            raise ShapeError(
                f"{first.name} has the dims {', '.join(names) or 'none'}, {other.name} "
                f"{', '.join(found) or 'none'}: they cannot be run on the same shapes."
            )
    axes = _axes(subjects, names, config)
    cases: list[Case] = []
    for text in config.shape or ("",):
        given = _read_shape(text, first) if text else {}
        free = [name for name in names if name not in given]
        for name in free:
            if name not in axes:
                raise ShapeError(
                    f"dim '{name}' of {first.name} has no size.",
                    do=f"Name it: --shape {','.join(f'{n}=SIZE' for n in free if n not in axes)}",
                )
        for sizes in itertools.product(*(axes[name] for name in free)):
            found_sizes = {**dict(zip(free, sizes, strict=True)), **given}
            case = Case({name: found_sizes[name] for name in names})
            if case not in cases:
                cases.append(case)
    for subject, case in itertools.product(subjects, cases):
        require_within_positions(subject, case)
    return cases


def rows_of(sizes: Mapping[str, int], subject: Subject) -> int:
    """Inputs of one run: the first dim of the first input; a graph without dims takes one."""
    dims = subject.record.inputs[0].dims
    return resolve_dim(dims[0], sizes) if dims else 1


def tokens_of(sizes: Mapping[str, int], subject: Subject) -> int | None:
    """Tokens of one run, padding included; None where the inputs are no tokens."""
    for spec in subject.record.inputs:
        if spec.name.endswith("input_ids") and len(spec.dims) == 2:
            rows, length = spec.shape(sizes)
            return rows * length
    return None


def require_within_positions(subject: Subject, case: Case) -> None:
    """Raises ShapeError where a sequence goes beyond the model's position embeddings."""
    limit = subject.limits.position_limit
    if limit is None:
        return
    for dim in (dim for spec in subject.record.inputs for dim in spec.dims):
        of_sequence = isinstance(dim, str) and "sequence" in dim_terms(dim)
        if of_sequence and (size := resolve_dim(dim, case.sizes)) > limit:
            raise ShapeError(
                f"{dim} {size} is beyond {subject.name}: its positions end at {limit}.",
                do=f"Measure up to {limit}: --sequence "
                f"{','.join(str(s) for s in (*_shorter(limit), limit))}",
            )


def _shorter(limit: int) -> list[int]:
    return [size for size in _SEQUENCES if size < limit]


def _axes(
    subjects: Sequence[Subject], names: Sequence[str], config: BenchConfig
) -> dict[str, Sequence[int]]:
    """The sizes to go through of each dim that the options or the model's config.json size."""
    first = subjects[0]
    axes: dict[str, Sequence[int]] = {
        name: (first.limits.sizes[canonical_dim(name)],)
        for name in names
        if canonical_dim(name) in first.limits.sizes
    }
    fixed = fixed_dims(first.record.inputs)
    for name, text in (("batch", config.batch), ("sequence", config.sequence)):
        if name in names:
            limits = [s.limits.position_limit or s.limits.max_positions for s in subjects]
            sizes = _auto(min(limits)) if text == AUTO else read_sizes(text, name)
            axes[name] = sizes
        elif text not in (AUTO, BenchConfig.batch) and read_sizes(text, name) != (fixed.get(name),):
            raise _no_dim(first, name, fixed)
    return axes


def _auto(limit: int) -> tuple[int, ...]:
    return tuple(size for size in _SEQUENCES if size <= limit) or (limit,)


def _no_dim(subject: Subject, name: str, fixed: Mapping[str, int]) -> OptionError:
    inputs = "; ".join(str(spec) for spec in subject.record.inputs)
    found = f"it is fixed at {fixed[name]}" if name in fixed else "there is none"
    others = [n for n in dynamic_dims(subject.record.inputs) if n != "batch"]
    return OptionError(
        f"option '{name}': {subject.name} has no free dim '{name}', {found}: {inputs}.",
        do=f"Leave --{name} out"
        + (
            f", or size its other dims: --shape {','.join(f'{n}=SIZE' for n in others)}"
            if others
            else ""
        )
        + ".",
    )


def _read_shape(text: str, subject: Subject) -> dict[str, int]:
    """Sizes from `batch=1,height=64`; a fixed dim may be named with its own size."""
    names = dynamic_dims(subject.record.inputs)
    fixed = fixed_dims(subject.record.inputs)
    given = parse_shape(text)
    for name, value in given.items():
        if name not in names and fixed.get(name) != value:
            if name in fixed:
                raise ShapeError(
                    f"{name} is fixed at {fixed[name]} in {subject.name}, found {name}={value}.",
                    do=f"Leave {name} out, or export the model with a dynamic {name}.",
                )
            raise OptionError(
                f"option 'shape': {subject.name} has no dim '{name}'{nearest(name, names)}",
                do=f"Its dynamic dims: {', '.join(names) or 'none'}.",
            )
    return {name: size for name, size in given.items() if name in names}
