"""Child processes return results or errors and never outlive their parent."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from enginery.core.errors import EngineryError, ExportError, InputError, ShapeError, SourceError
from enginery.core.subprocess import (
    Supervision,
    WorkerProcess,
    describe_exit,
    run_in_subprocess,
    run_module,
)

ROOT = str(Path(__file__).parents[2])

CHILD = """
import os, sys, time
from enginery.core.subprocess import report_phase, worker_main
from enginery.core.errors import ShapeError, SourceError
def handle(request):
    match request["do"]:
        case "double":
            report_phase("doubling")
            print("a warning", flush=True)
            return {"value": 2 * request["value"]}
        case "source":
            raise SourceError("no such model.", do="Name another.")
        case "shape":
            raise ShapeError("a dim does not fit.")
        case "bug":
            raise ValueError("first line\\nsecond line")
        case "crash":
            os.kill(os.getpid(), 11)
        case "leave":
            sys.stdout.write("last words")
            sys.stdout.flush()
            os._exit(3)
worker_main(handle, description="{do}: work")
"""

# Prints its process id, then is busy for ten minutes, with the GIL or without it.
BUSY = """
import re, sys, time
from enginery.core.subprocess import exit_with_parent
exit_with_parent()
import os
print(os.getpid(), flush=True)
if sys.argv[1] == "locked":
    re.match(r"(a+)+$", "a" * 64 + "b")  # C code that keeps the lock
time.sleep(600)
"""

REFUSING = """
from enginery.core.errors import InputError, os_errors_as
from enginery.core.subprocess import serve_requests
def handle(request):
    with os_errors_as(InputError, "the input is refused"):
        raise eval(request["error"])
serve_requests(handle)
"""

ECHO = """
from enginery.core.subprocess import serve_requests
serve_requests(lambda request: request)
"""

PARENT = """
import sys
from enginery.core.subprocess import run_module
run_module("busy", sys.argv[1], on_line=lambda line: print(line, end="", flush=True))
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The directory of the modules `child` and `busy`, which child processes import."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "busy.py").write_text(BUSY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), ROOT]))
    return tmp_path


def run(modules, do, error_classes=(ExportError,), **options):
    return run_in_subprocess(
        "child",
        {"do": do, "value": 21},
        log=modules / "logs" / "child.log",
        description="working",
        error_classes=error_classes,
        **options,
    )


def test_answer_comes_back_and_what_is_said_is_heard_or_logged(modules):
    phases = []
    assert run(modules, "double", supervision=Supervision(phases.append)) == {"value": 42}
    assert phases == ["doubling"]
    assert (modules / "logs" / "child.log").read_text() == "a warning\n"


def test_errors_of_the_given_classes_keep_their_class(modules):
    with pytest.raises(SourceError, match=r"no such model\. Name another\.") as found:
        run(modules, "source", (ExportError, SourceError))
    assert (found.value.message, found.value.do) == ("no such model.", "Name another.")
    with pytest.raises(ExportError, match=r"a dim does not fit\. The whole log: .*child\.log"):
        run(modules, "shape", (ExportError, SourceError))
    with pytest.raises(ShapeError):
        run(modules, "shape", (ExportError, SourceError, ShapeError))


def test_unexpected_exception_gives_one_line_and_a_traceback_in_the_log(modules):
    with pytest.raises(ExportError) as found:
        run(modules, "bug")
    assert found.value.message == "bug: work failed in ValueError: first line"
    assert "Traceback" in (modules / "logs" / "child.log").read_text()


def test_crash_message_names_the_signal_the_log_and_its_last_line(modules):
    with pytest.raises(ExportError, match=r"working: the process crashed with signal 11\. The"):
        run(modules, "crash")
    with pytest.raises(ExportError, match=r"ended with status 3\. .*last words.*child\.log"):
        run(modules, "leave")
    assert (modules / "logs" / "child.log").read_text() == "last words"


@pytest.mark.parametrize("file", ["request.json", "result.json"])
def test_file_that_the_child_cannot_use_is_named_with_the_cause(modules, monkeypatch, file):
    def removing_it_first(module, *arguments, **options):
        path = next(Path(word) for word in arguments if word.endswith(file))
        path.unlink(missing_ok=True)
        path.mkdir()
        return run_module(module, *arguments, **options)

    monkeypatch.setattr("enginery.core.subprocess.run_module", removing_it_first)
    with pytest.raises(ExportError, match=rf"Is a directory: \S*{file}"):
        run(modules, "double")


def test_module_that_cannot_be_imported_is_an_error(modules):
    with pytest.raises(ExportError, match="ended with status 1"):
        run_in_subprocess(
            "no_such_module",
            {},
            log=modules / "a.log",
            description="x",
            error_classes=[ExportError],
        )
    assert "No module named" in (modules / "a.log").read_text()


@pytest.mark.parametrize(
    ("status", "words"),
    [(-9, "killed (signal 9); the usual"), (-11, "crashed with signal 11"), (2, "with status 2")],
)
def test_describe_exit(status, words):
    assert words in describe_exit(status)


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(process, seconds=60):
    deadline = time.monotonic() + seconds
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(process)


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks processes up in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("busy", ["sleeping", "locked"])
def test_child_ends_when_its_parent_is_killed(modules, number, busy):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, busy],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    child = int(parent.stdout.readline())
    try:
        assert is_running(child)
        os.kill(parent.pid, number)  # the parent alone, not its group
        parent.communicate()
        assert parent.returncode != 0
        assert wait_until_gone(child)
    finally:
        for process in (parent.pid, child):
            if is_running(process):
                os.kill(process, signal.SIGKILL)


def test_child_ends_at_once_if_its_parent_has_ended(modules):
    theirs, ours = os.pipe()
    os.close(ours)
    ended = subprocess.run(
        [sys.executable, "-m", "busy", "sleeping"],
        pass_fds=(theirs,),
        check=False,
        env={**os.environ, "ENGINERY_PARENT_PIPE": str(theirs)},
        capture_output=True,
    )
    os.close(theirs)
    assert (ended.returncode, ended.stdout) == (-signal.SIGIO, b"")


def test_child_of_a_thread_that_blocks_signals_still_ends(modules):
    code = (
        "import signal, threading, sys\n"
        "def work():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))\n"
        + "".join(f"    {line}\n" for line in PARENT.strip().splitlines())
        + "threading.Thread(target=work).start()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, "sleeping"], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert wait_until_gone(child)


def test_exception_in_on_line_ends_the_child(modules):
    lines = []

    def interrupted(line):
        lines.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_module("busy", "sleeping", on_line=interrupted)
    assert wait_until_gone(lines[0])


def test_two_children_at_once_do_not_hold_each_others_pipes(modules):
    code = (
        "import threading\nfrom enginery.core.subprocess import run_module\n"
        "def work():\n"
        "    run_module('busy', 'sleeping', on_line=lambda line: print(line, end='', flush=True))\n"
        "for _ in range(2):\n    threading.Thread(target=work).start()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    children = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.communicate()
    assert all(wait_until_gone(child) for child in children)


def test_worker_can_be_run_by_hand(modules):
    (modules / "request.json").write_text(json.dumps({"do": "double", "value": 4}))
    words = [sys.executable, "-m", "child", modules / "request.json", modules / "result.json"]
    assert subprocess.run(words, check=False, stdin=subprocess.DEVNULL).returncode == 0
    assert json.loads((modules / "result.json").read_text()) == {"value": 8}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("PermissionError(13, 'Permission denied')", EngineryError),
        ("OSError(5, 'Input/output error')", EngineryError),
        ("FileNotFoundError(2, 'No such file or directory')", InputError),
        ("IsADirectoryError(21, 'Is a directory')", InputError),
        ("OSError('no tokenizer')", InputError),
    ],
)
def test_a_file_that_the_system_denies_is_no_refusal_of_the_input(modules, error, kind):
    (modules / "refusing.py").write_text(REFUSING)
    worker = WorkerProcess("refusing", description="working", error=ExportError)
    with worker, pytest.raises(EngineryError, match="the input is refused") as raised:
        worker.request("call", error=error)
    assert type(raised.value) is kind


def test_temporary_log_of_a_worker_process_is_removed_with_it(modules, monkeypatch):
    (modules / "echo.py").write_text(ECHO)
    (modules / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(modules / "tmp"))
    with WorkerProcess("echo", description="working", error=ExportError) as worker:
        assert worker.request("double", value=1) == {"do": "double", "value": 1}
        assert len(list((modules / "tmp").glob("enginery-worker-*/log"))) == 1
    assert list((modules / "tmp").iterdir()) == []
