"""Messages of the server are written in order and without blocking, each once a second at most."""

import json
import logging
import os
import threading

import pytest

from enginery.serve.observability.line_writer import LineWriter, MessageHandler, RepeatFilter
from enginery.serve.server import LineFormatter


@pytest.fixture
def pipe():
    """Read and write end of a pipe, of which a test may close either."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end is not None:
            os.close(end)


def close(pipe, index):
    os.close(pipe[index])
    pipe[index] = None


def fill(descriptor):
    """The number of bytes that a pipe takes."""
    os.set_blocking(descriptor, False)
    size = 0
    try:
        while True:
            size += os.write(descriptor, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(descriptor, True)
        return size


def drain(descriptor, size):
    while size:
        size -= len(os.read(descriptor, size))


def logger_of(handler, **options):
    handler.setFormatter(LineFormatter(**options))
    logger = logging.Logger("enginery.serve")
    logger.addHandler(handler)
    return logger


def test_messages_are_written_in_order_with_their_tracebacks(pipe):
    handler = MessageHandler(pipe[1])
    logger = logger_of(handler)
    logger.info("draining")
    try:
        raise ValueError("odd")
    except ValueError:
        logger.exception("it failed")
    handler.close()
    text = os.read(pipe[0], 1 << 16).decode()
    assert text.splitlines()[:2] == ["draining", "error: it failed"]
    assert "ValueError: odd" in text


@pytest.mark.parametrize("as_json", [False, True])
def test_messages_that_nobody_reads_are_dropped_and_counted(pipe, as_json):
    """The calls return; were they to wait for the pipe, this test would never end."""
    size = fill(pipe[1])
    handler = MessageHandler(pipe[1])
    logger = logger_of(handler, as_json=as_json)
    for number in range(5000):
        logger.warning("%d", number)
    drain(pipe[0], size)
    text = b""
    while not handler._writer._lines.empty():
        text += os.read(pipe[0], 1 << 16)
    logger.info("last")
    while b"last" not in text:
        text += os.read(pipe[0], 1 << 16)
    lines = [line for line in text.decode().split("\n") if line]
    if as_json:
        lines = [json.loads(line)["message"] for line in lines]
    notices = [line for line in lines if "dropped" in line]  # a second if a line got through
    count = sum(int(notice.split()[1]) for notice in notices)
    assert all(notice.startswith("warning: ") for notice in notices)
    assert count > 3000
    assert count + len(lines) - len(notices) == 5000 + 1


def test_end_does_not_wait_for_a_reader(pipe):
    size = fill(pipe[1])
    handler = MessageHandler(pipe[1])
    logger = logger_of(handler)
    logger.info("draining")
    handler._writer.close(0.1)
    assert handler._writer.dropped == 0  # the thread has it, and waits
    logger.info("late")
    assert handler._writer.dropped == 1
    drain(pipe[0], size)
    assert os.read(pipe[0], 100) == b"draining\n"


def test_reader_that_has_gone_is_no_error(pipe):
    close(pipe, 0)
    writer = LineWriter(pipe[1], max_lines=9, describe_dropped=str)
    writer.put("a\n")
    assert writer.flush(10)
    assert writer.dropped == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork of POSIX")
def test_process_that_was_forked_has_a_thread_of_its_own(pipe):
    writer = LineWriter(pipe[1], max_lines=9, describe_dropped=str)
    writer.put("parent\n")
    assert writer.flush(10)
    child = os.fork()
    if not child:
        writer.put("child\n")
        os._exit(not writer.flush(10))
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(pipe[0], 100) == b"parent\nchild\n"


def test_threads_lose_no_line(pipe):
    writer = LineWriter(pipe[1], max_lines=10_000, describe_dropped=str)
    threads = [
        threading.Thread(target=lambda: [writer.put("line\n") for _ in range(1000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.flush(10)
    assert os.read(pipe[0], 1 << 16) == b"line\n" * 4000


def test_message_like_the_last_one_passes_once_a_second(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    passed = []

    def log(message, *args):
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, message, args, None)
        if repeats.filter(record):
            passed.append(record.getMessage())

    repeats = RepeatFilter()
    for number in range(100):
        log("invalid %d", number)
        log("another")
    now[0] += 1
    log("invalid %d", 7)
    log("invalid %d", 8)
    assert passed == ["invalid 0", "another", "invalid 7 (99 more like it since the last message)"]
