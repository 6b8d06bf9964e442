"""Judge the speed goals for an H100 or H200, where their cases ran.

    judge(results.document["parts"], gpu="NVIDIA H200")[0].verdict  # 'reached'

A goal is reached if the whole interval meets it, and missed if no part of it does. Other GPUs get
figures without a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_check.records import rows

GPUS = ("H100", "H200")
EAGER_SIDES = ("PyTorch eager", "PyTorch SDPA")
OVER_EAGER: tuple[tuple[tuple[int, int], float], ...] = (((1, 128), 2.0), ((32, 128), 1.3))
"""Point -> required speedup of FP16 over PyTorch in eager mode."""
BEHIND_COMPILED = 1.05
"""Largest ratio of times to torch.compile in its fastest mode, at every measured point."""
MINILM_MS = 0.27
"""Largest latency of MiniLM at 1×16 and 1×128, from token ids to a vector, host to host."""
OVER_SDPA = 1.2
"""Least speedup of MiniLM over SDPA at 32×512, on the device."""
NEW_SHAPES = 1.5
"""Largest ratio of a shape's first time to its later ones, median and 99th percentile."""
SERVED: dict[int, tuple[float, str, float]] = {
    1: (0.0, "p50", 1.0),
    64: (20_000.0, "p99", 6.0),
    256: (30_000.0, "", 0.0),
}
"""Connections -> least requests/s, and the largest latency in ms of a percentile."""
LARGE_SHARE = 0.85
"""Least share of `load_model`'s rows/s that the server reaches with large requests."""
EMBEDDED = 55_000.0
OVER_SENTENCE_TRANSFORMERS = 6.0
PREDICTED = {"Parquet": 45_000.0, "JSON lines": 20_000.0}
"""Format -> least rows/s of `predict`, for the largest file that was measured."""
GENERATED: dict[str, dict[tuple[int, int], tuple[float, float]]] = {
    "gpt2": {(1, 1): (1500, 8), (8, 1): (10_000, 8), (32, 1): (30_000, 6), (1, 4): (0, 5)},
    "t5-small": {(1, 1): (1500, 10), (8, 1): (10_000, 9), (32, 1): (25_000, 6), (1, 4): (0, 5)},
    "m2m100": {(1, 4): (0, 5)},
    "llama": {(1, 1): (0, 5), (8, 1): (0, 5), (32, 1): (0, 5)},
    "qwen3": {(1, 1): (0, 5), (8, 1): (0, 5), (32, 1): (0, 5)},
}
"""Model -> rows and beams -> least tokens/s (0 for none), and the speedup over PyTorch in FP16."""
STREAMED_SHARE = 0.6
"""Least share of `generate`'s tokens/s that the server reaches with as many streams as rows."""

_GPUS = f"an {' or '.join(GPUS)}"
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
    goals += [
        *_pooled(rows(parts, "pooled")),
        *_shapes(rows(parts, "shapes")),
        *_served(rows(parts, "served")),
        *_large(rows(parts, "large")),
        *_embedded(rows(parts, "embedded")),
        *_predicted(rows(parts, "predicted")),
        *_generated(rows(parts, "generated")),
        *_streamed(rows(parts, "streamed"), rows(parts, "generated")),
    ]
    if any(name in gpu for name in GPUS):
        return goals
    return [Goal(g.goal, g.figure, f"no verdict: goals apply to {_GPUS}") for g in goals]


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


def _pooled(points: Points) -> Iterator[Goal]:
    for length in (16, 128):
        point = _at(points, "minilm", 1, length)
        best = fastest_enginery(point, "host") if point else None
        if point is None or best is None:
            continue
        span = point["latency"][f"{best[0]}, host"]["interval_ms"]
        # A shorter time is better, so the negative time is compared.
        verdict = _of_interval(span and (-span[1], -span[0]), least=-MINILM_MS)
        within = f", {span[0]:.3f} to {span[1]:.3f}" if span else ""
        figure = f"{best[1]:.3f} ms{within} ({best[0]})"
        yield Goal(f"minilm at 1×{length}, host: at most {MINILM_MS} ms", figure, verdict)
    point = _at(points, "minilm", 32, 512)
    ratio = _ratio(point, "device", EAGER_SIDES) if point else None
    if ratio is not None:
        yield Goal(
            f"minilm at 32×512, device: {OVER_SDPA:g} × SDPA",
            f"{ratio['words']} ({ratio['ours']})",
            _of_interval(ratio["interval"], least=OVER_SDPA),
        )


def _shapes(measured: Points) -> Iterator[Goal]:
    for row in measured:
        for name in ("p50", "p99"):
            new, seen = row["new_ms"][name], row["seen_ms"][name]
            yield Goal(
                f"{row['model']}, new shapes: at most {NEW_SHAPES} × seen ones, {name}",
                f"{new:.3f} ms, seen {seen:.3f} ms, {new / seen:.2f} ×",
                _reached(new <= NEW_SHAPES * seen),
            )


def _served(served: Points) -> Iterator[Goal]:
    for row in served:
        least, name, most = SERVED.get(row["connections"], (0.0, "", 0.0))
        if row["model"] != "minilm" or not (least or name):
            continue
        wanted = [f"{least:.0f} requests/s"] if least else []
        wanted += [f"{name} of at most {most:g} ms"] if name else []
        right = not (row["server_errors"] or row["wrong"] or row["lost"])
        met = row["per_second"] >= least and (not name or row["latency_ms"][name] <= most)
        yield Goal(
            f"the server with minilm, {row['connections']} connections: {', '.join(wanted)}, "
            "every answer right",
            f"{row['per_second']:.0f} requests/s, p50 {row['latency_ms']['p50']:.2f} ms, p99 "
            f"{row['latency_ms']['p99']:.2f} ms, {row['server_errors']} 5xx, {row['lost']} lost, "
            f"{row['wrong']} of {row['checked']} wrong",
            _reached(right and met),
        )


def _large(measured: Points) -> Iterator[Goal]:
    for row in measured:
        yield Goal(
            f"the server with {row['model']}, requests of {row['texts']} texts: "
            f"{LARGE_SHARE:.0%} of load_model's rows/s",
            f"{row['served_per_second']:.0f} rows/s, load_model "
            f"{row['load_model_per_second']:.0f}, {row['share']:.0%}",
            _reached(row["share"] >= LARGE_SHARE),
        )


def _embedded(measured: Points) -> Iterator[Goal]:
    # The first turn prepares what the others use.
    best = {row["side"]: (max(row["per_second"][1:]), row["rows"]) for row in measured}
    mine = next((value for side, value in best.items() if side.startswith("enginery")), None)
    beside = [pair[0] for side, pair in best.items() if not side.startswith("enginery")]
    if mine is None:
        return
    yield Goal(
        f"load_model(…).embed of {mine[1]} sentences: {EMBEDDED:.0f} rows/s",
        f"{mine[0]:.0f} rows/s",
        _reached(mine[0] >= EMBEDDED),
    )
    if beside:
        yield Goal(
            f"load_model(…).embed: {OVER_SENTENCE_TRANSFORMERS:g} × sentence-transformers",
            f"{mine[0]:.0f} rows/s, sentence-transformers {max(beside):.0f}, "
            f"{mine[0] / max(beside):.1f} ×",
            _reached(mine[0] >= OVER_SENTENCE_TRANSFORMERS * max(beside)),
        )


def _predicted(measured: Points) -> Iterator[Goal]:
    for form, least in PREDICTED.items():
        mine = [row for row in measured if row["way"] == form]
        if mine:
            row = max(mine, key=lambda row: int(row["rows"]))
            yield Goal(
                f"predict into {form}: {least:.0f} rows/s",
                f"{row['per_second']:.0f} rows/s, {row['rows']} rows",
                _reached(row["per_second"] >= least),
            )


def _generated(measured: Points) -> Iterator[Goal]:
    for row in measured:
        wanted = GENERATED.get(row["model"], {}).get((row["rows"], row["beams"]))
        if wanted is None:
            continue
        rate, speedup = wanted
        words = [f"{rate:.0f} tokens/s"] if rate else []
        yield Goal(
            f"{row['model']}, {row['rows']} × {row['beams']} (rows × beams): "
            f"{', '.join([*words, f'{speedup:g} × PyTorch FP16'])}",
            f"{row['per_second']:.0f} tokens/s, {row['speedup']:.1f} ×",
            _reached(row["per_second"] >= rate and row["speedup"] >= speedup),
        )


def _streamed(streamed: Points, generated: Points) -> Iterator[Goal]:
    for row in streamed:
        shape = (row["model"], row["streams"], 1)
        alone = [r for r in generated if (r["model"], r["rows"], r["beams"]) == shape]
        if row["streams"] > 1 and alone:
            share = row["per_second"] / alone[0]["per_second"]
            yield Goal(
                f"the server with {row['model']}, {row['streams']} streams: {STREAMED_SHARE:.0%} "
                "of generate's tokens/s",
                f"{row['per_second']:.0f} tokens/s, {share:.0%}",
                _reached(share >= STREAMED_SHARE),
            )


def _reached(met: bool) -> str:
    return "reached" if met else "missed"


def _of_interval(interval: Sequence[float] | None, *, least: float) -> str:
    """Return the verdict on a lower limit, based on the interval."""
    if interval is None:
        return "not decided: too few rounds"
    low, high = interval
    if low >= least:
        return "reached"
    return "missed" if high < least else "not decided: the interval contains the goal"
