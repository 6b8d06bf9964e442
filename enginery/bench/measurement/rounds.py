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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from enginery.bench.backends.warmup import Clock
from enginery.bench.measurement.statistics import latency, rounds_needed
from enginery.core.errors import EngineryError

TURN_MS = 50.0
"""A turn is at least so long, so that the run before it, which does not count, is little."""
MAX_RUNS = 1000
"""Of one turn: `TURN_MS` of runs that take a twentieth of a millisecond each."""
_OWN_TIMES = 5
"""So many times a shape's seconds one contender may take for the rounds that an interval needs."""

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
    """Of all contenders together; the rounds that an interval needs are run even so."""


@dataclass
class Rounds:
    """What was measured, by contender."""

    turns: dict[str, list[list[float]]] = field(default_factory=dict)
    """From the first round on; of one that sat out, fewer."""
    failed: dict[str, str] = field(default_factory=dict)
    """Those that failed in a turn, with the reason; they have no turns."""
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
    may_fail: Collection[str] = (),
    clock: Clock = time.perf_counter,
) -> Rounds:
    """Runs rounds until a bound is reached, or every interval is as narrow as asked; at least one.

    When the seconds are over, rounds go on up to as many as an interval needs; a contender that
    has taken five times the seconds by itself sits those out, so that it costs no other its own.

    Args:
        turns: what runs a turn, by contender.
        runs: how many runs a turn of each has.
        limits: when to end.
        may_fail: contenders whose failure ends their own turns alone.
        clock: seconds, ascending.

    Raises:
        EngineryError: as a turn does, of a contender that may not fail.
    """
    found = Rounds({name: [] for name in turns})
    spent = dict.fromkeys(turns, 0.0)
    names = list(turns)
    began = clock()
    needed = rounds_needed(limits.confidence)
    count = 0
    while not found.ended:
        for name in names if count % 2 == 0 else reversed(names):
            before = clock()
            try:
                found.turns[name].append(turns[name](runs[name]))
            except EngineryError as error:
                if name not in may_fail:
                    raise
                found.failed[name] = error.message
                del found.turns[name]
            spent[name] += clock() - before
        names = [name for name in names if name in found.turns]
        count += 1
        over = clock() - began >= limits.max_seconds
        if over:
            names = [name for name in names if spent[name] < _OWN_TIMES * limits.max_seconds]
        if count >= limits.max_rounds:
            found.ended = f"{count} rounds, the most asked for"
        elif (over and count >= needed) or not names:
            found.ended = f"the {limits.max_seconds:g} s for a shape were over"
        elif count >= max(limits.min_rounds, needed) and _narrow(found, limits):
            found.ended = f"every median is known within {limits.precision:.2%}"
    return found


def _narrow(rounds: Rounds, limits: Limits) -> bool:
    return all(
        latency(turns, confidence=limits.confidence).half_width <= limits.precision
        for turns in rounds.turns.values()
    )
