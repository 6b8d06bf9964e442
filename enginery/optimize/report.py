"""What an optimization did, as the JSON that `reports/optimization.json` holds.

>>> json.loads(Path("minilm-fp16/reports/optimization.json").read_text())["graphs"][0]["islands"]
[]
"""

from __future__ import annotations

from dataclasses import dataclass, field

from enginery.core.reports import Report
from enginery.optimize.guard import GuardRecord


@dataclass(frozen=True)
class OptimizationReport(Report):
    """The whole of `reports/optimization.json`, which no other stage reads."""

    FILE = "optimization.json"

    passed: bool
    summary: str
    target: str
    precision: str
    notes: list[str]
    graphs: list[GuardRecord]
    """One for each graph that was cast."""
    seconds: float
    schema_version: int = field(default=1)


def summarize(target: str, precision: str, records: list[GuardRecord]) -> str:
    """One sentence: what is wrong, or what was made."""
    failed = [record for record in records if not record.passed]
    if failed:
        return failed[0].describe()
    islands = sum(len(record.islands) for record in records)
    if not records:
        return f"{precision} for {target}"
    agreements = [agreement for record in records for agreement in record.agreements]
    worst = max(agreements, key=lambda a: a.max_abs / a.limit if a.limit else 0.0, default=None)
    said = f"{precision} for {target}, {islands} nodes kept FP32 for their range"
    return f"{said}; {worst.describe()}" if worst else said
