"""Serve the FP16 model on the device, and put it under load.

The clients are processes of this machine (`load.py`) and share its cores with the server. All loads
meet one server, which is started once.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_check.inputs import joined_sentences, sentences
from benchmarks.gpu_check.server import Load, Server, serving
from benchmarks.gpu_check.work import Work
from enginery import load_model

_BODIES = 500
_WORDS = 20
_CLOSE = 0.01
_KILL_CONNECTIONS = 64
_AGAIN_SECONDS = 20.0
"""Longest time until a server that lost a process is ready again."""


class SharedServer:
    """The server of a unit's cases, started by the first of them that runs."""

    def __init__(self, work: Work, stack: ExitStack, *options: str) -> None:
        self._work, self._stack, self._options = work, stack, options
        self._server: Server | None = None
        self._bodies: list[dict[str, Any]] = []
        self._expected: Any = None

    def get(self) -> Server:
        """Return the server; start it if none runs.

        Raises:
            ProviderError: it does not become ready.
        """
        if self._server is None or self._server.process.poll() is not None:
            context = serving(self._work.artifact("fp16"), self._work.provider, self._options)
            self._server = self._stack.enter_context(context)
        return self._server

    def bodies(self) -> tuple[list[dict[str, Any]], Any]:
        """Return the requests of a load, one text each, and the vectors expected."""
        if not self._bodies:
            texts = joined_sentences(50 if self._work.quick else _BODIES, words=_WORDS)
            with load_model(self._work.artifact("fp16"), providers=self._work.provider) as model:
                self._expected = model.embed(texts, normalize=True)
            self._bodies = [{"inputs": text} for text in texts]
        return self._bodies, self._expected


def run(work: Work) -> None:
    """Compare answers, then measure each number of connections; last, kill a process."""
    with ExitStack() as stack:
        shared = SharedServer(work, stack)
        work.case("answers", partial(_compare, work, shared), seconds=10.0)
        for clients in work.settings.clients:
            load = partial(_load, work, shared, clients)
            work.case(f"{clients} connections", load, seconds=10.0)
        work.case("a process is killed", partial(_kill, work, shared), seconds=10.0)


def _compare(work: Work, shared: SharedServer) -> None:
    """Check that the server's vectors are those of `load_model`, normalized and not."""
    texts = list(sentences()[:16])
    server = shared.get()
    with load_model(work.artifact("fp16"), providers=work.provider) as model:
        ours = {kind: model.embed(texts, normalize=kind) for kind in (True, False)}
    for normalize, vectors in ours.items():
        expected = np.asarray(vectors, np.float64)
        body = {"inputs": texts, "normalize": normalize}
        found = np.asarray(server.post("/embed", body), np.float64)
        apart = float(np.abs(found - expected).max() / np.abs(expected).max())
        kind = "normalized" if normalize else "raw"
        work.check(
            f"the server's {kind} vectors are those of load_model",
            passed=apart <= _CLOSE,
            found=f"largest difference {apart:.2g} of the largest value",
        )
    work.note(f"ready after {server.ready_seconds:.1f} s with {len(server.processes())} processes")
    if work.on_gpu:
        lines = [line for line in server.get("/metrics").splitlines() if "enginery_gpu_" in line]
        lines = [line for line in lines if not line.startswith("#")]
        work.check(
            "/metrics has the GPU's figures", passed=bool(lines), found=", ".join(lines) or "none"
        )


def _load(work: Work, shared: SharedServer, connections: int) -> None:
    """Measure a closed loop of this many connections."""
    bodies, expected = shared.bodies()
    server = shared.get()
    seconds = work.settings.load_seconds
    server.load(bodies, connections=connections, seconds=min(seconds, 1.0))
    result = server.load(bodies, connections=connections, seconds=seconds, expected=expected)
    record_load(work, result)
    work.check(
        f"{connections} connections are answered",
        passed=result.answered > 0
        and result.checked > 0
        and not (result.lost or result.wrong or result.server_errors),
        found=describe_load(result),
    )


def record_load(work: Work, result: Load, **fields: Any) -> None:
    """Add a load to the results of the current case."""
    work.add(
        "served",
        {
            "model": work.model,
            "connections": result.connections,
            "per_second": result.per_second,
            "latency_ms": {f"p{share}": result.percentile(share) for share in (50, 99)},
            "refused": result.refused,
            "server_errors": result.server_errors,
            "lost": len(result.lost),
            "checked": result.checked,
            "wrong": result.wrong,
            "least_cosine": result.least_cosine,
            **fields,
        },
    )


def describe_load(result: Load) -> str:
    """Return a sentence about a load."""
    cosine = "" if result.least_cosine is None else f", cosine at least {result.least_cosine:.6f}"
    lost = f" ({result.lost[0]})" if result.lost else ""
    return (
        f"{result.per_second:.0f} requests/s, p50 {result.percentile(50):.2f} ms, "
        f"p99 {result.percentile(99):.2f} ms, {result.refused} refused, of them "
        f"{result.server_errors} with 5xx, {len(result.lost)} connections lost{lost}, "
        f"{result.wrong} of {result.checked} vectors wrong{cosine}"
    )


def _kill(work: Work, shared: SharedServer) -> None:
    """Kill a process that has connections: only its own may be lost, and a new one starts."""
    bodies, expected = shared.bodies()
    server = shared.get()
    connections = _KILL_CONNECTIONS // 4 if work.quick else _KILL_CONNECTIONS
    killed: dict[str, int] = {}
    spared: list[str] = []

    def kill() -> None:
        time.sleep(work.settings.load_seconds / 2)
        accepted = server.connections()
        fronts = [n for n in accepted if n != server.processes()[0]]
        if len(fronts) < 2:
            spared.append(f"{len(accepted)} processes have connections")
            return
        killed["process"], killed["connections"] = fronts[0], accepted[fronts[0]]
        os.kill(fronts[0], signal.SIGKILL)

    result = server.load(
        bodies,
        connections=connections,
        seconds=work.settings.load_seconds,
        expected=expected,
        during=kill,
    )
    if not killed:
        work.note(f"no process was killed: {', '.join(spared)}")
        return
    until = time.monotonic() + _AGAIN_SECONDS
    while not (again := server.is_ready()) and time.monotonic() < until:
        time.sleep(0.1)
    work.set("killed", {**killed, "lost": len(result.lost), "per_second": result.per_second})
    work.check(
        "a process that is killed loses its own connections only",
        passed=again
        and len(result.lost) == killed["connections"]
        and not (result.wrong or result.server_errors)
        and result.answered > 0,
        found=f"it had {killed['connections']} of {connections} connections; "
        f"{describe_load(result)}; {'ready again' if again else 'not ready again'}",
    )
