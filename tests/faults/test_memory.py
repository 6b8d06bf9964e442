"""Resident memory over time reaches a plateau. `pytest -s` prints the curve.

$ SERVE_SECONDS=3600 SERVE_RATE=20 pytest -m slow -s tests/faults/test_memory.py -k reloads
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import httpx
import psutil
import pytest

from enginery.runtime.tensorrt.library import has_tensorrt
from tests.faults.scenarios import linear_artifact
from tests.serve.test_service import serving
from tests.tiny import tiny_artifact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc"),
]
ROOT = Path(__file__).parents[2]
SAMPLES = 40
ROWS = 1_000_000
SERVE_SECONDS = float(os.environ.get("SERVE_SECONDS", "300"))
SERVE_RATE = float(os.environ.get("SERVE_RATE", "60"))
"""Requests a second."""
RELOADS = 50
CLIENTS = 8
KEY = {"x-api-key": "k"}

MEASURE = """
import sys
from pathlib import Path

def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
"""
LOAD = """
from enginery import load_model
path, rounds, samples = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(rounds):
    with load_model(path) as model:
        model.classify(["the pump is warm"] * 4)
    if number % (rounds // samples) == 0:
        print(resident(), flush=True)
"""
PREDICT = """
import threading
from enginery.core.artifact.artifact import Artifact
from enginery.predict.config import PredictConfig
from enginery.predict.stage import run
path, source, out = sys.argv[1:]
ended = threading.Event()
def watch():
    while not ended.wait(0.25):
        print(resident(), flush=True)
watcher = threading.Thread(target=watch)
watcher.start()
run(Artifact.open(path), source, Path(out), PredictConfig(workers=1))
ended.set()
"""
BUILD = """
from enginery.core.shapes import Profile
from enginery.runtime.tensorrt.build import BuildRequest
from enginery.runtime.tensorrt.process import build_plan
path, rounds = Path(sys.argv[1]), int(sys.argv[2])
for number in range(rounds):
    build_plan(path, BuildRequest([Profile.parse("batch=1:4:8")]), isolated=False)
    print(resident(), flush=True)
"""


def curve(home, code, *arguments) -> list[float]:
    """Run a program that prints its resident memory; return the values in MiB."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE + code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ENGINERY_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [int(line) / 2**20 for line in result.stdout.split()]


def assert_plateau(found, what, *, slack) -> None:
    """Assert that the last third is hardly above the third before."""
    step = max(len(found) // SAMPLES, 1)
    print(f"\n{what}:", *(f"{value:.0f}" for value in found[::step]))  # noqa: T201
    third = len(found) // 3
    before, after = median(found[third : 2 * third]), median(found[2 * third :])
    assert after <= before + slack, f"{what}: {before:.0f}, then {after:.0f}"


def test_memory_of_a_thousand_models_that_are_loaded_and_closed(classifier, tmp_path):
    found = curve(tmp_path, LOAD, classifier, 1000, SAMPLES)
    assert len(found) >= SAMPLES
    assert_plateau(found, "MiB, 1,000 models loaded and closed", slack=10)


def test_memory_of_predict_over_a_million_rows(classifier, tmp_path):
    source = tmp_path / "in.csv"
    with source.open("w") as stream:
        stream.write("id,text\n")
        stream.writelines(f"{number},the pump {number} is warm\n" for number in range(ROWS))
    found = curve(tmp_path, PREDICT, classifier, source, tmp_path / "out.parquet")
    assert len(found) > 9
    assert_plateau(found, f"MiB, {ROWS:,} rows predicted", slack=20)


@pytest.mark.skipif(not has_tensorrt(), reason="needs TensorRT for RTX")
def test_memory_of_two_hundred_engines_that_one_process_builds(tmp_path):
    artifact = linear_artifact(tmp_path / "linear")
    found = curve(tmp_path, BUILD, artifact.model, 200)
    assert len(found) == 200
    assert_plateau(found, "MiB, 200 engines built", slack=20)


REQUESTS = [
    ("/predict/labels", {"inputs": "the pump is warm"}, 200),
    ("/predict/labels", {"inputs": ["a", "the valve is open", "the pump " * 15] * 8}, 200),
    ("/embed", {"inputs": "the engine runs"}, 200),
    ("/v1/embeddings", {"model": "words", "input": ["a", "the key of the pump"]}, 200),
    ("/embed", {"inputs": [f"text {number}" for number in range(40)]}, 200),
    ("/embed", {"inputs": {"not": "a text"}}, 422),
    ("/predict/nobody", {"inputs": "a"}, 404),
    ("/metrics", None, 200),
    ("/health", None, 200),
]
"""(path, body, status); without a body it is a GET."""


def test_memory_of_a_server_with_mixed_requests_and_fifty_reloads(classifier, tmp_path):
    words = tiny_artifact("bert", "feature-extraction", tmp_path / "words").path
    given = (f"labels={classifier}", f"words={words}")
    with serving(*given, options=("--access-log", "off"), ENGINERY_API_KEY="k") as server:
        began, period = time.monotonic(), SERVE_SECONDS / RELOADS
        number = itertools.count()

        def ask_in_turn() -> None:
            with httpx.Client(base_url=server.url, timeout=60, headers=KEY) as client:
                while (due := next(number) / SERVE_RATE) < SERVE_SECONDS:
                    time.sleep(max(began + due - time.monotonic(), 0))
                    path, body, status = REQUESTS[round(due * SERVE_RATE) % len(REQUESTS)]
                    found = client.post(path, json=body) if body else client.get(path)
                    assert found.status_code == status, (path, found.text)

        child, memory, handles = psutil.Process(server.child), [], []
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(ask_in_turn) for _ in range(CLIENTS)]
            for reload in range(RELOADS):
                time.sleep(max(began + reload * period - time.monotonic(), 0))
                if reload % 2:
                    server.process.send_signal(signal.SIGHUP)
                else:
                    server.client.post("/admin/reload", headers=KEY).raise_for_status()
                time.sleep(period / 2)
                memory.append(child.memory_info().rss / 2**20)
                handles.append(child.num_fds() + child.num_threads())
                assert not any(client.done() and client.exception() for client in clients)
            for client in clients:
                client.result()
        assert server.child == child.pid
        assert sum("labels: reloaded" in line for line in server.lines) == RELOADS // 2  # by SIGHUP
    requests = f"{SERVE_SECONDS * SERVE_RATE:,.0f} requests"
    said = f"{requests} and {RELOADS} reloads in {SERVE_SECONDS:.0f} seconds"
    assert_plateau(memory, f"MiB, {said}", slack=10)
    assert_plateau(handles, f"descriptors and threads, {said}", slack=4)
