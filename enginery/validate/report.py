"""What a validation found: for programs as JSON, for people as the lines of a table.

Leaves `reports/validation.json` in the artifact.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from enginery.validate.metrics import OutputMetrics


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
    """Why the case does not count: PyTorch itself rejects it."""

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
    """Share of sentences whose nearest other sentence is the same one."""


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
    schema_version: int = field(default=1)

    def worst(self) -> tuple[CaseResult, OutputMetrics] | None:
        """The case and output nearest to, or farthest beyond, its limit."""
        pairs = [(case, output) for case in self.cases for output in case.outputs]
        return max(pairs, key=lambda pair: pair[1].badness, default=None)

    def to_json(self) -> bytes:
        """JSON without NaN and Infinity, which JSON does not have: they become null."""
        return (json.dumps(_finite(asdict(self)), indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes) -> ValidationReport:
        """Reads what `to_json` wrote."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(_numbers(json.loads(text)))

    def rows(self) -> list[dict[str, str]]:
        """One row an output and case, for a table."""
        return [
            {
                "input": f"{case.kind}: {case.name}",
                "output": output.output,
                "shape": "×".join(str(size) for size in output.shape),
                "max abs": f"{output.max_abs:.2e}",
                "allowed": f"{output.limit:.2e}",
                "p99 abs": f"{output.p99_abs:.2e}",
                "max rel": f"{output.max_rel:.2e}",
                "cosine": f"{output.cosine:.8f}",
                "argmax": f"{output.argmax_agreement:.0%}" if "logits" in output.output else "",
                "verdict": output.problem or "ok",
            }
            for case in self.cases
            for output in case.outputs
        ]


_FLOATS = frozenset(
    name for name, kind in OutputMetrics.__annotations__.items() if kind in ("float", float)
)


def summarize(cases: list[CaseResult]) -> str:
    """One sentence: the first thing that is wrong, or the largest error of all."""
    compared = [case for case in cases if not case.skipped]
    for graph in dict.fromkeys(case.graph for case in cases):
        if not any(case.graph == graph for case in compared):
            reason = next(case.skipped for case in cases if case.graph == graph)
            return f"{graph} could not be compared at all: {reason}"
    for case in compared:
        if case.problem:
            return f"{case.graph}, {case.kind} '{case.name}': {case.problem}"
    pairs = [(case, output) for case in compared for output in case.outputs]
    if not pairs:
        return "nothing could be compared"
    case, output = max(pairs, key=lambda pair: pair[1].badness)
    where = f"{output.output} on {case.kind} '{case.name}'"
    failed = sum(not output.passed for _, output in pairs)
    if failed:
        return (
            f"{failed} of {len(pairs)} outputs differ from PyTorch; "
            f"worst: {where}, {output.problem}"
        )
    return (
        f"{len(pairs)} outputs agree with PyTorch; largest error {output.max_abs:.2g} "
        f"of {output.limit:.2g} allowed ({where})"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _numbers(value: Any) -> Any:
    """The inverse of `_finite` for the fields that are numbers."""
    if isinstance(value, dict):
        return {
            key: math.nan if item is None and key in _FLOATS else _numbers(item)
            for key, item in value.items()
        }
    return [_numbers(item) for item in value] if isinstance(value, list) else value
