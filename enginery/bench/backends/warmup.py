"""Warm-up until the times are stable, timed turns, and the wait for threads that are still busy.

    warm_up(lambda: runner(feeds), max_seconds=10)
    # WarmUp(first_ms=12.1, typical_ms=3.4, runs=14, settled=True)

In its first runs a session chooses kernels, plans memory and fills caches. Nobody knows in advance
how many runs that takes, so the warm-up compares two medians: that of the last runs, and that of as
many runs before them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

Clock = Callable[[], float]
"""Returns the time in seconds."""

WINDOW = 5
"""Number of runs in a window."""
TOLERANCE = 0.05
"""Largest difference of two windows' medians, as a share of the earlier."""
MAX_RUNS = 200
_SAMPLE_SECONDS = 0.02
_IDLE_SHARE = 0.1
"""Share of a core that a process uses at most when it is idle."""
_MAX_IDLE_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up."""

    first_ms: float
    """Time of the first run at the shape."""
    typical_ms: float
    """Median of the last window."""
    runs: int
    settled: bool
    """False if a limit ended the warm-up before the times were stable."""


def warm_up(
    run: Callable[[], object],
    *,
    max_seconds: float,
    max_runs: int = MAX_RUNS,
    window: int = WINDOW,
    tolerance: float = TOLERANCE,
    clock: Clock = time.perf_counter,
) -> WarmUp:
    """Run at least once, until two windows in a row agree or a limit is reached.

    Args:
        run: runs one inference and waits for it.
        max_seconds: no run starts after this time.
        max_runs: maximum number of runs.
        window: number of runs in a window.
        tolerance: largest difference of two windows' medians, as a share of the earlier.
        clock: returns seconds.
    """
    times: list[float] = []
    began = clock()
    settled = False
    while not settled and len(times) < max_runs:
        before = clock()
        if times and before - began >= max_seconds:
            break
        run()
        times.append((clock() - before) * 1e3)
        settled = is_settled(times, window=window, tolerance=tolerance)
    return WarmUp(times[0], median(times[-window:]), len(times), settled)


def is_settled(times: list[float], *, window: int, tolerance: float) -> bool:
    """Return True if the medians of the last two windows agree.

    The first run is in neither of them, because it is always slower.
    """
    if len(times) < 2 * window + 1:
        return False
    before, last = median(times[-2 * window : -window]), median(times[-window:])
    return abs(last - before) <= tolerance * before


def take_turn(
    run: Callable[[], object], *, runs: int, clock: Clock = time.perf_counter
) -> list[float]:
    """Run once without timing and then `runs` times; return their times in ms.

    The untimed run refills the caches that other backends' turns have displaced. Python's garbage
    collector is off during the turn, because it would slow down some runs at random.
    """
    gc.collect()
    gc.disable()
    try:
        run()
        times = []
        for _ in range(runs):
            before = clock()
            run()
            times.append((clock() - before) * 1e3)
    finally:
        gc.enable()
    return times


def wait_until_idle(
    *,
    cpu_seconds: Clock = time.process_time,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Wait until the threads of this process are idle; return False if they are still not.

    Threads of ONNX Runtime and of OpenMP wait for more work in busy loops, for a tenth of a second
    or more after a run. Meanwhile they would take cores from the backend whose turn is next.
    """
    until = clock() + _MAX_IDLE_WAIT_SECONDS
    while clock() < until:
        used, began = cpu_seconds(), clock()
        sleep(_SAMPLE_SECONDS)
        if cpu_seconds() - used <= _IDLE_SHARE * (clock() - began):
            return True
    return False
