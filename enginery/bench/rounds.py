"""Rounds of turns: every contender once a round, in an order that turns, until enough is known.

>>> rounds = run_rounds(runners, limits)
>>> latency(rounds.turns["enginery"]).interval_ms
(3.39, 3.43)

A round is one turn of each contender, and a turn is some runs in a row. In one round the first
goes first, in the next the last does, so that nobody always follows the same one; whatever the
machine does meanwhile, it does to all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from enginery.bench.statistics import latency, rounds_needed
from enginery.bench.warmup import Clock

TURN_MS = 50.0
"""A turn is at least so long, so that the run before it, which does not count, is little."""
MAX_RUNS = 50
"""Of one turn."""

Turn = Callable[[int], list[float]]
"""Takes a number of runs; gives their times in ms."""


@dataclass(frozen=True)
class Limits:
    """When rounds end."""

    confidence: float
    precision: float
    """They end when each contender's interval is within this share of its median."""
    min_rounds: int
    max_rounds: int
    max_seconds: float


@dataclass
class Rounds:
    """What was measured, by contender."""

    turns: dict[str, list[list[float]]] = field(default_factory=dict)
    ended: str = ""
    """Why no more were run."""


def runs_in_turn(typical_ms: float) -> int:
    """So many that a turn is not shorter than `TURN_MS`."""
    return max(1, min(MAX_RUNS, math.ceil(TURN_MS / max(typical_ms, 1e-6))))


def run_rounds(
    turns: Mapping[str, Turn],
    runs: Mapping[str, int],
    limits: Limits,
    *,
    clock: Clock = time.perf_counter,
) -> Rounds:
    """Runs rounds until a bound is reached, or every interval is as narrow as asked; at least one.

    Args:
        turns: what runs a turn, by contender.
        runs: how many runs a turn of each has.
        limits: when to end.
        clock: seconds, ascending.
    """
    found = Rounds({name: [] for name in turns})
    names: Sequence[str] = list(turns)
    began = clock()
    least = max(limits.min_rounds, rounds_needed(limits.confidence))
    count = 0
    while not found.ended:
        for name in names if count % 2 == 0 else reversed(names):
            found.turns[name].append(turns[name](runs[name]))
        count += 1
        if count >= limits.max_rounds:
            found.ended = f"{count} rounds, the most asked for"
        elif clock() - began >= limits.max_seconds:
            found.ended = f"the {limits.max_seconds:g} s for a shape were over"
        elif count >= least and _narrow(found, limits):
            found.ended = f"every median is known within {limits.precision:.2%}"
    return found


def _narrow(rounds: Rounds, limits: Limits) -> bool:
    return all(
        latency(turns, confidence=limits.confidence).half_width <= limits.precision
        for turns in rounds.turns.values()
    )
