"""The report of bench, `reports/benchmark.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.accuracy import Interval, LabelMetrics
from enginery.core.artifact.manifest import Count
from enginery.core.table import NOTHING, Row, Table
from enginery.reports.base import ProviderRecord, Report, named_versions
from enginery.reports.placement import PlacementRecord, fallback_rows, provider_rows
from enginery.reports.validation import ErrorUse
from enginery.runtime.onnxruntime.session import Advice
from enginery.runtime.providers.known import short_name

_TIMES = ("median", "interval", "mean", "p90", "p99", "first", "inputs/s", "tokens/s", "runs")
"""Columns of a measurement."""
_MAX_NAMES = 8
"""Number of copy nodes that are listed by name."""


@dataclass(frozen=True)
class Latency:
    """Latency of one contender at one shape, in milliseconds."""

    runs: Count
    rounds: Count
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    """None for fewer than 100 runs."""
    median_ms: float
    """Median of the medians of the rounds."""
    interval_ms: Interval | None
    """Confidence interval of `median_ms`; None if there were too few rounds."""

    @property
    def half_width(self) -> float:
        """Half the width of the interval divided by the median; infinite without an interval."""
        if self.interval_ms is None:
            return math.inf
        return (self.interval_ms[1] - self.interval_ms[0]) / 2 / self.median_ms


@dataclass(frozen=True)
class Comparison:
    """Speedup of one contender over another at one shape, from the rounds that both ran."""

    contender: str
    base: str
    speedup: float
    """Latency of the base divided by that of the contender; above 1, the contender is faster."""
    interval: Interval | None
    """Confidence interval of the speedup; None if there were too few rounds."""
    different: bool
    """True if the interval lies on one side of 1, beyond the smallest relevant difference."""
    words: str

    def speedup_of(self, contender: str) -> tuple[float, Interval | None]:
        """Return the speedup of either contender over the other one, with its interval."""
        if contender == self.contender:
            return self.speedup, self.interval
        inverse = (1 / self.interval[1], 1 / self.interval[0]) if self.interval else None
        return 1 / self.speedup, inverse


def is_clear_ratio(ratio: float, interval: Interval | None) -> bool:
    """Return True if a ratio's interval is known and no wider than the ratio itself.

    >>> is_clear_ratio(1.9, (1.7, 2.1)), is_clear_ratio(1.9, (0.9, 3.0)), is_clear_ratio(1.9, None)
    (True, False, False)
    """
    return interval is not None and interval[1] - interval[0] <= ratio


def format_ratio(ratio: float) -> str:
    """Format a ratio with two decimals, below 0.1 with two significant digits.

    >>> format_ratio(1.869), format_ratio(22.3), format_ratio(0.0418)
    ('1.87x', '22.30x', '0.042x')
    """
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def describe_ratio(ratio: float, interval: Interval | None) -> str:
    """Return a ratio, or its interval if that is wider than the ratio itself.

    >>> describe_ratio(1.9, (1.7, 2.1)), describe_ratio(1.9, (0.9, 3.0)), describe_ratio(1.9, None)
    ('1.90x', '0.90x to 3.00x', 'unclear')
    """
    if interval is None:
        return "unclear"
    low, high = map(format_ratio, interval)
    return format_ratio(ratio) if is_clear_ratio(ratio, interval) else f"{low} to {high}"


@with_config(ConfigDict(extra="allow"))
class ContenderFacts(TypedDict, total=False):
    """Facts about the session of a contender; some contenders have additional members."""

    placement: PlacementRecord
    no_placement: str
    """Reason why the placement is unknown."""
    provider_options: dict[str, dict[str, str]]
    profiles: list[str]
    convolutions: Count | None
    device: str


@dataclass(frozen=True)
class ContenderRecord:
    """One contender of the benchmark: a target in one backend."""

    name: str
    kind: str
    label: str
    subject: str
    providers: list[ProviderRecord]
    tools: dict[str, str]
    start_seconds: float
    """Start of the process, before loading: Python and the imports of the benchmark itself."""
    load_seconds: float
    """Loading of the model, including the imports that it needs."""
    peak_rss_bytes: Count
    """Peak host memory of its process, over all shapes."""
    device_memory_bytes: Count | None
    """Largest GPU memory of its process measured after a round; None if unknown."""
    device_memory: str
    """Reason why the GPU memory is unknown; empty otherwise."""
    facts: ContenderFacts
    notes: list[str]

    @property
    def is_enginery(self) -> bool:
        """True for enginery's own runner."""
        return self.kind == "enginery"

    @property
    def placement(self) -> PlacementRecord | None:
        """Providers of the nodes; None if unknown."""
        return self.facts.get("placement")


class CopyTimes(TypedDict):
    """Median times of the parts of a run on a GPU, in milliseconds, and the share of copies."""

    in_ms: float
    device_ms: float
    out_ms: float
    share: float


@dataclass(frozen=True)
class Measurement:
    """One contender at one shape."""

    contender: str
    first_ms: float
    """Time of the very first run at the shape."""
    warm_up_runs: Count
    settled: bool
    """True if the warm-up ended because the times were stable."""
    latency: Latency
    inputs_per_second: float
    tokens_per_second: float | None
    """Including padding; None if the inputs are not tokens."""
    joules_per_run: float | None = None
    copies: CopyTimes | None = None
    notes: list[str] = field(default_factory=list)
    """Peculiarities of this shape: it ran without a CUDA graph."""

    def row(self) -> Row:
        """Return the row of the table of latencies."""
        times = self.latency
        return {
            "backend": self.contender,
            "median": _ms(times.median_ms),
            "interval": _interval(times),
            "mean": _ms(times.mean_ms),
            "p90": _ms(times.p90_ms),
            "p99": _ms(times.p99_ms) if times.p99_ms is not None else NOTHING,
            "first": _ms(self.first_ms),
            "inputs/s": f"{self.inputs_per_second:,.1f}",
            "tokens/s": f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else NOTHING,
            "runs": str(times.runs),
        }


@dataclass(frozen=True)
class BenchCase:
    """All contenders at one shape."""

    sizes: dict[str, Count]
    rows: Count
    tokens: Count | None
    measurements: list[Measurement]
    comparisons: list[Comparison]
    problems: dict[str, str]
    """Contenders that could not run this shape -> reason."""
    unknown: dict[str, str]
    """Metrics that the GPU did not report -> reason."""
    rounds_ended: str

    @property
    def dims(self) -> str:
        """Names of the dims, as the title of a column: `batch×sequence`."""
        return "×".join(self.sizes) or "shape"

    @property
    def shape(self) -> str:
        """`1×16`."""
        return "×".join(str(size) for size in self.sizes.values()) or "fixed"


@dataclass(frozen=True)
class ImageTimes:
    """Times of one image, by contender."""

    file: str
    shape: list[Count]
    """Shape of the graph's input."""
    first_ms: dict[str, float]
    """First run, in the first pass over the folder; a new shape may take longer."""
    median_ms: dict[str, float]
    """Median over the later passes."""


@dataclass(frozen=True)
class ImagesResult:
    """A folder of images, each run alone at its own size."""

    folder: str
    images: list[ImageTimes]
    shapes: Count
    """Number of distinct shapes."""
    prepare_ms: float
    """Median time to read and scale an image; not part of the other times."""
    first_total_ms: dict[str, float]
    totals: dict[str, Latency]
    """Times of the later passes, each over all images."""
    comparisons: list[Comparison]
    passes: Count
    layout: Literal["first", "last"] = "first"
    """Position of the channels in the shapes: before height and width, or after them."""
    problems: dict[str, str] = field(default_factory=dict)
    """Contenders that could not run the images -> reason."""

    def rows(self) -> list[Row]:
        """Return a row for each image."""
        return [
            {
                "image": image.file,
                "input": "×".join(str(size) for size in image.shape),
                **{f"{name}, first": _ms(image.first_ms[name]) for name in self.totals},
                **{name: _ms(image.median_ms[name]) for name in self.totals},
            }
            for image in self.images
        ]

    def total_rows(self) -> list[Row]:
        """Return a row for each backend, with the times over all images."""
        return [
            {
                "backend": name,
                "images": str(len(self.images)),
                "shapes": str(self.shapes),
                "first pass": _ms(self.first_total_ms[name]),
                "later passes": _ms(total.median_ms),
                "per image": _ms(total.median_ms / len(self.images)),
                "passes": str(self.passes),
            }
            for name, total in self.totals.items()
        ]


@dataclass(frozen=True)
class Padding:
    """Padding of the texts of a file at one batch size."""

    batch: Count
    in_order: float
    """Share of tokens that are padding, with texts in the order of the file."""
    sorted: float
    """The same with texts sorted by length."""


@with_config(ConfigDict(extra="allow"))
class GpuName(TypedDict):
    """A GPU of the machine; see `runtime.providers.gpus.Gpu` for the other members."""

    name: str


@with_config(ConfigDict(extra="allow"))
class Machine(TypedDict):
    """The machine of the benchmark; values that could not be read are empty or 0."""

    cpu: str
    physical_cores: Count
    usable_cpus: Count
    cpu_flags: list[str]
    load: float | None
    """Load average over the last minute, before the benchmark."""
    memory_bytes: Count
    system: str
    python: str
    gpus: list[GpuName]
    no_gpu: str
    """Reason why there is no GPU."""
    driver: str
    tools: dict[str, str]


@with_config(ConfigDict(extra="allow"))
class SubjectRecord(TypedDict):
    """The measured artifact or graph."""

    name: str
    path: str
    graph: str
    graph_sha256: str
    source: str
    task: str
    precision: str
    target: str
    size_bytes: NotRequired[Count]
    """Size of the graph with its weights. Missing for an .onnx file, like the next members."""
    verdict: NotRequired[str]
    """Of its validation: `passed`, `failed` or `none`."""
    error: NotRequired[ErrorUse]
    """Missing if it was not validated."""


@dataclass(frozen=True, repr=False)
class BenchResult(Report):
    """The content of `reports/benchmark.json`."""

    FILE = "benchmark.json"

    subjects: list[SubjectRecord]
    machine: Machine
    options: dict[str, Any]
    fields: dict[str, str]
    """Fields of the fingerprint, which tell whether the result still holds."""
    contenders: list[ContenderRecord]
    left_out: dict[str, str]
    """Contenders of `auto` that could not run -> reason."""
    cases: list[BenchCase]
    images: ImagesResult | None
    padding: list[Padding]
    advice: list[Advice]
    unknown: dict[str, str]
    """Metrics that could not be measured on this machine -> reason."""
    notes: list[str]
    finished: str
    """Time in UTC, ISO 8601."""
    seconds: float
    labels: LabelMetrics | None = None
    """Accuracy of each artifact; None without labels."""
    schema_version: Literal[1] = field(default=1)

    @property
    def summary(self) -> str:
        """What was measured, and how the first pair compares, in one line."""
        shapes = f"{len(self.cases)} shape{'s' * (len(self.cases) != 1)}"
        names = ", ".join(record.name for record in self.contenders)
        return "; ".join([f"{names} at {shapes}", *self._compared_lines()[:1]])

    def contender(self, name: str) -> ContenderRecord:
        """Return the record of one contender; raise KeyError if there is none."""
        return {record.name: record for record in self.contenders}[name]

    def rows(self) -> list[Table | str]:
        """Return the tables and, below them, the lines of text."""
        return [*self.tables(), *self.lines()]

    def summary_rows(self) -> list[Table | str]:
        """Return what a reader decides by, in a line for each shape and for each pair."""
        images = self.images.total_rows() if self.images else []
        accuracy = self.labels.rows() if self.labels else []
        tables = (
            Table("Median latency", self._median_rows()),
            Table("Accuracy", accuracy),
            Table("All images", images),
        )
        texts = self._compared_lines()
        problems = {name: why for case in self.cases for name, why in case.problems.items()}
        texts += [f"{name} failed: {why.rstrip('.')}" for name, why in problems.items()]
        texts += [f"{advice.finding}: {advice.remedy}" for advice in self.advice]
        texts += [f"{name} was left out: {why.rstrip('.')}" for name, why in self.left_out.items()]
        texts += [f"note: {note}" for note in self.notes]
        return [*(table for table in tables if table.rows), *texts]

    def tables(self) -> list[Table]:
        """Return the tables that have rows."""
        placements = self._placements()
        tables = (
            Table("Latency", self.latency_rows()),
            Table("Accuracy", self.labels.rows() if self.labels else []),
            Table("Comparison", self.comparison_rows()),
            Table("Images", self.images.rows() if self.images else []),
            Table("All images", self.images.total_rows() if self.images else []),
            Table("Backends", self.backend_rows()),
            Table(
                "Placement",
                [
                    {"backend": name, **row}
                    for name, placement in placements
                    for row in provider_rows(placement)
                ],
            ),
            Table(
                "Compute on the CPU",
                [
                    {"backend": name, **row}
                    for name, placement in placements
                    for row in fallback_rows(placement)
                ],
            ),
            Table("Copies between devices", self._copy_rows()),
            Table("Padding", self._padding_rows()),
            Table("Advice", self._advice_rows()),
            Table(
                "Left out",
                [{"backend": name, "reason": why} for name, why in self.left_out.items()],
            ),
        )
        return [table for table in tables if table.rows]

    def lines(self) -> list[str]:
        """Return the machine, the notes and what was not measured, as lines of text."""
        machine = self.machine
        gpus = gpu_names(machine) or f"no GPU: {machine['no_gpu']}"
        texts = [f"on {machine['cpu']}, {machine['physical_cores']} cores; {gpus.rstrip('.')}"]
        for reason in dict.fromkeys(self.unknown.values()):
            names = ", ".join(name for name, why in self.unknown.items() if why == reason)
            texts.append(f"not measured: {names}: {reason.rstrip('.')}")
        for record in self.contenders:
            if problem := record.facts.get("no_placement"):
                texts.append(f"the placement of {record.name} is not known: {problem.rstrip('.')}")
            texts += [f"{record.name}: {note}" for note in record.notes]
        shapes_by_note: dict[str, list[str]] = {}
        for case in self.cases:
            for measurement in case.measurements:
                for note in measurement.notes:
                    text = f"{measurement.contender} {note}"
                    shapes_by_note.setdefault(text, []).append(case.shape)
        texts += [f"{note}: at {', '.join(shapes)}" for note, shapes in shapes_by_note.items()]
        if self.images:
            texts += [f"{name} did not run: {why}" for name, why in self.images.problems.items()]
        return texts + [f"note: {note}" for note in self.notes]

    def _median_rows(self) -> list[Row]:
        """Return a row for each shape, with a column for each backend."""
        failed = [name for case in self.cases for name in case.problems]
        names = [*(record.name for record in self.contenders), *failed]
        rows = []
        for case in self.cases:
            medians = dict.fromkeys(names, NOTHING) | dict.fromkeys(case.problems, "failed")
            for measurement in case.measurements:
                medians[measurement.contender] = _ms(measurement.latency.median_ms)
            rows.append({case.dims: case.shape, **medians})
        return rows

    def _compared_lines(self) -> list[str]:
        """Return a line for each pair, with its clear ratios over all shapes."""
        pairs: dict[tuple[str, str], list[Comparison]] = {}
        of_images = self.images.comparisons if self.images else []
        for c in (*(c for case in self.cases for c in case.comparisons), *of_images):
            pairs.setdefault((c.contender, c.base), []).append(c)
        busy = "; on a busy machine" if is_overloaded(self.machine) else ""
        lines = []
        for (contender, base), comparisons in pairs.items():
            clear = [c.speedup for c in comparisons if is_clear_ratio(c.speedup, c.interval)]
            if not clear:
                lines.append(f"{contender} and {base}: no clear ratio{busy}")
                continue
            ends = " to ".join(dict.fromkeys(format_ratio(r) for r in (min(clear), max(clear))))
            unclear = len(comparisons) - len(clear)
            rest = f"; unclear at {unclear} of {len(comparisons)} shapes" if unclear else ""
            lines.append(f"{contender}: {ends} as fast as {base}{rest}{busy}")
        return lines

    def latency_rows(self) -> list[Row]:
        """Return a row for each backend at each shape."""
        rows = []
        accuracies = self._accuracy_by_backend()
        for case in self.cases:
            shape = {case.dims: case.shape}
            rows += [{**shape, **measurement.row()} for measurement in case.measurements]
            for name, problem in case.problems.items():
                blank = dict.fromkeys(_TIMES, NOTHING)
                rows.append({**shape, "backend": name, **blank, "median": problem})
        if accuracies:
            rows = [{**row, "accuracy": accuracies.get(row["backend"], NOTHING)} for row in rows]
        return rows

    def comparison_rows(self, reference: str = "") -> list[Row]:
        """Return a row for each pair at each shape.

        Args:
            reference: a backend, for the pairs with it whose ratios are clear; empty for all pairs.
        """
        shaped = [(case.shape, c) for case in self.cases for c in case.comparisons]
        shaped += [("all", c) for c in self.images.comparisons] if self.images else []
        if reference:
            shaped = [
                (shape, c)
                for shape, c in shaped
                if reference in (c.contender, c.base) and is_clear_ratio(c.speedup, c.interval)
            ]
        head = self.cases[0].dims if self.cases else "images"
        busy = "; on a busy machine" if is_overloaded(self.machine) else ""
        return [
            {head: shape, "backend": c.contender, "compared with": c.base, "result": c.words + busy}
            for shape, c in shaped
        ]

    def backend_rows(self) -> list[Row]:
        """Return a row for each backend, with its providers, load time, memory and versions."""
        return [
            {
                "backend": record.name,
                "runs": record.label,
                "on": ", ".join(short_name(p["name"]) for p in record.providers)
                or str(record.facts.get("device", NOTHING)),
                "reason": record.providers[0]["reason"] if record.providers else NOTHING,
                "load": f"{record.load_seconds:.1f} s",
                "peak memory": f"{record.peak_rss_bytes / 1e6:,.0f} MB",
                "peak GPU memory": f"{record.device_memory_bytes / 1e6:,.0f} MB"
                if record.device_memory_bytes is not None
                else NOTHING,
                "versions": named_versions(record.tools),
            }
            for record in self.contenders
        ]

    def _copy_rows(self) -> list[Row]:
        """Return a row for each backend with Memcpy nodes."""
        return [
            {
                "backend": name,
                "copies per run": str(len(copies)),
                "nodes": ", ".join(copies[:_MAX_NAMES])
                + (f" and {len(copies) - _MAX_NAMES} more" if len(copies) > _MAX_NAMES else ""),
            }
            for name, placed in self._placements()
            if (copies := placed["copies"])
        ]

    def _padding_rows(self) -> list[Row]:
        """Return a row for each batch size."""
        return [
            {
                "batch": str(padding.batch),
                "padding in file order": f"{padding.in_order:.0%}",
                "padding sorted by length": f"{padding.sorted:.0%}",
            }
            for padding in self.padding
        ]

    def _advice_rows(self) -> list[Row]:
        """Return a row for each advice."""
        return [
            {"finding": advice.finding, "evidence": advice.evidence, "do": advice.remedy}
            for advice in self.advice
        ]

    def _accuracy_by_backend(self) -> dict[str, str]:
        """Return the accuracy of each artifact in enginery's runner; empty without labels.

        The other backends were only timed.
        """
        if self.labels is None:
            return {}
        by_subject = {accuracy.name: accuracy.describe() for accuracy in self.labels.accuracies}
        return {
            record.name: by_subject[record.subject]
            for record in self.contenders
            if record.is_enginery and record.subject in by_subject
        }

    def _placements(self) -> list[tuple[str, PlacementRecord]]:
        """Return (backend, placement) for the backends with a known placement."""
        return [(record.name, record.placement) for record in self.contenders if record.placement]


def is_overloaded(machine: Mapping[str, Any]) -> bool:
    """Return True if the load before the benchmark was higher than the number of CPUs."""
    load = machine["load"]
    return load is not None and bool(load > machine["usable_cpus"])


def gpu_names(machine: Machine) -> str:
    """Return the names of the machine's GPUs; empty if there are none."""
    return ", ".join(gpu["name"] for gpu in machine["gpus"])


def _ms(value: float) -> str:
    """Format a time with three significant digits: in ms, or in s from a second on."""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f} ms"


def _interval(times: Latency) -> str:
    if times.interval_ms is None:
        return f"too few rounds ({times.rounds})"
    low, high = times.interval_ms
    return f"{_ms(low).removesuffix(' ms').removesuffix(' s')} to {_ms(high)}"
