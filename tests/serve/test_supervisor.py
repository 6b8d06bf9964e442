"""The parent: it starts the serving process anew, hands signals on, and ends with it."""

import os
import signal
import socket
import time
from contextlib import suppress

import psutil
import pytest

from enginery.serve.supervisor import Restarts, pause_seconds, supervise
from tests.serve.test_server import GET, Server, raw, received, start  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def child_of(server):
    return server.get("about").json()


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def test_killed_child_is_replaced_and_served_again(start):  # noqa: F811
    server = start().ready()
    before = child_of(server)
    assert (before["restarts"], before["reason"]) == (0, "")
    assert before["pid"] != server.process.pid
    # In a group of its own, or Ctrl-C would count twice: from the terminal, and handed on.
    assert os.getpgid(before["pid"]) == before["pid"]
    running = raw(server, GET % b"wait")
    time.sleep(0.2)
    os.kill(before["pid"], signal.SIGKILL)
    with suppress(ConnectionError):
        assert received(running) == b""
    # The parent holds the listening socket: nobody is refused while there is no child.
    after = child_of(server)
    assert after["pid"] not in {before["pid"], server.process.pid}
    assert after["restarts"] == 1
    assert "was killed (signal 9)" in after["reason"]
    said = server.hear_until("started anew")
    assert "was killed (signal 9)" in said
    assert "at once (restart 1)" in said
    server.signal(signal.SIGTERM)
    assert server.rest()[0] == 0


def test_crash_within_a_request_is_named_and_others_are_served(start):  # noqa: F811
    server = start().ready()
    with suppress(ConnectionError):
        received(raw(server, GET % b"kill/11"))
    assert child_of(server)["reason"] == "crashed with signal 11"
    server.signal(signal.SIGTERM)
    assert server.rest()[0] == 0


def test_stuck_service_is_started_anew_and_its_requests_answered(start):  # noqa: F811
    server = start().ready()
    waiting = raw(server, GET % b"wait")
    assert received(raw(server, GET % b"stuck")).startswith(b"HTTP/1.1 503 ")
    assert received(waiting).startswith(b"HTTP/1.1 503 ")
    assert "a batch has run for 60 seconds." in server.hear_until("ending at once")
    after = child_of(server)
    assert (after["restarts"], after["reason"]) == (1, "ended itself, because it was stuck")
    server.signal(signal.SIGTERM)
    assert server.rest()[0] == 0


def test_child_ends_when_its_parent_is_killed(start):  # noqa: F811
    server = start().ready()
    child = child_of(server)["pid"]
    server.process.kill()
    server.process.wait()
    wait_until(lambda: gone(child))
    with pytest.raises(ConnectionRefusedError):
        raw(server)


def test_restarted_child_ends_with_its_parent_too(start):  # noqa: F811
    server = start().ready()
    os.kill(child_of(server)["pid"], signal.SIGKILL)
    child = child_of(server)["pid"]
    server.process.kill()
    server.process.wait()
    wait_until(lambda: gone(child))


def test_child_that_does_not_end_is_killed(start):  # noqa: F811
    server = start(patience=0.5).ready()
    child = psutil.Process(child_of(server)["pid"])
    child.suspend()
    server.signal(signal.SIGTERM)
    status, said = server.rest()
    assert status == 128 + signal.SIGKILL
    assert "did not end within 0.5 seconds; it is killed." in said
    assert gone(child.pid)


def test_parent_is_small(start):  # noqa: F811
    server = start().ready()
    child_of(server)
    private = psutil.Process(server.process.pid).memory_full_info().uss
    assert private < 15 * 1024**2


def supervised(serve, **options):
    """`supervise` in a child of ours, which the signals of the test do not reach; its status."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = supervise(serve, [], **options)
        finally:
            os._exit(status)
    return pid


def status_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_pauses_grow_from_none_to_half_a_minute():
    assert [pause_seconds(n) for n in range(1, 11)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize("code", [0, 1, 2, 5])
def test_status_of_a_child_that_ends_by_itself_is_the_parents(code):
    assert status_of(supervised(lambda _: code)) == code


def test_failing_restarts_are_tried_again_with_pauses(tmp_path):
    log = tmp_path / "log"

    def serve(restarts):
        with log.open("a") as stream:
            stream.write(f"{restarts.count} {restarts.reason}\n")
        if restarts.count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 if restarts.count < 3 else 0

    lines = tmp_path / "lines"

    def say(line):
        with lines.open("a") as stream:
            stream.write(f"{line}\n")

    # "Cannot start" is the end for the first child alone: once it ran, the cause may pass.
    assert status_of(supervised(serve, say=say)) == 0
    assert [line.split(" ", 1)[0] for line in log.read_text().splitlines()] == ["0", "1", "2", "3"]
    said = lines.read_text().splitlines()
    assert "at once (restart 1)" in said[0]
    assert "ended with status 2; it is started anew in 0.5 seconds (restart 2)" in said[1]
    assert "in 1 seconds (restart 3)" in said[2]


def test_sigterm_between_two_children_ends_with_0(tmp_path):
    def serve(restarts):
        (tmp_path / str(restarts.count)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    pid = supervised(serve, say=lambda _: None)
    wait_until((tmp_path / "3").exists)  # a pause of two seconds follows
    time.sleep(0.3)
    os.kill(pid, signal.SIGTERM)
    assert status_of(pid) == 0
    assert not (tmp_path / "4").exists()


def test_signals_wait_until_the_child_listens(tmp_path):
    ready = tmp_path / "ready"

    def serve(_):
        ready.touch()
        time.sleep(0.5)  # as importing would
        got = signal.sigwait({signal.SIGTERM})
        return 40 + (got == signal.SIGTERM)

    pid = supervised(serve)
    wait_until(ready.exists)
    os.kill(pid, signal.SIGTERM)
    assert status_of(pid) == 41


def test_exception_of_the_child_is_a_traceback_and_status_1(capfd):
    def serve(_):
        raise ZeroDivisionError("a bug")

    assert status_of(supervised(serve)) == 1
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


def test_without_restart_it_serves_in_this_process():
    found = []
    assert supervise(lambda r: found.append((os.getpid(), r)) or 7, [], restart=False) == 7
    assert found == [(os.getpid(), Restarts())]


def test_parent_lets_go_of_its_sockets_when_the_end_begins(tmp_path):
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    ready = tmp_path / "ready"

    def serve(_):
        listening.close()
        ready.touch()
        signal.sigwait({signal.SIGTERM})
        time.sleep(1)
        return 0

    pid = os.fork()
    if pid == 0:
        os._exit(supervise(serve, [listening]))
    listening.close()
    wait_until(ready.exists)
    socket.create_connection(address).close()  # it waits in the parent's backlog
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.4)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    assert status_of(pid) == 0
