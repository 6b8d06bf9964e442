"""The reports under `reports/`: what stages write, and what the card and the page read.

>>> report = ValidationReport.read(Path("minilm/reports/validation.json"))
>>> report.summary
'23 outputs agree with PyTorch; largest error 1.4e-06 of 1.1e-05 allowed (…)'

A report may come with a stranger's artifact. Its values are checked against the types below as it
is read, strictly: `"1"` is no number. Members that nobody here knows are ignored, because a later
version may write more. JSON has neither NaN nor infinities; both are written as null, and null is
read as NaN where a number is expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import REPORTS, Count
from enginery.core.errors import ArtifactError
from enginery.core.json_file import json_bytes, parse_json, read_document
from enginery.core.paths import resolve_inside


def _null_is_nan(value: Any) -> Any:
    return math.nan if value is None else value


Number = Annotated[float, BeforeValidator(_null_is_nan)]
"""A float that may be NaN or infinite: what could not be measured, or has no limit."""
Interval = tuple[float, float]
"""Low and high end."""


@dataclass(frozen=True)
class Report:
    """One JSON file below `reports/`."""

    FILE: ClassVar[str]
    """Its name, without `reports/`."""

    def to_json(self) -> bytes:
        """Return the file's content, with null for NaN and infinities."""
        return json_bytes(asdict(self))

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Return what `to_json` wrote.

        Raises:
            ValueError: it is no JSON, a member is missing, or one has another type; the message
                names the member, what was found and what is expected.
        """
        parse_json(content)  # raises for what is nested too deeply
        try:
            return TypeAdapter(cls).validate_json(content, strict=True)
        except ValidationError as error:
            raise ValueError(_first_problem(error)) from error

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a report.

        Raises:
            ArtifactError: the file cannot be read, or holds something else; the message names it,
                the member, what was found and what is expected.
        """
        try:
            return cls.from_json(read_document(file))
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError(
                f"{file} cannot be read: {problem}.", do="Make it again, or remove it."
            ) from error

    @classmethod
    def of(cls, artifact: Artifact) -> Self | None:
        """Read the report that an artifact's manifest records; None where it records none.

        Raises:
            ArtifactError: as `read` does.
        """
        file = artifact.report(cls.FILE)
        return cls.read(file) if file else None

    @classmethod
    def below(cls, path: Path) -> Self | None:
        """Read the report of the artifact at `path`; None where it has none.

        Raises:
            ArtifactError: the report leads out of the artifact, or `read` cannot read it.
        """
        file = resolve_inside(path, f"{REPORTS}/{cls.FILE}", what=str(path))
        return cls.read(file) if file.is_file() else None


def _first_problem(error: ValidationError) -> str:
    """`cases.0.graph: found 3, expected a valid string`."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "the document"
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "json_invalid":
        return f"it is not valid JSON: {problem['msg'].partition(': ')[2]}"
    found = json.dumps(problem["input"], default=str)
    found = found if len(found) <= 60 else f"{found[:60]}…"
    return f"{where}: found {found}, expected {problem['msg'].removeprefix('Input should be ')}"


# What several reports have


@with_config(ConfigDict(extra="allow"))
class ProviderRecord(TypedDict):
    """An execution provider, and why it was used."""

    name: str
    reason: str
    options: NotRequired[dict[str, Any]]


# validation.json


@dataclass(frozen=True)
class OutputMetrics:
    """Comparison of one output of one case with PyTorch. Values that were not measured are NaN."""

    output: str
    shape: tuple[Count, ...]
    max_abs: Number
    p99_abs: Number
    max_rel: Number
    """Largest absolute error divided by the largest magnitude of the reference."""
    cosine: Number
    argmax_agreement: Number
    """Share of rows with the same argmax. Ties within twice the limit count as agreement. 1.0 for
    outputs that are not logits."""
    nonfinite: Count
    """Number of elements that are NaN or infinite on one side only."""
    noise_floor: Number
    """PyTorch's own largest error at this precision on the same inputs."""
    limit: Number
    """Largest absolute error that passes; infinite for no limit, which is NaN once read."""
    cosine_limit: Number
    """Smallest cosine that passes; -1 if the output is no larger than the noise, so that its
    direction means nothing."""
    problem: str
    """Reason of the failure; empty if it passes."""

    @property
    def passed(self) -> bool:
        return not self.problem

    @property
    def limit_ratio(self) -> float:
        """Error as a multiple of its limit, for ranking; failures rank above all that passes.

        Without a limit on the absolute error, 1 - cosine is used.
        """
        if not math.isfinite(self.max_abs) or self.nonfinite:
            return math.inf
        if math.isfinite(self.limit):
            error, limit = self.max_abs, self.limit
        else:
            error, limit = 1.0 - self.cosine, 1.0 - self.cosine_limit
        ratio = error / limit if limit else math.inf
        ratio = 0.0 if error == 0 else ratio
        return 1.0 + ratio if self.problem else ratio


@dataclass(frozen=True)
class ValidationCaseResult:
    """Result of one case on one graph."""

    graph: str
    name: str
    kind: str
    shapes: dict[str, list[Count]]
    """Input name -> shape."""
    outputs: list[OutputMetrics]
    problem: str
    """Reason why nothing could be compared; empty otherwise."""
    skipped: str = ""
    """Reason why the case was skipped: PyTorch rejects it, or it fits no engine."""

    @property
    def passed(self) -> bool:
        return not self.problem and all(output.passed for output in self.outputs)


@dataclass(frozen=True)
class EmbeddingMetrics:
    """Comparison of pooled sentence embeddings with PyTorch's."""

    sentences: Count
    min_cosine: Number
    mean_cosine: Number
    neighbour_agreement: Number
    """Share of sentences whose nearest neighbour is the same one, or ties with it."""
    problem: str = ""
    """Reason of the failure; empty if they pass."""


@dataclass(frozen=True)
class OverallMetrics:
    """Comparison of one output of a quantized graph over all real inputs together."""

    graph: str
    output: str
    inputs: Count
    """Number of rows: sentences or images."""
    cosine: Number
    cosine_limit: Number
    problem: str = ""
    """Reason of the failure; empty if it passes."""


@dataclass(frozen=True)
class ValidationReport(Report):
    """The content of `reports/validation.json`."""

    FILE = "validation.json"

    passed: bool
    summary: str
    precision: str
    providers: list[ProviderRecord]
    reference: dict[str, str]
    """The PyTorch model: `id`, `revision`, `sha256`, and `as`, how it was run."""
    tolerance: dict[str, Any]
    cases: list[ValidationCaseResult]
    embeddings: EmbeddingMetrics | None
    notes: list[str]
    tools: dict[str, str]
    seconds: float
    overall: list[OverallMetrics] = field(default_factory=list)
    """For a quantized artifact that is checked against its own budget."""
    schema_version: Count = field(default=1)

    def worst(self) -> tuple[ValidationCaseResult, OutputMetrics] | None:
        """Return the case and output with the largest error in units of its limit."""
        pairs = [(case, output) for case in self.cases for output in case.outputs]
        return max(pairs, key=lambda pair: pair[1].limit_ratio, default=None)


# quantization.json


@dataclass(frozen=True)
class AccuracyMetrics:
    """Accuracy of one graph relative to a reference, on held-out rows."""

    rows: Count
    cosine: float
    """Mean over rows; with several outputs, the lowest of their means."""
    worst_cosine: float
    """Lowest cosine of any row."""
    neighbour_agreement: float | None
    """Share of embeddings whose nearest neighbour is the same; None for other models."""
    argmax_agreement: float | None
    """Share of positions with the same argmax; None for embeddings."""
    label_accuracy: float | None
    """Share of rows whose argmax is the correct label; None without labels."""


@dataclass(frozen=True)
class MixAccuracy(AccuracyMetrics):
    """The accuracy of one mix of quantized layers and others."""

    left_out: Count
    """How many layers are not quantized."""
    share: float
    """Of the multiply-adds that is quantized."""


@dataclass(frozen=True)
class LayerCounts:
    """Layers that could be quantized, and those that were."""

    quantized: Count
    all: Count


@dataclass(frozen=True)
class CalibrationRecord:
    """What ranges were measured on, and how."""

    inputs: str
    kind: str
    method: str


@dataclass(frozen=True)
class MultiplyAdds:
    """The work of the graph on one input, and the shares of it that are quantized."""

    counted: str
    """What counts, in words."""
    positions: Count
    all: Count
    attention: Count
    share: float
    share_with_attention: float


@dataclass(frozen=True)
class SearchRecord:
    """How the mix was chosen."""

    budget: str
    about: str
    """`cosine`, `agreement` or `accuracy`."""
    reference: float
    allowed: float
    simulated: AccuracyMetrics
    effects: dict[str, Number]
    """By layer: what quantizing it alone costs."""
    curve: list[MixAccuracy]
    """Measured mixes, from the smallest share to the largest."""


@dataclass(frozen=True)
class EngineTrial:
    """Results of one trial engine; the engine itself is discarded."""

    capability: str
    tensorrt: str
    profiles: tuple[str, ...]
    layers: dict[str, Count]
    """Kind and precision, such as `gemm int8` -> number of engine layers."""
    quantized_layers: Count
    """Number of quantized layers that the engine multiplies in INT8 or FP8."""
    not_quantized: tuple[str, ...]
    """Quantized layers that run in another precision, or whose kernel the engine does not name."""
    fused_attentions: Count
    plan_bytes: Count
    seconds: float


@dataclass(frozen=True)
class QuantizationReport(Report):
    """The content of `reports/quantization.json`; dynamic quantization sets only a few members."""

    FILE = "quantization.json"

    summary: str
    scheme: str
    notes: list[str]
    fields: dict[str, str]
    """Of the stage's fingerprint."""
    residual: str = ""
    """What the rest of the graph is in; empty for dynamic quantization."""
    per_channel: bool | None = None
    layers: LayerCounts | None = None
    quantized_layers: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Layers that are not quantized, with the reasons."""
    fp32_nodes: dict[str, str] = field(default_factory=dict)
    """Nodes whose numbers leave FP16's range, with the reasons."""
    calibration: CalibrationRecord | None = None
    activations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Scale and smoothing by activation; the vectors themselves are in ranges.json."""
    engines: list[EngineTrial] = field(default_factory=list)
    multiply_adds: MultiplyAdds | None = None
    """None where ranges were reused, like the two below."""
    search: SearchRecord | None = None
    accuracy: AccuracyMetrics | None = None
    products: dict[str, dict[str, Count]] = field(default_factory=dict)
    """Dynamic quantization: integer nodes by type, for each graph."""


# engines.json


@with_config(ConfigDict(extra="allow"))
class BuiltEngine(TypedDict):
    """An engine's record with its directory; see `EngineRecord` for the rest of its members."""

    directory: str
    from_store: NotRequired[bool]
    capabilities: list[str]
    profiles: list[str]
    layers: dict[str, Count]
    plan_size_bytes: Count


@dataclass(frozen=True)
class BuildReport(Report):
    """The content of `reports/engines.json`."""

    FILE = "engines.json"

    summary: str
    notes: list[str]
    engines: list[BuiltEngine]
    earlier_engines: list[str] = field(default_factory=list)
    """The artifact's other engines, from earlier builds."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Graphs without an engine, with the reasons."""
    profiles: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Any] | None = None
    """Buckets of the data that profiles were made from."""
    fields: dict[str, str] = field(default_factory=dict)
    """Of the stage's fingerprint."""


# benchmark.json


@dataclass(frozen=True)
class Advice:
    """What was seen, and what to do about it."""

    rule: str
    finding: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Latency:
    """The times of one contender at one shape, in milliseconds."""

    runs: Count
    rounds: Count
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    """None for fewer than 100 runs."""
    median_ms: float
    """The median of the turns' medians, which `interval_ms` is about."""
    interval_ms: Interval | None
    """Where that median lies; None where the turns were too few to say."""

    @property
    def half_width(self) -> float:
        """Half the interval's width, as a share of the median; infinite without an interval."""
        if self.interval_ms is None:
            return math.inf
        return (self.interval_ms[1] - self.interval_ms[0]) / 2 / self.median_ms


@dataclass(frozen=True)
class Comparison:
    """How much faster one contender is than another at one shape, by rounds that both ran."""

    contender: str
    base: str
    speedup: float
    """The base's time over the contender's: above 1, the contender is faster."""
    interval: Interval | None
    """None where the rounds were too few to say."""
    different: bool
    """Whether the interval lies on one side of 1, and beyond the smallest difference."""
    words: str


class PlacedProvider(TypedDict):
    """What one provider runs of a graph."""

    name: str
    nodes: Count
    for_shapes: Count
    multiply_adds: Count
    op_types: dict[str, Count]


class PlacedNode(TypedDict):
    """A compute node on the CPU although another provider was asked for."""

    name: str
    op_type: str
    multiply_adds: Count


class PlacementRecord(TypedDict):
    """Which nodes run where; what `Placement.as_json` leaves."""

    providers: list[PlacedProvider]
    copies: list[str]
    multiply_adds_counted: bool
    fallen: list[PlacedNode]


@with_config(ConfigDict(extra="allow"))
class ContenderFacts(TypedDict, total=False):
    """What a contender says of its session; each has members of its own, too."""

    placement: PlacementRecord | list[Any]
    """A list in results of early versions, which nothing reads."""
    no_placement: str
    """Why the placement is not known."""
    provider_options: dict[str, dict[str, str]]
    profiles: list[str]
    convolutions: Count | None
    device: str


@dataclass(frozen=True)
class ContenderRecord:
    """One contender, over all shapes."""

    name: str
    kind: str
    label: str
    subject: str
    providers: list[ProviderRecord]
    tools: dict[str, str]
    start_seconds: float
    """Of the process, until it could load: Python and the imports of the measuring itself."""
    load_seconds: float
    """Opening the model, with the imports that it needs."""
    peak_rss_bytes: Count
    """The most host memory that its process had, over all shapes."""
    device_memory_bytes: Count | None
    """The most of the GPU's memory that its process was seen to hold after a turn."""
    device_memory: str
    """Why that is not known; empty where it is."""
    facts: ContenderFacts
    notes: list[str]

    @property
    def placement(self) -> PlacementRecord | None:
        """Which nodes run where; None where that is not known."""
        found = self.facts.get("placement")
        return None if isinstance(found, list) else found


class CopyTimes(TypedDict):
    """Medians of one run's parts on a GPU, in milliseconds, and the share that is copying."""

    in_ms: float
    device_ms: float
    out_ms: float
    share: float


@dataclass(frozen=True)
class Measurement:
    """One contender at one shape."""

    contender: str
    first_ms: float
    """The very first run at the shape."""
    warm_up_runs: Count
    settled: bool
    """Whether the warm-up ended because the times had settled."""
    latency: Latency
    inputs_per_second: float
    tokens_per_second: float | None
    """Padding included; None where inputs are no tokens."""
    joules_per_run: float | None = None
    copies: CopyTimes | None = None
    notes: list[str] = field(default_factory=list)
    """What was otherwise at this shape: it ran without a CUDA graph."""


@dataclass(frozen=True)
class BenchCase:
    """All contenders at one shape."""

    sizes: dict[str, Count]
    rows: Count
    tokens: Count | None
    measurements: list[Measurement]
    comparisons: list[Comparison]
    problems: dict[str, str]
    """Contenders that could not run this shape, with the reason."""
    unknown: dict[str, str]
    """What a GPU did not tell of this shape, with the reason."""
    rounds_ended: str

    @property
    def shape(self) -> str:
        """`batch=1, sequence=16`."""
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items())


@dataclass(frozen=True)
class ImageTimes:
    """One image, by contender."""

    file: str
    shape: list[Count]
    """Of the graph's input."""
    first_ms: dict[str, float]
    """The first run, in the first pass over the folder: a new shape may cost more."""
    median_ms: dict[str, float]
    """Of the later passes."""


@dataclass(frozen=True)
class ImagesResult:
    """A folder of images, each run alone at its own size."""

    folder: str
    images: list[ImageTimes]
    shapes: Count
    """Distinct ones."""
    prepare_ms: float
    """Reading and scaling an image, the median; outside all other times."""
    first_total_ms: dict[str, float]
    totals: dict[str, Latency]
    """Of the later passes, each over all images."""
    comparisons: list[Comparison]
    passes: Count
    layout: Literal["first", "last"] = "first"
    """Where the channels are in the shapes: before height and width, or behind them."""
    problems: dict[str, str] = field(default_factory=dict)
    """Contenders that could not run the images, with the reason."""


@dataclass(frozen=True)
class Padding:
    """What texts of a file cost in padding at one batch size."""

    batch: Count
    in_order: float
    """The share of padded tokens with texts in the file's order."""
    sorted: float
    """The same with texts of like length together."""


@with_config(ConfigDict(extra="allow"))
class GpuName(TypedDict):
    """A GPU of the machine; its other members are those of `runtime.gpus.Gpu`."""

    name: str


@with_config(ConfigDict(extra="allow"))
class Machine(TypedDict):
    """The machine that was measured on; what could not be read is empty or 0."""

    cpu: str
    physical_cores: Count
    usable_cpus: Count
    cpu_flags: list[str]
    load: float | None
    """Processes that wanted to run over the last minute, before anything was measured."""
    memory_bytes: Count
    system: str
    python: str
    gpus: list[GpuName]
    no_gpu: str
    """Why there is none."""
    driver: str
    tools: dict[str, str]


@with_config(ConfigDict(extra="allow"))
class SubjectRecord(TypedDict):
    """What was measured, by content."""

    name: str
    path: str
    graph: str
    graph_sha256: str
    source: str
    task: str
    precision: str
    target: str


@dataclass(frozen=True)
class BenchResult(Report):
    """The whole of `reports/benchmark.json`."""

    FILE = "benchmark.json"

    subjects: list[SubjectRecord]
    machine: Machine
    options: dict[str, Any]
    contenders: list[ContenderRecord]
    left_out: dict[str, str]
    """Contenders of `auto` that could not run, with the reasons."""
    cases: list[BenchCase]
    images: ImagesResult | None
    padding: list[Padding]
    advice: list[Advice]
    unknown: dict[str, str]
    """What could not be measured here, with the reasons."""
    notes: list[str]
    finished: str
    """UTC, ISO 8601."""
    seconds: float
    schema_version: Literal[1] = field(default=1)

    def contender(self, name: str) -> ContenderRecord:
        """The record of one contender; raises KeyError where there is none."""
        return {record.name: record for record in self.contenders}[name]


def named_versions(tools: dict[str, str]) -> str:
    """`torch 2.13.0, onnxruntime 1.31.1`."""
    return ", ".join(f"{tool} {version}" for tool, version in tools.items())


def gpu_names(machine: Machine) -> str:
    """The names of the machine's GPUs; empty where there are none."""
    return ", ".join(gpu["name"] for gpu in machine["gpus"])


def worst_by_output(
    cases: Sequence[ValidationCaseResult],
) -> list[tuple[ValidationCaseResult, OutputMetrics]]:
    """The case in which each output of each graph is farthest off, in the outputs' order."""
    worst: dict[tuple[str, str], tuple[ValidationCaseResult, OutputMetrics]] = {}
    for case in cases:
        for output in case.outputs:
            key = (case.graph, output.output)
            if key not in worst or output.limit_ratio > worst[key][1].limit_ratio:
                worst[key] = (case, output)
    return list(worst.values())


@dataclass(frozen=True)
class Reports:
    """What an artifact's reports say; None where there is none."""

    validation: ValidationReport | None
    quantization: QuantizationReport | None
    benchmark: BenchResult | None
    benchmark_sha256: str
    """Of the file; empty where there is none."""

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Read the reports that the manifest records.

        Raises:
            ArtifactError: one of them is damaged.
        """
        measured = artifact.manifest.reports.get(f"{REPORTS}/{BenchResult.FILE}")
        return cls(
            ValidationReport.of(artifact),
            QuantizationReport.of(artifact),
            BenchResult.of(artifact),
            measured.sha256 if measured else "",
        )
