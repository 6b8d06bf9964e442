from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from enginery.bench.backends.plan import plan_contenders
from enginery.bench.backends.process import Contender
from enginery.bench.config import BenchConfig
from enginery.bench.target import Subject
from enginery.core.errors import InputError, ProviderError
from tests.bench.made import save_detector


@pytest.fixture
def started(tmp_path):
    subject = Subject.of(save_detector(tmp_path / "d.onnx"), "", allow_failed=False)
    config = BenchConfig(against="onnxruntime")
    plans, _ = plan_contenders([subject], config)
    with Contender(plans[1], subject, config, tmp_path / "log") as contender:
        yield contender


def child_of(contender):
    return contender.worker._process.pid


def feeds(path, **arrays):
    import numpy as np

    with path.open("wb") as stream:
        np.savez(stream, **arrays)
    return str(path)


def test_contender_answers_and_reports_its_own_memory(started, tmp_path):
    import numpy as np

    file = feeds(tmp_path / "f.npz", x=np.zeros((1, 3, 32, 32), "float32"))
    warmed = started.ask("prepare", feeds=file, seconds=0.2)
    assert warmed["runs"] >= 1
    assert len(started.ask("turn", runs=3)["times_ms"]) == 3
    peak = started.ask("memory")["peak_rss_bytes"]
    assert peak >= psutil.Process(child_of(started)).memory_info().rss * 0.9


def test_error_of_the_child_is_raised_as_it_was(started, tmp_path):
    import numpy as np

    file = feeds(tmp_path / "f.npz", x=np.zeros((1, 4, 32, 32), "float32"))
    with pytest.raises(InputError, match="the graph fails on x"):
        started.ask("prepare", feeds=file, seconds=0.2)
    # It lives on.
    assert started.ask("memory")["peak_rss_bytes"] > 0


def test_turn_before_inputs_is_refused(started):
    with pytest.raises(ProviderError, match="no inputs are prepared"):
        started.ask("turn", runs=1)


def test_crash_is_an_answer(started):
    os.kill(child_of(started), signal.SIGSEGV)
    started.worker._process.wait()
    with pytest.raises(ProviderError, match="onnxruntime: the process crashed with signal 11"):
        started.ask("memory")


def test_closing_ends_the_process_and_may_be_repeated(started):
    child = psutil.Process(child_of(started))
    started.close()
    started.close()
    assert not child.is_running()


def test_child_ends_when_its_parent_is_gone():
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


def test_what_libraries_print_does_not_spoil_the_answers(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("")
    code = (
        "import sys, os; from enginery.bench import contestant;"
        "contestant.Contestant.memory = lambda s, c: (print('noise'), os.system('echo more'),"
        " {'peak_rss_bytes': 1})[2];"
        "contestant.serve_requests(contestant.Contestant().answer)"
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
from enginery.bench.backends.plan import plan_contenders
from enginery.bench.backends.process import Contender
from enginery.bench.target import Subject

folder = Path(sys.argv[1])
subject = Subject.of(folder / "d.onnx", "", allow_failed=False)
config = BenchConfig(against="onnxruntime")
plans, _ = plan_contenders([subject], config)
np.savez(folder / "f.npz", x=np.zeros((1, 3, 32, 32), "float32"))
contenders = [Contender(plan, subject, config, folder / plan.name) for plan in plans]
for contender in contenders:
    contender.ask("prepare", feeds=str(folder / "f.npz"), seconds=0)
print(*(contender.worker._process.pid for contender in contenders), flush=True)
contenders[0].ask("turn", runs=10**9)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_contenders_end_with_a_killed_parent_in_the_middle_of_a_run(tmp_path, number):
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
        while children[0].cpu_times().user < busy + 0.2:  # it is at its billion runs
            time.sleep(0.02)
        os.kill(parent.pid, number)  # the parent alone, not its group
        parent.communicate()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
    finally:
        for process in psutil.wait_procs(children, timeout=0)[1]:
            process.kill()
