"""Shapes to measure, and inputs generated for them.

>>> target = Target.open(artifact, "", allow_failed=False)
>>> [str(case) for case in sweep([target], BenchConfig(batch="1,8", sequence="16"))]
['batch 1, sequence 16', 'batch 8, sequence 16']
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginery.bench.config import AUTO, BenchConfig, parse_shape, read_sizes
from enginery.bench.target import Target
from enginery.core.errors import OptionError, ShapeError, nearest
from enginery.core.model.feeds import Feeds, make_feeds
from enginery.core.shapes import canonical_dim, dim_terms, dynamic_dims, fixed_dims, resolve_dim

_SEQUENCES = (16, 128, 512)


@dataclass(frozen=True)
class Case:
    """One shape to measure."""

    sizes: Mapping[str, int]
    """Dynamic dim -> size."""

    def feeds(self, target: Target, *, seed: int) -> Feeds:
        """Generate inputs of this shape; raise ShapeError if an input has no known size."""
        return make_feeds(target.record.inputs, self.sizes, target.limits, seed=seed)

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items()) or "fixed shapes"


def sweep(targets: Sequence[Target], config: BenchConfig) -> list[Case]:
    """Return the shapes that the options select, each once.

    Args:
        targets: the models; all must accept every shape.
        config: the options.

    Raises:
        OptionError: an option names a dim that the graph does not have.
        ShapeError: a dim has no size, the targets have different dims, or a sequence is longer than
            the model allows.
    """
    first = targets[0]
    names = dynamic_dims(first.record.inputs)
    for other in targets[1:]:
        other_names = dynamic_dims(other.record.inputs)
        if set(other_names) != set(names):
            raise ShapeError(
                f"{first.name} has the dims {', '.join(names) or 'none'}, {other.name} "
                f"{', '.join(other_names) or 'none'}, so they cannot be compared on the same "
                "shapes."
            )
    axes = _axes(targets, names, config)
    cases: list[Case] = []
    for text in config.shape or ("",):
        requested = _read_shape(text, first) if text else {}
        free = [name for name in names if name not in requested]
        for name in free:
            if name not in axes:
                raise ShapeError(
                    f"dim '{name}' of {first.name} has no size.",
                    do=f"Set it: --shape {','.join(f'{n}=SIZE' for n in free if n not in axes)}",
                )
        for sizes in itertools.product(*(axes[name] for name in free)):
            case_sizes = {**dict(zip(free, sizes, strict=True)), **requested}
            case = Case({name: case_sizes[name] for name in names})
            if case not in cases:
                cases.append(case)
    for target, case in itertools.product(targets, cases):
        check_positions(target, case)
    return cases


def rows_of(sizes: Mapping[str, int], target: Target) -> int:
    """Return the inputs per run: the first dim of the first input, or 1 if that is a scalar."""
    dims = target.record.inputs[0].dims
    return resolve_dim(dims[0], sizes) if dims else 1


def tokens_of(sizes: Mapping[str, int], target: Target) -> int | None:
    """Return the tokens per run including padding, or None if the inputs are not tokens."""
    for spec in target.record.inputs:
        if spec.name.endswith("input_ids") and len(spec.dims) == 2:
            rows, length = spec.shape(sizes)
            return rows * length
    return None


def check_positions(target: Target, case: Case) -> None:
    """Raise ShapeError if a sequence is longer than the model's position embeddings."""
    limit = target.limits.position_limit
    if limit is None:
        return
    for dim in (dim for spec in target.record.inputs for dim in spec.dims):
        of_sequence = isinstance(dim, str) and "sequence" in dim_terms(dim)
        if of_sequence and (size := resolve_dim(dim, case.sizes)) > limit:
            raise ShapeError(
                f"{dim} {size} is too long for {target.name}, expected at most {limit}.",
                do=f"Measure up to {limit}: --sequence "
                f"{','.join(str(s) for s in (*_shorter(limit), limit))}",
            )


def _shorter(limit: int) -> list[int]:
    return [size for size in _SEQUENCES if size < limit]


def _axes(
    targets: Sequence[Target], names: Sequence[str], config: BenchConfig
) -> dict[str, Sequence[int]]:
    """Return dim -> sizes, for the dims with sizes from the options or the model's config.json."""
    first = targets[0]
    axes: dict[str, Sequence[int]] = {
        name: (first.limits.sizes[canonical_dim(name)],)
        for name in names
        if canonical_dim(name) in first.limits.sizes
    }
    fixed = fixed_dims(first.record.inputs)
    for name, text in (("batch", config.batch), ("sequence", config.sequence)):
        if name in names:
            limits = [s.limits.position_limit or s.limits.max_positions for s in targets]
            sizes = _auto(min(limits)) if text == AUTO else read_sizes(text, name)
            axes[name] = sizes
        elif text not in (AUTO, BenchConfig.batch) and read_sizes(text, name) != (fixed.get(name),):
            raise _no_dim(first, name, fixed)
    return axes


def _auto(limit: int) -> tuple[int, ...]:
    return tuple(size for size in _SEQUENCES if size <= limit) or (limit,)


def _no_dim(target: Target, name: str, fixed: Mapping[str, int]) -> OptionError:
    inputs = "; ".join(str(spec) for spec in target.record.inputs)
    reason = f"it is fixed at {fixed[name]}" if name in fixed else "the graph has none"
    other_dims = [n for n in dynamic_dims(target.record.inputs) if n != "batch"]
    example = ",".join(f"{n}=SIZE" for n in other_dims)
    return OptionError(
        f"option '{name}': {target.name} has no dynamic dim '{name}', {reason}: {inputs}.",
        do=f"Leave --{name} out"
        + (f", or set the sizes of its other dims: --shape {example}" if example else "")
        + ".",
    )


def _read_shape(text: str, target: Target) -> dict[str, int]:
    """Parse `batch=1,height=64` and check it against the graph; return the dynamic dims' sizes.

    A fixed dim may be given with its own size.
    """
    names = dynamic_dims(target.record.inputs)
    fixed = fixed_dims(target.record.inputs)
    sizes = parse_shape(text)
    for name, value in sizes.items():
        if name not in names and fixed.get(name) != value:
            if name in fixed:
                raise ShapeError(
                    f"{name} is fixed at {fixed[name]} in {target.name}, found {name}={value}.",
                    do=f"Leave {name} out, or export the model with a dynamic {name}.",
                )
            raise OptionError(
                f"option 'shape': {target.name} has no dim '{name}'{nearest(name, names)}",
                do=f"Its dynamic dims: {', '.join(names) or 'none'}.",
            )
    return {name: size for name, size in sizes.items() if name in names}
