"""Run backends in rounds until their medians are known precisely enough.

A round is one turn of each backend, and a turn is a number of runs in a row. Every other round has
the reverse order, so that no backend always follows the same one. A drift of the machine, such as
its clock frequency, thus affects all backends alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from enginery.bench.backends.warmup import Clock
from enginery.bench.measurement.statistics import latency, rounds_needed
from enginery.core.errors import EngineryError

TURN_MS = 50.0
"""Minimum length of a turn, so that its uncounted first run takes a small share of the time."""
MAX_RUNS = 1000
"""Maximum number of runs in a turn; reached if a run takes 0.05 ms or less."""
_SLOW_BACKEND_FACTOR = 5
"""A backend that has used this multiple of `max_seconds` does not run the remaining rounds."""

Turn = Callable[[int], list[float]]
"""Number of runs -> their times in ms."""


@dataclass(frozen=True)
class RoundLimits:
    """Conditions that end the rounds."""

    confidence: float
    precision: float
    """Stop when each backend's interval is within this share of its median."""
    min_rounds: int
    max_rounds: int
    max_seconds: float
    """Limit for all backends together. The rounds that an interval needs are run regardless."""


@dataclass
class Rounds:
    """Times of all rounds."""

    turns: dict[str, list[list[float]]] = field(default_factory=dict)
    """Backend -> times of each turn's runs in ms. A slow backend may have fewer turns."""
    failed: dict[str, str] = field(default_factory=dict)
    """Backends that failed in a turn -> reason. They have no turns."""
    ended: str = ""
    """Reason for stopping."""


def runs_in_turn(typical_ms: float) -> int:
    """Return the number of runs that make a turn at least `TURN_MS` long."""
    return max(1, min(MAX_RUNS, math.ceil(TURN_MS / max(typical_ms, 1e-6))))


def run_rounds(
    turns: Mapping[str, Turn],
    runs: Mapping[str, int],
    limits: RoundLimits,
    *,
    may_fail: Collection[str] = (),
    clock: Clock = time.perf_counter,
) -> Rounds:
    """Run rounds until a limit is reached or all intervals are narrow enough; at least one round.

    When `max_seconds` is over, the rounds continue up to the number that an interval needs. A
    backend that has used five times that limit by itself does not take part in them, so that the
    others still get their intervals.

    Args:
        turns: backend -> function that runs a turn.
        runs: backend -> runs per turn.
        limits: conditions that end the rounds.
        may_fail: backends that are left out if they fail.
        clock: returns seconds.

    Raises:
        EngineryError: a turn failed, of a backend that is not in `may_fail`.
    """
    rounds = Rounds({name: [] for name in turns})
    spent = dict.fromkeys(turns, 0.0)
    names = list(turns)
    began = clock()
    needed = rounds_needed(limits.confidence)
    count = 0
    while not rounds.ended:
        order = names if count % 2 == 0 else names[::-1]
        for name in order:
            before = clock()
            try:
                rounds.turns[name].append(turns[name](runs[name]))
            except EngineryError as error:
                if name not in may_fail:
                    raise
                rounds.failed[name] = error.message
                del rounds.turns[name]
            spent[name] += clock() - before
        names = [name for name in names if name in rounds.turns]
        count += 1
        over = clock() - began >= limits.max_seconds
        if over:
            limit = _SLOW_BACKEND_FACTOR * limits.max_seconds
            names = [name for name in names if spent[name] < limit]
        if count >= limits.max_rounds:
            rounds.ended = f"{count} rounds, the maximum"
        elif (over and count >= needed) or not names:
            rounds.ended = f"the time limit of {limits.max_seconds:g} s for a shape was reached"
        elif count >= max(limits.min_rounds, needed) and _is_precise(rounds, limits):
            rounds.ended = f"every median is known within {limits.precision:.2%}"
    return rounds


def _is_precise(rounds: Rounds, limits: RoundLimits) -> bool:
    return all(
        latency(turns, confidence=limits.confidence).half_width <= limits.precision
        for turns in rounds.turns.values()
    )
