"""Peak memory of this process."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far, in bytes.

    Linux's `ru_maxrss` survives exec, so a child would report its parent's size;
    `VmHWM` belongs to the program that runs.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024
