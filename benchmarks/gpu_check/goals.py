"""Judge the speed goals for an H200, where their cases ran.

    judge(results.document["parts"], gpu="NVIDIA H200")[0].verdict  # 'reached'

A goal is reached if the whole interval meets it, and missed if no part of it does. Other GPUs get
figures without a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_check.records import rows

GPU = "H200"
EAGER_SIDES = ("PyTorch eager", "PyTorch SDPA")
OVER_EAGER: tuple[tuple[tuple[int, int], float], ...] = (((1, 128), 2.0), ((32, 128), 1.3))
"""Point -> required speedup of FP16 over PyTorch in eager mode."""
BEHIND_COMPILED = 1.05
"""Largest ratio of times to torch.compile in its fastest mode, at every measured point."""
MINILM_MS = 0.5
"""Largest latency of MiniLM at 1×128."""
REQUESTS_PER_SECOND = 5000.0
"""Smallest rate of the server with MiniLM."""

Points = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A goal and its verdict."""

    goal: str
    figure: str
    verdict: str
    """`reached`, `missed`, `not decided` if the interval contains the goal, `reached at 4 of 5
    points`, or `no verdict` with the reason."""

    def __str__(self) -> str:
        return f"{self.goal}: {self.figure}: {self.verdict}"


def judge(parts: Mapping[str, Any], *, gpu: str) -> list[Goal]:
    """Judge every goal of which a case ran.

    Args:
        parts: results of the units.
        gpu: name of the GPU; empty for a dry run.
    """
    points, compiled = rows(parts, "points"), rows(parts, "compiled")
    models = dict.fromkeys(point["model"] for point in (*points, *compiled))
    goals = [
        goal
        for model in models
        for place in ("host", "device")
        for goal in (
            *_over_eager(points, model, place),
            *_behind_compiled(compiled, model, place),
        )
    ]
    goals += [*_minilm(points), *_served(rows(parts, "served"))]
    if GPU in gpu:
        return goals
    return [Goal(g.goal, g.figure, f"no verdict: goals apply to an {GPU}") for g in goals]


def fastest_enginery(point: Mapping[str, Any], place: str) -> tuple[str, float] | None:
    """Return enginery's fastest way at a point and its median in ms."""
    found = {
        name.removesuffix(f", {place}"): one["median_ms"]
        for name, one in point["latency"].items()
        if name.startswith("enginery") and name.endswith(f", {place}")
    }
    return min(found.items(), key=lambda pair: pair[1]) if found else None


def _over_eager(points: Points, model: str, place: str) -> Iterator[Goal]:
    for (batch, length), wanted in OVER_EAGER:
        point = _at(points, model, batch, length)
        ratio = _ratio(point, place, EAGER_SIDES) if point else None
        if ratio is None:
            continue
        figure = f"{ratio['speedup']:.2f} × {ratio['theirs']}, {ratio['words']} ({ratio['ours']})"
        yield Goal(
            f"{model} at {batch}×{length}, {place}: {wanted:g} × PyTorch's eager mode",
            figure,
            _of_interval(ratio["interval"], least=wanted),
        )


def _behind_compiled(compiled: Points, model: str, place: str) -> Iterator[Goal]:
    """Judge each shape against the fastest mode that was measured there."""
    closest: dict[tuple[int, int], Mapping[str, Any]] = {}
    for point in compiled:
        ratio = _ratio(point, place, ("torch.compile",))
        if point["model"] != model or ratio is None:
            continue
        shape = (point["batch"], point["sequence"])
        found = {**ratio, "mode": point["mode"], "shape": f"{shape[0]}×{shape[1]}"}
        closest[shape] = min(closest.get(shape, found), found, key=lambda r: r["speedup"])
    if not closest:
        return
    verdicts = [_of_interval(r["interval"], least=1 / BEHIND_COMPILED) for r in closest.values()]
    reached = verdicts.count("reached")
    worst = min(closest.values(), key=lambda r: r["speedup"])
    whole = "missed" if "missed" in verdicts else f"reached at {reached} of {len(verdicts)} points"
    yield Goal(
        f"{model}, {place}: at most 5 % slower than torch.compile at every point",
        f"at worst {worst['words']} ({worst['ours']}, {worst['mode']}) at {worst['shape']}, of "
        f"{len(closest)} points compared",
        "reached" if reached == len(verdicts) else whole,
    )


def _at(points: Points, model: str, batch: int, length: int) -> Mapping[str, Any] | None:
    shape = (model, batch, length)
    return next((p for p in points if (p["model"], p["batch"], p["sequence"]) == shape), None)


def _ratio(point: Mapping[str, Any], place: str, sides: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the ratio of enginery's fastest way to PyTorch's; None if one of them is missing."""
    best = fastest_enginery(point, place)
    rivals = [
        r
        for r in point["ratios"]
        if best and (r["place"], r["ours"]) == (place, best[0]) and r["theirs"] in sides
    ]
    return min(rivals, key=lambda r: r["speedup"], default=None)


def _minilm(points: Points) -> Iterator[Goal]:
    point = _at(points, "minilm", 1, 128)
    best = fastest_enginery(point, "host") if point else None
    if point is None or best is None:
        return
    span = point["latency"][f"{best[0]}, host"]["interval_ms"]
    # A shorter time is better, so the negative time is compared.
    verdict = _of_interval(span and (-span[1], -span[0]), least=-MINILM_MS)
    within = f", {span[0]:.3f} to {span[1]:.3f}" if span else ""
    figure = f"{best[1]:.3f} ms{within} ({best[0]})"
    yield Goal(f"minilm at 1×128, host: at most {MINILM_MS} ms", figure, verdict)


def _served(served: Points) -> Iterator[Goal]:
    mine = [row for row in served if row["model"] == "minilm"]
    if not mine:
        return
    best = max(mine, key=lambda row: row["per_second"])
    yield Goal(
        f"the server with minilm: {REQUESTS_PER_SECOND:.0f} requests/s",
        f"{best['per_second']:.0f} requests/s with {best['connections']} connections",
        "reached" if best["per_second"] >= REQUESTS_PER_SECOND else "missed",
    )


def _of_interval(interval: Sequence[float] | None, *, least: float) -> str:
    """Return the verdict on a lower limit, based on the interval."""
    if interval is None:
        return "not decided: too few rounds"
    low, high = interval
    if low >= least:
        return "reached"
    return "missed" if high < least else "not decided: the interval contains the goal"
