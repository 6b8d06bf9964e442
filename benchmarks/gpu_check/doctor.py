"""What the machine has: doctor's report, and what of it keeps CUDA from running.

>>> run(work)
>>> work.found["report"]["nvidia"]["driver"]
'580.65.06'
"""

from __future__ import annotations

from benchmarks.gpu_check.work import Work
from enginery.doctor.config import DoctorConfig
from enginery.doctor.stage import examine


def run(work: Work) -> None:
    """Leaves the report, and checks that the provider of this run answers rightly."""
    report = examine(DoctorConfig())
    work.found["report"] = report.as_json()
    status = next(s for s in report.providers if s.name.lower().startswith(work.provider))
    work.check(
        f"{work.provider} runs a model of one operation",
        passed=status.runs,
        found=f"{status.state}{f': {status.reason}' if status.reason else ''}",
    )
