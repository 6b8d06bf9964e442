"""A backend's process: load a model and run it on command.

The process reads one JSON command per line from standard input and writes one JSON line per answer
to standard output:

    $ echo '{"do": "memory"}' | python -m enginery.bench.backends.worker
    {"peak_rss_bytes": 41205760}

Each backend has its own process, so that its peak memory can be measured and a crash affects no
other. The process ends when its standard input is closed or its parent dies, even during a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STARTED = time.perf_counter()

import numpy as np  # noqa: E402  these imports are part of the measured start

from enginery.bench.backends.backend import (  # noqa: E402
    Backend,
    BackendPlan,
    EngineryBackend,
    OrtSessionBackend,
    Run,
)
from enginery.bench.backends.warmup import take_turn, wait_until_idle, warm_up  # noqa: E402
from enginery.bench.config import ENGINERY  # noqa: E402
from enginery.core.artifact.artifact import Artifact  # noqa: E402
from enginery.core.artifact.manifest import GraphRecord, Manifest  # noqa: E402
from enginery.core.errors import ProviderError  # noqa: E402
from enginery.core.extras import missing_packages_as_errors  # noqa: E402
from enginery.core.subprocess import (  # noqa: E402
    WorkerResult,
    peak_rss_bytes,
    serve_requests,
)
from enginery.core.trust.resource_limits import watching_own_calls  # noqa: E402
from enginery.runtime.nvml import Nvml  # noqa: E402


def open_backend(plan: BackendPlan, artifact: Artifact, record: GraphRecord) -> Backend:
    """Load the model in a backend.

    Args:
        plan: the backend.
        artifact: the artifact.
        record: the graph to run.

    Raises:
        EngineryError: the backend cannot run.
    """
    if plan.kind in (ENGINERY, "enginery-cpu", "onnxruntime"):
        backend = OrtSessionBackend if plan.kind == "onnxruntime" else EngineryBackend
        return backend(artifact, record, plan)
    with missing_packages_as_errors(f"Running {plan.label}"):
        from enginery.bench.backends import frameworks

    if plan.kind == "optimum":
        return frameworks.OptimumBackend(artifact, record, plan)
    return frameworks.PyTorchBackend(artifact, record, plan)


class BenchmarkWorker:
    """A backend and the state of its measurement."""

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._run: Run | None = None
        self._feeds: dict[str, Any] = {}
        self._device_id = 0
        self._device_memory: WorkerResult = {}
        self._becomes_idle = True
        """False for a backend whose threads never stop waiting in busy loops."""

    def answer(self, command: Mapping[str, Any]) -> WorkerResult:
        """Run a command, and return its answer once no thread is busy any more.

        Raises:
            EngineryError: the command fails.
        """
        commands = {
            "load": self.load,
            "prepare": self.prepare,
            "turn": self.turn,
            "energy": self.energy,
            "memory": self.memory,
        }
        try:
            return commands[command["do"]](command)
        finally:
            if self._becomes_idle:
                self._becomes_idle = wait_until_idle()

    def load(self, command: Mapping[str, Any]) -> WorkerResult:
        """Load the model. The time includes the imports that the backend needs."""
        manifest = Manifest.model_validate(command["manifest"])
        artifact = Artifact(Path(command["artifact"]), manifest)
        plan = BackendPlan.from_json(command["plan"])
        self._device_id = int(plan.device.partition(":")[2] or 0)
        before = time.perf_counter()
        self._backend = open_backend(plan, artifact, artifact.graph(command["graph"]))
        loaded = time.perf_counter()
        return {
            "start_seconds": before - _STARTED,
            "load_seconds": loaded - before,
            "providers": self._backend.providers,
            "tools": self._backend.tools,
            "notes": self._backend.notes,
            "rss_bytes": peak_rss_bytes(),
        }

    def prepare(self, command: Mapping[str, Any]) -> WorkerResult:
        """Read inputs from a file, and warm up on them if `seconds` is above 0."""
        with np.load(command["feeds"], allow_pickle=False) as stored:
            self._feeds = {name: stored[name] for name in stored.files}
        backend = self._require_backend()
        self._run = backend.prepare(self._feeds)
        if command["seconds"] <= 0:
            return {"prepared": True}
        result = warm_up(self._run, max_seconds=command["seconds"])
        self._sample_device_memory()
        note = backend.note_for(self._feeds) if isinstance(backend, EngineryBackend) else ""
        return {**vars(result), "notes": [note] if note else []}

    def turn(self, command: Mapping[str, Any]) -> WorkerResult:
        """Run a turn and return its times; with `cold`, time a single run without a warm-up."""
        run = self._require_run()
        if command.get("cold"):
            before = time.perf_counter()
            run()
            times = [(time.perf_counter() - before) * 1e3]
        else:
            times = take_turn(run, runs=command["runs"])
        self._sample_device_memory()
        return {"times_ms": times}

    def energy(self, command: Mapping[str, Any]) -> WorkerResult:
        """Measure the energy of a run in joules.

        The average is taken over several seconds, because the counter is updated only every 20 to
        100 ms.
        """
        run = self._require_run()
        with Nvml.open(self._device_id) as nvml:
            before, began, runs = nvml.energy_joules(), time.perf_counter(), 0
            while not runs or time.perf_counter() - began < command["seconds"]:
                run()
                runs += 1
            return {"joules": (nvml.energy_joules() - before) / runs}

    def memory(self, command: Mapping[str, Any]) -> WorkerResult:  # noqa: ARG002
        """Return peak memory and the facts of the session.

        Memory is read first, because collecting the facts opens further sessions.
        """
        self._sample_device_memory()
        result: WorkerResult = {"peak_rss_bytes": peak_rss_bytes(), **self._device_memory}
        if self._backend is not None:
            result["facts"] = self._backend.facts()
        return result

    def _sample_device_memory(self) -> None:
        """Update the highest GPU memory use of this process so far.

        The driver keeps no peak, so memory that a run allocates and frees again is missed.
        """
        if "device_memory" in self._device_memory:
            return  # the driver does not report it
        providers = self._backend.providers if self._backend else []
        if providers and "CPU" in providers[0]["name"]:
            self._device_memory = {"device_memory": "the backend runs on the CPU"}
            return
        try:
            with Nvml.open(self._device_id) as nvml:
                held = nvml.memory_bytes(os.getpid())
        except ProviderError as error:
            if not self._device_memory:
                self._device_memory = {"device_memory": error.message}
            return
        peak_bytes = max(held, self._device_memory.get("device_memory_bytes", 0))
        self._device_memory = {"device_memory_bytes": peak_bytes}

    def _require_backend(self) -> Backend:
        if self._backend is None:
            raise ProviderError("no model is loaded.")
        return self._backend

    def _require_run(self) -> Run:
        if self._run is None:
            raise ProviderError("no inputs are prepared.")
        return self._run


def _end(message: str) -> None:
    """End the process with the last line of its log, which the command repeats."""
    os.write(2, f"{message}\n".encode())
    os._exit(1)


if __name__ == "__main__":
    with watching_own_calls(_end):
        serve_requests(BenchmarkWorker().answer)
