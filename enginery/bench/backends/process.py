"""One contender's process, seen from the parent.

>>> with Contender(plan, subject, config, log) as contender:
...     contender.ask("turn", runs=10)
{'times_ms': [3.41, 3.38, …]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.bench.backends.plan import Plan
from enginery.bench.config import BenchConfig
from enginery.bench.target import Subject
from enginery.core.closing import Closeable
from enginery.core.errors import ProviderError
from enginery.core.subprocess import WorkerProcess, WorkerResult


class Contender(Closeable):
    """A contender that has loaded its model. A context manager; closing ends its process."""

    def __init__(self, plan: Plan, subject: Subject, config: BenchConfig, log: Path) -> None:
        """Start the process and load the model.

        Args:
            plan: who runs.
            subject: what.
            config: the threads, whether another provider will do, and what the user trusts.
            log: where everything goes that it says.

        Raises:
            EngineryError: it cannot run, with its own reason.
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
            self.loaded = self.ask(
                "load",
                plan=plan.as_json(),
                artifact=str(subject.artifact.path),
                manifest=subject.artifact.manifest.model_dump(mode="json"),
                graph=subject.record.file,
                threads=config.threads,
                allow_fallback=config.allow_fallback,
                trust_remote_code=config.trust_remote_code,
                allow_pickle=config.allow_pickle,
            )
        except BaseException:
            self.close()
            raise

    def ask(self, does: str, **values: Any) -> WorkerResult:
        """Send one command and return its answer.

        Raises:
            EngineryError: as the contender raised it, or ProviderError where it died.
        """
        return self.worker.request(does, **values)

    def close(self) -> None:
        """End the process; closing twice is fine."""
        self.worker.close()
