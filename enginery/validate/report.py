"""Report of a validation: `reports/validation.json`, and a summary in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from enginery.core.json_file import json_bytes, parse_json
from enginery.validate.metrics import OutputMetrics

OUTSIDE_PROFILES = "outside the profiles of all engines: "
"""Start of the reason why a case was skipped that fits no engine."""


@dataclass(frozen=True)
class ValidationCaseResult:
    """Result of one case on one graph."""

    graph: str
    name: str
    kind: str
    shapes: dict[str, list[int]]
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

    sentences: int
    min_cosine: float
    mean_cosine: float
    neighbour_agreement: float
    """Share of sentences whose nearest neighbour is the same one, or ties with it."""
    problem: str = ""
    """Reason of the failure; empty if they pass."""


@dataclass(frozen=True)
class OverallMetrics:
    """Comparison of one output of a quantized graph over all real inputs together."""

    graph: str
    output: str
    inputs: int
    """Number of rows: sentences or images."""
    cosine: float
    cosine_limit: float
    problem: str = ""
    """Reason of the failure; empty if it passes."""


@dataclass(frozen=True)
class ValidationReport:
    """The content of `reports/validation.json`."""

    passed: bool
    summary: str
    precision: str
    providers: list[dict[str, Any]]
    reference: dict[str, str]
    tolerance: dict[str, Any]
    cases: list[ValidationCaseResult]
    embeddings: EmbeddingMetrics | None
    notes: list[str]
    tools: dict[str, str]
    seconds: float
    overall: list[OverallMetrics] = field(default_factory=list)
    """For a quantized artifact that is checked against its own budget."""
    schema_version: int = field(default=1)

    def worst(self) -> tuple[ValidationCaseResult, OutputMetrics] | None:
        """Return the case and output with the largest error in units of its limit."""
        pairs = [(case, output) for case in self.cases for output in case.outputs]
        return max(pairs, key=lambda pair: pair[1].limit_ratio, default=None)

    def to_json(self) -> bytes:
        """Return the report as JSON. NaN, which JSON does not have, becomes null."""
        return json_bytes(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> ValidationReport:
        """Read a report that `to_json` wrote.

        Raises:
            ValueError: the text is not such a report.
        """
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(_nulls_to_nan(parse_json(text)))


_FLOATS = frozenset(
    name
    for record in (OutputMetrics, EmbeddingMetrics, OverallMetrics)
    for name, kind in record.__annotations__.items()
    if kind in ("float", float)
)


def summarize(
    cases: list[ValidationCaseResult],
    embeddings: EmbeddingMetrics | None = None,
    overall: Sequence[OverallMetrics] = (),
) -> str:
    """Summarize the results in one sentence: the worst failure, or the largest error."""
    compared = [case for case in cases if not case.skipped]
    for graph in dict.fromkeys(case.graph for case in cases):
        if not any(case.graph == graph for case in compared):
            reason = next(case.skipped for case in cases if case.graph == graph)
            return f"{graph} could not be compared on any input: {reason}"
    if broken := [case for case in compared if case.problem]:
        case = broken[0]
        more = f" ({len(broken)} of {len(compared)} inputs fail)" if len(broken) > 1 else ""
        return f"{case.graph}, {case.kind} '{case.name}': {case.problem}{more}"
    pairs = [(case, output) for case in compared for output in case.outputs]
    if not pairs:
        return "nothing could be compared"
    case, output = max(pairs, key=lambda pair: pair[1].limit_ratio)
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
    outside = sum(case.skipped.startswith(OUTSIDE_PROFILES) for case in cases)
    rejected = len(cases) - len(compared) - outside
    return (
        f"{len(pairs)} outputs agree with PyTorch; {_nearest_to_fail(output, where, overall)}"
        + (f"; {rejected} inputs skipped that PyTorch rejects" if rejected else "")
        + (f"; {outside} inputs skipped that fit no engine" if outside else "")
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


def _nulls_to_nan(value: Any) -> Any:
    """Turn null back into NaN in fields that are numbers."""
    if isinstance(value, dict):
        return {
            key: math.nan if item is None and key in _FLOATS else _nulls_to_nan(item)
            for key, item in value.items()
        }
    return [_nulls_to_nan(item) for item in value] if isinstance(value, list) else value
