"""What a validation found, as the JSON that `reports/validation.json` holds, and in one sentence.

>>> ValidationReport.from_json(Path("minilm/reports/validation.json").read_bytes()).summary
'23 outputs agree with PyTorch; largest error 1.4e-06 of 1.1e-05 allowed (…)'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from enginery.core.json_file import json_bytes, parse_json
from enginery.validate.metrics import OutputMetrics

UNTAKEN = "no engine takes it: "
"""What the reason of a case starts with that is outside the profiles of the engines."""


@dataclass(frozen=True)
class CaseResult:
    """One case on one graph."""

    graph: str
    name: str
    kind: str
    shapes: dict[str, list[int]]
    """Of the inputs."""
    outputs: list[OutputMetrics]
    problem: str
    """Why nothing could be compared; empty where it could."""
    skipped: str = ""
    """Why the case does not count: PyTorch itself rejects it, or no engine takes it."""

    @property
    def passed(self) -> bool:
        return not self.problem and all(output.passed for output in self.outputs)


@dataclass(frozen=True)
class EmbeddingMetrics:
    """Sentence embeddings, pooled as the model's own configuration says, against PyTorch's."""

    sentences: int
    min_cosine: float
    mean_cosine: float
    neighbour_agreement: float
    """Share of sentences whose nearest other sentence is the same one, or as near."""
    problem: str = ""
    """Why they fail, in words; empty when they pass."""


@dataclass(frozen=True)
class OverallMetrics:
    """One output of a quantized graph over all real inputs together, as if they were one."""

    graph: str
    output: str
    inputs: int
    """Rows: sentences or images."""
    cosine: float
    cosine_limit: float
    problem: str = ""
    """Why it fails, in words; empty when it passes."""


@dataclass(frozen=True)
class ValidationReport:
    """The whole of `reports/validation.json`."""

    passed: bool
    summary: str
    precision: str
    providers: list[dict[str, Any]]
    reference: dict[str, str]
    tolerance: dict[str, Any]
    cases: list[CaseResult]
    embeddings: EmbeddingMetrics | None
    notes: list[str]
    tools: dict[str, str]
    seconds: float
    overall: list[OverallMetrics] = field(default_factory=list)
    """For a quantized artifact that is held to its own budget."""
    schema_version: int = field(default=1)

    def worst(self) -> tuple[CaseResult, OutputMetrics] | None:
        """The case and output farthest beyond its limit, or else nearest to it."""
        pairs = [(case, output) for case in self.cases for output in case.outputs]
        return max(pairs, key=lambda pair: pair[1].badness, default=None)

    def to_json(self) -> bytes:
        """JSON without NaN, which JSON does not have: a number that is none becomes null."""
        return json_bytes(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> ValidationReport:
        """Reads what `to_json` wrote; raises ValueError for anything else."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(_numbers(parse_json(text)))


_FLOATS = frozenset(
    name
    for record in (OutputMetrics, EmbeddingMetrics, OverallMetrics)
    for name, kind in record.__annotations__.items()
    if kind in ("float", float)
)


def summarize(
    cases: list[CaseResult],
    embeddings: EmbeddingMetrics | None = None,
    overall: Sequence[OverallMetrics] = (),
) -> str:
    """One sentence: what is wrong and where it is worst, or the largest error of all."""
    compared = [case for case in cases if not case.skipped]
    for graph in dict.fromkeys(case.graph for case in cases):
        if not any(case.graph == graph for case in compared):
            reason = next(case.skipped for case in cases if case.graph == graph)
            return f"{graph} could not be compared at all: {reason}"
    if broken := [case for case in compared if case.problem]:
        case = broken[0]
        more = f" ({len(broken)} of {len(compared)} inputs fail)" if len(broken) > 1 else ""
        return f"{case.graph}, {case.kind} '{case.name}': {case.problem}{more}"
    pairs = [(case, output) for case in compared for output in case.outputs]
    if not pairs:
        return "nothing could be compared"
    case, output = max(pairs, key=lambda pair: pair[1].badness)
    where = f"{output.output} on {case.kind} '{case.name}'"
    if len({case.graph for case in cases}) > 1:
        where = f"{case.graph}, {where}"
    if failed := sum(not output.passed for _, output in pairs):
        return (
            f"{failed} of {len(pairs)} outputs differ from PyTorch; "
            f"worst: {where}, {output.problem}"
        )
    if far := [found for found in overall if found.problem]:
        least = min(far, key=lambda found: found.cosine - found.cosine_limit)
        return f"{least.output} differs from PyTorch's: {least.problem}"
    if embeddings and embeddings.problem:
        return f"pooled embeddings differ from PyTorch's: {embeddings.problem}"
    untaken = sum(case.skipped.startswith(UNTAKEN) for case in cases)
    rejected = len(cases) - len(compared) - untaken
    return (
        f"{len(pairs)} outputs agree with PyTorch; {_nearest_to_fail(output, where, overall)}"
        + (f"; {rejected} inputs skipped that PyTorch itself rejects" if rejected else "")
        + (f"; {untaken} inputs skipped that no engine takes" if untaken else "")
    )


def _nearest_to_fail(output: OutputMetrics, where: str, overall: Sequence[OverallMetrics]) -> str:
    if overall:
        least = min(overall, key=lambda found: found.cosine - found.cosine_limit)
        return (
            f"cosine {least.cosine:.4f} over {least.inputs} real inputs, at least "
            f"{least.cosine_limit:.4f} expected ({least.output})"
        )
    if math.isfinite(output.limit):
        return f"largest error {output.max_abs:.2g} of {output.limit:.2g} allowed ({where})"
    return f"cosine {output.cosine:.4f}, at least {output.cosine_limit:.4f} expected ({where})"


def _numbers(value: Any) -> Any:
    """The inverse of `json_bytes` for the fields that are numbers."""
    if isinstance(value, dict):
        return {
            key: math.nan if item is None and key in _FLOATS else _numbers(item)
            for key, item in value.items()
        }
    return [_numbers(item) for item in value] if isinstance(value, list) else value
