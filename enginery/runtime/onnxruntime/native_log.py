"""Read what ONNX Runtime's native code logs, count it, and tell each kind once.

    with reading_log() as log:
        session = onnxruntime.InferenceSession(…)
    tell_once(log)

Providers and kernels log through the one logger of the process, which writes to standard error and
has no callback in Python: a line for every session on a GPU, and for every convolution at every
size that runs in cuDNN's fallback mode. After the first session its warnings are off, and are on
while a log is read. Then standard error is a temporary file, for the whole process. Lines of others
are written to standard error at the end.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO

_log = logging.getLogger("enginery.runtime")

_WARNING, _ERROR = 2, 3
"""Severities of `onnxruntime.set_default_logger_severity`."""
_STDERR = 2
_LINE = re.compile(
    rb"(?:\x1b\[[\d;]*m)?\d{4}-\d\d-\d\d [\d:.]+ "
    rb"\[(?P<severity>[VIWEF]):onnxruntime:[^,\]]*, (?P<source>[^\]]*)\] (?P<text>.*?)(?:\x1b\[m)?$"
)
# What ends a message in color, on a line of its own.
_CONTINUED = re.compile(rb"^\x1b\[m$")
_NAMES = re.compile(r"\([^)]*\)|'[^']*'|\d+")
"""What differs between warnings of one kind."""
_PLACE = re.compile(r"^.*\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_MOST_CHARACTERS = 300

_EXPECTED = (
    # It looks for a plugin first, and then opens the provider that is built in.
    "No registered plugin EP device found",
    # Indices of a cache are those of its rows, which differ.
    "ScatterND with reduction=='none' only guarantees",
)
"""Beginnings of warnings that say nothing about the model."""
_FALLBACK = "running in Fallback mode"


@dataclass(frozen=True)
class LogMessage:
    """A line of ONNX Runtime's log."""

    severity: str
    """V, I, W, E or F."""
    source: str
    """File, line and function."""
    text: str


@dataclass
class NativeLog:
    """The messages that were logged, when the block has ended."""

    messages: list[LogMessage] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        """Texts of errors, without the place in ONNX Runtime's source."""
        texts = (message.text for message in self.messages if message.severity in "EF")
        return [_PLACE.sub("", text) for text in texts]

    @property
    def warnings(self) -> Counter[str]:
        """Number of warnings of each kind, by the first of the kind."""
        first: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for message in self.messages:
            if message.severity == "W" and not message.text.startswith(_EXPECTED):
                counts[first.setdefault(_NAMES.sub("", message.text), message.text)] += 1
        return counts


_reading = threading.Lock()
_warned: set[str] = set()
_telling = threading.Lock()


def silence_default_logger() -> None:
    """Turn warnings of the process's logger off; errors stay on."""
    import onnxruntime as ort

    ort.set_default_logger_severity(_ERROR)


@contextmanager
def reading_log() -> Iterator[NativeLog]:
    """Collect what the process's logger writes in the block; afterwards its warnings are off.

    While another thread reads, without a standard error or a directory for temporary files,
    nothing is collected.
    """
    log = NativeLog()
    # Standard error is one for the whole process: only one thread at a time can redirect it.
    if not _reading.acquire(blocking=False):
        yield log
        return
    try:
        with ExitStack() as opened:
            try:
                file = opened.enter_context(tempfile.TemporaryFile())
                stderr = opened.enter_context(os.fdopen(os.dup(_STDERR), "wb"))
            except OSError:  # nothing can be written there, or standard error is closed
                silence_default_logger()
                yield log
                return
            try:
                with _redirected(file, stderr.fileno()):
                    yield log
            finally:
                file.seek(0)
                # What was not ONNX Runtime's goes where it would have gone.
                log.messages, others = _parse(file.read())
                with suppress(OSError):
                    stderr.write(others)
                    stderr.flush()
    finally:
        _reading.release()


@contextmanager
def _redirected(file: IO[bytes], original: int) -> Iterator[None]:
    """Write standard error into a file, with the logger's warnings."""
    import onnxruntime as ort

    # What Python has buffered so far belongs to the old standard error.
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
    # The file descriptor itself, because native code does not write through `sys.stderr`.
    os.dup2(file.fileno(), _STDERR)
    ort.set_default_logger_severity(_WARNING)
    try:
        yield
    finally:
        silence_default_logger()
        with suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        os.dup2(original, _STDERR)


def _parse(content: bytes) -> tuple[list[LogMessage], bytes]:
    """Return ONNX Runtime's messages, and the lines of others."""
    messages: list[LogMessage] = []
    others = []
    for line in content.splitlines(keepends=True):
        if match := _LINE.match(line.rstrip(b"\r\n")):
            severity, source, text = (group.decode(errors="replace") for group in match.groups())
            messages.append(LogMessage(severity, source, text.strip()))
        elif not _CONTINUED.match(line.rstrip(b"\r\n")):
            others.append(line)
    return messages, b"".join(others)


def tell_once(log: NativeLog) -> None:
    """Log each kind of warning once in this process, with its number, at `enginery.runtime`."""
    for text, count in log.warnings.items():
        kind = _NAMES.sub("", text)
        with _telling:
            if kind in _warned:
                continue
            _warned.add(kind)
        _log.warning("%s", describe_warning(text, count))


def describe_warning(text: str, count: int) -> str:
    """Return a sentence about warnings of one kind.

    >>> describe_warning("A node was removed.", 2)
    'ONNX Runtime warns, 2 times: A node was removed.'
    """
    if _FALLBACK in text:
        convolutions = "a convolution runs" if count == 1 else f"{count} convolutions run"
        return (
            f"{convolutions} in cuDNN's fallback mode, which is slow: set "
            "cuda.cudnn_conv_algo_search=HEURISTIC."
        )
    times = "" if count == 1 else f", {count} times"
    return f"ONNX Runtime warns{times}: {text[:_MOST_CHARACTERS]}"
