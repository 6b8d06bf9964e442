"""Run the command line in a child process, with a pipe or a terminal.

    on_terminal("store", "list", columns=80).out    # 'The store is empty.\\n'

On a terminal the output has progress bars and colors.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from dataclasses import dataclass

_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Finished:
    """The result of a finished command."""

    status: int
    out: str
    """Standard output; of a terminal, without escape sequences."""
    err: str
    raw: bytes


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without variables that affect terminal output."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "PYTHONIOENCODING")
    }
    return {**ours, "TERM": "xterm-256color", **changes}


def start(*words: object, stdout: int = subprocess.PIPE, **changes: str) -> subprocess.Popen[bytes]:
    """Start the command."""
    return subprocess.Popen(
        [sys.executable, "-m", "enginery", *map(str, words)],
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


def in_pipe(*words: object, **changes: str) -> Finished:
    """Run the command with its output in pipes."""
    child = start(*words, **changes)
    out, err = child.communicate()
    return Finished(child.returncode, out.decode(), err.decode(), out)


def on_terminal(*words: object, columns: int = 80, **changes: str) -> Finished:
    """Run the command with its output on a terminal of this width."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, columns))
    child = start(*words, stdout=theirs, **changes)
    os.close(theirs)
    raw = b""
    while chunk := _read(ours):
        raw += chunk
    os.close(ours)
    _, err = child.communicate()
    shown = _MOVES.sub("", raw.decode()).replace("\r\n", "\n")
    return Finished(child.returncode, shown, err.decode(), raw)


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # Linux's way to say that the other end is closed
        return b""
