"""Compare rows of padded batches with the same rows run alone, in ONNX Runtime.

The outputs of a row must depend neither on the other rows of its batch nor on padding that its mask
excludes. A graph that ignores the mask above 64 tokens, or that computes something else for more
than 16 rows, breaks this rule. Checking it does not take PyTorch, so it is checked for many more
batch sizes and lengths than PyTorch could run.

A deviation is not yet a fault: some models read padded positions in PyTorch, too (a convolution
over the sequence). So the validate stage compares shapes that deviate with PyTorch, and only that
result counts.

Two dims are scanned: the batch size, with short rows, and the length, with two rows; then both in
powers of two, and wherever the graph's own decisions change. The length is the dim that a padding
mask covers: `sequence` in an encoder, `past_sequence` in a decoder with a KV cache,
`encoder_sequence` in a decoder that attends to an encoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError, ShapeError
from enginery.core.model.feeds import FeedLimits, Feeds, is_padding_mask, make_feeds
from enginery.core.model.random_numbers import is_random_input
from enginery.core.shapes import Profile, TensorSpec, dim_terms, dynamic_dims
from enginery.core.tolerance import QuantizedTolerance
from enginery.reports.validation import GraphCoverage, ValidationCaseResult
from enginery.runtime.engines.padding import dim_sizes
from enginery.validate.cases.decisions import Decisions, is_of_decision
from enginery.validate.cases.sweep import LONGEST, ValidationCase, sweep_sizes
from enginery.validate.compare import GraphComparison
from enginery.validate.config import Effort
from enginery.validate.reference import ReferenceRun

Array = NDArray[Any]

_SHORT = 4
"""Length of the rows in the scan over batch sizes."""

_ROW_LENGTHS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513)
"""Lengths of the rows that are padded: one above each power of two."""

_DIFFERENT_ROWS = 5
"""Number of different rows in a batch of images or of audio."""

_POSITIONS = 64
"""Number of positions of a row that are compared. GPT-2's logits for 1024 positions take 200 MB."""

_SUSPICIOUS = 0.5
"""Share of a limit that a row may deviate. Either side of the comparison has its own roundings."""

_MORE_ERROR, _LEAST_SHORTFALL = 2.0, 1e-3
"""How many times farther from PyTorch a quantized batch may be than rows alone: 1 - cosine may be
this multiple of theirs, and this number more."""

_ROWS_ALONE = 8
"""Number of rows alone, besides its own, that a quantized batch is judged by. The cosine of a few
logits differs tenfold between two rows."""

_CONFIRMED = 8
"""Number of deviating shapes that PyTorch runs."""

_EVERY_LENGTH = {"quick": 8, "normal": 40, "thorough": LONGEST}
"""Effort -> length up to which every length runs. Beyond, powers of two and their neighbours do."""
_EVERY_BATCH = {"quick": (8, 33), "normal": (33, 65), "thorough": (129, 257)}
"""Effort -> batch size up to which every size runs, and the largest one."""
_TOGETHER = {"quick": 128, "normal": 512, "thorough": 128 * 512}
"""Effort -> tokens of the largest batch of the combinations of batch sizes and lengths."""
_BATCHES_OF_IMAGES = {
    "quick": (2, 3, 9, 17),
    "normal": (2, 3, 8, 17, 32, 33),
    "thorough": tuple(range(2, 34)),
}
"""Effort -> batch sizes of graphs without a padded dim, whose rows are images or audio."""


@dataclass(frozen=True)
class ScanShape:
    """A batch size, and the length that its rows are padded to; 0 if nothing is padded."""

    batch: int
    length: int


@dataclass
class ScanResult:
    """Result of the scan of one graph."""

    consistent: list[ScanShape] = field(default_factory=list)
    """Shapes at which every row equals the same row alone."""
    deviating: dict[ScanShape, float] = field(default_factory=dict)
    """Other shapes -> largest difference divided by its limit."""
    reason: str = ""
    """Reason why nothing ran."""

    def to_confirm(self) -> list[ScanShape]:
        """Return the shapes that PyTorch should run: the worst, and some of the others."""
        ranked = sorted(self.deviating, key=lambda shape: -self.deviating[shape])
        half = _CONFIRMED // 2
        # Not the worst alone: they may all have one cause, which PyTorch shares.
        others = ranked[half:]
        step = max(1, len(others) // half)
        return [*ranked[:half], *others[::step][:half]]


@dataclass(frozen=True)
class PaddedDim:
    """The dim that a padding mask covers."""

    name: str
    """A term of the mask's second dim."""
    left: bool
    """True if padding is on the left, as in decoders."""

    @classmethod
    def of(cls, record: GraphRecord) -> PaddedDim | None:
        """Return the dim that the graph's first padding mask covers; None without one."""
        inputs, padding = record.inputs, record.padding
        mask = next((spec for spec in inputs if is_padding_mask(spec)), None)
        terms = dim_terms(mask.dims[1]) if mask else []
        if mask is None or not terms:
            return None
        past = next((term for term in terms if term.startswith("past_")), None)
        if padding is not None and padding.side != "none":
            return cls(past or terms[0], left=padding.side == "left")
        decodes = past is not None or any(spec.name == "position_ids" for spec in inputs)
        return cls(past or terms[0], left=decodes and not mask.name.startswith("encoder_"))


@dataclass(frozen=True)
class _RowOutput:
    """An output of a row that ran alone."""

    shape: tuple[int, ...]
    """Its shape, without the batch."""
    positions: list[Array]
    """The compared positions of each axis."""
    values: Array
    """The values there."""


class ConsistencyScan:
    """The padded batches of one graph, and the outputs of their rows alone."""

    def __init__(
        self,
        run: Callable[[Feeds], dict[str, Array]],
        record: GraphRecord,
        limits: FeedLimits,
        *,
        engines: Sequence[Profile] = (),
        decisions: Decisions | None = None,
        seed: int,
    ) -> None:
        """Prepare the scan of a graph.

        Args:
            run: runs the graph.
            record: the graph.
            limits: limits on its inputs.
            engines: profiles of the engines that run it. If they take no single row, a row "alone"
                is a batch of the same row.
            decisions: what the graph decides from sizes: they run, and so do the numbers that it
                holds, with their neighbours.
            seed: random seed for the rows.
        """
        # A graph that treats some length differently holds that length.
        self._decisions = decisions or Decisions()
        self._special = {n + step for n in self._decisions.constants for step in (-1, 0, 1)}
        self._run = run
        self._record = record
        self._limits = limits
        self._seed = seed
        self._names = dynamic_dims(record.inputs)
        self._batch_dim = _batch_dim(record)
        # Samples of audio are padded before they are normalized, which no mask undoes.
        tokens = limits.min_sequence == 1
        self._padded = PaddedDim.of(record) if tokens else None
        self.dim = self._padded.name if self._padded else ""
        """Name of the padded dim; empty if there is none."""
        self._longest = self._sizes(LONGEST)[self._padded.name] if self._padded else 0
        least = {dim: min(p.dims[dim].min for p in engines) for p in engines for dim in p.dims}
        self._shortest = least.get(self.dim, 1)
        self._fixed = self._batch_dim if isinstance(self._batch_dim, int) else 0
        # Engines that take no single row run a batch of copies of it.
        self._copies = self._fixed or least.get("batch", 1)
        self._rows: dict[int, Feeds] = {}
        self._names_compared: set[str] = set()
        self._alone: dict[int, dict[str, _RowOutput]] = {}

    def shapes(self, effort: Effort, profiles: Sequence[Profile]) -> list[ScanShape]:
        """Return the shapes to run.

        Args:
            effort: how many.
            profiles: shape profiles, whose bounds run in any case.
        """
        batches = self._batch_sizes(effort, profiles)
        if self._padded is None:
            return [ScanShape(size, 0) for size in sorted(batches)]
        bounds = _bounds(profiles, self.dim) | {self._longest - 1, self._longest}
        special = {size for size in self._special if size <= self._longest}
        lengths = _with_powers_of_two(_EVERY_LENGTH[effort], self._longest) | bounds | special
        short = max(min(_SHORT, self._longest), self._shortest)
        # With one row, there would be no other to depend on.
        two = self._fixed or max(2, self._copies)
        by_length = [ScanShape(two, size) for size in sorted(lengths) if size >= self._shortest]
        by_batch = [ScanShape(size, short) for size in sorted(batches)]
        together = self._together(effort) if not self._fixed else []
        return list(dict.fromkeys([*by_length, *by_batch, *together, *self._decided()]))

    def _together(self, effort: Effort) -> list[ScanShape]:
        """Return combinations of powers of two for both sizes: ragged batches, as they are served.

        The graph's decisions are known for all larger ones, see `cases/decisions.py`; these runs
        show what kernels do.
        """
        batches = [2**k for k in range(2, 8)]
        lengths = [2**k for k in range(3, 10) if self._shortest <= 2**k <= self._longest]
        return [
            ScanShape(batch, length)
            for batch in batches
            for length in lengths
            if batch * length <= _TOGETHER[effort] and batch >= self._copies
        ]

    def _decided(self) -> list[ScanShape]:
        """Return the shapes at which the graph begins to do something else."""
        shapes = []
        for sizes in self._decisions.sizes:
            rows = [size for dim, size in sizes.items() if dim == self._batch_dim]
            length = sizes.get(self.dim, 0)
            if rows and length >= self._shortest and rows[0] >= max(2, self._copies):
                shapes.append(ScanShape(rows[0], length))
        return shapes

    def _batch_sizes(self, effort: Effort, profiles: Sequence[Profile]) -> set[int]:
        if self._fixed:
            return {self._fixed}
        if self._padded:
            sizes = _with_powers_of_two(*_EVERY_BATCH[effort])
        else:
            sizes = set(_BATCHES_OF_IMAGES[effort])
        sizes |= {size for size in self._special if size <= max(sizes)}
        return {size for size in sizes | _bounds(profiles, "batch") if size >= max(2, self._copies)}

    def run(self, shapes: Sequence[ScanShape], comparison: GraphComparison) -> ScanResult:
        """Run padded batches and compare their rows with the rows alone.

        Args:
            shapes: the shapes; those that no engine takes are left out.
            comparison: that of the other cases with PyTorch; outputs that PyTorch lacks in some of
                them are left out.
        """
        reference, limits = comparison.reference, comparison.limits
        result = ScanResult(reason=_obstacle(self._record))
        if result.reason:
            return result
        ran = [set(expected.files) for expected in reference.outputs if expected.files]
        if not ran:
            return ScanResult(reason=f"{reference.name} ran on no input")
        # Outputs of one branch of an If are not in every case.
        self._names_compared = set.intersection(*ran)
        with comparison.progress.task("batches against rows alone", total=len(shapes)) as advance:
            for shape in shapes:
                try:
                    ratios = [
                        limits.ratio(mine, alone, reference.noise_floor(name, real=False))
                        for name, mine, alone in self._compare(shape)
                    ]
                except ShapeError:  # no engine takes it
                    continue
                except InputError:  # the graph fails
                    ratios = [math.inf]
                finally:
                    advance()
                if not ratios:
                    return ScanResult(reason="no output has a row for each input")
                # Not a fault yet: some models read padded positions in PyTorch, too.
                if max(ratios) > _SUSPICIOUS:
                    result.deviating[shape] = max(ratios)
                else:
                    result.consistent.append(shape)
        return result

    def confirm(
        self,
        scanned: ScanResult,
        comparison: GraphComparison,
        run_reference: Callable[[Sequence[ValidationCase]], ReferenceRun],
    ) -> list[ValidationCaseResult]:
        """Compare the worst shapes that deviate with PyTorch; those it rejects are left out.

        Args:
            scanned: the result of the scan.
            comparison: that of the other cases with PyTorch.
            run_reference: runs PyTorch on these cases.
        """
        shapes = scanned.to_confirm()
        if not shapes:
            return []
        reference = comparison.reference
        quantized = isinstance(comparison.limits.tolerance, QuantizedTolerance)
        rows = [set(self._row_lengths(shape)) for shape in shapes]
        if quantized:
            # The cosine of a few logits differs tenfold between two rows, so several are needed.
            rows = [
                row_lengths | self._rows_like(shape)
                for row_lengths, shape in zip(rows, shapes, strict=True)
            ]
        lengths = sorted(set().union(*rows), reverse=True)
        batches = [self.batch_case(shape) for shape in shapes]
        listed = [*batches, *map(self.alone_case, lengths)]
        confirmed = run_reference(listed)
        # Without real inputs: a near tie of a real answer must not excuse errors elsewhere.
        generated = {
            name: reference.noise_floor(name, real=False) for name in reference.noise_floors
        }
        floors = {
            name: floor.wider(confirmed.noise_floors.get(name, floor))
            for name, floor in generated.items()
        }
        confirmed = replace(confirmed, noise_floors=floors, generated_floors=floors)
        again = GraphComparison(confirmed, comparison.limits, progress=comparison.progress)
        results = again.compare(self._run, self._record, listed)
        if quantized:
            # Dynamic INT8 takes its scales from the whole batch: rows alone are the measure.
            alone = dict(zip(lengths, results[len(batches) :], strict=True))
            for index, row_lengths in enumerate(rows):
                rows_alone = [alone[length] for length in row_lengths]
                results[index] = _judge_by(rows_alone, results[index], measure="rows alone")
        return [result for result in results if not result.skipped]

    def _rows_like(self, shape: ScanShape) -> set[int]:
        """Return lengths of some rows that ran alone, none of them longer than a batch's."""
        ran = [n for n in sorted(self._alone) if self._padded is None or n <= shape.length]
        return {ran[index] for index in _positions(len(ran), _ROWS_ALONE)}

    def coverage(self, cases: Sequence[ValidationCaseResult], scanned: ScanResult) -> GraphCoverage:
        """Return the batch sizes and lengths of the compared cases and of the scan."""
        compared = {self._shape_of(case) for case in cases if case.outputs}
        return GraphCoverage(
            graph=self._record.file,
            dim=self.dim,
            compared=sorted((shape.batch, shape.length) for shape in compared),
            consistent=[(shape.batch, shape.length) for shape in scanned.consistent],
            deviating=[(shape.batch, shape.length) for shape in scanned.deviating],
            reason=scanned.reason,
        )

    def _shape_of(self, case: ValidationCaseResult) -> ScanShape:
        arrays = {name: np.empty(shape, bool) for name, shape in case.shapes.items()}
        sizes = dim_sizes(self._record.inputs, arrays)
        first = case.shapes[self._record.inputs[0].name] if self._record.inputs else []
        return ScanShape(first[0] if first else 1, sizes.get(self.dim, 0))

    def batch_case(self, shape: ScanShape) -> ValidationCase:
        """Return the padded batch of a shape as a case for PyTorch."""
        padded = f"padded to {shape.length}" if self._padded else "of different rows"
        return ValidationCase(
            f"batch {shape.batch} {padded}", "sweep", partial(self._make_batch, shape)
        )

    def alone_case(self, length: int) -> ValidationCase:
        """Return a row alone as a case for PyTorch."""
        name = f"length {length}" if self._padded else f"row {length} alone"
        return ValidationCase(name, "sweep", partial(self._make_alone, length))

    def _compare(self, shape: ScanShape) -> Iterator[tuple[str, Array, Array]]:
        """Run a padded batch, and yield each output's name, values and those of the rows alone.

        Only positions that both have are yielded, in one row. Outputs whose size does not follow
        from the inputs' dims are left out.
        """
        together = self._run(self._make_batch(shape))
        rows = [self._run_alone(length) for length in self._row_lengths(shape)]
        for spec in self._outputs():
            _check_rows(together[spec.name], spec, shape.batch)
            selections = [self._place(spec, row[spec.name], together[spec.name]) for row in rows]
            if all(selection is not None for selection in selections):
                mine = [
                    together[spec.name][index][selection].ravel()
                    for index, selection in enumerate(selections)
                ]
                alone = [row[spec.name].values.ravel() for row in rows]
                yield spec.name, np.concatenate(mine)[None], np.concatenate(alone)[None]

    def _place(self, spec: TensorSpec, row: _RowOutput, together: Array) -> Any:
        """Return the index of a row's compared positions in a padded row; None if unknown."""
        index = []
        for dim, positions, size, wide in zip(
            spec.dims[1:], row.positions, row.shape, together.shape[1:], strict=True
        ):
            # Only padding makes an axis longer. Other sizes depend on values, and positions cannot
            # be matched.
            if size != wide and not (size < wide and self._pads(dim)):
                return None
            left = self._padded is not None and self._padded.left
            index.append(positions + (wide - size if left else 0))
        return np.ix_(*index)

    def _outputs(self) -> list[TensorSpec]:
        return [
            spec
            for spec in self._record.outputs
            if spec.name in self._names_compared and spec.dims and spec.dims[0] == self._batch_dim
        ]

    def _pads(self, dim: int | str) -> bool:
        """Return True if an axis grows with padding."""
        return self._padded is not None and self._padded.name in dim_terms(dim)

    def _sizes(self, length: int) -> dict[str, int]:
        return sweep_sizes(self._names, self._limits, batch=1, sequence=length)

    def _row_lengths(self, shape: ScanShape) -> list[int]:
        """Return the lengths of the rows before they are padded.

        One row is a token shorter than the padded length, so that the lengths of a scan are run
        with and without padding. Without a padded dim, the numbers only tell rows apart.
        """
        if self._padded is None:
            return [index % _DIFFERENT_ROWS for index in range(shape.batch)]
        allowed = range(self._shortest, shape.length)
        shorter = [size for size in _ROW_LENGTHS[::-1] if size in allowed] or [shape.length]
        middle = shorter[len(shorter) // 2]
        if shape.batch == 1:
            return [middle]
        if shape.batch == 2:
            return [max(shape.length - 1, self._shortest), middle]
        return [(shape.length, *shorter)[i % (len(shorter) + 1)] for i in range(shape.batch)]

    def _make_row(self, length: int) -> Feeds:
        if length not in self._rows:
            sizes = self._sizes(_SHORT)
            if self._padded:
                sizes[self._padded.name] = length
            # By its length, so that a row is the same alone and in every batch.
            seed = self._seed + length
            self._rows[length] = make_feeds(self._record.inputs, sizes, self._limits, seed=seed)
        return self._rows[length]

    def _make_alone(self, length: int) -> Feeds:
        row = self._make_row(length)
        return {
            spec.name: np.repeat(row[spec.name], self._copies, axis=0)
            if spec.dims[0] == self._batch_dim
            else row[spec.name]
            for spec in self._record.inputs
        }

    def _run_alone(self, length: int) -> dict[str, _RowOutput]:
        if length not in self._alone:
            outputs = self._run(self._make_alone(length))
            row_outputs = {}
            for spec in self._outputs():
                _check_rows(outputs[spec.name], spec, self._copies)
                # All rows of the batch are copies of one.
                values = outputs[spec.name][0]
                positions = [
                    # Fewer positions, but all of their features: the logits of every position take
                    # too much memory.
                    _positions(size, _POSITIONS if self._pads(dim) else size)
                    for dim, size in zip(spec.dims[1:], values.shape, strict=True)
                ]
                row_outputs[spec.name] = _RowOutput(
                    values.shape, positions, values[np.ix_(*positions)]
                )
            self._alone[length] = row_outputs
        return self._alone[length]

    def _make_batch(self, shape: ScanShape) -> Feeds:
        lengths = self._row_lengths(shape)
        rows = [self._make_row(length) for length in lengths]
        feeds = dict(rows[0])  # of `use_cache_branch` there is one for all rows
        for spec in self._record.inputs:
            if spec.dims[0] == self._batch_dim:
                padded = [
                    self._pad(row[spec.name], spec, shape.length - length)
                    for row, length in zip(rows, lengths, strict=True)
                ]
                feeds[spec.name] = np.concatenate(padded)
        return feeds

    def _pad(self, array: Array, spec: TensorSpec, missing: int) -> Array:
        """Pad one row: 0 in the mask, the padding token in ids, repeated values elsewhere."""
        if self._padded is None or missing <= 0:
            return array
        wide = [
            ((missing, 0) if self._padded.left else (0, missing))
            if self._padded.name in dim_terms(dim)
            else (0, 0)
            for dim in spec.dims
        ]
        if spec.name.endswith("input_ids"):
            return np.pad(array, wide, constant_values=self._limits.pad_token_id)
        if np.issubdtype(array.dtype, np.floating):
            # What a mask excludes need not be 0: an encoder computes states there, too.
            return np.pad(array, wide, mode="wrap")
        return np.pad(array, wide)


def judge_decisions(results: Sequence[ValidationCaseResult]) -> list[ValidationCaseResult]:
    """Judge the cases of a quantized graph's decisions by its other generated cases.

    Rounding does not depend on what a graph decides, so where it decides rightly, its error is
    hardly larger than elsewhere.
    """
    elsewhere = [
        result for result in results if result.kind == "sweep" and not is_of_decision(result.name)
    ]
    return [
        _judge_by(elsewhere, result, measure="other inputs")
        if is_of_decision(result.name)
        else result
        for result in results
    ]


def _judge_by(
    measures: Sequence[ValidationCaseResult], case: ValidationCaseResult, *, measure: str
) -> ValidationCaseResult:
    """Judge a case of a quantized graph by others.

    Such a graph has no limit on its error that is tight on generated inputs. But other rows and
    padding make its error hardly larger: a batch may be twice as far from PyTorch as the worst of
    several rows alone. They need not be in the batch: dynamic INT8 takes its scales from all rows.

    Args:
        measures: the other cases.
        case: the case.
        measure: what they are, for the message.
    """
    outputs = []
    for output in case.outputs:
        cosines = [
            row.cosine for other in measures for row in other.outputs if row.output == output.output
        ]
        least = min(cosines, default=-1.0)
        limit = 1 - _MORE_ERROR * (1 - least) - _LEAST_SHORTFALL
        if not output.problem and output.cosine < limit:
            problem = f"cosine {output.cosine:.4f}, but at least {least:.4f} for {measure}"
            output = replace(output, cosine_limit=limit, problem=problem)  # noqa: PLW2901
        outputs.append(output)
    return replace(case, outputs=outputs)


def scan_notes(
    record: GraphRecord,
    scanned: ScanResult,
    cases: Sequence[ValidationCaseResult],
    reference: str = "PyTorch",
    *,
    quantized: bool,
) -> list[str]:
    """Return notes on what a scan could not tell, given all cases compared with the reference."""
    if scanned.reason:
        return [f"{record.file}: batches were not compared with rows alone: {scanned.reason}"]
    if not scanned.deviating or not all(case.passed for case in cases):
        return []
    total = len(scanned.deviating) + len(scanned.consistent)
    judged = (
        "are not much farther from its outputs than rows alone"
        if quantized
        else "equal its outputs, so it does the same"
    )
    return [
        f"{record.file}: {len(scanned.deviating)} of {total} batches differ from their rows alone; "
        f"the worst of those that {reference} accepts {judged}"
    ]


def _obstacle(record: GraphRecord) -> str:
    """Return the reason why rows of a graph cannot be run alone; empty if they can."""
    batch = _batch_dim(record)
    if batch is None:
        return "its first input has no dims"
    if any(is_random_input(spec.name) for spec in record.inputs):
        return "a row alone would get other random numbers"
    for spec in record.inputs:
        if spec.name != "use_cache_branch" and (not spec.dims or spec.dims[0] != batch):
            return f"the first dim of {spec.name} is not the batch"
    return ""


def _batch_dim(record: GraphRecord) -> int | str | None:
    """Return the first dim of the first input; None if there is none."""
    dims = record.inputs[0].dims if record.inputs else ()
    return dims[0] if dims else None


def _check_rows(output: Array, spec: TensorSpec, rows: int) -> None:
    if output.ndim != len(spec.dims) or len(output) != rows:
        raise InputError(f"{spec}: found shape {output.shape} for a batch of {rows}.")


def _bounds(profiles: Sequence[Profile], dim: str) -> set[int]:
    """Return the sizes of a dim in profiles: minimum, optimum and maximum."""
    ranges = [profile.dims[dim] for profile in profiles if dim in profile.dims]
    return {size for dim_range in ranges for size in (dim_range.min, dim_range.opt, dim_range.max)}


def _with_powers_of_two(every: int, largest: int) -> set[int]:
    """Return the sizes up to `every`, and powers of two with their neighbours up to `largest`."""
    powers = {2**k + step for k in range(largest.bit_length() + 1) for step in (-1, 0, 1)}
    return {size for size in {*range(1, every + 1), *powers} if 1 <= size <= largest}


def _positions(size: int, count: int) -> Array:
    """Return up to `count` evenly spread positions, the first and the last included."""
    return np.linspace(0, size - 1, min(size, count)).round().astype(int)
