"""Running until the times have settled, and then in turns.

>>> warm_up(lambda: runner(feeds), max_seconds=10)
WarmUp(first_ms=12.1, typical_ms=3.4, runs=14, settled=True)

A session chooses kernels, plans memory and fills caches in its first runs. How many it needs is
not known before: the median of the last runs is held against that of as many before them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

Clock = Callable[[], float]
"""Seconds."""

WINDOW = 5
"""Runs whose median is compared with that of as many before."""
TOLERANCE = 0.05
"""How far the two may lie apart, as a share of the earlier."""
MAX_RUNS = 200


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up took."""

    first_ms: float
    """The very first run at the shape."""
    typical_ms: float
    """The median of the last window."""
    runs: int
    settled: bool
    """False where it was ended by its bounds."""


def warm_up(
    run: Callable[[], object],
    *,
    max_seconds: float,
    max_runs: int = MAX_RUNS,
    window: int = WINDOW,
    tolerance: float = TOLERANCE,
    clock: Clock = time.perf_counter,
) -> WarmUp:
    """Runs until two windows in a row agree, or a bound is reached; at least once.

    Args:
        run: one inference, complete when it returns.
        max_seconds: no run starts after these.
        max_runs: at most so many.
        window: runs in a window.
        tolerance: how far the medians of two windows may lie apart, as a share.
        clock: seconds, ascending.
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
        settled = has_settled(times, window=window, tolerance=tolerance)
    return WarmUp(times[0], median(times[-window:]), len(times), settled)


def has_settled(times: list[float], *, window: int, tolerance: float) -> bool:
    """Whether the median of the last window is near that of the one before it.

    The first run of all is in neither: it is the one that a warm-up is for.
    """
    if len(times) < 2 * window + 1:
        return False
    before, last = median(times[-2 * window : -window]), median(times[-window:])
    return abs(last - before) <= tolerance * before


def take_turn(
    run: Callable[[], object], *, runs: int, clock: Clock = time.perf_counter
) -> list[float]:
    """The times in ms of `runs` runs, after one that does not count.

    That one brings the caches back that the others' turns took. Python's garbage collector rests
    meanwhile: it would hit one contender or another by chance.
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
