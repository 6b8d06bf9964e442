"""Send hostile requests to a server, and measure what a neighbour notices.

    $ python -m benchmarks.hostile_requests --requests 200
    $ python -m benchmarks.hostile_requests --requests 200 -- --fronts 1     # options of the server

The script serves a tiny BERT and, without fronts, a tiny GPT-2 with a chat template. Requests of
every kind below come from several connections at a time: headers, pipelines and bodies that are
large or do not end, lists and numbers beyond their bounds, tensors that contradict their shapes,
lists of long texts. Beside them a neighbour embeds a short text every 50 ms. The script prints, for
each kind, the statuses, and in the end the neighbour's longest wait and how far the memory of all
processes rose above what it was at rest. It fails if the wait exceeds a second, the memory 300 MB,
a neighbour's answer is not 200, a hostile one is 500, or a process was replaced.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

MAX_WAIT_SECONDS = 1.0
MAX_RISE_BYTES = 300 * 10**6
EVERY_SECONDS = 0.05
THREADS = 4
LIMIT = 8_388_608
WORDS = "the pump runs warm again and the valve of the engine is open"

Parts = list[bytes]


def main() -> None:
    """Run the campaign; exit with status 1 if a limit was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kind", help="send requests of this kind only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="options of the server, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifacts = prepare(Path(scratch), generates="--fronts" not in options.options)
        with Server([*artifacts, *options.options], Path(scratch) / "log") as server:
            made = kinds(random.Random(options.seed), generates=len(artifacts) > 1)
            if options.kind:
                made = {options.kind: made[options.kind]}
            failed = run(server, made, options.requests)
    raise SystemExit(failed)


def prepare(folder: Path, *, generates: bool) -> list[str]:
    """Make the artifacts; return the arguments that name them."""
    from tests.tiny import save_tiny, tiny_artifact

    tiny_artifact("bert", "feature-extraction", folder / "vectors")
    arguments = [f"vectors={folder / 'vectors'}"]
    if generates:
        task = "text-generation-with-past"
        source = save_tiny("gpt2", task, folder / "gpt2")
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        (source / "chat_template.jinja").write_text(template)
        tiny_artifact("gpt2", task, folder / "writer", source=source)
        arguments.append(f"writer={folder / 'writer'}")
    return arguments


class Server:
    """A process of `enginery serve`."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "enginery", "serve", *arguments, "--access-log", "off"]
        with log.open("w") as stream:
            self._process = subprocess.Popen([*command, "--port", str(self.port)], stderr=stream)
        self.processes: list[psutil.Process] = []

    def __enter__(self) -> Server:
        while self.status("GET", "/health/ready") != 200:
            if self._process.poll() is not None:
                raise SystemExit(self.log.read_text())
            time.sleep(0.1)
        parent = psutil.Process(self._process.pid)
        self.processes = [parent, *parent.children(recursive=True)]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def status(self, method: str, path: str, body: Any = None) -> int:
        """Return the status of a request; 0 without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            response.read()
            return response.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def exchange(self, parts: Parts, *, seconds: float) -> list[int]:
        """Send bytes on a connection; return the statuses of what comes back."""
        text = b""
        address = ("127.0.0.1", self.port)
        with socket.create_connection(address, timeout=seconds) as client, suppress(OSError):
            for part in parts:
                client.sendall(part)
            while part := client.recv(65_536):
                text += part
        return [int(part[:3]) for part in text.split(b"HTTP/1.1 ")[1:]]

    def memory(self) -> int:
        """Return the memory of all processes, without what they share."""
        total = 0
        parent = psutil.Process(self._process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.Error):
                total += process.memory_full_info().uss
        return total


def post(path: str, body: Any, *headers: bytes) -> Parts:
    """Return a request with a body: bytes, or values for JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [b"POST %b HTTP/1.1" % path.encode(), b"host: x", b"connection: close", *headers]
    return [b"\r\n".join([*head, b"content-length: %d" % len(content), b"", b""]), content]


def tensor(**changes: Any) -> dict[str, Any]:
    """Return the body of /infer with one tensor."""
    values = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
    return {"inputs": [{**values, **changes}]}


def kinds(chance: random.Random, *, generates: bool) -> dict[str, Callable[[], Parts]]:
    """Return what makes a request of each kind."""
    get = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
    many = LIMIT // 2 - 100
    keys = [f"x{number}" for number in range(120_000)]
    elements = struct.pack("<I", 0) * (LIMIT // 4 - 1000)
    infer, lengths = "/v2/models/vectors/infer", b"inference-header-content-length: %d"
    binary = json.dumps(
        tensor(
            name="text",
            datatype="BYTES",
            shape=[2],
            data=None,
            parameters={"binary_data_size": len(elements)},
        )
    ).encode()
    made: dict[str, Callable[[], Parts]] = {
        "header": lambda: [get + b"x: ", *[b"a" * 2**20] * chance.randint(1, 50)],
        "headers": lambda: [get, *[b"x%d: a\r\n" % n for n in range(20_000)]],
        "unfinished headers": lambda: [get + b"x: a\r\n" * chance.randint(1, 99)],
        "path": lambda: [b"GET /" + b"a" * chance.randint(70_000, 10**7) + b" HTTP/1.1\r\n\r\n"],
        "pipeline": lambda: [(get + b"\r\n") * 1000] * 20,
        "invalid": lambda: [bytes(chance.randrange(256) for _ in range(200))],
        "unfinished body": lambda: [*post("/embed", {"inputs": "a" * 10**6})[:1], b"a" * 10**5],
        "trailer": lambda: [
            b"POST /embed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
            b"1\r\na\r\n0\r\nx: ",
            *[b"a" * 2**20] * 8,
        ],
        "deep JSON": lambda: post("/embed", b'{"inputs":' + b"[" * many),
        "many texts": lambda: post("/embed", b'{"inputs":["' + b'","' * (many // 2) + b'"]}'),
        "many pairs": lambda: post("/predict", b'{"inputs":[' + b'["a"],' * 10**6 + b'["a"]]}'),
        "many ids": lambda: post("/embed", b'{"inputs":[1' + b",1" * many + b"]}"),
        "long text": lambda: post("/embed", {"inputs": "a b " * (LIMIT // 4 - 100)}),
        "list": lambda: post("/embed", {"inputs": [WORDS * 15] * 64}),
        "tokenize": lambda: post("/tokenize", {"inputs": "a " * many}),
        "tokenize list": lambda: post("/tokenize", {"inputs": ["a " * 2000] * 1000}),
        "decode": lambda: post("/decode", b'{"ids":[1' + b",1" * many + b"]}"),
        "tensor": lambda: post(infer, tensor(data=[1] * (LIMIT // 3 - 1000))),
        "nested tensor": lambda: post(infer, tensor(shape=[10**6, 1], data=[[1]] * 10**6)),
        "large tensor": lambda: post(infer, tensor(shape=[1, 10**6], data=[1] * 10**6)),
        "strings": lambda: post(infer, binary + elements, lengths % len(binary)),
        "many strings": lambda: post(
            infer, tensor(name="text", datatype="BYTES", shape=[10**6], data=["a"] * 10**6)
        ),
        "no tensors": lambda: post(infer, {"inputs": [1] * 10**6}),
        "many outputs": lambda: post(
            infer,
            {
                "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}],
                "outputs": [{"name": f"y{number}"} for number in range(40_000)],
            },
        ),
        "documents": lambda: post("/v1/rerank", {"query": "a", "documents": [1] * 10**6}),
        "fields": lambda: post("/predict/vectors", {"inputs": "a"} | dict.fromkeys(keys, 1)),
    }
    if generates:
        parameters: dict[str, dict[str, Any]] = {
            "end tokens": {"num_beams": 2, "eos_token_id": [7] * 60_000},
            "suppressed": {"suppress_tokens": list(range(10**6))},
            "length penalty": {"num_beams": 2, "length_penalty": 1e308},
            "stop strings": {"stop_strings": ["a" * 255] * 20_000},
            "bad words": {"bad_words_ids": [[1, 2]] * 10**6},
            "beams": {"num_beams": 16, "max_new_tokens": 64, "eos_token_id": list(range(64))},
        }
        for name, values in parameters.items():
            body = {"inputs": "a", "parameters": values}
            made[name] = lambda body=body: post("/generate", body)  # type: ignore[misc]
        made["chat"] = lambda: post(
            "/v1/chat/completions",
            {"model": "writer", "messages": [{"role": "user", "content": "a " * 10**5}]},
        )
        made["bias"] = lambda: post(
            "/v1/completions",
            {"model": "writer", "prompt": "a", "logit_bias": dict.fromkeys(range(10**5), 1)},
        )
        made["texts"] = lambda: post(
            "/v1/completions", {"prompt": "a", "temperature": 1, "n": 20_000_000}
        )
        made["messages"] = lambda: post("/v1/chat/completions", {"messages": [1] * 10**6})
    return made


def ask(server: Server, body: Any, answers: Any, end: Any) -> None:
    """Ask as a neighbour until the end; then put the status and seconds of each answer."""
    observed = []
    while not end.is_set():
        began = time.perf_counter()
        status = server.status("POST", "/embed", body)
        observed.append((status, time.perf_counter() - began))
        time.sleep(max(EVERY_SECONDS - observed[-1][1], 0))
    answers.put(observed)


def run(server: Server, made: dict[str, Callable[[], Parts]], requests: int) -> int:
    """Send the requests; return 1 if a limit was exceeded."""
    names = list(made.items())
    body = {"inputs": "The engine is warm.", "model": "vectors"}
    for _ in range(50):
        server.status("POST", "/embed", body)
    rest, peak = server.memory(), 0
    waits: list[float] = []
    statuses: dict[str, Counter[int]] = {name: Counter() for name, _ in names}
    neighbours: Counter[int] = Counter()
    todo, done, lock = list(range(requests)), threading.Event(), threading.Lock()

    def send() -> None:
        while True:
            with lock:
                if not todo:
                    return
                name, make = names[todo.pop() % len(names)]
                parts = make()
            seconds = 3.0 if name.startswith("unfinished") else 60.0
            statuses[name].update(server.exchange(parts, seconds=seconds) or [0])

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, server.memory())
            time.sleep(0.1)

    # In a process of its own: the requests are made under this one's lock.
    context = multiprocessing.get_context("fork")
    answers, end = context.Queue(), context.Event()
    neighbour = context.Process(target=ask, args=(server, body, answers, end))
    neighbour.start()
    watcher = threading.Thread(target=watch)
    senders = [threading.Thread(target=send) for _ in range(THREADS)]
    for thread in (watcher, *senders):
        thread.start()
    for thread in senders:
        thread.join()
    done.set()
    watcher.join()
    end.set()
    for status, seconds in answers.get():
        neighbours[status] += 1
        waits.append(seconds)
    neighbour.join()
    for name, counts in statuses.items():
        print(f"{name:20} {dict(counts)}")
    waits.sort()
    replaced = not all(process.is_running() for process in server.processes)
    print(
        f"neighbour: {dict(neighbours)}, median {waits[len(waits) // 2]:.3f} s, longest "
        f"{waits[-1]:.3f} s; memory at rest {rest / 1e6:.0f} MB, at most "
        f"{(peak - rest) / 1e6:.0f} MB above; processes replaced: {replaced}"
    )
    faults = [name for name, counts in statuses.items() if counts[500]]
    if faults:
        print(f"answered with 500: {', '.join(faults)}")
    failed = waits[-1] > MAX_WAIT_SECONDS or peak - rest > MAX_RISE_BYTES
    return int(failed or replaced or bool(faults) or set(neighbours) != {200})


if __name__ == "__main__":
    main()
