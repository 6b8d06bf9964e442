"""A line a request: what is in it, what never is, and what happens when nobody reads."""

import json
import os
import subprocess
import sys
import threading
from datetime import datetime

import pytest

from enginery.serve.observability.access_log import AccessLog
from tests.serve.observability.application import TIMINGS, App, ask, record


class Pipe:
    """Each end is closed once: another thread's file may have its number next."""

    def __init__(self):
        self.read, self.write = self._open = list(os.pipe())

    def close(self, *ends):
        for end in ends:
            if end in self._open:
                self._open.remove(end)
                os.close(end)


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    made.close(made.read, made.write)


def logged(pipe, *calls):
    """The lines that a log writes for `calls`."""
    log = AccessLog(pipe.write)
    for call in calls:
        answer(log, **call)
    log.close()
    pipe.close(pipe.write)
    return os.read(pipe.read, 1 << 16)


class Reader:
    """Reads a pipe to its end, beside the test."""

    def __init__(self, descriptor):
        self._text = b""
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        while part := os.read(self._descriptor, 1 << 16):
            self._text += part

    def lines(self):
        self._thread.join()
        return [json.loads(line) for line in self._text.splitlines()]


def answer(log, **known):
    log.put(record(**known))


def test_line_has_client_request_and_timings(pipe):
    text = logged(pipe, {"timings": TIMINGS})
    line = json.loads(text)
    when = datetime.fromisoformat(line.pop("time"))
    assert when.utcoffset().total_seconds() == 0
    assert line == {
        "client": "10.0.0.7:51234",
        "method": "POST",
        "path": "/embed",
        "route": "/embed",
        "model": "minilm",
        "status": 200,
        "duration_ms": 4.1,
        "tokenize_ms": 0.25,
        "queue_ms": 1.0,
        "inference_ms": 2.5,
        "tokens": 7,
        "request_id": "abc",
        "bytes_in": 24,
        "bytes_out": 8,
    }
    assert text.endswith(b"}\n")


def test_line_of_a_request_without_a_model_has_no_timings(pipe):
    line = json.loads(logged(pipe, {}))
    assert not {"tokenize_ms", "queue_ms", "inference_ms", "tokens"} & set(line)


def test_bodies_keys_and_queries_are_never_logged(pipe):
    log = AccessLog(pipe.write)
    ask(App(body=b"secret answer"), observed={"access_log": log})
    log.close()
    text = os.read(pipe.read, 1 << 16)
    assert text.count(b"\n") == 1
    assert b"secret" not in text


@pytest.mark.parametrize(
    "path",
    [
        '/a\n{"status":200}',
        "/a\r\nb",
        "/\x00\x1b[2J\x7f",
        "/\x85b\u2028c\u2029d",
        "/\ud800half",
        '/"},{"a":"',
        "/名前",
    ],
    ids=ascii,
)
def test_path_cannot_forge_a_line(pipe, path):
    text = logged(pipe, {"path": path}, {}).decode("ascii")
    assert len(text.splitlines()) == 2  # which also splits at U+0085 and U+2028
    assert all(character == "\n" or " " <= character < "\x7f" for character in text)
    assert json.loads(text.splitlines()[0])["path"] == path


def test_long_path_is_cut(pipe):
    assert len(json.loads(logged(pipe, {"path": "/" + "x" * 100_000}))["path"]) == 1024


def test_unread_pipe_drops_and_counts_lines(pipe):
    """The calls return; were they to wait for the pipe, this test would never end."""
    log = AccessLog(pipe.write, lines=1000)
    for _ in range(20_000):
        answer(log)
    dropped = log.dropped
    assert dropped > 10_000
    reader = Reader(pipe.read)
    log.close(timeout_seconds=60)
    pipe.close(pipe.write)
    lines = reader.lines()
    told = sum(line.get("access_log_dropped", 0) for line in lines)
    assert told == dropped == 20_000 - sum("path" in line for line in lines)


def test_non_blocking_pipe_is_waited_for(pipe):
    os.set_blocking(pipe.write, False)
    log = AccessLog(pipe.write, lines=10_000)
    for number in range(3000):
        answer(log, path=f"/{number}")
    reader = Reader(pipe.read)
    log.close(timeout_seconds=60)
    pipe.close(pipe.write)
    assert [line["path"] for line in reader.lines()] == [f"/{n}" for n in range(3000)]


def test_lines_are_written_when_the_process_ends():
    code = (
        "from enginery.serve.observability.access_log import AccessLog\n"
        "from tests.serve.observability.application import record\n"
        "log = AccessLog.from_option('json')\n"
        "for _ in range(100):\n"
        "    log.put(record())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert len(done.stdout.splitlines()) == 100
    assert done.stderr == b""


def test_off_disables_the_log():
    assert AccessLog.from_option("off") is None
