"""A line of JSON for each request, on standard output, through the standard library's logging.

    >>> log = AccessLog.from_option("json")
    >>> log.write(record)
    {"time":"2026-01-01T12:00:00.000Z","client":"10.0.0.7:51234","method":"POST","path":"/embed",…}

A request only puts its record into a queue; a listener's thread makes lines of them and writes.
Where nobody reads the pipe, the thread waits and the server goes on: at most `MAX_WAITING_LINES` records are
kept, those beyond are counted, and a line says how many when the pipe moves again. A line never has
a body, a key or a query; what a client chose is escaped to ASCII, so that it cannot begin a line of
its own.
"""

from __future__ import annotations

import atexit
import json
import logging
import logging.handlers
import os
import select
import threading
import time
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any, Literal

import orjson

from enginery.serve.observability.record import RequestRecord

MAX_WAITING_LINES = 20_000
"""The most lines that wait to be written."""
MAX_PATH_CHARACTERS = 1024
"""Characters of a path that are kept: with `MAX_WAITING_LINES` it bounds the memory."""
_TOGETHER_SECONDS = 0.05
"""The listener sleeps for so long once it has written all, or each request would wake it up."""


class AccessLog:
    """Writes lines to a file descriptor from a thread of its own."""

    def __init__(self, descriptor: int = 1, *, lines: int = MAX_WAITING_LINES) -> None:
        """Start the thread.

        Args:
            descriptor: where to; standard output.
            lines: the most that wait.
        """
        self._queue = _Queue(SimpleQueue(), lines)
        self._file = _DescriptorHandler(descriptor, self._queue)
        self._file.setFormatter(_JsonFormatter())
        self._listener = _Listener(self._queue.queue, self._file)
        # Of its own, not one of the process's: two servers in a process have two logs.
        self._logger = logging.Logger("enginery.access", logging.INFO)
        self._logger.addHandler(self._queue)
        self._closed = False
        self._listener.start()
        atexit.register(self.close)

    @classmethod
    def from_option(cls, option: Literal["json", "off"]) -> AccessLog | None:
        """Return the log that `--access-log` asks for; None for `off`."""
        return cls() if option == "json" else None

    @property
    def dropped(self) -> int:
        """Return how many lines a full queue, or a reader that has gone, has cost."""
        return self._queue.dropped

    def write(self, record: RequestRecord) -> None:
        """Log a request whose response is sent; wait for nothing."""
        if self._closed:
            self._queue.dropped += 1
            return
        # The level is not asked for, nor the caller looked up: each request would pay for it.
        self._logger.handle(
            logging.LogRecord("enginery.access", logging.INFO, "", 0, record, None, None)
        )

    def close(self, *, timeout_seconds: float = 2.0) -> None:
        """Write what waits and end the thread; what a stuck reader leaves is dropped."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        # `stop` waits for the listener, which may wait for a reader that never reads.
        stopping = threading.Thread(target=self._listener.stop, daemon=True)
        stopping.start()
        stopping.join(timeout_seconds)
        if stopping.is_alive():
            self._file.given_up = True
            self._queue.dropped += self._queue.queue.qsize()


class _Queue(logging.handlers.QueueHandler):
    """A queue that never keeps a request waiting: what a full one drops is counted."""

    queue: SimpleQueue[Any]

    def __init__(self, records: SimpleQueue[Any], most: int) -> None:
        super().__init__(records)
        self._most = most
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record as it is: the listener formats it, in its own time."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put the record into the queue, or count it as dropped where the queue is full."""
        if self.queue.qsize() >= self._most:
            self.dropped += 1
        else:
            self.queue.put(record)


class _Listener(logging.handlers.QueueListener):
    def dequeue(self, block: bool) -> logging.LogRecord:
        """Return the next record; lines are written many at once."""
        waiting: Any = self.queue
        if waiting.empty():
            time.sleep(_TOGETHER_SECONDS)
        return super().dequeue(block)


class _DescriptorHandler(logging.Handler):
    """Writes to a descriptor, which may be a pipe that is full, non-blocking, or closed."""

    def __init__(self, descriptor: int, waiting: _Queue) -> None:
        super().__init__()
        self._descriptor, self._waiting = descriptor, waiting
        self._told = 0
        self.given_up = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, and before it one of those that were dropped."""
        if self.given_up:
            return
        dropped = self._waiting.dropped
        text = self.format(record)
        if dropped > self._told:
            facts = {"time": _utc(time.time()), "access_log_dropped": dropped - self._told}
            text = f"{json.dumps(facts, separators=(',', ':'))}\n{text}"
        try:
            self._write(text.encode("ascii"))
            self._told = max(self._told, dropped)
        except OSError:  # the reader is gone for good
            self._waiting.dropped += 1

    def _write(self, text: bytes) -> None:
        left = memoryview(text)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # somebody who shares the pipe has made it non-blocking
                select.select([], [self._descriptor], [])


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a RequestRecord, its end included, in ASCII."""
        request: Any = record.msg
        found: RequestRecord = request
        facts: dict[str, Any] = {
            "time": _utc(record.created),
            "client": found.client,
            "method": found.method,
            "path": found.path[:MAX_PATH_CHARACTERS],
            "route": found.route,
            "model": found.model,
            "status": found.status,
            "duration_ms": _ms(found.seconds),
        }
        if (timings := found.timings) is not None:
            facts["tokenize_ms"] = _ms(timings.tokenize_seconds)
            facts["queue_ms"] = _ms(timings.queue_seconds)
            facts["inference_ms"] = _ms(timings.inference_seconds)
            facts["tokens"] = timings.tokens
        facts["request_id"] = found.request_id
        facts["bytes_in"] = found.body_bytes
        facts["bytes_out"] = found.sent_bytes
        try:
            text = orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:  # half a surrogate pair, which is no UTF-8
            text = b"\x80"
        if not text.isascii():
            # U+0085 and U+2028 end a line for some readers, and orjson leaves them as they are.
            text = f"{json.dumps(facts, separators=(',', ':'))}\n".encode("ascii")
        return text.replace(b"\x7f", b"\\u007f").decode("ascii")


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
