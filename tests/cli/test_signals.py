"""SIGTERM ends a command as Ctrl-C does: nothing temporary is left, nor a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from enginery.cli import app as cli
from tests.bench.sample_results import save_detector


@pytest.mark.more
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM between processes")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_bench_that_is_ended_leaves_nothing_behind(tmp_path, number, status):
    model, scratch = save_detector(tmp_path / "d.onnx"), tmp_path / "scratch"
    scratch.mkdir()
    words = [
        "bench",
        str(model),
        "--shape",
        "batch=1,height=32,width=32",
        "--max-seconds",
        "1000",
        "--min-rounds",
        "100000",
        "--max-rounds",
        "100000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "enginery", *words],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 60
        while not list(scratch.glob("enginery-bench-*/feeds-0.npz")):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    assert "Traceback" not in said
    assert ("ended by SIGTERM." if number == signal.SIGTERM else "interrupted.") in said
    assert list(scratch.glob("enginery-*")) == []  # ONNX Runtime keeps a file of its own
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_the_handler_is_gone_when_a_command_has_ended_and_serve_has_its_own(monkeypatch):
    before, seen = signal.getsignal(signal.SIGTERM), []

    def command(words, **_):
        seen.append(signal.getsignal(signal.SIGTERM) == before)

    monkeypatch.setattr(cli, "commands", lambda _: command)
    for words in (["doctor"], ["serve", "x"]):
        with pytest.raises(SystemExit):
            cli.main(words)
    assert seen == [False, True]
    assert signal.getsignal(signal.SIGTERM) == before
