"""A server process as its tests see it, started with the options of `tests.serve.serving`."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"


class ServerProcess:
    """A process of `tests.serve.serving`; what it says is in `lines`."""

    def __init__(self, **options):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.serving", json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.heard = queue.Queue()
        self.lines = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.url = self.hear_until("listening on ").removeprefix("listening on ")
        self.port = int(self.url.rpartition(":")[2])

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

    def send(self, number):
        self.process.send_signal(number)

    def get(self, path):
        return httpx.get(f"{self.url}/{path}", timeout=60)

    def pid(self):
        """Of the worker that answers."""
        return int(self.get("pid").text)

    def ready(self):
        wait_until(lambda: self.get("ready").status_code == 200)
        return self

    def raw(self, *parts):
        """A connection on which this was sent."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        client.sendall(b"".join(parts))
        return client

    def running(self, path):
        """A connection whose request has begun to run."""
        client = self.raw(b"POST /%b HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n" % path)
        # Connections are read in the order in which they came.
        assert self.get("pid").status_code == 200
        return client

    def end(self, number=signal.SIGTERM):
        """The exit status and everything that was said, after a signal."""
        self.send(number)
        return self.rest()

    def clean_up(self):
        if self.process.poll() is None:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                each.kill()
            self.process.kill()
        self.process.wait()
        while self.lines[-1] is not None:
            self.hear()
        self.process.stdout.close()


def received(client):
    """Everything until the server ends the connection."""
    with client:
        found = b""
        while part := client.recv(65_536):
            found += part
    return found


def one_answer(client):
    """An answer on a connection that stays open."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(65_536)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65_536)
    return head + body


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def waiting_connections(port):
    """Connections that the kernel has accepted for a listening port and nobody has taken."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[1] == f"0100007F:{port:04X}" and words[3] == "0A":
            return int(words[4].partition(":")[2], 16)
    return 0
