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
from enginery.core.table import NOTHING, Row, Table, format_number
from enginery.reports.base import ProviderRecord, Report, named_versions
from enginery.reports.placement import PlacementRecord, fallback_rows, provider_rows
from enginery.reports.validation import ErrorUse
from enginery.runtime.providers.known import short_name

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

    def words_of(self, contender: str) -> str:
        """Return the speedup of either contender over the other one, in words."""
        ratio, interval = self.speedup_of(contender)
        if contender == self.contender or interval is None:
            return self.words
        return describe_ratio(ratio, interval, different=self.different)


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


def describe_ratio(ratio: float, interval: Interval, *, different: bool) -> str:
    """Return a speedup with its interval; without the ratio if the interval is wider than it.

    >>> describe_ratio(1.9, (1.7, 2.1), different=True)
    '1.90x as fast (1.70x to 2.10x)'
    >>> describe_ratio(1.9, (0.9, 3.0), different=False)
    'unclear (0.90x to 3.00x)'
    """
    if is_clear_ratio(ratio, interval):
        words = f"{format_ratio(ratio)} as fast" if different else "no difference seen"
    elif different:
        words = f"{'faster' if interval[0] > 1 else 'slower'}, unclear by how much"
    else:
        words = "unclear"
    return f"{words} ({format_ratio(interval[0])} to {format_ratio(interval[1])})"


@dataclass(frozen=True)
class Advice:
    """A ratio that speaks against a choice, and what to do about it."""

    finding: str
    evidence: str
    remedy: str


@with_config(ConfigDict(extra="allow"))
class ContenderFacts(TypedDict, total=False):
    """Facts about the session of a contender; some contenders have additional members."""

    placement: PlacementRecord
    no_placement: str
    """Reason why the placement is unknown."""
    provider_options: dict[str, dict[str, str]]
    profiles: list[str]
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
    def device(self) -> str:
        """Short names of the providers, or PyTorch's device."""
        providers = ", ".join(short_name(provider["name"]) for provider in self.providers)
        return providers or str(self.facts.get("device", "cpu"))

    @property
    def placement(self) -> PlacementRecord | None:
        """Providers of the nodes; None if unknown."""
        return self.facts.get("placement")


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

    def comparisons(self) -> list[tuple[str, Comparison]]:
        """Return (shape, comparison) of every pair at every shape, such as `1×16`."""
        compared = [(case.shape, c) for case in self.cases for c in case.comparisons]
        of_images = self.images.comparisons if self.images else []
        return compared + [("all images", c) for c in of_images]

    def rows(self) -> list[Table | str]:
        """Return the tables and, below them, the lines of text."""
        return [*self.tables(), *self.lines()]

    def summary_rows(self) -> list[Table | str]:
        """Return what a reader decides by, in a line for each shape and for each pair."""
        tables = [Table("Median latency", self._median_rows()), *self._totals()]
        problems = {name: why for case in self.cases for name, why in case.problems.items()}
        texts = [
            *self._compared_lines(),
            *(f"{name} failed: {why.rstrip('.')}" for name, why in problems.items()),
            *(f"{advice.finding}: {advice.remedy}" for advice in self.advice),
            *(f"{name} was left out: {why.rstrip('.')}" for name, why in self.left_out.items()),
            *(f"note: {note}" for note in self.notes),
        ]
        return [*(table for table in tables if table.rows), *texts]

    def tables(self) -> list[Table]:
        """Return all tables that have rows."""
        comparison = Table("Comparison", self.comparison_rows())
        tables = [
            *self.speed_tables(),
            comparison,
            *self._totals(),
            *self.environment_tables(),
        ]
        return [table for table in tables if table.rows]

    def _totals(self) -> list[Table]:
        return [
            Table("Accuracy", self.labels.rows() if self.labels else []),
            Table("All images", self.images.total_rows() if self.images else []),
        ]

    def speed_tables(self) -> list[Table]:
        """Return the tables of what was measured at each shape, of the padding and the advice."""
        advice = [
            {"finding": advice.finding, "evidence": advice.evidence, "do": advice.remedy}
            for advice in self.advice
        ]
        padding = [
            {
                "batch": str(padding.batch),
                "padding in file order": f"{padding.in_order:.0%}",
                "padding sorted by length": f"{padding.sorted:.0%}",
            }
            for padding in self.padding
        ]
        return [
            Table("Latency", self.latency_rows()),
            Table("Images", self.images.rows() if self.images else []),
            Table("Padding", padding),
            Table("Advice", advice),
        ]

    def environment_tables(self) -> list[Table]:
        """Return the tables of the backends, and of what runs where in each."""
        placements = [(r.name, r.placement) for r in self.contenders if r.placement]
        providers = [
            {"backend": name, **row} for name, placed in placements for row in provider_rows(placed)
        ]
        fallbacks = [
            {"backend": name, **row} for name, placed in placements for row in fallback_rows(placed)
        ]
        copies = [
            {
                "backend": name,
                "copies per run": str(len(nodes)),
                "nodes": ", ".join(nodes[:_MAX_NAMES])
                + (f" and {len(nodes) - _MAX_NAMES} more" if len(nodes) > _MAX_NAMES else ""),
            }
            for name, placed in placements
            if (nodes := placed["copies"])
        ]
        left_out = [{"backend": name, "reason": why} for name, why in self.left_out.items()]
        return [
            Table("Backends", self.backend_rows()),
            Table("Placement", providers),
            Table("Compute on the CPU", fallbacks),
            Table("Copies between devices", copies),
            Table("Left out", left_out),
        ]

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
        for _, c in self.comparisons():
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
        """Return a row for each backend at each shape.

        Of the backends, the accuracy is that of enginery's runner; the others were only timed.
        """
        accuracies = {a.name: a.describe() for a in self.labels.accuracies} if self.labels else {}
        subjects = {record.name: record.subject for record in self.contenders if record.is_enginery}
        has_energy = any(m.joules_per_run for case in self.cases for m in case.measurements)
        rows = []
        for case in self.cases:
            for measurement in case.measurements:
                row = {case.dims: case.shape, **measurement.row()}
                if has_energy:
                    row["J/run"] = format_number(measurement.joules_per_run, ".3g")
                if accuracies:
                    subject = subjects.get(measurement.contender, "")
                    row["accuracy"] = accuracies.get(subject, NOTHING)
                rows.append(row)
            for name, problem in case.problems.items():
                rows.append({case.dims: case.shape, "backend": name, "median": problem})
        columns = list(rows[0]) if rows else []
        return [{column: row.get(column, NOTHING) for column in columns} for row in rows]

    def comparison_rows(self) -> list[Row]:
        """Return a row for each pair at each shape."""
        head = self.cases[0].dims if self.cases else "images"
        busy = "; on a busy machine" if is_overloaded(self.machine) else ""
        return [
            {head: shape, "backend": c.contender, "compared with": c.base, "result": c.words + busy}
            for shape, c in self.comparisons()
        ]

    def backend_rows(self) -> list[Row]:
        """Return a row for each backend, with its providers, load time, memory and versions."""
        return [
            {
                "backend": record.name,
                "runs": record.label,
                "on": record.device,
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
