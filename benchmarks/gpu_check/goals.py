"""The goals of the project on an H200, judged by what was measured.

    >>> goals = judge(points, ["minilm"], seconds=412, gpu="NVIDIA H200", max_minutes=8, shapes=9)
    >>> goals[0].verdict
    'reached'

Pure: takes what the part `speed` left. A goal is reached where the whole interval is on its side,
missed where none of it is. On any other GPU figures are given without a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GPU = "H200"
EAGER_SIDES = ("PyTorch eager", "PyTorch SDPA")
COMPILED_SIDE = "torch.compile"
OVER_EAGER: tuple[tuple[tuple[int, int], float], ...] = (((1, 128), 2.0), ((32, 128), 1.3))
"""A point, and how many times as fast as PyTorch in eager mode FP16 is to be there."""
BEHIND_COMPILED = 1.05
"""No measured point may take more times as long as with torch.compile."""
MINILM_MS = 0.5
"""MiniLM at 1×128."""

_NOT_MEASURED = "not measured"

Points = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """One goal and what became of it."""

    goal: str
    figure: str
    verdict: str
    """reached, missed, not measured; `not decided` where the interval holds the goal; `reached at
    7 of 9 points`; or `no verdict` and why."""

    def __str__(self) -> str:
        return f"{self.goal}: {self.figure}: {self.verdict}"


def judge(
    points: Points,
    models: Iterable[str],
    *,
    seconds: float,
    gpu: str,
    max_minutes: float,
    shapes: int,
) -> list[Goal]:
    """Every goal.

    Args:
        points: the part `speed`'s, of all models.
        models: those that have goals.
        seconds: of the whole run.
        gpu: its name; empty for a dry run.
        max_minutes: that the whole run may take.
        shapes: points that each model has, where all are measured.
    """
    names = list(models)
    goals = [
        goal
        for model in names
        for place in ("host", "device")
        for goal in _of_model(points, model, place, shapes)
    ]
    goals.append(_minilm(points))
    took = seconds / 60
    goals.append(
        Goal(
            f"the whole run in {max_minutes:g} minutes",
            f"{took:.1f} minutes",
            _verdict(reached=took < max_minutes),
        )
    )
    if GPU in gpu:
        return goals
    why = f"no verdict: goals hold on an {GPU}"
    return [Goal(g.goal, g.figure, g.verdict if g.verdict == _NOT_MEASURED else why) for g in goals]


def best_of_ours(point: Mapping[str, Any], place: str) -> tuple[str, float] | None:
    """Our fastest way at a point, and its median in ms."""
    found = {
        name.removesuffix(f", {place}"): one["median_ms"]
        for name, one in point["latency"].items()
        if name.startswith("enginery") and name.endswith(f", {place}")
    }
    return min(found.items(), key=lambda pair: pair[1]) if found else None


def _of_model(points: Points, model: str, place: str, shapes: int) -> Iterator[Goal]:
    mine = [point for point in points if point["model"] == model]
    for (batch, length), wanted in OVER_EAGER:
        goal = f"{model} at {batch}×{length}, {place}: {wanted:g} × PyTorch's eager mode"
        at = next((p for p in mine if (p["batch"], p["sequence"]) == (batch, length)), None)
        ratio = _ratio(at, place, EAGER_SIDES) if at else None
        yield _goal(goal, ratio, wanted)
    goal = f"{model}, {place}: at no point more than 5 % slower than torch.compile"
    compared = [
        (ratio, point) for point in mine if (ratio := _ratio(point, place, (COMPILED_SIDE,)))
    ]
    if not compared:
        yield Goal(goal, "–", _NOT_MEASURED)
        return
    verdicts = [_of_interval(ratio["interval"], least=1 / BEHIND_COMPILED) for ratio, _ in compared]
    reached = verdicts.count("reached")
    worst, point = min(compared, key=lambda pair: pair[0]["speedup"])
    yield Goal(
        goal,
        f"at worst {worst['words']} ({worst['ours']}) at {point['batch']}×{point['sequence']}, "
        f"of {len(compared)} points compared",
        "missed"
        if "missed" in verdicts
        else "reached"
        if reached >= shapes
        else f"reached at {reached} of {shapes} points",
    )


def _ratio(point: Mapping[str, Any], place: str, sides: Sequence[str]) -> Mapping[str, Any] | None:
    """Our fastest way beside the fastest of theirs; None where one of the two is missing."""
    best = best_of_ours(point, place)
    rivals = [
        r
        for r in point["ratios"]
        if best and (r["place"], r["ours"]) == (place, best[0]) and r["theirs"] in sides
    ]
    return min(rivals, key=lambda r: r["speedup"], default=None)


def _goal(goal: str, ratio: Mapping[str, Any] | None, wanted: float) -> Goal:
    if ratio is None:
        return Goal(goal, "–", _NOT_MEASURED)
    figure = f"{ratio['speedup']:.2f} × {ratio['theirs']}, {ratio['words']} ({ratio['ours']})"
    return Goal(goal, figure, _of_interval(ratio["interval"], least=wanted))


def _minilm(points: Points) -> Goal:
    goal = f"minilm at 1×128, host: at most {MINILM_MS} ms"
    at = next(
        (p for p in points if (p["model"], p["batch"], p["sequence"]) == ("minilm", 1, 128)), None
    )
    best = best_of_ours(at, "host") if at else None
    if at is None or best is None:
        return Goal(goal, "–", _NOT_MEASURED)
    span = at["latency"][f"{best[0]}, host"]["interval_ms"]
    # Of a time less is better: what holds for its negative is judged.
    verdict = _of_interval(span and (-span[1], -span[0]), least=-MINILM_MS)
    within = f", {span[0]:.3f} to {span[1]:.3f}" if span else ""
    return Goal(goal, f"{best[1]:.3f} ms{within} ({best[0]})", verdict)


def _of_interval(interval: Sequence[float] | None, *, least: float) -> str:
    """Whether a figure is at least so large, as surely as its interval says."""
    if interval is None:
        return "not decided: too few rounds"
    low, high = interval
    if low >= least:
        return "reached"
    return "missed" if high < least else "not decided: the interval holds the goal"


def _verdict(*, reached: bool) -> str:
    return "reached" if reached else "missed"
