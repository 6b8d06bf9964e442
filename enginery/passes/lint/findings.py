"""The findings of lint, and the report that holds them.

>>> finding = LintFinding("type", "error", "x", "is INT16.", "Use INT32.")
>>> report = LintReport("model.onnx", "tensorrt", (finding,), parser="")
>>> report.passed, report.summary
(False, '1 error')
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from enginery.core.errors import CheckFailedError
from enginery.core.table import Table

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class LintFinding:
    """A problem of one node."""

    rule: str
    severity: Severity
    """`error`: the target rejects the node or computes it wrongly. `warning`: the node is slow, or
    the target may reject it."""
    node: str
    """The name of the node (of its first output, if the node has none) or of the constant at fault;
    empty for the whole graph."""
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
    """The result of TensorRT's own parser, or the reason why it did not run."""

    @property
    def errors(self) -> tuple[LintFinding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[LintFinding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def passed(self) -> bool:
        """True if there are no errors."""
        return not self.errors

    @property
    def summary(self) -> str:
        counts = [
            f"{len(findings)} {word}{'' if len(findings) == 1 else 's'}"
            for word, findings in (("error", self.errors), ("warning", self.warnings))
            if findings
        ]
        return "; ".join(part for part in (", ".join(counts) or "no findings", self.parser) if part)

    @property
    def problem(self) -> str:
        """Why the graph does not suit the target; empty if it does."""
        if self.passed:
            return ""
        return f"{self.path} does not suit {self.target}: {self.summary}"

    def rows(self) -> list[Table | str]:
        """Return a table, in which nodes with the same finding share a row, and the summary."""
        groups: dict[tuple[str, ...], list[LintFinding]] = {}
        for finding in self.findings:
            words = (finding.severity, finding.rule, finding.problem, finding.remedy)
            groups.setdefault(words, []).append(finding)
        rows = [
            {
                "severity": severity,
                "rule": rule,
                "where": _where([finding.node for finding in group]),
                "problem": problem,
                "remedy": remedy,
            }
            for (severity, rule, problem, remedy), group in groups.items()
        ]
        return [Table(self.path, rows), self.summary]

    def as_json(self) -> dict[str, Any]:
        """Return the whole report as JSON data."""
        return {**asdict(self), "passed": self.passed, "summary": self.summary}

    def require_passed(self) -> None:
        """Raise CheckFailedError if there are errors."""
        if self.problem:
            raise CheckFailedError(self.problem)


class LintReports(list[LintReport]):
    """The reports of a model, one a graph."""

    @property
    def problem(self) -> str:
        """Why the first unsuitable graph does not suit the target; empty if all do."""
        return next((report.problem for report in self if not report.passed), "")

    def rows(self) -> list[Table | str]:
        """Return the table and the summary of each graph."""
        return [block for report in self for block in report.rows()]

    def as_json(self) -> dict[str, Any]:
        """Return the reports as JSON data."""
        return {"graphs": [report.as_json() for report in self]}


def sort_findings(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Remove duplicates and put errors first; the order within a severity stays."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.severity != "error"))


def _where(nodes: list[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more"
