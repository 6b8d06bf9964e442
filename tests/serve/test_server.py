"""The server's process: signals, draining, loading, and the sockets it listens on."""

import asyncio
import errno
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import httpx
import pytest

from enginery.core.errors import EngineryError, OptionError
from enginery.serve.http_sockets import bind, close, urls

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and processes of POSIX")
MODES = pytest.mark.parametrize("restart", [True, False], ids=["supervised", "alone"])


class Server:
    """A process of `tests.serve.serving`; what it says is in `lines`."""

    def __init__(self, **options):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.serving", json.dumps(options)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.heard = queue.Queue()
        self.lines = []
        threading.Thread(target=self._listen, daemon=True).start()
        pid, port = self.hear().split()
        assert int(pid) == self.process.pid
        self.port = int(port)
        self.url = f"http://127.0.0.1:{port}"

    def _listen(self):
        for line in self.process.stdout:
            self.heard.put(line.rstrip("\n"))
        self.heard.put(None)

    def hear(self):
        line = self.heard.get(timeout=60)
        self.lines.append(line)
        return line

    def hear_until(self, words):
        while words not in (line := self.hear() or pytest.fail(f"ended; said {self.lines}")):
            pass
        return line

    def rest(self):
        """The exit status and everything that was said."""
        while self.lines[-1] is not None:
            self.hear()
        return self.process.wait(60), "\n".join(self.lines[:-1])

    def signal(self, number):
        self.process.send_signal(number)

    def get(self, path):
        return httpx.get(f"{self.url}/{path}", timeout=60)

    def ready(self):
        self.hear_until("listening on")
        until = time.monotonic() + 60
        while self.get("ready").status_code != 200:
            assert time.monotonic() < until
        return self


@pytest.fixture
def start():
    started = []

    def make(**options):
        started.append(Server(**options))
        return started[-1]

    yield make
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        while server.lines[-1] is not None:
            server.hear()
        server.process.stdout.close()


def raw(server, *parts):
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(b"".join(parts))
    return client


def received(client):
    with client:
        found = b""
        while part := client.recv(65_536):
            found += part
    return found


GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"


@MODES
def test_it_says_where_it_listens_and_ends_with_0(start, restart):
    server = start(restart=restart)
    assert server.hear_until("listening") == f"listening on {server.url}"
    assert server.get("echo").json()["path"] == "/echo"
    server.signal(signal.SIGTERM)
    status, said = server.rest()
    assert status == 0
    assert said.splitlines()[-2:] == ["draining", "closed"]


def test_it_answers_before_the_models_are_loaded(start):
    server = start(load_seconds=1.0)
    server.hear_until("listening")
    assert server.get("ready").status_code == 503
    until = time.monotonic() + 60
    while server.get("ready").status_code == 503:
        assert time.monotonic() < until
    server.signal(signal.SIGTERM)
    assert server.rest()[0] == 0


def test_sigterm_while_loading_ends_with_0(start):
    server = start(load_seconds=600)
    server.hear_until("listening")
    server.signal(signal.SIGTERM)
    assert server.rest()[0] == 0


@MODES
def test_models_that_cannot_be_loaded_end_it_with_2(start, restart):
    server = start(load_error=True, restart=restart)
    status, said = server.rest()
    assert status == 2
    assert "error: m: found no manifest.json. Export it with: enginery export" in said
    assert "Traceback" not in said
    assert "started anew" not in said


@MODES
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_and_what_was_sent_is_answered_with_close(start, restart, number):
    server = start(restart=restart).ready()
    running = raw(server, GET % b"sleep/1", GET % b"echo")
    idle = raw(server, GET % b"echo")
    assert b"200 OK" in idle.recv(65_536)
    half = raw(server, b"GET /echo HTTP/1.1\r\n")
    time.sleep(0.3)
    server.signal(number)
    server.hear_until("draining")
    half.sendall(b"Host: a\r\n\r\n")
    assert received(idle) == b""
    found = received(half)
    assert (found.count(b"200 OK"), found.count(b"connection: close")) == (1, 1)
    found = received(running)
    assert (found.count(b"200 OK"), found.count(b"connection: close")) == (2, 1)
    assert server.rest()[0] == 0


def test_readiness_goes_at_once_and_connections_are_taken_for_the_drain_delay(start):
    server = start(config={"drain_delay": 2.0}).ready()
    server.signal(signal.SIGTERM)
    server.hear_until("draining")
    answer = server.get("ready")
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")
    assert server.get("echo").status_code == 200
    assert server.rest()[0] == 0
    with pytest.raises(ConnectionRefusedError):
        raw(server)


def test_what_runs_longer_than_the_grace_is_answered_with_503(start):
    server = start(config={"grace": 0.5}).ready()
    clients = [raw(server, GET % b"wait") for _ in range(3)]
    time.sleep(0.3)
    server.signal(signal.SIGTERM)
    for client in clients:
        found = received(client)
        assert found.startswith(b"HTTP/1.1 503 ")
        assert b"the server is shutting down." in found
    status, said = server.rest()
    assert status == 0
    assert "3 requests were still running; they were answered with 503." in said


@MODES
def test_second_interrupt_ends_at_once(start, restart):
    server = start(restart=restart).ready()
    client = raw(server, GET % b"wait")
    time.sleep(0.3)
    server.signal(signal.SIGINT)
    server.hear_until("draining")
    server.signal(signal.SIGINT)
    assert received(client).startswith(b"HTTP/1.1 503 ")
    status, said = server.rest()
    assert status == 130
    assert "ending at once: interrupted." in said


@MODES
def test_sighup_reloads(start, restart):
    server = start(restart=restart).ready()
    server.signal(signal.SIGHUP)
    assert server.hear_until("reloaded") == "m: reloaded, of the same content"
    assert server.get("echo").status_code == 200
    server.signal(signal.SIGTERM)
    assert server.rest()[0] == 0


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "new"])
def test_sigterm_under_load_loses_no_request(start, keep):
    server = start().ready()
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
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                outcomes[f"lost: {type(error).__name__}"] += 1
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
        server.signal(signal.SIGTERM)
        await asyncio.gather(*clients)

    asyncio.run(load())
    assert set(outcomes) == {"HTTP/1.1 200 OK", "closed"}, outcomes
    assert outcomes["HTTP/1.1 200 OK"] > 100
    assert server.rest()[0] == 0


def test_port_0_is_a_free_port_and_the_same_for_all_addresses():
    sockets = bind("localhost", 0)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert f"http://127.0.0.1:{sockets[0].getsockname()[1]}" in urls(sockets)
    finally:
        close(sockets)


def test_ipv6_address_is_written_in_brackets():
    try:
        sockets = bind("::1", 0)
    except EngineryError:
        pytest.skip("no IPv6 here")
    assert urls(sockets) == [f"http://[::1]:{sockets[0].getsockname()[1]}"]
    close(sockets)


def test_taken_port_names_who_holds_it():
    held = bind("127.0.0.1", 0)
    port = held[0].getsockname()[1]
    try:
        with pytest.raises(EngineryError) as caught:
            bind("127.0.0.1", port)
    finally:
        close(held)
    assert f"127.0.0.1 port {port} is taken by process {os.getpid()}" in caught.value.message
    assert "--port 0" in caught.value.do


@pytest.mark.parametrize(
    ("host", "words"),
    [("192.0.2.1", "no address of this machine"), ("no-such-host.invalid", "no address is known")],
)
def test_host_that_is_not_ours_is_an_option_error(host, words):
    with pytest.raises(OptionError, match=words):
        bind(host, 0)


def test_privileged_port_is_an_option_error(monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(OptionError, match="port 80 may not be listened on"):
        bind("127.0.0.1", 80)
