"""The report of bench, `reports/benchmark.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.accuracy import Interval, LabelMetrics
from enginery.core.artifact.manifest import Count
from enginery.reports.base import ProviderRecord, Report
from enginery.reports.validation import ErrorUse
from enginery.runtime.onnxruntime.session import Advice


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


class PlacedProvider(TypedDict):
    """The part of a graph that one provider runs."""

    name: str
    nodes: Count
    for_shapes: Count
    multiply_adds: Count
    op_types: dict[str, Count]


class FallbackNode(TypedDict):
    """A compute node that runs on the CPU although another provider was requested."""

    name: str
    op_type: str
    multiply_adds: Count


class PlacementRecord(TypedDict):
    """Providers of the nodes of a graph, from `Placement.as_json`."""

    providers: list[PlacedProvider]
    copies: list[str]
    multiply_adds_counted: bool
    fallen: list[FallbackNode]


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
    def shape(self) -> str:
        """`batch=1, sequence=16`."""
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items())


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


@dataclass(frozen=True)
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

    def contender(self, name: str) -> ContenderRecord:
        """Return the record of one contender; raise KeyError if there is none."""
        return {record.name: record for record in self.contenders}[name]


def gpu_names(machine: Machine) -> str:
    """Return the names of the machine's GPUs; empty if there are none."""
    return ", ".join(gpu["name"] for gpu in machine["gpus"])
