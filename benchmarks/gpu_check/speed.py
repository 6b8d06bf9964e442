"""Measure FP16 of a model at several batch sizes and lengths: enginery's runner and PyTorch.

All ways of running take turns in one process, in rounds; every other round has the reverse order
(bench/measurement/rounds.py). Medians and intervals are those of bench/measurement/statistics.py.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import pytorch
from benchmarks.gpu_check.compiling import Compiler
from benchmarks.gpu_check.settings import Point
from benchmarks.gpu_check.variants import (
    BOUND,
    COMPILED,
    EAGER,
    GRAPH,
    PLACES,
    PLAIN,
    SDPA,
    Variant,
    enginery_variants,
    pytorch_variants,
)
from benchmarks.gpu_check.work import Work, describe_error
from enginery.bench.backends.warmup import take_turn, warm_up
from enginery.bench.measurement.rounds import RoundLimits, Rounds, run_rounds, runs_in_turn
from enginery.bench.measurement.statistics import compare, latency
from enginery.core.artifact.artifact import Artifact
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.runtime.onnxruntime.runner import OrtRunner

CONFIDENCE, SMALLEST = 0.95, 0.02
_FOR_A_POINT = 7.0
"""Seconds reserved for each point that is not measured yet; torch.compile gets the rest."""
_CAPTURES = 8
"""Number of shapes that a runner captures, see runtime/onnxruntime/binding.py."""
_WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"io_binding": False},
    BOUND: {},
    GRAPH: {"cuda_graph": True},
}


class Runners:
    """enginery's runner in each of its ways; that of CUDA graphs is reopened after eight shapes."""

    def __init__(self, work: Work, artifact: Artifact) -> None:
        self._work, self._artifact = work, artifact
        self._open: dict[str, OrtRunner] = {}
        self._refused: dict[str, str] = {}
        self._captured = 0

    def for_a_shape(self, found: dict[str, Any]) -> dict[str, OrtRunner]:
        """Return the runners for another shape; record those that cannot be opened in `found`."""
        if self._captured == _CAPTURES and GRAPH in self._open:
            self._open.pop(GRAPH).close()
            self._captured = 0
        self._captured += 1
        for side, options in _WAYS.items():
            if side in self._open:
                continue
            if side in self._refused:
                found["left out"][side] = self._refused[side]
                continue
            try:
                self._open[side] = OrtRunner(
                    self._artifact, providers=[self._work.provider], **options
                )
            except Exception as error:
                self._refused[side] = describe_error(error)
                _record_skipped(self._work, found, side, error, is_failure=self._work.on_gpu)
        return self._open


def run(work: Work) -> None:
    """Measure `work.only_model` at every point, the most important first."""
    pytorch.require_device(work.device)
    model = work.only_model
    work.found["points"] = []
    artifact = work.artifact(model, "fp16")
    if artifact is None:
        return
    source = Path(work.artifacts[model]["source"])
    models = {
        side: pytorch.load_text_model(source, attention, "fp16", work.device)
        for side, attention in ((EAGER, "eager"), (SDPA, "sdpa"))
    }
    compiler = Compiler(work.settings.compile_backend)
    runners = Runners(work, artifact)
    for index, point in enumerate(work.settings.points):
        left_after = len(work.settings.points) - index - 1
        must = index < work.settings.must_points
        if work.left() < _FOR_A_POINT / 2 and index:
            rest = work.settings.points[index:]
            work.note(
                f"{model}: {len(rest)} points left out, no time left: "
                + ", ".join(f"{b}×{s}" for b, s in rest)
            )
            break
        with work.step(f"speed of {model} at {point[0]}×{point[1]}"):
            # Points that have goals of their own go before the others: those may be left out.
            others = work.settings.must_points - index - 1 if must else left_after
            seconds = work.left() - (1 + others) * (1.0 if work.quick else _FOR_A_POINT)
            _measure(
                work, model, artifact, runners, models, compiler, point, compile_seconds=seconds
            )


def _measure(
    work: Work,
    model: str,
    artifact: Artifact,
    runners: Runners,
    models: dict[str, Any],
    compiler: Compiler,
    point: Point,
    *,
    compile_seconds: float,
) -> None:
    feeds = _full_rows(artifact, point)
    found: dict[str, Any] = {
        "model": model,
        "batch": point[0],
        "sequence": point[1],
        "left out": {},
        "compile": {},
    }
    sides = dict(models)
    try:
        compiled = compiler.compile(models[SDPA], feeds, work.device, seconds=compile_seconds)
    except Exception as error:
        _record_skipped(work, found, COMPILED, error, is_failure=False)
    else:
        sides[COMPILED] = compiled.model
        found["compile"] = {
            "mode": compiled.mode,
            "seconds": compiled.seconds,
            "tried": list(compiled.tried),
        }
    variants = [
        *enginery_variants(runners.for_a_shape(found), feeds, work.device),
        *pytorch_variants(sides, feeds, work.device),
    ]
    rounds = _take_turns(work, found, variants)
    _evaluate(found, variants, rounds)
    work.found["points"].append(found)
    medians = ", ".join(
        f"{name} {latency['median_ms']:.3f} ms" for name, latency in found["latency"].items()
    )
    print(f"speed: {model} at {point[0]}×{point[1]}: {medians}", flush=True)
    work.save()


def _take_turns(work: Work, found: dict[str, Any], variants: list[Variant]) -> Rounds:
    """Warm all up, leave out those that fail, and run rounds of the rest."""
    settings = work.settings
    runs: dict[str, int] = {}
    turns: dict[str, Any] = {}
    for variant in variants:
        try:
            warm = warm_up(variant.run, max_seconds=settings.warm_up_seconds)
        except Exception as error:
            _record_skipped(
                work, found, variant.name, error, is_failure=variant.is_enginery and work.on_gpu
            )
            continue
        runs[variant.name] = min(runs_in_turn(warm.typical_ms), settings.most_runs)
        turns[variant.name] = lambda count, run=variant.run: take_turn(run, runs=count)
    limits = RoundLimits(
        CONFIDENCE,
        0.01,
        settings.min_rounds,
        settings.max_rounds,
        min(settings.point_seconds, max(1.0, work.left() - 5.0)),
    )
    began = time.monotonic()
    # Each turn collects garbage before it. With torch's and the compiler's objects set aside that
    # takes a millisecond and not a tenth of a second, which is more than most turns.
    gc.collect()
    gc.freeze()
    try:
        rounds = run_rounds(turns, runs, limits)
    finally:
        gc.unfreeze()
    found["rounds"] = {"ended": rounds.ended, "seconds": time.monotonic() - began}
    return rounds


def _evaluate(found: dict[str, Any], variants: list[Variant], rounds: Rounds) -> None:
    """Compute the latencies, and the speedups of enginery's ways over PyTorch's."""
    found["latency"] = {
        name: asdict(latency(turns, confidence=CONFIDENCE)) for name, turns in rounds.turns.items()
    }
    there = [variant for variant in variants if variant.name in rounds.turns]
    found["ratios"] = [
        {
            "place": place,
            "ours": mine.side,
            "theirs": other.side,
            **asdict(
                compare(
                    rounds.turns[other.name],
                    rounds.turns[mine.name],
                    confidence=CONFIDENCE,
                    smallest=SMALLEST,
                    names=(mine.name, other.name),
                )
            ),
        }
        for place in PLACES
        for mine in there
        if mine.is_enginery and mine.place == place
        for other in there
        if not other.is_enginery and other.place == place
    ]


def _record_skipped(
    work: Work, found: dict[str, Any], name: str, error: Exception, *, is_failure: bool
) -> None:
    """Record why a way does not run; if it is enginery's on a GPU, the check fails."""
    found["left out"][name] = describe_error(error)
    what = f"{name} of {found['model']} at {found['batch']}×{found['sequence']}"
    if is_failure:
        work.check(what, passed=False, found=describe_error(error))
    else:
        work.note(f"{what}: left out, {describe_error(error)}")


def _full_rows(artifact: Artifact, point: Point) -> Feeds:
    """Return inputs without padding, which PyTorch and the graph treat differently."""
    record = artifact.manifest.graphs[0]
    limits = FeedLimits.from_artifact(artifact)
    sizes = dict(zip(("batch", "sequence"), point, strict=True))
    return make_feeds(record.inputs, sizes, limits, seed=3)
