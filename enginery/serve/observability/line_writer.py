"""Write lines to a file descriptor from a thread, so that nobody who logs ever waits.

    writer = LineWriter(2, max_lines=1000, describe_dropped=describe)
    writer.put(line)

Standard output and standard error are often pipes. If nobody reads one, it fills up, and a process
that writes to it blocks: the event loop, or the parent that should end its workers. Here only the
thread blocks. At most `max_lines` lines are kept; further ones are dropped and counted, and once
the pipe is read again a line reports their number. A process that was forked gets its own thread.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_LINES_TOGETHER = 64
"""Maximum number of lines that are written with one system call."""
MAX_WAITING_MESSAGES = 1000
"""Maximum number of the server's messages that wait to be written."""
MAX_MESSAGE_CHARACTERS = 16_384
"""Maximum length of a message, with its traceback."""
_FLUSH_SECONDS = 1.0
"""Maximum time to wait, at the end, for a reader of messages."""


class LineWriter:
    """Writes lines to a descriptor, even to a full, non-blocking or closed pipe."""

    def __init__(
        self,
        descriptor: int,
        *,
        max_lines: int,
        describe_dropped: Callable[[int], str],
        render: Callable[[Any, float], str] = lambda line, _: str(line),
        collect_seconds: float = 0.0,
    ) -> None:
        """Create the writer; the thread starts with the first line.

        Args:
            descriptor: the file descriptor.
            max_lines: maximum number of lines that wait to be written.
            describe_dropped: returns the line that reports a number of dropped lines.
            render: called in the thread with what was put and its Unix time; returns a line with
                its line end.
            collect_seconds: time that the thread sleeps if nothing waits, so that not every line
                wakes it.
        """
        self.dropped = 0
        """Number of lines dropped because too many waited, or the reader was gone."""
        self._descriptor, self._max_lines = descriptor, max_lines
        self._describe_dropped, self._render = describe_dropped, render
        self._collect_seconds = collect_seconds
        self._reported = 0
        self._closed = self._gave_up = False
        self._starting = threading.Lock()
        self._process = 0
        self._lines: SimpleQueue[tuple[Any, float] | threading.Event] = SimpleQueue()

    def put(self, line: Any) -> None:
        """Put a line into the queue; never wait."""
        if self._process != os.getpid():
            self._start()
        if self._closed or self._lines.qsize() >= self._max_lines:
            self.dropped += 1
        else:
            self._lines.put((line, time.time()))

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until the lines are written; return False if nobody reads them in that time."""
        if self._process != os.getpid():  # no line was put in this process
            return True
        written = threading.Event()
        self._lines.put(written)
        return written.wait(timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write the waiting lines; drop them if nobody reads them in that time."""
        if self._closed:
            return
        self._closed = True
        if not self.flush(timeout_seconds):
            self._gave_up = True
            self.dropped += max(self._lines.qsize() - 1, 0)

    def _start(self) -> None:
        """Start the thread of this process."""
        with self._starting:
            if self._process == os.getpid():
                return
            self._lines = SimpleQueue()  # a fork may have interrupted what used the former one
            threading.Thread(target=self._work, daemon=True, name="enginery-log").start()
            self._process = os.getpid()

    def _work(self) -> None:
        lines = self._lines
        while not self._gave_up:
            if self._collect_seconds and lines.empty():
                time.sleep(self._collect_seconds)
            batch: list[str] = []
            item = lines.get()
            while not isinstance(item, threading.Event):
                batch.append(self._render(*item))
                if len(batch) == _LINES_TOGETHER or lines.empty():
                    break
                item = lines.get()
            self._write_lines(batch)
            if isinstance(item, threading.Event):
                item.set()

    def _write_lines(self, batch: list[str]) -> None:
        """Write lines, after one with the number of dropped lines if there are any."""
        if not batch or self._gave_up:
            return
        dropped = self.dropped
        notice = (
            self._describe_dropped(dropped - self._reported) if dropped > self._reported else ""
        )
        try:
            self._write((notice + "".join(batch)).encode("utf-8", "backslashreplace"))
            self._reported = max(self._reported, dropped)
        except OSError:  # the reader has closed the pipe
            self.dropped += len(batch)

    def _write(self, text: bytes) -> None:
        remaining = memoryview(text)
        while remaining:
            try:
                remaining = remaining[os.write(self._descriptor, remaining) :]
            except BlockingIOError:  # another process has made the shared pipe non-blocking
                select.select([], [self._descriptor], [])


class MessageHandler(logging.Handler):
    """A handler that writes the server's messages to standard error without blocking."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._writer = LineWriter(
            descriptor, max_lines=MAX_WAITING_MESSAGES, describe_dropped=self._describe_dropped
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record."""
        try:
            line = self.format(record)
        except Exception:  # a bug in the call; printing its traceback could block
            line = f"a message could not be formatted: {record.msg!r}"
        self._writer.put(f"{line[:MAX_MESSAGE_CHARACTERS]}\n")

    def flush(self) -> None:
        """Wait, for a second at most, until the messages are written."""
        self._writer.flush(_FLUSH_SECONDS)

    def close(self) -> None:
        """Write the waiting messages; drop them if nobody reads."""
        self._writer.close(_FLUSH_SECONDS)
        super().close()

    def _describe_dropped(self, count: int) -> str:
        message = f"{count} messages were dropped, because nobody read standard error in time."
        record = logging.LogRecord("enginery.serve", logging.WARNING, "", 0, message, None, None)
        return f"{self.format(record)}\n"


class RepeatFilter(logging.Filter):
    """A filter that lets a message pass once a second, with the number of those in between.

    Clients cause the messages of uvicorn, and could fill a disk with them.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._passed: dict[object, tuple[float, int]] = {}
        """When each message passed last, and how many have not since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if a message like this did not pass in the last second."""
        last, count = self._passed.get(record.msg, (float("-inf"), 0))
        now = time.monotonic()
        if now - last < self._seconds:
            self._passed[record.msg] = (last, count + 1)
            return False
        self._passed[record.msg] = (now, 0)
        if count:
            record.msg = f"{record.getMessage()} ({count} more like it since the last message)"
            record.args = None
        return True
