"""The parent's side of a backend's process.

with BenchmarkProcess(plan, target, log) as process:
    process.request("prepare", feeds="feeds.npz", seconds=10)
    process.request("turn", runs=10)  # {'times_ms': [3.41, 3.38, …]}
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from enginery.bench.backends.backend import BackendPlan
from enginery.bench.target import Target
from enginery.core.errors import ProviderError
from enginery.core.subprocess import WorkerProcess


class BenchmarkProcess(WorkerProcess):
    """A process that has loaded a backend. A context manager; closing it ends the process."""

    def __init__(self, plan: BackendPlan, target: Target, log: Path) -> None:
        """Start the process and load the model.

        Args:
            plan: the backend.
            target: the model.
            log: file for the output of the process.

        Raises:
            EngineryError: the backend cannot run.
        """
        super().__init__(
            "enginery.bench.backends.worker",
            log=log,
            description=plan.name,
            error=ProviderError,
            environment={"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        self.plan = plan
        try:
            self.loaded = self.request(
                "load",
                plan=asdict(plan),
                artifact=str(target.artifact.path),
                manifest=target.artifact.manifest.model_dump(mode="json"),
                graph=target.record.file,
            )
        except BaseException:
            self.close()
            raise
