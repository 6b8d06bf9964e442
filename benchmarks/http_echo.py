"""What HTTP costs: a JSON answer of 11 bytes, in CPU time of the server for a request.

    $ python benchmarks/http_echo.py --seconds 5 --rounds 3

`floor` parses with httptools and answers every request with the same bytes: no limits, no timeouts,
no task, no order. `enginery` is enginery.serve's ASGI application around one of one line, under
uvicorn, and `uvicorn` the shortest ASGI application there.
All are one process on uvloop, asked by wrk over the loopback interface; they take turns in each
round. What counts is CPU time, of the kernel's side too, divided by the requests that wrk counted:
unlike a rate, a busy machine leaves it alone. Needs wrk and uvicorn. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys

import httptools
import psutil
import uvloop

from enginery.serve.asgi import AsgiApp
from enginery.serve.messages import Request, Response

BODY = b'{"ok":true}'
CONTENDERS = ("floor", "enginery", "uvicorn")


class Floor(asyncio.Protocol):
    """The least that can be called a server."""

    answer = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(BODY), BODY)
    )

    def connection_made(self, transport):
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_url(self, url):
        self.url = url

    def on_message_complete(self):
        self.transport.write(self.answer)


class Echo:
    """The application."""

    async def __call__(self, _: Request) -> Response:
        return Response(200, BODY)

    def admit(self, _: Request) -> None:
        return

    def refusal(self, _path: str, status: int, message: str) -> Response:
        return Response.of_json({"error": message}, status=status)


async def shortest(scope, _receive, send):
    if scope["type"] != "http":
        return
    await send(
        {"type": "http.response.start", "status": 200,
         "headers": [(b"content-type", b"application/json"), (b"content-length", b"11")]}
    )  # fmt: skip
    await send({"type": "http.response.body", "body": BODY})


async def serve(contender: str) -> None:
    loop = asyncio.get_running_loop()
    if contender != "floor":
        import uvicorn

        config = uvicorn.Config(
            shortest if contender == "uvicorn" else AsgiApp(Echo()),
            port=0, http="httptools", loop="uvloop", access_log=False, log_level="warning",
            lifespan="off",
        )  # fmt: skip
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await running
        return
    server = await loop.create_server(Floor, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def measure(contender: str, *, connections: int, seconds: float) -> dict[str, float]:
    """Microseconds of CPU time a request, requests a second, and the median latency."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", contender], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(child.stdout.readline())
        words = ["wrk", "-t1", f"-c{connections}", "--latency", f"http://127.0.0.1:{port}/echo"]
        subprocess.run([*words, "-d1"], capture_output=True, check=True)
        process = psutil.Process(child.pid)
        before = process.cpu_times()
        found = subprocess.run(
            [*words, f"-d{seconds:g}"], capture_output=True, text=True, check=True
        ).stdout
        after = process.cpu_times()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    if "Non-2xx" in found or "Socket errors" in found:
        sys.exit(f"{contender}: {found}")
    requests = int(re.search(r"(\d+) requests in", found)[1])
    latency, unit = re.search(r"50%\s+([\d.]+)(us|ms|s)", found).groups()
    cpu = after.user + after.system - before.user - before.system
    return {
        "cpu_us": cpu / requests * 1e6,
        "rate": float(re.search(r"Requests/sec:\s+([\d.]+)", found)[1]),
        "p50_us": float(latency) * {"us": 1, "ms": 1e3, "s": 1e6}[unit],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--only", nargs="*", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        uvloop.run(serve(asked.serve))
        return
    found = {contender: [] for contender in asked.only}
    for number in range(asked.rounds):
        for contender in asked.only if number % 2 == 0 else reversed(asked.only):
            found[contender].append(
                measure(contender, connections=asked.connections, seconds=asked.seconds)
            )
    print(f"{asked.connections} connections, medians of {asked.rounds} rounds\n")
    print("| server | CPU µs a request | of the first | requests/s | p50 µs |")
    print("|---|---|---|---|---|")
    median = {
        contender: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for contender, runs in found.items()
    }
    first = median[asked.only[0]]["cpu_us"]
    for contender, figures in median.items():
        print(
            f"| {contender} | {figures['cpu_us']:.1f} | {figures['cpu_us'] / first:.2f} "
            f"| {figures['rate']:,.0f} | {figures['p50_us']:.0f} |"
        )


if __name__ == "__main__":
    main()
