"""What lint finds in a graph.

>>> report = lint_onnx(Path("model_quantized.onnx"))
>>> report.passed, report.summary
(False, '26 errors, 4 warnings; TensorRT 1.7.1.116 refuses the graph')
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from enginery.core.errors import CheckFailedError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class LintFinding:
    """One thing that is wrong with one node."""

    rule: str
    severity: Severity
    """`error`: refused, or computed wrongly. `warning`: slower than it looks, or at risk."""
    node: str
    """The node's name; that of its first output where it has none; of a stored tensor where that
    is at fault; empty for the graph as a whole."""
    problem: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        return f"{self.severity}: {where}{self.problem} {self.remedy} [{self.rule}]"


@dataclass(frozen=True)
class LintReport:
    """All findings on one graph."""

    path: str
    target: str
    findings: tuple[LintFinding, ...]
    """Errors first, each severity in the order of the rules and of the graph."""
    parser: str
    """What TensorRT's own parser says, or why it was not asked."""

    @property
    def errors(self) -> tuple[LintFinding, ...]:
        return tuple(found for found in self.findings if found.severity == "error")

    @property
    def warnings(self) -> tuple[LintFinding, ...]:
        return tuple(found for found in self.findings if found.severity == "warning")

    @property
    def passed(self) -> bool:
        """No errors; there may be warnings."""
        return not self.errors

    @property
    def summary(self) -> str:
        counts = [
            f"{len(found)} {word}{'' if len(found) == 1 else 's'}"
            for word, found in (("error", self.errors), ("warning", self.warnings))
            if found
        ]
        return "; ".join(part for part in (", ".join(counts) or "no findings", self.parser) if part)

    def rows(self) -> list[dict[str, str]]:
        """The findings for a table: nodes with the same words share a row."""
        groups: dict[tuple[str, ...], list[LintFinding]] = {}
        for found in self.findings:
            words = (found.severity, found.rule, found.problem, found.remedy)
            groups.setdefault(words, []).append(found)
        return [
            {
                "severity": severity,
                "rule": rule,
                "where": _where([found.node for found in group]),
                "problem": problem,
                "remedy": remedy,
            }
            for (severity, rule, problem, remedy), group in groups.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """The whole report, for programs."""
        return {**asdict(self), "passed": self.passed, "summary": self.summary}

    def require_passed(self) -> None:
        """Raises CheckFailedError, with the first error, unless there are none."""
        if self.errors:
            raise CheckFailedError(f"{self.path} is not fit for {self.target}: {self.summary}")


def sort_findings(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Errors first; within a severity the order stays. Each finding once."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda found: found.severity != "error"))


def _where(nodes: list[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more"
