"""The access log: one line of JSON per request on standard output, written with `logging`.

    log = AccessLog.from_option("json")
    log.write(record)
    # {"time":"2026-01-01T12:00:00.000Z","client":"10.0.0.7:51234","method":"POST","path":…}

A request only puts its record into a queue; a listener thread formats and writes the lines. If
nobody reads the pipe, the thread blocks, but the server does not: at most `MAX_WAITING_LINES`
records are kept, further ones are dropped and counted, and once the pipe is read again a line
reports their number. A line never contains a body, a key or a query string. Text from clients is
escaped to ASCII, so that it cannot start a new line.
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
from typing import Any, Literal, cast

import orjson

from enginery.serve.observability.record import RequestRecord

MAX_WAITING_LINES = 20_000
"""Maximum number of lines that wait to be written."""
MAX_PATH_CHARACTERS = 1024
"""Maximum length of a logged path. Together with `MAX_WAITING_LINES` it bounds the memory."""
_LINES_TOGETHER = 64
"""Maximum number of lines that are written with one system call."""
_TOGETHER_SECONDS = 0.05
"""Time that the listener sleeps if the queue is empty, so that not every request wakes it."""


class AccessLog:
    """An access log that writes to a file descriptor from its own thread."""

    def __init__(self, descriptor: int = 1, *, lines: int = MAX_WAITING_LINES) -> None:
        """Start the thread.

        Args:
            descriptor: the file descriptor; by default standard output.
            lines: maximum number of lines that wait to be written.
        """
        self._queue = _Queue(lines)
        self._file = _DescriptorHandler(descriptor, self._queue)
        self._file.setFormatter(_JsonFormatter())
        self._listener = _Listener(self._queue.records, self._file)
        self._closed = False
        self._listener.start()
        atexit.register(self.close)

    @classmethod
    def from_option(cls, option: Literal["json", "off"]) -> AccessLog | None:
        """Return the log for the value of `--access-log`; None for `off`."""
        return cls() if option == "json" else None

    @property
    def dropped(self) -> int:
        """Number of lines dropped because the queue was full or the reader was gone."""
        return self._queue.dropped

    def write(self, record: RequestRecord) -> None:
        """Log a request whose response has been sent; never block."""
        if self._closed:
            self._queue.dropped += 1
            return
        self._queue.put(record)

    def close(self, *, timeout_seconds: float = 2.0) -> None:
        """Write the waiting lines and end the thread; drop them if nobody reads the pipe."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        # `stop` waits for the listener, which blocks if nobody reads the pipe.
        stopping = threading.Thread(target=self._listener.stop, daemon=True)
        stopping.start()
        stopping.join(timeout_seconds)
        if stopping.is_alive():
            self._file.given_up = True
            self._queue.dropped += self._queue.records.qsize()


class _Queue:
    """A queue that never blocks a request: if it is full, it drops the line and counts it."""

    def __init__(self, max_records: int) -> None:
        self.records: SimpleQueue[Any] = SimpleQueue()
        self.dropped = 0
        self._max_records = max_records

    def put(self, record: RequestRecord) -> None:
        """Put a record and the present time into the queue; if it is full, count it as dropped."""
        if self.records.qsize() >= self._max_records:
            self.dropped += 1
        else:
            self.records.put((record, time.time()))


class _Listener(logging.handlers.QueueListener):
    def dequeue(self, block: bool) -> logging.LogRecord:
        """Return the next record; sleep first if the queue is empty, to collect several.

        The record of `logging` is made here and not by the request, since that takes longer than
        all else.
        """
        waiting: Any = self.queue
        if waiting.empty():
            time.sleep(_TOGETHER_SECONDS)
        item: Any = super().dequeue(block)
        if not isinstance(item, tuple):
            self.handlers[0].flush()
            return cast("logging.LogRecord", item)  # the sign to end
        record, created = item
        log_record = logging.LogRecord("enginery.access", logging.INFO, "", 0, record, None, None)
        log_record.created = created
        return log_record


class _DescriptorHandler(logging.Handler):
    """A handler that writes to a descriptor, even to a full, non-blocking or closed pipe."""

    def __init__(self, descriptor: int, waiting: _Queue) -> None:
        super().__init__()
        self._descriptor, self._waiting = descriptor, waiting
        self._told = 0
        self._lines: list[str] = []
        self.given_up = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line together with those that wait.

        They are preceded by a line with the number of dropped lines if there are any.
        """
        if self.given_up:
            return
        self._lines.append(self.format(record))
        if len(self._lines) >= _LINES_TOGETHER or self._waiting.records.empty():
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait."""
        lines, self._lines = self._lines, []
        dropped = self._waiting.dropped
        notice = f"{_told_line(dropped - self._told)}\n" if dropped > self._told else ""
        if not lines:
            return
        try:
            self._write((notice + "".join(lines)).encode("ascii"))
            self._told = max(self._told, dropped)
        except OSError:  # the reader has closed the pipe
            self._waiting.dropped += len(lines)

    def _write(self, text: bytes) -> None:
        remaining = memoryview(text)
        while remaining:
            try:
                remaining = remaining[os.write(self._descriptor, remaining) :]
            except BlockingIOError:  # another process has made the shared pipe non-blocking
                select.select([], [self._descriptor], [])


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Format a RequestRecord as one line of ASCII, including its line end."""
        request: Any = record.msg
        request_record: RequestRecord = request
        facts: dict[str, Any] = {
            "time": _utc(record.created),
            "client": request_record.client,
            "method": request_record.method,
            "path": request_record.path[:MAX_PATH_CHARACTERS],
            "route": request_record.route,
            "model": request_record.model,
            "status": request_record.status,
            "duration_ms": _ms(request_record.seconds),
        }
        if (timings := request_record.timings) is not None:
            facts["tokenize_ms"] = _ms(timings.tokenize_seconds)
            facts["queue_ms"] = _ms(timings.queue_seconds)
            facts["inference_ms"] = _ms(timings.inference_seconds)
            facts["tokens"] = timings.tokens
        if request_record.generated:
            facts["generated_tokens"] = request_record.generated
            facts["first_token_ms"] = _ms(request_record.first_token_at - request_record.started)
        facts["request_id"] = request_record.request_id
        facts["bytes_in"] = request_record.body_bytes
        facts["bytes_out"] = request_record.sent_bytes
        try:
            text = orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:  # a lone surrogate, which UTF-8 cannot encode
            text = b"\x80"
        if not text.isascii():
            # Some readers treat U+0085 and U+2028 as line ends, and orjson does not escape them.
            text = f"{json.dumps(facts, separators=(',', ':'))}\n".encode("ascii")
        return text.replace(b"\x7f", b"\\u007f").decode("ascii")


def _told_line(dropped: int) -> str:
    facts = {"time": _utc(time.time()), "access_log_dropped": dropped}
    return json.dumps(facts, separators=(",", ":"))


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
