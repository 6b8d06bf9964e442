"""One shape, run by every contender in turn.

>>> with started(plans, subjects, config) as contenders:
...     result = measure_case(case, contenders, subjects, config, scratch)

Inputs are made once, in this process, and handed to each contender as a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from enginery.bench.backends.plan import Plan, runs_on_cpu
from enginery.bench.backends.process import Contender
from enginery.bench.config import BenchConfig
from enginery.bench.measurement.cases import Case, rows_of, tokens_of
from enginery.bench.measurement.pairs import comparisons
from enginery.bench.measurement.rounds import Limits, run_rounds, runs_in_turn
from enginery.bench.measurement.statistics import latency
from enginery.bench.target import Subject
from enginery.core.artifact.reports import BenchCase, CopyTimes, Measurement
from enginery.core.errors import EngineryError
from enginery.core.model.feeds import Feeds
from enginery.core.subprocess import WorkerResult

_GPU_SECONDS = 1.0
Contenders = Mapping[str, Contender]


def limits_of(config: BenchConfig) -> Limits:
    """When the rounds of a shape end."""
    return Limits(
        config.confidence,
        config.precision,
        config.min_rounds,
        config.max_rounds,
        config.max_seconds,
    )


def may_fail(contenders: Contenders) -> set[str]:
    """Those of `auto`: when one fails, the others are measured without it."""
    return {name for name, contender in contenders.items() if not contender.plan.asked}


def plans_of(contenders: Contenders) -> dict[str, Plan]:
    """What each contender was to be."""
    return {name: contender.plan for name, contender in contenders.items()}


def measure_case(
    case: Case,
    contenders: Contenders,
    subjects: Mapping[str, Subject],
    config: BenchConfig,
    scratch: Path,
) -> BenchCase:
    """All contenders at one shape.

    Raises:
        EngineryError: our runner, or a contender that was named, fails at the shape.
    """
    first = next(iter(subjects.values()))
    prepared: dict[str, WorkerResult] = {}
    problems: dict[str, str] = {}
    files = _feed_files(case, subjects, config, scratch)
    for name, contender in contenders.items():
        try:
            prepared[name] = contender.ask(
                "prepare", feeds=files[contender.plan.subject], seconds=config.warm_up_seconds
            )
        except EngineryError as error:
            if contender.plan.asked:
                raise
            problems[name] = error.message
    rounds = run_rounds(
        {name: partial(_turn, contenders[name]) for name in prepared},
        {name: runs_in_turn(answer["typical_ms"]) for name, answer in prepared.items()},
        limits_of(config),
        may_fail=may_fail(contenders),
    )
    problems |= rounds.failed
    rows, tokens = rows_of(case.sizes, first), tokens_of(case.sizes, first)
    measurements = []
    unknown: dict[str, str] = {}
    for name, turns in rounds.turns.items():
        answer, contender = prepared[name], contenders[name]
        found = latency(turns, confidence=config.confidence)
        measurements.append(
            Measurement(
                contender=name,
                first_ms=answer["first_ms"],
                warm_up_runs=answer["runs"],
                settled=answer["settled"],
                latency=found,
                inputs_per_second=1e3 * rows / found.median_ms,
                tokens_per_second=1e3 * tokens / found.median_ms if tokens else None,
                joules_per_run=(_told(contender, "energy", unknown) or {}).get("joules"),
                copies=cast(
                    "CopyTimes | None",
                    _told(contender, "copies", unknown, device=_gpu_of(contender)),
                )
                if contender.plan.kind == "onnxruntime"
                else None,
                notes=answer["notes"],
            )
        )
    return BenchCase(
        sizes=dict(case.sizes),
        rows=rows,
        tokens=tokens,
        measurements=measurements,
        comparisons=comparisons(rounds.turns, plans_of(contenders), config),
        problems=problems,
        unknown=unknown,
        rounds_ended=rounds.ended,
    )


def _turn(contender: Contender, runs: int) -> list[float]:
    times: list[float] = contender.ask("turn", runs=runs)["times_ms"]
    return times


def _feed_files(
    case: Case, subjects: Mapping[str, Subject], config: BenchConfig, scratch: Path
) -> dict[str, str]:
    """Subjects with the same inputs get the same numbers: they are drawn from one seed."""
    return {
        name: str(save_feeds(case.feeds(subject, seed=config.seed), scratch / f"feeds-{index}.npz"))
        for index, (name, subject) in enumerate(subjects.items())
    }


def save_feeds(feeds: Feeds, path: Path) -> Path:
    """Writes inputs where a contender reads them."""
    with path.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **feeds)
    return path


def _told(
    contender: Contender, what: str, unknown: dict[str, str], **values: Any
) -> dict[str, float] | None:
    """What a GPU tells over a second of runs; None where it does not, or there is none."""
    if not on_gpu(contender):
        return None
    try:
        found: dict[str, float] = contender.ask(what, seconds=_GPU_SECONDS, **values)
    except EngineryError as error:
        unknown["host copies" if what == "copies" else what] = error.message
        return None
    return found


def _gpu_of(contender: Contender) -> str:
    """The GPU of a contender's first provider, `cuda:0`."""
    options = contender.loaded["providers"][0].get("options", {})
    return f"cuda:{options.get('device_id', 0)}"


def on_gpu(contender: Contender) -> bool:
    """Whether a contender runs on an NVIDIA GPU."""
    providers = contender.loaded["providers"]
    if not providers:
        return contender.plan.device.startswith("cuda")
    return not runs_on_cpu(providers) and any(
        word in providers[0]["name"] for word in ("CUDA", "Tensor")
    )
