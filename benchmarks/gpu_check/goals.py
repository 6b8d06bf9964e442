"""Judge the speed goals for an H200.

    goals = judge(points, ["minilm"], seconds=412, gpu="NVIDIA H200", max_minutes=8, shapes=9)
    goals[0].verdict  # 'reached'

A goal is reached if the whole interval meets it, and missed if no part of it does. Other GPUs get
figures without a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GPU = "H200"
EAGER_SIDES = ("PyTorch eager", "PyTorch SDPA")
COMPILED_SIDE = "torch.compile"
OVER_EAGER: tuple[tuple[tuple[int, int], float], ...] = (((1, 128), 2.0), ((32, 128), 1.3))
"""Point -> required speedup of FP16 over PyTorch in eager mode."""
BEHIND_COMPILED = 1.05
"""Largest ratio of times to torch.compile, at every measured point."""
MINILM_MS = 0.5
"""Largest latency of MiniLM at 1×128."""

_NOT_MEASURED = "not measured"

Points = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A goal and its verdict."""

    goal: str
    figure: str
    verdict: str
    """`reached`, `missed`, `not measured`, `not decided` if the interval contains the goal,
    `reached at 7 of 9 points`, or `no verdict` with the reason."""

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
    """Judge every goal.

    Args:
        points: results of the part `speed` for all models.
        models: models with goals.
        seconds: duration of the whole run.
        gpu: name of the GPU; empty for a dry run.
        max_minutes: time limit of the whole run.
        shapes: number of points of each model if all are measured.
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
    why = f"no verdict: goals apply to an {GPU}"
    return [Goal(g.goal, g.figure, g.verdict if g.verdict == _NOT_MEASURED else why) for g in goals]


def fastest_enginery(point: Mapping[str, Any], place: str) -> tuple[str, float] | None:
    """Return enginery's fastest way at a point and its median in ms."""
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
    goal = f"{model}, {place}: at most 5 % slower than torch.compile at every point"
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
    """Return the ratio of enginery's fastest way to PyTorch's; None if one of them is missing."""
    best = fastest_enginery(point, place)
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
    best = fastest_enginery(at, "host") if at else None
    if at is None or best is None:
        return Goal(goal, "–", _NOT_MEASURED)
    span = at["latency"][f"{best[0]}, host"]["interval_ms"]
    # A shorter time is better, so the negative time is compared.
    verdict = _of_interval(span and (-span[1], -span[0]), least=-MINILM_MS)
    within = f", {span[0]:.3f} to {span[1]:.3f}" if span else ""
    return Goal(goal, f"{best[1]:.3f} ms{within} ({best[0]})", verdict)


def _of_interval(interval: Sequence[float] | None, *, least: float) -> str:
    """Return the verdict on a lower limit, based on the interval."""
    if interval is None:
        return "not decided: too few rounds"
    low, high = interval
    if low >= least:
        return "reached"
    return "missed" if high < least else "not decided: the interval contains the goal"


def _verdict(*, reached: bool) -> str:
    return "reached" if reached else "missed"
