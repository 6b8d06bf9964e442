"""Fit the test cases to the profiles of the artifact's engines.

An engine accepts only shapes inside its profiles, and nothing is built for others. Cases of the
sweep that do not fit are skipped. Real inputs are split into as many rows as an engine accepts,
stripped of padding that only the other rows needed, and padded to the profile's minimum, as in
serving. Corners of profiles that the user names are always run: outside the engines' profiles they
must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ProviderError, ShapeError
from enginery.core.model.feeds import Feeds, is_padding_mask
from enginery.core.shapes import Profile, TensorSpec, canonical_dim, choose_profile
from enginery.reports.validation import ValidationCaseResult
from enginery.runtime.engines.padding import dim_sizes, max_rows, padded_sizes
from enginery.runtime.engines.selection import choose_with_engines, reachable_profile
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.specification import ProviderSpec
from enginery.runtime.sample_inputs import fixed_batch
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.report import OUTSIDE_PROFILES

_ROWS = "batch"


def reachable_profiles(
    artifact: Artifact, specs: Sequence[ProviderSpec], *, allow_fallback: bool
) -> dict[str, list[Profile]]:
    """Return the profiles of the engines that will run, by graph file; empty without engines.

    Raises:
        ProviderError: the providers or engines cannot be used, or the CPU would have to run BF16.
            Checking this here saves a useless run of PyTorch.
    """
    profiles_by_file: dict[str, list[Profile]] = {}
    for record in artifact.manifest.graphs:
        chosen, engines = choose_with_engines(
            artifact, record, specs, allow_fallback=allow_fallback
        )
        if artifact.manifest.float_precision == "bf16" and chosen[0].name == CPU:
            raise ProviderError(
                f"{artifact.path} is bf16, but ONNX Runtime has no BF16 kernels on the CPU.",
                do="Validate it on a GPU: --providers cuda",
            )
        profiles_by_file[record.file] = [reachable_profile(engine.record) for engine in engines]
    return profiles_by_file


def split_by_profiles(
    cases: Sequence[ValidationCase], record: GraphRecord, profiles: Sequence[Profile]
) -> tuple[list[ValidationCase], list[ValidationCaseResult]]:
    """Return the cases that fit an engine, and results with reasons for those that do not.

    Args:
        cases: cases of one graph.
        record: the graph.
        profiles: one profile for each engine; empty without engines.
    """
    fitting: list[ValidationCase] = []
    left_out: list[ValidationCaseResult] = []
    for case in cases:
        if not profiles or case.kind == "profile" or not _find_unfit(case, record, profiles):
            fitting.append(case)
            continue
        # Real inputs are split into as many rows as an engine accepts, as in serving.
        parts = _split_rows(case, record, profiles) if case.kind == "real" else [case]
        for part in parts:
            if unfit := _find_unfit(part, record, profiles):
                left_out.append(unfit)
            else:
                fitting.append(part)
    return fitting, left_out


def _find_unfit(
    case: ValidationCase, record: GraphRecord, profiles: Sequence[Profile]
) -> ValidationCaseResult | None:
    feeds = case.make()
    try:
        choose_profile(profiles, dim_sizes(record.inputs, feeds))
    except ShapeError as error:
        shapes = {name: list(array.shape) for name, array in feeds.items()}
        reason = f"{OUTSIDE_PROFILES}{error.message}"
        return ValidationCaseResult(
            record.file, case.name, case.kind, shapes, [], "", skipped=reason
        )
    return None


def _split_rows(
    case: ValidationCase, record: GraphRecord, profiles: Sequence[Profile]
) -> list[ValidationCase]:
    """Split a case of real inputs into cases of as many rows as an engine accepts, at least one."""
    feeds = case.make()
    sizes = dim_sizes(record.inputs, feeds)
    count = len(next(iter(feeds.values())))
    others = {name: size for name, size in sizes.items() if name != _ROWS}
    # 0 if no profile takes the other sizes: then single rows show which of them fit.
    rows = count if fixed_batch(record) else max_rows(profiles, _ROWS, others) or 1
    parts = []
    for start in range(0, count, rows):
        end = min(start + rows, count)
        label = f"row {end}" if end == start + 1 else f"rows {start + 1}–{end}"
        name = case.name if rows >= count else f"{case.name}, {label}"
        make = partial(_take_rows, case.make, record, profiles, slice(start, end))
        parts.append(ValidationCase(name, case.kind, make))
    return parts


def _take_rows(
    make: Callable[[], Feeds], record: GraphRecord, profiles: Sequence[Profile], rows: slice
) -> Feeds:
    """Take some rows of a case, drop columns that none of them uses, and pad to a valid size."""
    feeds = {name: array[rows] for name, array in make().items()}
    mask = next((spec for spec in record.inputs if is_padding_mask(spec)), None)
    columns = mask.dims[1] if mask else None  # all inputs of a text graph are (batch, sequence)
    if mask and isinstance(columns, str):
        # The other columns are padding that only rows of another part needed.
        used = feeds[mask.name].any(axis=0)
        feeds = {
            spec.name: feeds[spec.name][:, used] if columns in spec.dims else feeds[spec.name]
            for spec in record.inputs
        }
    sizes = padded_sizes(profiles, dim_sizes(record.inputs, feeds))
    return {spec.name: _pad(feeds[spec.name], spec, sizes, columns) for spec in record.inputs}


def _pad(
    array: NDArray[Any], spec: TensorSpec, sizes: Mapping[str, int], columns: int | str | None
) -> NDArray[Any]:
    """Pad an array: repeat the last row, and append zero columns, which the mask excludes."""
    wide = [0] * array.ndim
    for axis, dim in enumerate(spec.dims):
        if isinstance(dim, str) and (axis == 0 or dim == columns):
            wide[axis] = max(sizes.get(canonical_dim(dim), 0) - array.shape[axis], 0)
    array = np.pad(array, [(0, wide[0]), *[(0, 0)] * (array.ndim - 1)], mode="edge")
    return np.pad(array, [(0, 0), *((0, more) for more in wide[1:])])
