"""Run prototype scripts in the same run, and keep the lines of JSON that they print.

The directory of `--prototypes` has `bucket.py`, `server.py`, `gpt2_step.py` and `t5_step.py`, on
plain ONNX Runtime. They show what a mechanism reaches on this machine. Without the option they are
left out.
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.inputs import joined_sentences
from benchmarks.gpu_check.server import Server
from benchmarks.gpu_check.work import Work
from enginery.core.errors import ProviderError

_SECONDS = 120.0
_FRONTS = 9
_START_SECONDS = 60.0
_WORDS = 20


def run(work: Work) -> None:
    """Run every script."""
    if not work.prototypes:
        work.case("prototypes", lambda: work.note("left out: no --prototypes"))
        return
    work.case("gpt2_step", partial(_run_script, work, "gpt2_step.py", ["sampler=argmax"]))
    work.case("t5_step", partial(_run_script, work, "t5_step.py", []))
    for name, action in (("bucket", _run_bucket), ("server", _run_server)):
        if work.quick:  # the scripts are for vectors of 384 numbers
            work.case(name, partial(work.note, f"{name}: left out, it needs the real MiniLM"))
        else:
            work.case(name, partial(action, work))


def _script(work: Work, name: str) -> Path:
    path = Path(work.prototypes) / name
    if not path.is_file():
        raise ProviderError(f"{path} was not found.")
    return path


def _run_script(work: Work, name: str, arguments: list[str]) -> None:
    """Run a script and keep its lines."""
    script = _script(work, name)
    with tempfile.TemporaryDirectory(prefix="enginery-gpu-check-") as scratch:
        words = [*arguments, *([] if work.on_gpu else ["cpu"])]
        child = subprocess.run(
            [sys.executable, str(script), *words],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            cwd=scratch,
        )
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        work.add("prototyped", {"script": name, "line": line})
    errors = [str(line["error"]) for line in lines if "error" in line]
    last = (child.stderr.strip().splitlines() or ["no output"])[-1]
    work.check(
        f"the prototype {name} runs",
        passed=child.returncode == 0 and bool(lines) and not errors,
        found="; ".join(errors) or (last if child.returncode else f"{len(lines)} lines"),
    )


def _pooled(work: Work, directory: Path) -> tuple[Path, Path]:
    """Return the graph that ends in vectors, which `bucket.py` makes, and the tokenizer's file."""
    import onnx

    artifact = work.artifact("fp16")
    graph, plain = directory / "pooled.onnx", directory / "plain.onnx"
    model = onnx.load(artifact.model)
    # The script adds an output of this name, which the graph may have.
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == "sentence_embedding":
                node.output[index] = "own_sentence_embedding"
    del model.graph.output[1:]
    onnx.save(model, plain)
    command = [sys.executable, str(_script(work, "bucket.py")), "pooled", str(plain)]
    subprocess.run([*command, str(graph)], capture_output=True, check=True, timeout=60)
    return graph, artifact.path / "tokenizer.json"


def _run_bucket(work: Work) -> None:
    with tempfile.TemporaryDirectory(prefix="enginery-gpu-check-") as scratch:
        graph, tokenizer = _pooled(work, Path(scratch))
        _run_script(work, "bucket.py", ["run", str(graph), str(tokenizer)])


def _run_server(work: Work) -> None:
    """Put the prototype of the server under the loads of `serve`."""
    script = _script(work, "server.py")
    bodies: list[Any] = [{"inputs": text} for text in joined_sentences(500, words=_WORDS)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    fronts = _FRONTS if work.on_gpu else 2
    with tempfile.TemporaryDirectory(prefix="enginery-gpu-check-") as scratch:
        graph, tokenizer = _pooled(work, Path(scratch))
        words = [str(graph), str(tokenizer), str(port), str(fronts)]
        command = [sys.executable, str(script), *words, *([] if work.on_gpu else ["cpu"])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            server = Server(child, port)
            try:
                _wait_for_port(server)
                for connections in work.settings.clients:
                    load = partial(server.load, bodies, connections=connections)
                    load(seconds=1.0)
                    result = load(seconds=work.settings.load_seconds)
                    line = {
                        "connections": connections,
                        "requests/s": round(result.per_second),
                        "p50 ms": round(result.percentile(50), 2),
                        "p99 ms": round(result.percentile(99), 2),
                        "refused": result.refused,
                        "lost": len(result.lost),
                    }
                    work.add("prototyped", {"script": "server.py", "line": line})
            finally:
                started = server.processes()
                _end(started)
    work.check("the prototype server.py runs", passed=True, found=f"{fronts} front processes")


def _wait_for_port(server: Server) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and server.process.poll() is None:
        try:
            server.post("/embed", {"inputs": "The engine is warm."})
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise ProviderError("the prototype of the server did not answer.")


def _end(processes: list[int]) -> None:
    for number in processes:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
