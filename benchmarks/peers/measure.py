"""Run a contender once in a process of its own: its speed, its memory, its first answer."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.peers.contenders import PROGRAMS, Library, Server
from benchmarks.peers.environments import OFFLINE, UnavailableError
from benchmarks.serve_load import answers, closed_loop, free_port, message_of

PATIENCE_SECONDS = 180
SAMPLE_SECONDS = 0.1  # each reads the page tables of the process, which takes milliseconds


class PeakMemory:
    """Samples the proportional set of a process and its children; shared pages count once."""

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.mib = max(self.mib, _tree_mib(self._pid))


def _tree_mib(pid: int) -> float:
    """Return the memory of a process and its descendants; those that have just ended are absent."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    found = 0
    for process in family:
        try:
            found += process.memory_full_info().pss
        except psutil.Error:
            continue
    return found / 2**20


def encode(
    library: Library, python: Path, model: Path, texts: Path, scratch: Path
) -> tuple[dict[str, float], NDArray[np.float32]]:
    """Encode all texts; return rows per second, seconds to the first answer, peak memory; vectors.

    Raises:
        UnavailableError: the program fails.
    """
    rows = len(json.loads(texts.read_text(encoding="utf-8")))
    out = scratch / "vectors.npy"
    log = scratch / "log"
    program = str(PROGRAMS / "encode.py")
    command = [str(python), program, library.function, str(model), str(texts), str(out)]
    started = time.perf_counter()
    with (
        log.open("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=OFFLINE, cwd=scratch
        ) as process,
        PeakMemory(process.pid) as memory,
    ):
        boot, seconds = 0.0, 0.0
        for line in process.stdout or ():
            if line.startswith('{"ready"'):
                boot = time.perf_counter() - started
            elif line.startswith('{"seconds"'):
                seconds = json.loads(line)["seconds"]
        status = process.wait()
    if status or not seconds:
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise UnavailableError(f"it ended with status {status}: {' '.join(last)}")
    return {"rate": rows / seconds, "boot": boot, "memory_mib": memory.mib}, np.load(out)


def serve(
    server: Server,
    python: Path,
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    connections: Sequence[int],
    seconds: float,
    seed: int,
    checked: int,
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Load a server; return its figures, and the vectors of the first texts.

    Raises:
        UnavailableError: it does not start.
    """
    bodies = scratch / "bodies.jsonl"
    bodies.write_text("".join(json.dumps(server.body(t)) + "\n" for t in texts), encoding="utf-8")
    with _running(server, python, model, scratch) as (port, process, boot):
        vectors = [_ask(server, port, text) for text in texts[:checked]]
        closed_loop(port, 8, 2, bodies, seed=1000 + seed, route=server.route)
        with PeakMemory(process.pid) as memory:
            closed = {
                str(count): closed_loop(
                    port, count, seconds, bodies, seed + count, route=server.route
                )
                for count in connections
            }
    found = {"boot": boot, "memory_mib": memory.mib, "closed": closed}
    return found, np.asarray(vectors, np.float32)


@contextmanager
def _running(
    server: Server, python: Path, model: Path, scratch: Path
) -> Iterator[tuple[int, subprocess.Popen[bytes], float]]:
    """Start a server and wait for its first answer; yield port, process and seconds."""
    port = free_port()
    message = message_of(json.dumps(server.body("The engine is warm.")), server.route)
    log = scratch / "log"
    started = time.perf_counter()
    with (
        log.open("wb") as output,
        subprocess.Popen(
            server.command(python, model, port),
            stdout=output,
            stderr=output,
            env=OFFLINE,
            cwd=scratch,
            start_new_session=True,
        ) as process,
    ):
        try:
            while not answers(port, message):
                late = time.perf_counter() - started > PATIENCE_SECONDS
                if process.poll() is not None or late:
                    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
                    raise UnavailableError(
                        f"it {'does not answer' if late else 'ended'}: {' '.join(last)}"
                    )
                time.sleep(0.005)
            yield port, process, time.perf_counter() - started
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and its workers, which are a process group of their own."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _ask(server: Server, port: int, text: str) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", server.route, json.dumps(server.body(text)), headers)
        return server.vector(json.loads(connection.getresponse().read()))
    finally:
        connection.close()
