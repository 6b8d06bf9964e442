"""Start `enginery serve`, put it under load, and look at its processes.

with serving(artifact, "cuda") as server:
    server.load(bodies, connections=64, seconds=5.0, route="/embed").per_second
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_check.load import Job
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ProviderError

START_SECONDS = 120.0
CLIENT_PROCESSES = 4
_LISTENING, _ESTABLISHED = "0A", "01"


@dataclass(frozen=True)
class Load:
    """What the connections of a load got."""

    connections: int
    seconds: float
    statuses: Counter[str]
    latencies_ms: NDArray[Any] = field(repr=False)
    """Of responses with status 200."""
    lost: tuple[str, ...]
    """Reasons of connections that ended."""
    events: int
    checked: int
    wrong: int
    least_cosine: float | None

    @property
    def answered(self) -> int:
        return self.statuses["200"]

    @property
    def server_errors(self) -> int:
        return sum(count for status, count in self.statuses.items() if status.startswith("5"))

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds

    @property
    def refused(self) -> int:
        return sum(self.statuses.values()) - self.answered

    def percentile(self, share: float) -> float:
        """Return a percentile of the latency in ms; 0 without responses."""
        return float(np.percentile(self.latencies_ms, share)) if len(self.latencies_ms) else 0.0


class Server:
    """A running `enginery serve`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self.ready_seconds = 0.0
        """Seconds from its start until it was ready."""

    def load(
        self,
        bodies: Sequence[Any],
        *,
        connections: int,
        seconds: float,
        route: str = "/embed",
        expected: NDArray[Any] | None = None,
        check_every: int = 50,
        streamed: bool = False,
        during: Callable[[], None] = lambda: None,
    ) -> Load:
        """Send requests in a closed loop of several processes.

        Args:
            bodies: the requests' bodies, which take turns.
            connections: number of connections.
            seconds: length of the load.
            route: path of the requests.
            expected: vectors of all bodies, of length 1; None to check none.
            check_every: of how many responses one is compared with `expected`.
            streamed: the responses are event streams.
            during: called once the load has begun.
        """
        count = min(CLIENT_PROCESSES, connections, os.cpu_count() or 1)
        with tempfile.TemporaryDirectory(prefix="enginery-load-") as scratch:
            directory = Path(scratch)
            lines = b"".join(json.dumps(body).encode() + b"\n" for body in bodies)
            (directory / "bodies").write_bytes(lines)
            if expected is not None:
                np.save(directory / "expected.npy", expected)
            jobs = [
                Job(
                    port=self.port,
                    connections=len(range(index, connections, count)),
                    seconds=seconds,
                    route=route,
                    bodies=str(directory / "bodies"),
                    first=1009 * index,
                    expected="" if expected is None else str(directory / "expected.npy"),
                    check_every=check_every,
                    streamed=streamed,
                )
                for index in range(count)
            ]
            results, latencies = _run_clients(jobs, directory, during)
        cosines = [r["least_cosine"] for r in results if r["least_cosine"] is not None]
        return Load(
            connections=connections,
            # The clients begin within a millisecond, and end with their last response.
            seconds=max(float(r["seconds"]) for r in results),
            statuses=sum((Counter(r["statuses"]) for r in results), Counter[str]()),
            latencies_ms=np.concatenate(latencies),
            lost=tuple(reason for r in results for reason in r["lost"]),
            events=sum(int(r["events"]) for r in results),
            checked=sum(int(r["checked"]) for r in results),
            wrong=sum(int(r["wrong"]) for r in results),
            least_cosine=min(cosines, default=None),
        )

    def post(self, route: str, body: Any) -> Any:
        """Return the JSON response to a request.

        Raises:
            OSError: there is none, or its status is an error.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{route}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def get(self, path: str) -> str:
        """Return the text at a path."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return str(response.read().decode())

    def is_ready(self) -> bool:
        """Return True if /health says so."""
        try:
            self.get("/health")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def processes(self) -> list[int]:
        """Return the ids of the server's processes, the first that of the command."""
        parents: dict[int, list[int]] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(directory.name))
        found, waiting = [], [self.process.pid]
        while waiting:
            found.append(waiting.pop(0))
            waiting += sorted(parents.get(found[-1], []))
        return found

    def connections(self) -> Counter[int]:
        """Return the number of accepted connections of each process that has any."""
        inodes = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].partition(":")[2], 16) == self.port and fields[3] == _ESTABLISHED:
                inodes.add(f"socket:[{fields[9]}]")
        found: Counter[int] = Counter()
        for number in self.processes():
            for link in Path(f"/proc/{number}/fd").glob("*"):
                with suppress(OSError):
                    found[number] += str(link.readlink()) in inodes
        return +found


def _run_clients(
    jobs: Sequence[Job], directory: Path, during: Callable[[], None]
) -> tuple[list[dict[str, Any]], list[NDArray[Any]]]:
    """Run one process for each job; return their results and latencies."""
    clients = []
    paths = [directory / f"job{index}.json" for index in range(len(jobs))]
    try:
        for path, job in zip(paths, jobs, strict=True):
            path.write_text(json.dumps(asdict(job)))
            command = [sys.executable, "-m", "benchmarks.gpu_check.load", str(path)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            clients.append(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
        for client in clients:
            if client.stdout.readline() != "ready\n":
                raise ProviderError("a client could not connect to the server.")
        for client in clients:
            client.stdin.write("\n")
            client.stdin.flush()
        during()
        results = [json.loads(client.communicate()[0]) for client in clients]
    finally:
        for client in clients:
            client.kill()
            client.wait()
            client.stdin.close()
            client.stdout.close()
    return results, [np.load(path.with_suffix(".npy")) for path in paths]


@contextmanager
def serving(artifact: Artifact, provider: str, options: Sequence[str] = ()) -> Iterator[Server]:
    """Start `enginery serve`; yield when /health says that it is ready.

    Raises:
        ProviderError: its packages are not installed, or it does not become ready.
    """
    if find_spec("starlette") is None:
        raise ProviderError(
            "the server's packages are not installed.", do="pip install 'enginery[serve]'"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "enginery", "serve", str(artifact.path), "--port", str(port)]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, "--providers", provider, *options], stdout=subprocess.DEVNULL
    ) as process:
        server = Server(process, port)
        try:
            _wait_until_ready(server)
            server.ready_seconds = time.monotonic() - began
            yield server
        finally:
            started = server.processes()
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                for number in started:
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)


def _wait_until_ready(server: Server) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.process.poll() is not None:
            raise ProviderError(f"the server ended with status {server.process.returncode}.")
        if server.is_ready():
            return
        time.sleep(0.05)
    raise ProviderError(f"the server is not ready within {START_SECONDS:.0f} s.")
