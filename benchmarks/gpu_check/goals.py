"""The goals of the project on an H200, judged by what was measured.

    >>> [str(goal) for goal in judge(points, seconds=412, gpu="NVIDIA H200", max_minutes=8)][0]
    'minilm at 1×128, host: 3.10 × PyTorch eager, 2 wanted: reached'

Pure: takes what the part `speed` left. On any other GPU figures are given without a verdict.
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

Points = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """One goal and what became of it."""

    goal: str
    figure: str
    verdict: str
    """reached, missed, not measured, or `no verdict` and why."""

    def __str__(self) -> str:
        return f"{self.goal}: {self.figure}: {self.verdict}"


def judge(
    points: Points, models: Iterable[str], *, seconds: float, gpu: str, max_minutes: float
) -> list[Goal]:
    """Every goal.

    Args:
        points: the part `speed`'s, of all models.
        models: those that have goals.
        seconds: of the whole run.
        gpu: its name; empty for a dry run.
        max_minutes: that the whole run may take.
    """
    names = list(models)
    goals = [goal for model in names for place in ("host", "device")
             for goal in _of_model(points, model, place)]  # fmt: skip
    goals.append(_minilm(points))
    took = seconds / 60
    goals.append(Goal(f"the whole run in {max_minutes:g} minutes", f"{took:.1f} minutes",
                      _verdict(reached=took < max_minutes)))  # fmt: skip
    if GPU in gpu:
        return goals
    why = f"no verdict: goals hold on an {GPU}"
    return [Goal(g.goal, g.figure, why if g.verdict in ("reached", "missed") else g.verdict)
            for g in goals]  # fmt: skip


def best_of_ours(point: Mapping[str, Any], place: str) -> tuple[str, float] | None:
    """Our fastest way at a point, and its median in ms."""
    found = {name.removesuffix(f", {place}"): one["median_ms"]
             for name, one in point["latency"].items()
             if name.startswith("enginery") and name.endswith(f", {place}")}  # fmt: skip
    return min(found.items(), key=lambda pair: pair[1]) if found else None


def _of_model(points: Points, model: str, place: str) -> Iterator[Goal]:
    mine = [point for point in points if point["model"] == model]
    for (batch, length), wanted in OVER_EAGER:
        goal = f"{model} at {batch}×{length}, {place}: {wanted:g} × PyTorch's eager mode"
        at = next((p for p in mine if (p["batch"], p["sequence"]) == (batch, length)), None)
        ratio = _ratio(at, place, EAGER_SIDES) if at else None
        yield _goal(goal, ratio, wanted)
    goal = f"{model}, {place}: at no point more than 5 % slower than torch.compile"
    compared = [(ratio, point) for point in mine
                if (ratio := _ratio(point, place, (COMPILED_SIDE,)))]  # fmt: skip
    if not compared:
        yield Goal(goal, "–", "not measured")
        return
    worst, point = min(compared, key=lambda pair: pair[0]["speedup"])
    yield Goal(
        goal,
        f"at worst {worst['words']} ({worst['ours']}) at {point['batch']}×{point['sequence']}, "
        f"of {len(compared)} points",
        _verdict(reached=worst["speedup"] >= 1 / BEHIND_COMPILED),
    )


def _ratio(point: Mapping[str, Any], place: str, sides: Sequence[str]) -> Mapping[str, Any] | None:
    """Our fastest way beside the fastest of theirs; None where one of the two is missing."""
    best = best_of_ours(point, place)
    rivals = [r for r in point["ratios"]
              if best and (r["place"], r["ours"]) == (place, best[0]) and r["theirs"] in sides
              ]  # fmt: skip
    return min(rivals, key=lambda r: r["speedup"], default=None)


def _goal(goal: str, ratio: Mapping[str, Any] | None, wanted: float) -> Goal:
    if ratio is None:
        return Goal(goal, "–", "not measured")
    figure = f"{ratio['speedup']:.2f} × {ratio['theirs']}, {ratio['words']} ({ratio['ours']})"
    return Goal(goal, figure, _verdict(reached=ratio["speedup"] >= wanted))


def _minilm(points: Points) -> Goal:
    goal = f"minilm at 1×128, host: at most {MINILM_MS} ms"
    at = next((p for p in points
               if (p["model"], p["batch"], p["sequence"]) == ("minilm", 1, 128)), None)  # fmt: skip
    best = best_of_ours(at, "host") if at else None
    if best is None:
        return Goal(goal, "–", "not measured")
    return Goal(goal, f"{best[1]:.3f} ms ({best[0]})", _verdict(reached=best[1] <= MINILM_MS))


def _verdict(*, reached: bool) -> str:
    return "reached" if reached else "missed"
