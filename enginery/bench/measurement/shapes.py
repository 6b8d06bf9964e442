"""Measure all backends at one shape.

The inputs are generated once, in the parent process, and each backend reads them from a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from enginery.bench.backends.backend import BackendPlan
from enginery.bench.backends.plan import runs_on_cpu
from enginery.bench.backends.process import BenchmarkProcess
from enginery.bench.config import ENGINERY, BenchConfig
from enginery.bench.measurement.cases import Case, rows_of, tokens_of
from enginery.bench.measurement.rounds import RoundLimits, run_rounds, runs_in_turn
from enginery.bench.measurement.statistics import compare, latency
from enginery.bench.target import Target
from enginery.core.errors import EngineryError
from enginery.core.model.feeds import Feeds
from enginery.core.subprocess import WorkerResult
from enginery.reports.benchmark import BenchCase, Comparison, Measurement

_GPU_SECONDS = 1.0
"""Duration of a measurement of energy."""
Processes = Mapping[str, BenchmarkProcess]


def round_limits(config: BenchConfig) -> RoundLimits:
    """Return the limits of the rounds at one shape."""
    return RoundLimits(
        config.confidence,
        config.precision,
        config.min_rounds,
        config.max_rounds,
        config.max_seconds,
    )


def optional_backends(processes: Processes) -> set[str]:
    """Return the backends that `auto` chose: if one fails, the others are measured without it."""
    return {name for name, process in processes.items() if not process.plan.required}


def plans_of(processes: Processes) -> dict[str, BackendPlan]:
    """Return name -> plan."""
    return {name: process.plan for name, process in processes.items()}


def measure_case(
    case: Case,
    processes: Processes,
    targets: Mapping[str, Target],
    config: BenchConfig,
    scratch: Path,
) -> BenchCase:
    """Warm up all backends at one shape, run the rounds, and return the measurements.

    Args:
        case: the shape.
        processes: name -> backend's process.
        targets: name -> target.
        config: the options.
        scratch: directory for the input files.

    Raises:
        EngineryError: enginery's runner, or a backend named in `against`, fails at the shape.
    """
    first = next(iter(targets.values()))
    prepared: dict[str, WorkerResult] = {}
    problems: dict[str, str] = {}
    files = _feed_files(case, targets, config, scratch)
    for name, process in processes.items():
        try:
            prepared[name] = process.request(
                "prepare", feeds=files[process.plan.target], seconds=config.warm_up_seconds
            )
        except EngineryError as error:
            if process.plan.required:
                raise
            problems[name] = error.message
    rounds = run_rounds(
        {name: partial(_turn, processes[name]) for name in prepared},
        {name: runs_in_turn(answer["typical_ms"]) for name, answer in prepared.items()},
        round_limits(config),
        may_fail=optional_backends(processes),
    )
    problems |= rounds.failed
    rows, tokens = rows_of(case.sizes, first), tokens_of(case.sizes, first)
    measurements = []
    unknown: dict[str, str] = {}
    for name, turns in rounds.turns.items():
        answer, process = prepared[name], processes[name]
        timings = latency(turns, confidence=config.confidence)
        measurements.append(
            Measurement(
                contender=name,
                first_ms=answer["first_ms"],
                warm_up_runs=answer["runs"],
                settled=answer["settled"],
                latency=timings,
                inputs_per_second=1e3 * rows / timings.median_ms,
                tokens_per_second=1e3 * tokens / timings.median_ms if tokens else None,
                joules_per_run=_measure_energy(process, unknown),
                notes=answer["notes"],
            )
        )
    return BenchCase(
        sizes=dict(case.sizes),
        rows=rows,
        tokens=tokens,
        measurements=measurements,
        comparisons=compare_pairs(rounds.turns, plans_of(processes), config),
        problems=problems,
        unknown=unknown,
        rounds_ended=rounds.ended,
    )


def _turn(process: BenchmarkProcess, runs: int) -> list[float]:
    times: list[float] = process.request("turn", runs=runs)["times_ms"]
    return times


def _feed_files(
    case: Case, targets: Mapping[str, Target], config: BenchConfig, scratch: Path
) -> dict[str, str]:
    """Write the inputs of each target; return target -> file. All are drawn from one seed."""
    return {
        name: str(save_feeds(case.feeds(target, seed=config.seed), scratch / f"feeds-{index}.npz"))
        for index, (name, target) in enumerate(targets.items())
    }


def save_feeds(feeds: Feeds, path: Path) -> Path:
    """Write inputs to an .npz file and return its path."""
    with path.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **feeds)
    return path


def _measure_energy(process: BenchmarkProcess, unknown: dict[str, str]) -> float | None:
    """Return the joules of a run, from a second of runs; None without a GPU or if it is unknown.

    `unknown` receives the reason if the GPU does not report its energy.
    """
    if not on_gpu(process):
        return None
    try:
        return float(process.request("energy", seconds=_GPU_SECONDS)["joules"])
    except EngineryError as error:
        unknown["energy"] = error.message
        return None


def on_gpu(process: BenchmarkProcess) -> bool:
    """Return True if a backend runs on an NVIDIA GPU."""
    providers = process.loaded["providers"]
    if not providers:
        return process.plan.device.startswith("cuda")
    return not runs_on_cpu(providers) and any(
        word in providers[0]["name"] for word in ("CUDA", "Tensor")
    )


def compare_pairs(
    turns: Mapping[str, Sequence[Sequence[float]]],
    plans: Mapping[str, BackendPlan],
    config: BenchConfig,
) -> list[Comparison]:
    """Compare every backend with PyTorch and with enginery's runner; each pair once.

    PyTorch and Optimum run once, for the first artifact. PyTorch represents the model, so the
    runner of every artifact is compared with it. All other pairs belong to one artifact, or are
    enginery's runner on two artifacts.

    Args:
        turns: backend -> times of each turn's runs, in ms.
        plans: backend -> plan.
        config: the confidence level and the smallest difference.
    """
    bases = [name for name in turns if plans[name].kind == "pytorch"]
    bases += [name for name in turns if plans[name].kind == ENGINERY]
    comparisons: dict[frozenset[str], Comparison] = {}
    for base in bases:
        for name in turns:
            pair = frozenset((base, name))
            if name == base or pair in comparisons or not is_comparable(plans[name], plans[base]):
                continue
            comparisons[pair] = compare(
                turns[base],
                turns[name],
                confidence=config.confidence,
                smallest=config.smallest_difference,
                names=(name, base),
            )
    return list(comparisons.values())


def is_comparable(first: BackendPlan, second: BackendPlan) -> bool:
    """Return True if the two belong to one artifact, or each is enginery's runner or PyTorch."""
    if first.target == second.target:
        return True
    return all(plan.kind == ENGINERY or plan.kind.startswith("pytorch") for plan in (first, second))
