"""Send requests to a server from one process, as many at a time as there are connections.

    $ python -m benchmarks.gpu_check.load JOB.json        # writes JOB.npy: latencies in ms
    {"statuses": {"200": 41210}, "lost": [], "checked": 640, "wrong": 0, …}

Each connection sends its next request after a response (a closed loop). The process uses sockets
and epoll directly, so that the load costs little of the cores that it shares with the server; a
load has several processes. It prints `ready`, begins when it gets a line, and ends after the job's
seconds.

Every response's status is read. Of each `check_every`-th, the vectors are compared with those
expected after the load.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_COSINE = 0.999
"""Between a vector and the one expected; FP16 in another batch gives 0.99999 and more."""
_BUFFER_BYTES = 1 << 20
_LAST_CHUNK = b"0\r\n\r\n"
_GIVEN_UP_SECONDS = 60.0
"""Longest wait for responses after the load's end."""


@dataclass(frozen=True)
class Job:
    """The load of one process."""

    port: int
    connections: int
    seconds: float
    route: str
    bodies: str
    """File with the requests' bodies, JSON, one a line."""
    first: int = 0
    """Index of the first body; connections begin at different ones."""
    expected: str = ""
    """File of an array: vectors of all bodies, one after the other, of length 1; empty for none."""
    check_every: int = 50
    streamed: bool = False
    """Responses are chunked event streams."""


@dataclass
class Outcome:
    """What the connections got."""

    statuses: Counter[int] = field(default_factory=Counter)
    latencies_ms: list[float] = field(default_factory=list)
    """Of responses with status 200."""
    lost: list[str] = field(default_factory=list)
    """Reasons of connections that ended."""
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    """Index of the body and the response's body, of those to check."""
    events: int = 0


class Connection:
    """A connection and the response that it waits for."""

    def __init__(self, job: Job, index: int, requests: list[bytes], outcome: Outcome) -> None:
        self._job, self._requests, self._outcome = job, requests, outcome
        self._index = index
        self._socket = socket.create_connection(("127.0.0.1", job.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._missing = -1
        """Bytes of the response that have not come; -1 before its head is known."""
        self._head_bytes = 0
        self._status = 0
        self._began = 0.0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self) -> None:
        """Send the next request."""
        request = self._requests[self._index % len(self._requests)]
        self._began = time.perf_counter()
        if len(request) < 65536:
            self._socket.send(request)
            return
        self._socket.settimeout(_GIVEN_UP_SECONDS)
        self._socket.sendall(request)
        self._socket.settimeout(0)

    def read(self) -> bool:
        """Take what has come; return True if the response is complete.

        Raises:
            OSError: the connection is lost, or what came is no response.
        """
        data = self._socket.recv(_BUFFER_BYTES)
        if not data:
            raise ConnectionResetError("closed by the server")
        self._received += data
        if self._missing < 0 and not self._read_head():
            return False
        if self._job.streamed:
            complete = self._received.endswith(_LAST_CHUNK)
        else:
            complete = len(self._received) >= self._missing
        if complete:
            self._finish()
        return complete

    def close(self) -> None:
        self._socket.close()

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._received[:end]).lower()
        self._status = int(head[9:12])
        self._head_bytes = end + 4
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        self._missing = self._head_bytes + int(length or 0)
        if not length and not self._job.streamed:
            raise ConnectionError(f"a response without content-length: {head[:80]!r}")
        return True

    def _finish(self) -> None:
        outcome = self._outcome
        outcome.statuses[self._status] += 1
        if self._status == 200:
            outcome.latencies_ms.append((time.perf_counter() - self._began) * 1e3)
            if self._job.streamed:
                outcome.events += self._received.count(b"data:")
            elif self._job.expected and not len(outcome.latencies_ms) % self._job.check_every:
                body = bytes(self._received[self._head_bytes :])
                outcome.kept.append((self._index % len(self._requests), body))
        self._received.clear()
        self._missing = -1
        self._index += 1


def load(job: Job, begin: Any) -> tuple[Outcome, float]:
    """Run a job; return what came, and the seconds until the last response.

    Args:
        job: the job.
        begin: called when all connections are open; returns when the load may begin.
    """
    lines = Path(job.bodies).read_bytes().splitlines()
    head = (
        b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n"
    )
    requests = [head % (job.route.encode(), len(line)) + line for line in lines]
    outcome = Outcome()
    poll = select.epoll()
    open_ones: dict[int, Connection] = {}
    for number in range(job.connections):
        connection = Connection(job, job.first + 37 * number, requests, outcome)
        open_ones[connection.fileno()] = connection
        poll.register(connection.fileno(), select.EPOLLIN)
    begin()
    began = time.perf_counter()
    until = began + job.seconds
    waiting = dict(open_ones)
    for connection in open_ones.values():
        connection.send()
    while waiting and time.perf_counter() < until + _GIVEN_UP_SECONDS:
        for number, _ in poll.poll(1.0):
            connection = open_ones[number]
            try:
                if not connection.read():
                    continue
                if time.perf_counter() < until:
                    connection.send()
                else:
                    del waiting[number]
            except OSError as error:
                # One that is lost while it waits for nothing counts as well.
                outcome.lost.append(f"{type(error).__name__}: {error}")
                waiting.pop(number, None)
                poll.unregister(number)
                connection.close()
    outcome.lost += ["no response"] * len(waiting)
    return outcome, time.perf_counter() - began


def compare(kept: list[tuple[int, bytes]], expected: NDArray[Any], bodies: int) -> dict[str, Any]:
    """Compare responses with the vectors expected, which are `bodies` equal groups."""
    group = len(expected) // bodies
    cosines = []
    for index, body in kept:
        vectors = np.asarray(json.loads(body), np.float64)
        wanted = expected[index * group : (index + 1) * group]
        if vectors.shape != wanted.shape:
            cosines.append(-1.0)
            continue
        norms = np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
        cosines.append(float(((vectors * wanted).sum(axis=1) / norms).min()))
    return {
        "checked": len(cosines),
        "wrong": sum(not cosine >= MIN_COSINE for cosine in cosines),
        "least_cosine": min(cosines, default=None),
    }


def main(path: Path) -> None:
    """Run the job of a file and print its outcome."""
    job = Job(**json.loads(path.read_bytes()))

    def begin() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    outcome, seconds = load(job, begin)
    np.save(path.with_suffix(".npy"), np.asarray(outcome.latencies_ms, np.float32))
    checked: dict[str, Any] = {"checked": 0, "wrong": 0, "least_cosine": None}
    if job.expected:
        bodies = Path(job.bodies).read_bytes().count(b"\n")
        checked = compare(outcome.kept, np.load(job.expected), bodies)
    document = {
        "statuses": {str(status): count for status, count in outcome.statuses.items()},
        "lost": outcome.lost,
        "events": outcome.events,
        "seconds": seconds,
        **checked,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
