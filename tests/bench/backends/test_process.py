from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from enginery.bench.backends.plan import plan_backends
from enginery.bench.backends.process import BenchmarkProcess
from enginery.bench.config import BenchConfig
from enginery.bench.target import Target
from enginery.core.errors import EngineryError, InputError, ProviderError
from tests.bench.sample_results import save_detector


@pytest.fixture
def started(tmp_path):
    target = Target.open(save_detector(tmp_path / "d.onnx"), "", allow_failed=False)
    config = BenchConfig(against="onnxruntime")
    plans, _ = plan_backends([target], config)
    with BenchmarkProcess(plans[1], target, tmp_path / "log") as process:
        yield process


def child_of(process):
    return process._process.pid


def feeds(path, **arrays):
    import numpy as np

    with path.open("wb") as stream:
        np.savez(stream, **arrays)
    return str(path)


def test_backend_answers_and_reports_its_own_memory(started, tmp_path):
    import numpy as np

    file = feeds(tmp_path / "f.npz", x=np.zeros((1, 3, 32, 32), "float32"))
    warmed = started.request("prepare", feeds=file, seconds=0.2)
    assert warmed["runs"] >= 1
    assert len(started.request("turn", runs=3)["times_ms"]) == 3
    peak = started.request("memory")["peak_rss_bytes"]
    assert peak >= psutil.Process(child_of(started)).memory_info().rss * 0.9


def test_error_of_the_child_is_raised_in_the_parent(started, tmp_path):
    import numpy as np

    file = feeds(tmp_path / "f.npz", x=np.zeros((1, 4, 32, 32), "float32"))
    with pytest.raises(InputError, match="the graph fails on x"):
        started.request("prepare", feeds=file, seconds=0.2)
    # The process is still running.
    assert started.request("memory")["peak_rss_bytes"] > 0


def test_turn_without_inputs_is_an_error(started):
    with pytest.raises(ProviderError, match="no inputs are prepared"):
        started.request("turn", runs=1)


def test_crash_is_an_error(started):
    os.kill(child_of(started), signal.SIGSEGV)
    started._process.wait()
    with pytest.raises(EngineryError, match="onnxruntime: the process crashed with signal 11"):
        started.request("memory")


def test_close_ends_the_process_and_may_be_repeated(started):
    child = psutil.Process(child_of(started))
    started.close()
    started.close()
    assert not child.is_running()


def test_child_ends_when_its_input_is_closed():
    child = subprocess.Popen(
        [sys.executable, "-m", "enginery.bench.backends.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child.stdin.write(json.dumps({"do": "memory"}) + "\n")
    child.stdin.flush()
    assert "peak_rss_bytes" in child.stdout.readline()
    child.stdin.close()
    assert child.wait(timeout=30) == 0
    child.stdout.close()


def test_output_of_libraries_does_not_mix_with_the_answers():
    code = (
        "import sys, os; from enginery.bench.backends import worker;"
        "worker.BenchmarkWorker.memory = lambda s, c: (print('noise'), os.system('echo more'),"
        " {'peak_rss_bytes': 1})[2];"
        "worker.serve_requests(worker.BenchmarkWorker().answer)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        input='{"do": "memory"}\n',
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == {"peak_rss_bytes": 1}
    assert "more" in found.stderr


PARENT = """
import sys
from pathlib import Path
import numpy as np
from enginery.bench.config import BenchConfig
from enginery.bench.backends.plan import plan_backends
from enginery.bench.backends.process import BenchmarkProcess
from enginery.bench.target import Target

folder = Path(sys.argv[1])
target = Target.open(folder / "d.onnx", "", allow_failed=False)
config = BenchConfig(against="onnxruntime")
plans, _ = plan_backends([target], config)
np.savez(folder / "f.npz", x=np.zeros((1, 3, 32, 32), "float32"))
processes = [BenchmarkProcess(plan, target, folder / plan.name) for plan in plans]
for process in processes:
    process.request("prepare", feeds=str(folder / "f.npz"), seconds=0)
print(*(process._process.pid for process in processes), flush=True)
processes[0].request("turn", runs=10**9)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.more
def test_processes_end_when_the_parent_is_killed_during_a_run(tmp_path, number):
    save_detector(tmp_path / "d.onnx")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
    try:
        assert len(children) == 2
        busy = children[0].cpu_times().user
        while children[0].cpu_times().user < busy + 0.2:  # the turn has started
            time.sleep(0.02)
        os.kill(parent.pid, number)  # the parent alone, not its group
        parent.communicate()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
    finally:
        for process in psutil.wait_procs(children, timeout=0)[1]:
            process.kill()
