"""Record doctor's report, and check that the provider runs."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu_check.work import Work
from enginery.doctor.config import DoctorConfig
from enginery.doctor.stage import examine


def run(work: Work) -> None:
    """Examine the machine."""
    work.case("report", partial(_examine, work))


def _examine(work: Work) -> None:
    """Record the report, and check that the provider of this run computes correctly."""
    report = examine(DoctorConfig())
    work.set("report", report.as_json())
    status = next(s for s in report.providers if s.name.lower().startswith(work.provider))
    work.check(
        f"{work.provider} runs a model of one operation",
        passed=status.runs,
        found=f"{status.state}{f': {status.reason}' if status.reason else ''}",
    )
