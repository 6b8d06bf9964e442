"""What an optimization did, as the JSON that `reports/optimization.json` holds.

>>> json.loads(Path("minilm-fp16/reports/optimization.json").read_text())["graphs"][0]["islands"]
[]
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from enginery.optimize.guard import GuardRecord


@dataclass(frozen=True)
class OptimizationReport:
    """The whole of `reports/optimization.json`."""

    passed: bool
    summary: str
    target: str
    precision: str
    notes: list[str]
    graphs: list[GuardRecord]
    """One for each graph that was cast."""
    seconds: float
    schema_version: int = field(default=1)

    def to_json(self) -> bytes:
        """JSON without NaN, which JSON does not have: a number that is none becomes null."""
        return (json.dumps(_finite(asdict(self)), indent=2) + "\n").encode()


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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
