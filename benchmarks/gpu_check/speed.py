"""FP16 of one model over batches and lengths: our runner's ways beside PyTorch's.

>>> run(work)
>>> work.found["points"][0]["latency"]["enginery, CUDA graph, host"]["median_ms"]
0.31

All take turns in this one process, a round after another, in an order that is reversed from round
to round (bench/measurement/rounds.py); medians and intervals are those of
bench/measurement/statistics.py.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import pytorch
from benchmarks.gpu_check.compiling import Compiler
from benchmarks.gpu_check.contenders import (
    BOUND,
    COMPILED,
    EAGER,
    GRAPH,
    PLACES,
    PLAIN,
    SDPA,
    Contender,
    ours,
    theirs,
)
from benchmarks.gpu_check.settings import Point
from benchmarks.gpu_check.work import Work, in_words
from enginery.bench.backends.warmup import take_turn, warm_up
from enginery.bench.measurement.rounds import RoundLimits, Rounds, run_rounds, runs_in_turn
from enginery.bench.measurement.statistics import compare, latency
from enginery.core.artifact.artifact import Artifact
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.model.files import ModelConfig
from enginery.runtime.onnxruntime.runner import OrtRunner

CONFIDENCE, SMALLEST = 0.95, 0.02
_FOR_A_POINT = 7.0
"""Seconds that each point not yet measured keeps from torch.compile."""
_CAPTURES = 8
"""Shapes that a runner records, see runtime/onnxruntime/binding.py."""
_WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"io_binding": False},
    BOUND: {},
    GRAPH: {"cuda_graph": True},
}


class Runners:
    """Our runner in each of its ways, opened once; that of CUDA graphs anew after eight shapes."""

    def __init__(self, work: Work, artifact: Artifact) -> None:
        self._work, self._artifact = work, artifact
        self._open: dict[str, OrtRunner] = {}
        self._refused: dict[str, str] = {}
        self._captured = 0

    def for_a_shape(self, found: dict[str, Any]) -> dict[str, OrtRunner]:
        """Those that can be opened, for one more shape; the others are recorded in `found`."""
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
                self._refused[side] = in_words(error)
                _leave_out(self._work, found, side, error, ours_fails=self._work.on_gpu)
        return self._open


def run(work: Work) -> None:
    """Measures `work.only_model` at every point, the most important first."""
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
                f"{model}: {len(rest)} points left out, the time is spent: "
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
        _leave_out(work, found, COMPILED, error, ours_fails=False)
    else:
        sides[COMPILED] = compiled.model
        found["compile"] = {
            "mode": compiled.mode,
            "seconds": compiled.seconds,
            "tried": list(compiled.tried),
        }
    contenders = [
        *ours(runners.for_a_shape(found), feeds, work.device),
        *theirs(sides, feeds, work.device),
    ]
    rounds = _take_turns(work, found, contenders)
    _evaluate(found, contenders, rounds)
    work.found["points"].append(found)
    medians = ", ".join(
        f"{name} {latency['median_ms']:.3f} ms" for name, latency in found["latency"].items()
    )
    print(f"speed: {model} at {point[0]}×{point[1]}: {medians}", flush=True)
    work.save()


def _take_turns(work: Work, found: dict[str, Any], contenders: list[Contender]) -> Rounds:
    """Warms each up, leaves out what fails, and runs rounds of the rest."""
    settings = work.settings
    runs: dict[str, int] = {}
    turns: dict[str, Any] = {}
    for contender in contenders:
        try:
            warm = warm_up(contender.run, max_seconds=settings.warm_up_seconds)
        except Exception as error:
            _leave_out(
                work, found, contender.name, error, ours_fails=contender.ours and work.on_gpu
            )
            continue
        runs[contender.name] = min(runs_in_turn(warm.typical_ms), settings.most_runs)
        turns[contender.name] = lambda count, run=contender.run: take_turn(run, runs=count)
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


def _evaluate(found: dict[str, Any], contenders: list[Contender], rounds: Rounds) -> None:
    """Each one's latency, and each of ours beside each of PyTorch's in the same place."""
    found["latency"] = {
        name: asdict(latency(turns, confidence=CONFIDENCE)) for name, turns in rounds.turns.items()
    }
    there = [contender for contender in contenders if contender.name in rounds.turns]
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
        if mine.ours and mine.place == place
        for other in there
        if not other.ours and other.place == place
    ]


def _leave_out(
    work: Work, found: dict[str, Any], name: str, error: Exception, *, ours_fails: bool
) -> None:
    """Records why somebody does not run; where that is ours on a GPU, a check has failed."""
    found["left out"][name] = in_words(error)
    what = f"{name} of {found['model']} at {found['batch']}×{found['sequence']}"
    if ours_fails:
        work.check(what, passed=False, found=in_words(error))
    else:
        work.note(f"{what}: left out, {in_words(error)}")


def _full_rows(artifact: Artifact, point: Point) -> Feeds:
    """Made-up inputs without padding, which PyTorch and the graph treat differently."""
    record = artifact.manifest.graphs[0]
    limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    sizes = dict(zip(("batch", "sequence"), point, strict=True))
    return make_feeds(record.inputs, sizes, limits, seed=3)
