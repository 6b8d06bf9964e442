"""Signals, clocks and full temporary folders: clear words, exit statuses, and nothing lost."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from enginery.core.errors import EngineryError
from enginery.publish.config import PublishConfig
from enginery.publish.stage import run as publish
from tests.core.artifacts import FINGERPRINT, publishable, validated
from tests.export.test_onnx_file import linear
from tests.faults.file_operations import FailFrom, FileOperations
from tests.faults.scenarios import obtain, stored

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc")


@pytest.fixture(autouse=True)
def default_hangup():
    """Let commands start with SIGHUP's default action; `nohup make test` would pass on its own."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def start_export(root, *, before=()):
    """Start an export; return it once its child process runs."""
    (root / "tmp").mkdir()
    model = linear(root / "mine.onnx")
    words = [sys.executable, "-m", "enginery", "export", str(model), "--out", str(root / "out")]
    process = subprocess.Popen(
        [*before, *words],
        env={**os.environ, "TMPDIR": str(root / "tmp"), "ENGINERY_HOME": str(root / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not list((root / "tmp").glob("enginery-child-*/request.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        (signal.SIGHUP, 129, "ended by SIGHUP."),
        pytest.param(signal.SIGTERM, 143, "ended by SIGTERM.", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "interrupted.", marks=pytest.mark.slow),
    ],
)
def test_signal_during_the_child_process_of_a_stage(tmp_path, number, status, words):
    process = start_export(tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    assert words in said
    assert "Traceback" not in said
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert list((tmp_path / "tmp").glob("enginery-*")) == []
    assert not (tmp_path / "out").exists()


def test_second_interrupt_ends_the_cleanup_at_once():
    """The first one is being handled for a minute."""
    code = (
        "import sys, time\n"
        "from enginery.cli import app\n"
        "def command(words, **_):\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaning', flush=True)\n"
        "        time.sleep(60)\n"
        "app.commands = lambda _: command\n"
        "app.main(['doctor'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in ("ready\n", "cleaning\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "error: interrupted twice.\n"


@pytest.mark.slow
def test_nohup_keeps_a_command_running(tmp_path):
    process = start_export(tmp_path, before=["nohup"])
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert (tmp_path / "out" / "manifest.json").is_file()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("scenario", ["optimize", "publish"], indirect=True)
def test_full_temporary_folder_is_named_and_nothing_is_lost(sandbox, scenario, code):
    temporary = sandbox.root / "tmp"
    with (
        FileOperations(temporary, FailFrom(1, code)) as operations,
        pytest.raises(EngineryError, match=re.escape(os.strerror(code))) as raised,
    ):
        scenario.run(sandbox.root)
    assert operations.fired
    assert str(temporary) in str(raised.value)
    assert "TMPDIR" in raised.value.do
    sandbox.check(scenario)
    scenario.run(sandbox.root)
    sandbox.check_finished(scenario)


def test_clock_that_goes_backwards_changes_no_result(sandbox, monkeypatch):
    sandbox.empty()
    root, now = sandbox.root, time.time()
    times = iter(range(10**6))

    def earlier() -> float:
        return now - 3600 * next(times)

    monkeypatch.setattr(time, "time", earlier)
    monkeypatch.setattr(time, "time_ns", lambda: int(earlier() * 1e9))
    obtain(FINGERPRINT)
    found = stored()
    obtain(FINGERPRINT)
    assert stored() == found
    for number in range(3):
        artifact = validated(publishable(root / "artifact", graph=b"%d" % number), report=b"{}")
        published = publish(artifact, str(root / "registry"), PublishConfig(name="m"))
        assert published.version == str(number + 1)
        assert (root / "registry" / "m" / "latest").readlink().name == published.version
