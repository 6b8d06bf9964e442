"""The parent of the worker processes: it replaces them, hands signals on, and stays small."""

import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from enginery.core.errors import OptionError
from enginery.serve.config import ServeConfig, check_options
from enginery.serve.http.parent import restart_delay_seconds
from enginery.serve.http.sockets import bind
from enginery.serve.server import LineFormatter, log_config
from tests.serve.processes import GET, gone, one_answer, received, wait_until
from tests.serve.test_service import HEAVY

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")


@pytest.mark.more
@pytest.mark.parametrize("spawn", [False, True], ids=["as-here", "spawned"])
def test_killed_worker_is_replaced_and_answers_within_seconds(start, spawn):
    server = start(spawn=spawn).ready()
    before = server.pid()
    assert before != server.process.pid
    # In a group of its own, or Ctrl-C would count twice: from the terminal, and handed on.
    assert os.getpgid(before) == before
    running = server.running(b"wait")
    os.kill(before, signal.SIGKILL)
    killed_at = time.monotonic()
    with suppress(ConnectionError):
        assert received(running) == b""
    # The parent holds the listening socket: nobody is refused while there is no worker.
    after = server.pid()
    assert time.monotonic() - killed_at < 5
    assert after not in {before, server.process.pid}
    said = server.hear_until("it is replaced immediately")
    assert f"warning: worker process {before} was killed (signal 9)" in said
    assert server.end()[0] == 0


@pytest.mark.more
def test_crash_within_a_request_is_named_and_others_are_served(start):
    server = start().ready()
    with suppress(ConnectionError):
        received(server.raw(GET % b"kill/11"))
    assert server.get("echo").status_code == 200
    server.hear_until("crashed with signal 11; it is replaced immediately.")
    assert server.end()[0] == 0


@pytest.mark.more
def test_worker_that_cannot_restart_is_retried_with_delays(start, tmp_path):
    server = start(fails_again=str(tmp_path / "loaded")).ready()
    os.kill(server.pid(), signal.SIGKILL)
    server.hear_until("it is replaced immediately")
    server.hear_until("error: m: found no manifest.json.")
    server.hear_until("ended with status 2; it is replaced in 0.5 seconds.")
    server.hear_until("it is replaced in 1 seconds.")
    (tmp_path / "loaded").unlink()  # the cause passes
    server.ready()
    assert server.end()[0] == 0


@pytest.mark.more
@pytest.mark.parametrize("processes", [1, 2])
def test_worker_that_ends_alone_leaves_the_socket_to_its_replacement(start, processes):
    server = start(config={"processes": processes}).ready()
    pid = server.pid()
    psutil.Process(pid).terminate()
    server.hear_until("it is replaced")
    for _ in range(20):
        with server.raw(GET % b"echo") as client:
            client.settimeout(20)
            assert b"200 OK" in one_answer(client)
    wait_until(lambda: server.get("ready").status_code == 200)
    assert server.end()[0] == 0


@pytest.mark.more
def test_sigterm_between_two_workers_ends_with_0(start, tmp_path):
    server = start(fails_again=str(tmp_path / "loaded")).ready()
    os.kill(server.pid(), signal.SIGKILL)
    server.hear_until("it is replaced in 2 seconds.")
    server.send(signal.SIGTERM)
    assert server.rest()[0] == 0  # whatever the last worker ended with
    assert not psutil.pid_exists(server.process.pid)


@pytest.mark.more
def test_two_processes_answer_and_reload_together(start):
    server = start(config={"processes": 2}).ready()
    pids = set()
    wait_until(lambda: pids.add(server.pid()) or len(pids) == 2)
    server.send(signal.SIGHUP)
    reloaded = {int(server.hear_until("reloaded").partition(":")[0]) for _ in range(2)}
    assert reloaded == pids
    server.get("reload")  # over HTTP one worker is asked, and has all of them reload
    reloaded = {int(server.hear_until("reloaded").partition(":")[0]) for _ in range(2)}
    assert reloaded == pids
    os.kill(min(pids), signal.SIGKILL)
    server.hear_until("it is replaced immediately")
    wait_until(lambda: server.pid() not in pids)
    assert server.pid()
    assert server.end()[0] == 0
    assert all(map(gone, pids))


def answered(server):
    text = server.get("metrics").text
    counts = re.findall(
        r"^enginery_request_duration_seconds_count\{.*\} (\S+)$", text, re.MULTILINE
    )
    return sum(map(float, counts))


@pytest.mark.more
@pytest.mark.parametrize("spawn", [False, True], ids=["as-here", "spawned"])
def test_workers_end_when_their_parent_is_killed(start, spawn):
    server = start(config={"processes": 2}, spawn=spawn).ready()
    pids = set()
    wait_until(lambda: pids.add(server.pid()) or len(pids) == 2)
    os.kill(min(pids), signal.SIGKILL)  # the one that replaces it ends, too
    wait_until(lambda: pids.add(server.pid()) or len(pids) == 3)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: all(map(gone, pids)))
    wait_until(lambda: refuses(server))


def test_worker_that_does_not_end_is_killed(start):
    server = start(config={"grace": 0.0}, patience=0.5).ready()
    worker = psutil.Process(server.pid())
    worker.suspend()
    status, said = server.end()
    assert status == 128 + signal.SIGKILL
    assert f"error: worker process {worker.pid} did not exit in time; killing it." in said
    assert gone(worker.pid)


@pytest.mark.more
def test_worker_that_hangs_is_replaced(start):
    server = start(hang=2.0).ready()
    worker = psutil.Process(server.pid())
    worker.suspend()
    server.hear_until(f"worker process {worker.pid} did not answer for 2 seconds; it is replaced")
    assert server.pid() != worker.pid
    assert server.end()[0] == 0


def test_parent_is_small_and_imports_nothing_heavy(start):
    server = start().ready()
    private = psutil.Process(server.process.pid).memory_full_info().uss
    assert private < 20 * 1024**2
    # A worker is a fork of the parent, and this one has imported nothing since.
    modules = set(server.get("modules").text.split())
    assert "uvicorn" in modules
    assert not modules & HEAVY
    assert server.end()[0] == 0


@pytest.mark.more
def test_parent_closes_its_sockets_at_shutdown(start):
    server = start(config={"drain_delay": 0.0}).ready()
    client = server.running(b"sleep/2")
    server.send(signal.SIGTERM)
    server.hear_until("draining")
    wait_until(lambda: refuses(server))
    assert received(client).startswith(b"HTTP/1.1 200 OK")  # which still ran
    assert server.rest()[0] == 0


def refuses(server):
    """Whether nobody listens; a process lets go of its sockets with the last of its threads."""
    try:
        server.raw().close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.more
def test_connections_wait_while_no_more_files_can_be_opened(start):
    """The server says so once, closes connections that idle, and answers those that wait."""
    server = start(open_files=128, idle=0.2).ready()
    clients = [server.raw(GET % b"echo") for _ in range(100)]
    server.hear_until("as many as the limit of open files allows; further ones wait")
    for client in clients:
        assert b"200 OK" in one_answer(client)
    closed = [client for client in clients if select.select([client], [], [], 0)[0]]
    assert all(client.recv(1) == b"" for client in closed)
    assert len(closed) >= 100 + 64 - 128
    for client in clients:
        client.close()
    status, said = server.end()
    assert status == 0
    assert said.count("ulimit -n") == 1


def test_restart_delays_grow_from_0_to_30_seconds():
    assert [restart_delay_seconds(n) for n in range(10)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_several_processes_need_a_parent():
    with pytest.raises(OptionError, match="'processes' is 2, expected 1 without 'restart'"):
        check_options(ServeConfig(processes=2, restart=False))


@pytest.fixture
def record():
    def make(level, message, *arguments, **more):
        return logging.makeLogRecord({"levelno": level, "msg": message, "args": arguments, **more})

    return make


def test_lines_are_text_or_json(record):
    text, as_json = LineFormatter(), LineFormatter(as_json=True)
    draining = record(logging.INFO, "draining")
    assert text.format(draining) == "draining"
    assert text.format(record(logging.WARNING, "%s is late", "m")) == "warning: m is late"
    failed = record(logging.ERROR, "m: not reloaded: é\nno")
    assert text.format(failed) == "error: m: not reloaded: é\nno"
    line = as_json.format(failed)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {"message": "error: m: not reloaded: é\nno"}
    hostile = record(logging.ERROR, "m: \x1b]52;c;eA==\x07 \x9b2J\x7f")
    assert text.format(hostile) == "error: m: \\x1b]52;c;eA==\\x07 \\x9b2J\\x7f"
    line = as_json.format(hostile)
    assert line.isprintable()
    assert json.loads(line)["message"] == "error: m: \x1b]52;c;eA==\x07 \x9b2J\x7f"
    try:
        raise ValueError("a bug")
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    assert "ValueError: a bug" in text.format(record(logging.ERROR, "failed", exc_info=caught))


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_logs_only_errors(quiet, capfd):
    code = (
        "import logging, logging.config\n"
        "from enginery.serve.server import log_config\n"
        f"logging.config.dictConfig(log_config(quiet={quiet}))\n"
        "log = logging.getLogger('enginery.serve')\n"
        "log.info('draining'); log.warning('late'); log.error('no')\n"
        "logging.getLogger('uvicorn.error').info('chatter')\n"
        "logging.getLogger('other').info('chatter')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    everything = ["draining", "warning: late", "error: no"]
    assert done.stderr.splitlines() == (everything[-1:] if quiet else everything)


def test_uvicorn_does_not_trace_its_connections():
    levels = {name: found["level"] for name, found in log_config()["loggers"].items()}
    assert levels["uvicorn.error"] == "WARNING"


@pytest.mark.more
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"config": {"restart": False, "grace": 1.0}},
        {"config": {"processes": 2, "grace": 1.0}},
        {"held_up": True, "close": 0.0, "config": {"grace": 0.0}},
        {"stopped": True, "patience": 0.5, "config": {"grace": 0.0}},
    ],
    ids=["one", "no-parent", "two", "held-up", "stopped"],
)
def test_stderr_that_nobody_reads_stops_neither_answers_nor_the_end(options):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    stopped = options.get("stopped")
    (free,) = bind("127.0.0.1", 0)
    port = free.getsockname()[1]
    free.close()
    command = [sys.executable, "-m", "tests.serve.serving", json.dumps({**options, "port": port})]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer)
    os.close(writer)
    try:

        def ask(request):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(request)
                return client.recv(100)

        def is_ready():
            with suppress(OSError):
                return b" 200 " in ask(GET % b"ready")

        wait_until(is_ready)
        for _ in range(100):
            assert b" 400 " in ask(b"bad\r\n\r\n")
        assert b" 200 " in ask(GET % b"pid")
        if stopped:
            (worker,) = psutil.Process(server.pid).children()
            worker.suspend()
        server.terminate()
        assert server.wait(60) == (128 + signal.SIGKILL if stopped else 0)
        assert os.read(reader, 100) == b"." * 100  # nobody has read any
    finally:
        os.close(reader)
        server.kill()
        server.wait()
