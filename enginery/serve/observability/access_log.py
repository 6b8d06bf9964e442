"""The access log: one line of JSON per request on standard output.

    log = AccessLog.from_option("json")
    log.put(record)
    # {"time":"2026-01-01T12:00:00.000Z","client":"10.0.0.7:51234","method":"POST","path":…}

A request only puts its record into a queue; a thread formats and writes the lines, see
`line_writer`. A line never contains a body, a key or a query string. Text from clients is escaped
to ASCII, so that it cannot start a new line.
"""

from __future__ import annotations

import atexit
import json
import time
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from enginery.serve.observability.line_writer import LineWriter
from enginery.serve.observability.record import RequestRecord

MAX_WAITING_LINES = 20_000
"""Maximum number of lines that wait to be written."""
MAX_PATH_CHARACTERS = 1024
"""Maximum length of a logged path. Together with `MAX_WAITING_LINES` it bounds the memory."""
_TOGETHER_SECONDS = 0.05
"""Time that the thread sleeps if the queue is empty, so that not every request wakes it."""


class AccessLog(LineWriter):
    """An access log that writes to a file descriptor from its own thread."""

    def __init__(self, descriptor: int = 1, *, lines: int = MAX_WAITING_LINES) -> None:
        """Open the log.

        Args:
            descriptor: the file descriptor; by default standard output.
            lines: maximum number of lines that wait to be written.
        """
        super().__init__(
            descriptor,
            max_lines=lines,
            describe_dropped=_dropped_line,
            render=_line,
            collect_seconds=_TOGETHER_SECONDS,
        )
        atexit.register(self.close)

    @classmethod
    def from_option(cls, option: Literal["json", "off"]) -> AccessLog | None:
        """Return the log for the value of `--access-log`; None for `off`."""
        return cls() if option == "json" else None

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Write the waiting lines; drop them if nobody reads the pipe."""
        atexit.unregister(self.close)
        super().close(timeout_seconds)


def _line(request_record: RequestRecord, created: float) -> str:
    """Return one line of ASCII for a request, including its line end."""
    facts: dict[str, Any] = {
        "time": _utc(created),
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


def _dropped_line(dropped: int) -> str:
    facts = {"time": _utc(time.time()), "access_log_dropped": dropped}
    return f"{json.dumps(facts, separators=(',', ':'))}\n"


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
