"""What a bench found, as the JSON that `reports/benchmark.json` holds.

>>> BenchResult.from_json(Path("minilm/reports/benchmark.json").read_bytes()).cases[0].sizes
{'batch': 1, 'sequence': 16}
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from enginery.bench.statistics import Comparison, Latency
from enginery.core.json_file import json_bytes, parse_json
from enginery.runtime.advice import Advice


@dataclass(frozen=True)
class ContenderRecord:
    """One contender, over all shapes."""

    name: str
    kind: str
    label: str
    subject: str
    providers: list[dict[str, Any]]
    tools: dict[str, str]
    start_seconds: float
    """Of the process, until it could load: Python and the imports of the measuring itself."""
    load_seconds: float
    """Opening the model, with the imports that it needs."""
    peak_rss_bytes: int
    """The most host memory that its process had, over all shapes."""
    device_memory_bytes: int | None
    """The most of the GPU's memory that its process was seen to hold after a turn."""
    device_memory: str
    """Why that is not known; empty where it is."""
    facts: dict[str, Any]
    notes: list[str]


@dataclass(frozen=True)
class Measurement:
    """One contender at one shape."""

    contender: str
    first_ms: float
    """The very first run at the shape."""
    warm_up_runs: int
    settled: bool
    """Whether the warm-up ended because the times had settled."""
    latency: Latency
    inputs_per_second: float
    tokens_per_second: float | None
    """Padding included; None where inputs are no tokens."""
    joules_per_run: float | None = None
    copies: dict[str, float] | None = None
    """Medians of one run's parts on a GPU: in_ms, device_ms, out_ms, and their share."""
    notes: list[str] = field(default_factory=list)
    """What was otherwise at this shape: it ran without a CUDA graph."""


@dataclass(frozen=True)
class CaseResult:
    """All contenders at one shape."""

    sizes: dict[str, int]
    rows: int
    tokens: int | None
    measurements: list[Measurement]
    comparisons: list[Comparison]
    problems: dict[str, str]
    """Contenders that could not run this shape, with the reason."""
    unknown: dict[str, str]
    """What a GPU did not tell of this shape, with the reason."""
    rounds_ended: str


@dataclass(frozen=True)
class ImageTimes:
    """One image, by contender."""

    file: str
    shape: list[int]
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
    shapes: int
    """Distinct ones."""
    prepare_ms: float
    """Reading and scaling an image, the median; outside all other times."""
    first_total_ms: dict[str, float]
    totals: dict[str, Latency]
    """Of the later passes, each over all images."""
    comparisons: list[Comparison]
    passes: int
    layout: Literal["first", "last"] = "first"
    """Where the channels are in the shapes: before height and width, or behind them."""
    problems: dict[str, str] = field(default_factory=dict)
    """Contenders that could not run the images, with the reason."""


@dataclass(frozen=True)
class Padding:
    """What texts of a file cost in padding at one batch size."""

    batch: int
    in_order: float
    """The share of padded tokens with texts in the file's order."""
    sorted: float
    """The same with texts of like length together."""


@dataclass(frozen=True)
class BenchResult:
    """The whole of `reports/benchmark.json`."""

    subjects: list[dict[str, Any]]
    machine: dict[str, Any]
    options: dict[str, Any]
    contenders: list[ContenderRecord]
    left_out: dict[str, str]
    """Contenders of `auto` that could not run, with the reasons."""
    cases: list[CaseResult]
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

    def to_json(self) -> bytes:
        """For programs."""
        return json_bytes(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> BenchResult:
        """Reads what `to_json` wrote; raises ValueError for anything else."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(parse_json(text))
