"""One shape, or one folder of images, run by every contender in turn.

>>> with started(plans, subjects, config) as contenders:
...     result = measure_case(case, contenders, subjects, config, scratch)

Inputs are made once, in this process, and handed to each contender as a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from enginery.bench.cases import Case, rows_of, tokens_of
from enginery.bench.config import OURS, BenchConfig
from enginery.bench.contenders import runs_on_cpu
from enginery.bench.images import ImageInputs
from enginery.bench.process import Answer, Contender
from enginery.bench.result import CaseResult, ImagesResult, ImageTimes, Measurement
from enginery.bench.rounds import Limits, run_rounds, runs_in_turn
from enginery.bench.statistics import Comparison, compare, latency
from enginery.bench.subject import Subject
from enginery.core.errors import EngineryError
from enginery.core.feeds import Feeds

_GPU_SECONDS = 1.0
Contenders = Mapping[str, Contender]


def limits_of(config: BenchConfig) -> Limits:
    """When the rounds of a shape end."""
    return Limits(config.confidence, config.precision, config.min_rounds, config.max_rounds,
                  config.max_seconds)  # fmt: skip


def measure_case(
    case: Case,
    contenders: Contenders,
    subjects: Mapping[str, Subject],
    config: BenchConfig,
    scratch: Path,
) -> CaseResult:
    """All contenders at one shape.

    Raises:
        EngineryError: our runner, or a contender that was named, fails at the shape.
    """
    first = next(iter(subjects.values()))
    prepared: dict[str, Answer] = {}
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
    )
    rows, tokens = rows_of(case.sizes, first), tokens_of(case.sizes, first)
    measurements = []
    unknown: dict[str, str] = {}
    for name, answer in prepared.items():
        found = latency(rounds.turns[name], confidence=config.confidence)
        contender = contenders[name]
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
                copies=_told(contender, "copies", unknown, device=_gpu_of(contender))
                if contender.plan.kind == "onnxruntime"
                else None,
            )
        )
    return CaseResult(
        sizes=dict(case.sizes),
        rows=rows,
        tokens=tokens,
        measurements=measurements,
        comparisons=comparisons(rounds.turns, contenders, config),
        problems=problems,
        unknown=unknown,
        rounds_ended=rounds.ended,
    )


def comparisons(
    turns: Mapping[str, Sequence[Sequence[float]]], contenders: Contenders, config: BenchConfig
) -> list[Comparison]:
    """Everyone beside PyTorch, and beside our runner of each artifact; each pair once."""
    kinds = {name: contenders[name].plan.kind for name in turns}
    bases = [name for name, kind in kinds.items() if kind == "pytorch"]
    bases += [name for name, kind in kinds.items() if kind == OURS]
    found: dict[frozenset[str], Comparison] = {}
    for base in bases:
        for name in turns:
            pair = frozenset((base, name))
            if name != base and pair not in found:
                found[pair] = compare(
                    turns[base], turns[name], confidence=config.confidence,
                    smallest=config.smallest_difference, names=(name, base),
                )  # fmt: skip
    return list(found.values())


def measure_images(
    inputs: ImageInputs,
    contenders: Contenders,
    config: BenchConfig,
    scratch: Path,
    advance: Callable[[], None] = lambda: None,
) -> ImagesResult:
    """Every contender on every image: a first pass with cold shapes, then rounds of passes.

    Raises:
        InputError: an image cannot be read.
        EngineryError: a contender fails on one.
    """
    files: list[Path] = []
    shapes: list[list[int]] = []
    prepare_ms: list[float] = []
    for index, image in enumerate(inputs.files):
        before = time.perf_counter()
        feeds = inputs.feeds(image)
        prepare_ms.append((time.perf_counter() - before) * 1e3)
        shapes.append(list(feeds[inputs.spec.name].shape))
        files.append(_save(feeds, scratch / f"image-{index}.npz"))
    first = {name: [0.0] * len(files) for name in contenders}
    for index, file in enumerate(files):
        # Whoever goes first at one image goes last at the next.
        for name in list(contenders)[:: 1 if index % 2 == 0 else -1]:
            contenders[name].ask("prepare", feeds=str(file), seconds=0)
            (first[name][index],) = contenders[name].ask("turn", runs=1, cold=True)["times_ms"]
        advance()
    passes: dict[str, list[list[float]]] = {name: [] for name in contenders}

    def run_pass(name: str, _: int) -> list[float]:
        times = []
        for file in files:
            contenders[name].ask("prepare", feeds=str(file), seconds=0)
            (time_ms,) = contenders[name].ask("turn", runs=1, cold=True)["times_ms"]
            times.append(time_ms)
        passes[name].append(times)
        return [sum(times)]

    rounds = run_rounds(
        {name: partial(run_pass, name) for name in contenders},
        dict.fromkeys(contenders, 1),
        limits_of(config),
    )
    images = [
        ImageTimes(
            file=image.name,
            shape=shape,
            first_ms={name: first[name][index] for name in contenders},
            median_ms={name: median(times[index] for times in passes[name])
                       for name in contenders},
        )
        for index, (image, shape) in enumerate(zip(inputs.files, shapes, strict=True))
    ]  # fmt: skip
    return ImagesResult(
        folder=config.images,
        images=images,
        shapes=len({tuple(shape) for shape in shapes}),
        prepare_ms=median(prepare_ms),
        first_total_ms={name: sum(times) for name, times in first.items()},
        totals={name: latency(turns, confidence=config.confidence)
                for name, turns in rounds.turns.items()},
        comparisons=comparisons(rounds.turns, contenders, config),
        passes=len(next(iter(rounds.turns.values()))),
    )  # fmt: skip


def _turn(contender: Contender, runs: int) -> list[float]:
    times: list[float] = contender.ask("turn", runs=runs)["times_ms"]
    return times


def _feed_files(
    case: Case, subjects: Mapping[str, Subject], config: BenchConfig, scratch: Path
) -> dict[str, str]:
    """Subjects with the same inputs get the same numbers: they are drawn from one seed."""
    return {
        name: str(_save(case.feeds(subject, seed=config.seed), scratch / f"feeds-{index}.npz"))
        for index, (name, subject) in enumerate(subjects.items())
    }


def _save(feeds: Feeds, path: Path) -> Path:
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
