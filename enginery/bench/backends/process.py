"""The parent's side of a backend's process.

with BenchmarkProcess(plan, target, config, log) as process:
    process.request("prepare", feeds="feeds.npz", seconds=10)
    process.request("turn", runs=10)  # {'times_ms': [3.41, 3.38, …]}
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.bench.backends.backend import LoadOptions
from enginery.bench.backends.plan import BackendPlan
from enginery.bench.config import BenchConfig
from enginery.bench.target import Target
from enginery.core.closing import Closeable
from enginery.core.errors import ProviderError
from enginery.core.subprocess import WorkerProcess, WorkerResult


class BenchmarkProcess(Closeable):
    """A process that has loaded a backend. A context manager; closing it ends the process."""

    def __init__(self, plan: BackendPlan, target: Target, config: BenchConfig, log: Path) -> None:
        """Start the process and load the model.

        Args:
            plan: the backend.
            target: the model.
            config: the options.
            log: file for the output of the process.

        Raises:
            EngineryError: the backend cannot run.
        """
        self.plan = plan
        self.worker = WorkerProcess(
            "enginery.bench.backends.worker",
            log=log,
            description=plan.name,
            error=ProviderError,
            environment={"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        try:
            self.loaded = self.request(
                "load",
                plan=plan.as_json(),
                artifact=str(target.artifact.path),
                manifest=target.artifact.manifest.model_dump(mode="json"),
                graph=target.record.file,
                options=asdict(
                    LoadOptions(
                        threads=config.threads,
                        allow_fallback=config.allow_fallback,
                        trust_remote_code=config.trust_remote_code,
                        allow_pickle=config.allow_pickle,
                    )
                ),
            )
        except BaseException:
            self.close()
            raise

    def request(self, command: str, **values: Any) -> WorkerResult:
        """Send a command to the process and return its answer.

        Raises:
            EngineryError: the backend raised it.
            ProviderError: the process died.
        """
        return self.worker.request(command, **values)

    def close(self) -> None:
        """End the process; may be called again."""
        self.worker.close()
