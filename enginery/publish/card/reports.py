"""What an artifact's reports say, as far as its card and registries want it.

Reads the reports that the manifest records, nothing else.

    >>> reports = Reports.read(Artifact.open("minilm"))
    >>> reports.validation.passed, reports.quantization
    (True, None)

Stages meet through files: these are the parts of their JSON that a card needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from enginery.core.artifact import REPORTS, Artifact
from enginery.core.errors import ArtifactError
from enginery.core.json_file import document_bytes


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Output(_Part):
    """One output of one case; None is a number that is none, or a limit that there is not."""

    output: str
    max_abs: float | None
    limit: float | None
    cosine: float | None
    argmax_agreement: float | None
    problem: str


class Case(_Part):
    """One input of a validation."""

    graph: str
    kind: str
    outputs: tuple[Output, ...]
    problem: str
    skipped: str


class Overall(_Part):
    """One output over all real inputs together."""

    output: str
    inputs: int
    cosine: float | None
    cosine_limit: float | None


class Embeddings(_Part):
    """Pooled sentence embeddings."""

    sentences: int
    min_cosine: float | None
    mean_cosine: float | None
    neighbour_agreement: float | None


class Validation(_Part):
    """`reports/validation.json`."""

    passed: bool
    summary: str
    providers: tuple[dict[str, Any], ...]
    reference: dict[str, str]
    cases: tuple[Case, ...]
    embeddings: Embeddings | None
    overall: tuple[Overall, ...] = ()
    notes: tuple[str, ...]
    tools: dict[str, str]

    def outputs(self) -> list[Output]:
        """Every output that was compared."""
        return [output for case in self.cases for output in case.outputs]


class Accuracy(_Part):
    """Answers beside FP32's on held-out inputs."""

    rows: int
    cosine: float | None
    worst_cosine: float | None
    neighbour_agreement: float | None
    argmax_agreement: float | None
    label_accuracy: float | None


class LayerCounts(_Part):
    """Layers that could be quantized, and those that were."""

    quantized: int
    all: int


class MultiplyAdds(_Part):
    """Shares of the multiply-adds that are quantized."""

    share: float
    share_with_attention: float


class Quantization(_Part):
    """`reports/quantization.json`."""

    summary: str
    scheme: str
    residual: str
    layers: LayerCounts
    left_out: dict[str, str]
    calibration: dict[str, str]
    multiply_adds: MultiplyAdds | None = None
    accuracy: Accuracy | None = None


class Latency(_Part):
    """Times of one contender at one shape, in milliseconds."""

    p50_ms: float
    p99_ms: float | None
    runs: int


class Measurement(_Part):
    """One contender at one shape."""

    contender: str
    latency: Latency
    inputs_per_second: float


class Comparison(_Part):
    """One contender beside another at one shape."""

    contender: str
    base: str
    speedup: float
    interval: tuple[float, float] | None
    words: str


class BenchCase(_Part):
    """All contenders at one shape."""

    sizes: dict[str, int]
    measurements: tuple[Measurement, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def shape(self) -> str:
        """`batch=1, sequence=16`."""
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items())


class Contender(_Part):
    """Who was measured."""

    name: str
    label: str
    peak_rss_bytes: int
    tools: dict[str, str]


class Benchmark(_Part):
    """`reports/benchmark.json`."""

    machine: dict[str, Any]
    contenders: tuple[Contender, ...]
    cases: tuple[BenchCase, ...]
    notes: tuple[str, ...]


Report = TypeVar("Report", bound=_Part)


@dataclass(frozen=True)
class Reports:
    """What an artifact's reports say; None where there is none."""

    validation: Validation | None
    quantization: Quantization | None
    benchmark: Benchmark | None
    benchmark_sha256: str
    """Of the file; empty where there is none."""

    @classmethod
    def read(cls, artifact: Artifact) -> Reports:
        """Read those that the manifest records; raise ArtifactError for one that is damaged."""
        measured = artifact.manifest.reports.get(f"{REPORTS}/benchmark.json")
        return cls(
            _read(Validation, artifact.report("validation.json")),
            _read(Quantization, artifact.report("quantization.json")),
            _read(Benchmark, artifact.report("benchmark.json")),
            measured.sha256 if measured else "",
        )


def _read(kind: type[Report], file: Path | None) -> Report | None:
    if file is None:
        return None
    try:
        return kind.model_validate_json(document_bytes(file))
    except (OSError, ValidationError) as error:
        first = str(error).partition("\n")[0]
        if isinstance(error, ValidationError):
            problem = error.errors()[0]
            first = f"{'.'.join(map(str, problem['loc'])) or 'the document'}: {problem['msg']}"
        raise ArtifactError(
            f"{file} cannot be read: {first}.", do="Make it again, or remove it."
        ) from error
