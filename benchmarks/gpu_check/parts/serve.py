"""Serve the FP16 model on the device, and put it under load.

The clients are processes of this machine (`load.py`) and share its cores with the server.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.gpu_check.inputs import sentences
from benchmarks.gpu_check.work import Work
from enginery import load_model
from enginery.core.errors import ProviderError

_START_SECONDS = 60.0
_CLIENT_PROCESSES = 4
_CLOSE = 0.01


def run(work: Work) -> None:
    """Compare answers, then measure each number of connections."""
    work.case("answers", partial(_compare, work), seconds=10.0)
    for clients in work.settings.clients:
        work.case(f"{clients} connections", partial(_load, work, clients), seconds=10.0)


def _compare(work: Work) -> None:
    """Check that the server's vectors are those of `load_model`."""
    texts = list(sentences()[:16])
    with load_model(work.artifact("fp16"), providers=work.provider) as model:
        expected = np.asarray(model(texts), np.float64)
    with _server(work) as port:
        found = np.asarray(_post(port, {"inputs": texts, "normalize": False}), np.float64)
        metrics = _get(port, "/metrics")
    apart = float(np.abs(found - expected).max() / np.abs(expected).max())
    work.check(
        "the server's vectors are those of load_model",
        passed=apart <= _CLOSE,
        found=f"largest difference {apart:.2g} of the largest value",
    )
    if work.on_gpu:
        lines = [line for line in metrics.splitlines() if line.startswith("enginery_gpu_")]
        work.check(
            "/metrics has the GPU's figures", passed=bool(lines), found=", ".join(lines) or "none"
        )


def _load(work: Work, connections: int) -> None:
    """Measure a closed loop of this many connections."""
    seconds = work.settings.load_seconds
    processes = min(_CLIENT_PROCESSES, connections, os.cpu_count() or 1)
    with _server(work) as port:
        _clients(port, processes, connections, min(seconds, 2.0))
        found = _clients(port, processes, connections, seconds)
    answered, refused, failed = (
        sum(int(one[name]) for one in found) for name in ("answered", "refused", "failed")
    )
    latency = {
        name: max((float(one["latency_ms"].get(name, 0.0)) for one in found), default=0.0)
        for name in ("p50", "p99")
    }
    work.add(
        "served",
        {
            "model": work.model,
            "connections": connections,
            "processes": processes,
            "per_second": answered / seconds,
            "latency_ms": latency,
            "refused": refused,
        },
    )
    work.check(
        f"{connections} connections are answered",
        passed=answered > 0 and not failed,
        found=f"{answered / seconds:.0f} requests/s, p50 {latency['p50']:.2f} ms, "
        f"p99 {latency['p99']:.2f} ms, {refused} refused, {failed} connections failed",
    )


def _clients(port: int, processes: int, connections: int, seconds: float) -> list[dict[str, Any]]:
    """Run the clients; return the result of each process."""
    shares = [len(range(index, connections, processes)) for index in range(processes)]
    module = [sys.executable, "-m", "benchmarks.gpu_check.load"]
    started = [
        subprocess.Popen(
            [*module, str(port), str(share), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        for share in shares
    ]
    return [json.loads(client.communicate()[0]) for client in started]


@contextmanager
def _server(work: Work) -> Iterator[int]:
    """Start `enginery serve`; yield its port when it answers."""
    if find_spec("starlette") is None:
        raise ProviderError(
            "the server's packages are not installed.", do="pip install 'enginery[serve]'"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "enginery", "serve", str(work.artifact("fp16").path)]
    options = ["--port", str(port), "--providers", work.provider]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as process:
        try:
            _wait_until_ready(port, process)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ProviderError(f"the server ended with status {process.returncode}.")
        try:
            _post(port, {"inputs": "The engine is warm."})
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
        else:
            return
    raise ProviderError(f"the server does not answer within {_START_SECONDS:.0f} s.")


def _post(port: int, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/embed",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return str(response.read().decode())
