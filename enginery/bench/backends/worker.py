"""The process of one contender: it loads a model and runs it on request.

Reads one JSON command a line from standard input, answers one JSON line on standard output:

    $ echo '{"do": "memory"}' | python -m enginery.bench.backends.worker
    {"peak_rss_bytes": 41205760}

Contenders stay in processes of their own, so that each has its own peak of memory and a crash is
an answer; they take turns when told, so that a drift of the machine hits all of them. When the
parent is gone, so is the process, in the middle of a run too; and when standard input ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STARTED = time.perf_counter()

import numpy as np  # noqa: E402  starting is measured

from enginery.bench.backends.backend import (  # noqa: E402
    BareSession,
    Opened,
    OurRunner,
    Run,
    open_contender,
)
from enginery.bench.backends.copies import measure_copies  # noqa: E402
from enginery.bench.backends.nvml import Nvml  # noqa: E402
from enginery.bench.backends.warmup import take_turn, warm_up  # noqa: E402
from enginery.core.artifact.artifact import Artifact  # noqa: E402
from enginery.core.artifact.manifest import Manifest  # noqa: E402
from enginery.core.errors import ProviderError  # noqa: E402
from enginery.core.subprocess import (  # noqa: E402
    WorkerResult,
    peak_rss_bytes,
    serve_requests,
)


class Contestant:
    """One contender and what it was told so far."""

    def __init__(self) -> None:
        self._opened: Opened | None = None
        self._run: Run | None = None
        self._feeds: dict[str, Any] = {}
        self._device_id = 0
        self._device_memory: WorkerResult = {}

    def answer(self, command: Mapping[str, Any]) -> WorkerResult:
        """Does what a command says; raises EngineryError where it cannot be done."""
        does = {
            "load": self.load,
            "prepare": self.prepare,
            "turn": self.turn,
            "copies": self.copies,
            "energy": self.energy,
            "memory": self.memory,
        }
        return does[command["do"]](command)

    def load(self, command: Mapping[str, Any]) -> WorkerResult:
        """Opens the model; the seconds are those of opening, with the imports that it needs."""
        manifest = Manifest.model_validate(command["manifest"])
        artifact = Artifact(Path(command["artifact"]), manifest)
        self._device_id = int(command["plan"]["device"].partition(":")[2] or 0)
        before = time.perf_counter()
        self._opened = open_contender(
            command["plan"],
            artifact,
            artifact.graph(command["graph"]),
            threads=command["threads"],
            allow_fallback=command["allow_fallback"],
            trust_remote_code=command["trust_remote_code"],
            allow_pickle=command["allow_pickle"],
        )
        loaded = time.perf_counter()
        return {
            "start_seconds": before - _STARTED,
            "load_seconds": loaded - before,
            "providers": self._opened.providers,
            "tools": self._opened.tools,
            "notes": self._opened.notes,
            "rss_bytes": peak_rss_bytes(),
        }

    def prepare(self, command: Mapping[str, Any]) -> WorkerResult:
        """Takes inputs from a file, and warms up on them where `seconds` are given."""
        with np.load(command["feeds"], allow_pickle=False) as stored:
            self._feeds = {name: stored[name] for name in stored.files}
        self._run = self._ready().prepared(self._feeds)
        if command["seconds"] <= 0:
            return {"prepared": True}
        found = warm_up(self._run, max_seconds=command["seconds"])
        self._look_at_memory()
        opened = self._ready()
        note = opened.note_on(self._feeds) if isinstance(opened, OurRunner) else ""
        return {**vars(found), "notes": [note] if note else []}

    def turn(self, command: Mapping[str, Any]) -> WorkerResult:
        """The times of some runs; `cold` ones are timed from the first on."""
        run = self._prepared()
        if command.get("cold"):
            before = time.perf_counter()
            run()
            times = [(time.perf_counter() - before) * 1e3]
        else:
            times = take_turn(run, runs=command["runs"])
        self._look_at_memory()
        return {"times_ms": times}

    def copies(self, command: Mapping[str, Any]) -> WorkerResult:
        """The copies to and from the device, apart."""
        opened = self._ready()
        if not isinstance(opened, BareSession):
            raise ProviderError("copies are measured on a bare session.")
        session = opened.session_for(self._feeds)
        found = measure_copies(
            session, self._feeds, device=command["device"], seconds=command["seconds"]
        )
        return {**vars(found), "share": found.share}

    def energy(self, command: Mapping[str, Any]) -> WorkerResult:
        """Joules of one run, over some seconds of them: the counter moves every 20 to 100 ms."""
        run = self._prepared()
        with Nvml.open(self._device_id) as nvml:
            before, began, runs = nvml.energy_joules(), time.perf_counter(), 0
            while not runs or time.perf_counter() - began < command["seconds"]:
                run()
                runs += 1
            return {"joules": (nvml.energy_joules() - before) / runs}

    def memory(self, command: Mapping[str, Any]) -> WorkerResult:  # noqa: ARG002
        """The most memory so far, and what the session says of itself.

        That opens further sessions, whose memory is none of the contender's.
        """
        self._look_at_memory()
        found: WorkerResult = {"peak_rss_bytes": peak_rss_bytes(), **self._device_memory}
        if self._opened is not None:
            found["facts"] = self._opened.facts()
        return found

    def _look_at_memory(self) -> None:
        """Keeps the most that this process was seen to hold of the GPU; between turns it is told.

        The driver counts nothing by itself: what a run took and gave back in it is not seen.
        """
        if "device_memory" in self._device_memory:
            return  # it is not told, and will not be
        providers = self._opened.providers if self._opened else []
        if providers and "CPU" in providers[0]["name"]:
            self._device_memory = {"device_memory": "it runs on the CPU"}
            return
        try:
            with Nvml.open(self._device_id) as nvml:
                held = nvml.memory_bytes(os.getpid())
        except ProviderError as error:
            if not self._device_memory:
                self._device_memory = {"device_memory": error.message}
            return
        most = max(held, self._device_memory.get("device_memory_bytes", 0))
        self._device_memory = {"device_memory_bytes": most}

    def _ready(self) -> Opened:
        if self._opened is None:
            raise ProviderError("no model is loaded.")
        return self._opened

    def _prepared(self) -> Run:
        if self._run is None:
            raise ProviderError("no inputs are prepared.")
        return self._run


if __name__ == "__main__":
    serve_requests(Contestant().answer)
