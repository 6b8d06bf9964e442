"""A line of JSON for each request, on standard output.

Takes a request and its answer; leaves a line, in a moment.

    >>> log = AccessLog.from_option("json")
    >>> log(request, response, route="/embed", model="minilm", seconds=0.0041, timings=timings)
    {"time":"2026-01-01T12:00:00.000Z","client":"10.0.0.7:51234","method":"POST","path":"/embed",…}

The caller only puts the facts aside; a thread makes lines of them and writes. Where nobody reads
the pipe, the thread waits and the server goes on: at most `LINES` lines are kept, those beyond are
counted, and a line says how many when the pipe moves again. A line never has a body, a key or a
query; what a client chose is escaped to ASCII, so that it cannot begin a line of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from enginery.serve.messages import Request, Response
from enginery.serve.replies import Timings

LINES = 20_000
"""The most lines that wait to be written."""
LONGEST = 1024
"""Characters of a path that are kept: with `LINES` it bounds the memory."""
_TOGETHER_SECONDS = 0.05
"""Lines are written this far apart, many at once."""


class AccessLog:
    """Writes lines to a file descriptor from a thread of its own.

    Args:
        descriptor: where to; standard output.
        lines: the most that wait.
    """

    def __init__(self, descriptor: int = 1, *, lines: int = LINES) -> None:
        self.dropped = 0
        """Lines that there was no room for, or no reader."""
        self._descriptor = descriptor
        self._limit = lines
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._in_hand = 0
        self._told = 0
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._given_up = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @classmethod
    def from_option(cls, option: Literal["json", "off"]) -> AccessLog | None:
        """The log that `--access-log` asks for; None for `off`, so that callers skip it whole."""
        return cls() if option == "json" else None

    def __call__(
        self,
        request: Request,
        response: Response,
        *,
        route: str,
        model: str,
        seconds: float,
        timings: Timings | None,
    ) -> None:
        """Logs one answered request.

        Args:
            request: its body and headers are not kept.
            response: its `x-request-id` names the line. The body of an answer to HEAD is not sent,
                and counts as none.
            route: the pattern that matched; empty where none did.
            model: the hosted model's name, or empty.
            seconds: from the first byte of the request to its answer.
            timings: where the time went; None where no model was asked.
        """
        if len(self._waiting) + self._in_hand >= self._limit or self._ended.is_set():
            self.dropped += 1
            return
        name = next((value for key, value in response.headers if key == "x-request-id"), "")
        self._waiting.append((
            time.time(), request.client, request.method, request.path[:LONGEST], route, model,
            response.status, seconds, timings, name, len(request.body),
            len(response.body) if request.method != "HEAD" else 0,
        ))  # fmt: skip
        if not self._wake.is_set():
            if self._thread is None:
                self._start()
            self._wake.set()

    def close(self, *, timeout_seconds: float = 2.0) -> None:
        """Writes what waits and ends the thread; what a stuck reader leaves is dropped."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            self._given_up = True
            self.dropped += len(self._waiting)
        atexit.unregister(self.close)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                # A daemon: a reader that never reads must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._ended.wait(_TOGETHER_SECONDS)
            last = self._ended.is_set()
            self._wake.clear()
            while self._waiting and not self._given_up:
                rows = [self._waiting.popleft() for _ in range(min(512, len(self._waiting)))]
                self._in_hand = len(rows)
                text = b"".join(map(_line, rows))
                told = self.dropped
                try:
                    self._write(text + _dropped_line(told - self._told))
                    self._told = told
                except OSError:  # the reader is gone for good
                    self.dropped += len(rows)
                self._in_hand = 0
            if last:
                return

    def _write(self, text: bytes) -> None:
        left = memoryview(text)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # somebody who shares the pipe has made it non-blocking
                select.select([], [self._descriptor], [])


def _dropped_line(count: int) -> bytes:
    if not count:
        return b""
    facts = {"time": _utc(time.time()), "access_log_dropped": count}
    return orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)


def _line(row: tuple[Any, ...]) -> bytes:
    (at, client, method, path, route, model, status, seconds, timings, name, got, sent) = row
    facts: dict[str, Any] = {
        "time": _utc(at), "client": client, "method": method, "path": path, "route": route,
        "model": model, "status": status, "duration_ms": _ms(seconds),
    }  # fmt: skip
    if timings is not None:
        facts["tokenize_ms"] = _ms(timings.tokenize_seconds)
        facts["queue_ms"] = _ms(timings.queue_seconds)
        facts["inference_ms"] = _ms(timings.inference_seconds)
        facts["tokens"] = timings.tokens
    facts |= {"request_id": name, "bytes_in": got, "bytes_out": sent}
    try:
        text = orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # half a surrogate pair, which is no UTF-8
        text = b"\x80"
    if not text.isascii():
        # U+0085 and U+2028 end a line for some readers, and orjson leaves them as they are.
        text = f"{json.dumps(facts, separators=(',', ':'))}\n".encode("ascii")
    return text.replace(b"\x7f", b"\\u007f")


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
