"""The life of a worker process: signals, draining, loading, and how it ends."""

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress

import psutil
import pytest
import uvicorn

from enginery.serve.config import ServeConfig
from enginery.serve.http import lifecycle as lifecycle_module
from enginery.serve.http.lifecycle import Activity, ProcessLifecycle, Supervision
from enginery.serve.http.listener import Listener
from enginery.serve.server import uvicorn_config
from tests.serve.processes import GET, one_answer, received, wait_until, waiting_connections

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and processes of POSIX")
MODES = pytest.mark.parametrize("restart", [True, False], ids=["supervised", "alone"])


@pytest.mark.more
@MODES
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_and_ends_with_0(start, restart, number):
    server = start(config={"restart": restart})
    answer = server.get("echo")
    assert (answer.text, "server" in answer.headers) == ("/echo", False)
    status, said = server.end(number)
    assert status == 0
    assert said.splitlines()[-2:] == ["draining", "closed"]


@pytest.mark.more
def test_it_answers_before_the_models_are_loaded(start):
    server = start(load_seconds=1.0)
    assert server.get("ready").status_code == 503
    server.ready()
    assert server.end()[0] == 0


@pytest.mark.more
@MODES
def test_sigterm_while_loading_ends_with_0(start, restart):
    server = start(load_seconds=600, config={"restart": restart})
    assert server.get("ready").status_code == 503
    assert server.end()[0] == 0


@pytest.mark.more
@MODES
def test_sigterm_while_the_process_starts_ends_with_0(start, restart):
    status, said = start(config={"restart": restart}).end()
    assert status == 0
    assert "Traceback" not in said


@MODES
def test_models_that_cannot_be_loaded_end_it_with_2(start, restart):
    status, said = start(load_error=True, config={"restart": restart}).rest()
    assert status == 2
    assert "error: m: found no manifest.json. Export it with: enginery export" in said
    assert "Traceback" not in said
    assert "it is replaced" not in said


@MODES
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_and_sent_requests_are_answered_with_connection_close(start, restart, number):
    server = start(config={"restart": restart}).ready()
    running = server.raw(GET % b"sleep/2", GET % b"echo")  # two on one connection
    idle = server.raw(GET % b"echo")
    assert b"200 OK" in one_answer(idle)
    half = server.raw(b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbo")
    server.get("echo")  # all of that was read
    server.send(number)
    server.hear_until("draining")
    half.sendall(b"dy")
    found = received(half)
    assert (found.count(b"200 OK"), found.count(b"connection: close")) == (1, 1)
    assert found.endswith(b"body")
    assert received(idle) == b""
    found = received(running)
    assert found.count(b"200 OK") >= 1
    assert found.count(b"connection: close") == 1
    assert server.rest()[0] == 0


@pytest.mark.more
def test_readiness_ends_at_once_and_connections_are_accepted_for_the_drain_delay(start):
    server = start(config={"drain_delay": 2.0}).ready()
    server.send(signal.SIGTERM)
    server.hear_until("draining")
    answer = server.get("ready")
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")
    assert server.get("echo").status_code == 200
    assert server.rest()[0] == 0
    with pytest.raises(ConnectionRefusedError):
        server.raw()


@pytest.mark.more
@MODES
def test_waiting_connections_are_answered(start, restart):
    server = start(config={"restart": restart}).ready()
    worker = psutil.Process(server.pid())
    worker.suspend()  # the kernel accepts connections all the same
    clients = [server.raw(GET % b"echo") for _ in range(20)]
    wait_until(lambda: waiting_connections(server.port) == 20)
    worker.send_signal(signal.SIGTERM)  # it reads the signal before any connection
    server.send(signal.SIGTERM)
    worker.resume()
    for client in clients:
        assert received(client).startswith(b"HTTP/1.1 200 OK")
    assert server.rest()[0] == 0


def test_requests_longer_than_the_grace_are_answered_with_503(start):
    server = start(config={"grace": 0.5}).ready()
    clients = [server.running(b"wait") for _ in range(3)]
    server.send(signal.SIGTERM)
    for client in clients:
        found = received(client)
        assert found.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in found
        assert found.endswith(b'{"error":"the server is shutting down."}')
    status, said = server.rest()
    assert status == 0
    assert "3 requests were still running; they are answered with 503." in said
    assert "Traceback" not in said


@MODES
def test_second_interrupt_ends_at_once(start, restart):
    server = start(config={"restart": restart}).ready()
    client = server.running(b"wait")
    server.send(signal.SIGINT)
    server.hear_until("draining")
    server.send(signal.SIGINT)
    assert received(client).startswith(b"HTTP/1.1 503 ")
    status, said = server.rest()
    assert status == 130
    assert "ending at once: interrupted." in said


def test_two_interrupts_in_a_row_end_at_once(start):
    server = start().ready()
    client = server.running(b"wait")
    client.settimeout(0.05)
    for _ in range(200):  # the kernel makes one of those that come together
        server.send(signal.SIGINT)
        with suppress(TimeoutError):
            assert client.recv(65_536).startswith(b"HTTP/1.1 503 ")
            break
    client.close()
    assert server.rest()[0] == 130


@pytest.mark.more
@MODES
def test_sighup_reloads(start, restart):
    server = start(config={"restart": restart}).ready()
    server.send(signal.SIGHUP)
    assert server.hear_until("reloaded") == f"{server.pid()}: reloaded, content unchanged"
    assert server.end()[0] == 0


@pytest.mark.more
def test_stuck_worker_is_replaced_and_its_requests_answered(start):
    server = start().ready()
    before = server.pid()
    waiting = server.running(b"wait")
    found = received(server.raw(GET % b"stuck"))
    assert found.startswith(b"HTTP/1.1 503 ")
    assert found.endswith(b"the model is stuck.")
    assert received(waiting).startswith(b"HTTP/1.1 503 ")
    assert "a batch has run for 60 seconds." in server.hear_until("ending at once")
    assert server.pid() != before
    server.hear_until("exited because it was stuck; it is replaced immediately.")
    assert server.end()[0] == 0


@pytest.mark.more
@MODES
def test_blocked_event_loop_does_not_prevent_exit(start, restart):
    config = {"grace": 0.0, "restart": restart}
    status, said = start(held_up=True, close=0.0, config=config).ready().end()
    assert status == 0
    assert "killed" not in said


def test_simultaneous_signals_turn_readiness_off(monkeypatch):
    """Draining has not begun to run when the second one has it end at once."""
    happened = []
    # Its timer would end the process of the tests.
    monkeypatch.setattr(lifecycle_module, "exit_after", lambda seconds, status: None)

    async def whole():
        server = uvicorn.Server(uvicorn_config(None, ServeConfig()))
        server.started, server.servers = True, []
        lifecycle = ProcessLifecycle(server, Listener(server, []), ServeConfig(), Supervision())
        activity = Activity()
        lifecycle.start(
            begin_drain=lambda: happened.append("drain"), reload=None, activity=activity
        )
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        while not server.should_exit:
            await asyncio.sleep(0.01)
        assert activity.draining
        assert happened == ["drain"]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(whole())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.more
@pytest.mark.parametrize(
    "round_", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))]
)
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "new"])
@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_under_load_loses_no_request(start, keep, processes, round_):
    server = start(config={"processes": processes}).ready()
    outcomes = Counter()

    async def client(number):
        """Asks until the server says that it ends; what was sent has to be answered."""
        reader = writer = None
        while True:
            if writer is None:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                except OSError:
                    return
            try:
                writer.write(GET % b"sleep/0.005")
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                outcomes["lost" if keep else "reset"] += 1
                writer.close()
                return
            outcomes[head.split(b"\r\n")[0].decode()] += 1
            closes = b"connection: close" in head
            if closes:
                outcomes["closed"] += 1
            if closes or not keep:
                writer.close()
                writer = None
            if closes and keep:
                return

    async def load():
        clients = [asyncio.create_task(client(n)) for n in range(32)]
        await asyncio.sleep(0.7)
        server.send(signal.SIGTERM)
        await asyncio.gather(*clients)

    asyncio.run(load())
    # The kernel resets a connection that comes between the last `accept` and `close`.
    assert outcomes.pop("reset", 0) <= 3
    assert set(outcomes) <= {"HTTP/1.1 200 OK", "closed"}, outcomes
    assert not keep or outcomes["closed"] == 32
    assert outcomes["HTTP/1.1 200 OK"] > 100
    assert server.rest()[0] == 0
