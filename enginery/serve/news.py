"""What a server says of itself, a line each, on standard error.

>>> News()("listening on http://127.0.0.1:8000")
listening on http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

ERROR = "error: "
"""How a line begins that says why the server cannot go on, or not do what it was told."""


@dataclass(frozen=True)
class News:
    """Writes lines; calling it writes one."""

    as_json: bool = False
    """Each as a JSON document with its time."""
    quiet: bool = False
    """Errors alone."""

    def __call__(self, line: str) -> None:
        if self.quiet and not line.startswith(ERROR):
            return
        if self.as_json:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": time, "message": line}, ensure_ascii=False)
        with suppress(OSError, ValueError):  # nobody reads it any more; the server goes on
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
