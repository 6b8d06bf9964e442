"""Cases beside the profiles of engines: those that an engine takes, and why others are left out.

>>> cases, left_out = within_profiles(cases, record, [Profile.parse("batch=1:2:4,sequence=1:8:64")])
>>> left_out[0].name, left_out[0].skipped
('longest', 'no engine takes it: batch 2, sequence 128 is outside the profile …: …')

An engine takes no other shape, and nothing is built for one. Of the sweep, what does not fit is
left out: it was nobody's promise. Real inputs are cut into as many rows as an engine takes, without
the padding that the others needed, and padded to its minimum, as answers are. A corner of a profile
that the user named stays whatever the engines are: there the answer has to be no.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import ProviderError, ShapeError
from enginery.core.feeds import Feeds, is_padding_mask
from enginery.core.manifest import GraphRecord
from enginery.core.profile_choice import choose_profile
from enginery.core.reports import CaseResult
from enginery.core.shapes import Profile, TensorSpec, canonical_dim
from enginery.runtime.engines import choose_with_engines, reachable_profile
from enginery.runtime.profiles import most_rows, padded_sizes, sizes_of
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.specification import ProviderSpec
from enginery.runtime.real_inputs import fixed_batch
from enginery.validate.cases import Case
from enginery.validate.report import UNTAKEN

_ROWS = "batch"


def reached_profiles(
    artifact: Artifact, specs: Sequence[ProviderSpec], *, allow_fallback: bool
) -> dict[str, list[Profile]]:
    """By graph, the profiles of the engines that will run; none where no engine is used.

    Raises:
        ProviderError: what `OrtRunner` would raise after PyTorch had worked for nothing; or the
            CPU is to run BF16.
    """
    found: dict[str, list[Profile]] = {}
    for record in artifact.manifest.graphs:
        chosen, engines = choose_with_engines(
            artifact, record, specs, allow_fallback=allow_fallback
        )
        if artifact.manifest.precision == "bf16" and chosen[0].name == CPU:
            raise ProviderError(
                f"{artifact.path} is bf16, and ONNX Runtime has no BF16 kernels on the CPU.",
                do="Validate it on a GPU: --provider cuda",
            )
        found[record.file] = [reachable_profile(engine.record) for engine in engines]
    return found


def within_profiles(
    cases: Sequence[Case], record: GraphRecord, profiles: Sequence[Profile]
) -> tuple[list[Case], list[CaseResult]]:
    """The cases that an engine takes, and the others with the reasons.

    Args:
        cases: of one graph; each makes its feeds once for it.
        record: the graph.
        profiles: what requests must fit, one for each engine; none where no engine is used.
    """
    taken: list[Case] = []
    left_out: list[CaseResult] = []
    for case in cases:
        if not profiles or case.kind == "profile" or not _outside(case, record, profiles):
            taken.append(case)
            continue
        for part in _parts(case, record, profiles) if case.kind == "real" else [case]:
            if found := _outside(part, record, profiles):
                left_out.append(found)
            else:
                taken.append(part)
    return taken, left_out


def _outside(case: Case, record: GraphRecord, profiles: Sequence[Profile]) -> CaseResult | None:
    feeds = case.make()
    try:
        choose_profile(profiles, sizes_of(record.inputs, feeds))
    except ShapeError as error:
        shapes = {name: list(array.shape) for name, array in feeds.items()}
        said = f"{UNTAKEN}{error.message}"
        return CaseResult(record.file, case.name, case.kind, shapes, [], "", skipped=said)
    return None


def _parts(case: Case, record: GraphRecord, profiles: Sequence[Profile]) -> list[Case]:
    """A case of real inputs in parts of as many rows as an engine takes, or of one."""
    feeds = case.make()
    sizes = sizes_of(record.inputs, feeds)
    count = len(next(iter(feeds.values())))
    others = {name: size for name, size in sizes.items() if name != _ROWS}
    rows = count if fixed_batch(record) else most_rows(profiles, _ROWS, others) or 1
    parts = []
    for start in range(0, count, rows):
        end = min(start + rows, count)
        said = f"row {end}" if end == start + 1 else f"rows {start + 1}–{end}"
        name = case.name if rows >= count else f"{case.name}, {said}"
        make = partial(_part, case.make, record, profiles, slice(start, end))
        parts.append(Case(name, case.kind, make))
    return parts


def _part(
    make: Callable[[], Feeds], record: GraphRecord, profiles: Sequence[Profile], rows: slice
) -> Feeds:
    """Some rows of a case, without columns that none of them uses, at a size that is taken."""
    feeds = {name: array[rows] for name, array in make().items()}
    mask = next((spec for spec in record.inputs if is_padding_mask(spec)), None)
    columns = mask.dims[1] if mask else None  # all inputs of texts are (batch, sequence)
    if mask and isinstance(columns, str):
        used = feeds[mask.name].any(axis=0)
        feeds = {spec.name: feeds[spec.name][:, used] if columns in spec.dims else feeds[spec.name]
                 for spec in record.inputs}  # fmt: skip
    sizes = padded_sizes(profiles, sizes_of(record.inputs, feeds))
    return {spec.name: _padded(feeds[spec.name], spec, sizes, columns) for spec in record.inputs}


def _padded(
    array: NDArray[Any], spec: TensorSpec, sizes: Mapping[str, int], columns: int | str | None
) -> NDArray[Any]:
    """More rows are the last one again; more columns are masked, so any token will do."""
    wide = [0] * array.ndim
    for axis, dim in enumerate(spec.dims):
        if isinstance(dim, str) and (axis == 0 or dim == columns):
            wide[axis] = max(sizes.get(canonical_dim(dim), 0) - array.shape[axis], 0)
    array = np.pad(array, [(0, wide[0]), *[(0, 0)] * (array.ndim - 1)], mode="edge")
    return np.pad(array, [(0, 0), *((0, more) for more in wide[1:])])
