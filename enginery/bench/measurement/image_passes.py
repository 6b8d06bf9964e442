"""Measure all backends on a folder of images, each image by itself at its own size.

The first pass meets each shape for the first time and is reported separately. Each later pass is
one turn of a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from enginery.bench.config import BenchConfig
from enginery.bench.measurement.images import ImageInputs
from enginery.bench.measurement.rounds import run_rounds
from enginery.bench.measurement.shapes import (
    Processes,
    compare_pairs,
    optional_backends,
    plans_of,
    round_limits,
    save_feeds,
)
from enginery.bench.measurement.statistics import latency
from enginery.core.errors import EngineryError
from enginery.reports.benchmark import ImagesResult, ImageTimes


def measure_images(
    inputs: ImageInputs,
    processes: Processes,
    config: BenchConfig,
    scratch: Path,
    advance: Callable[[], None] = lambda: None,
) -> ImagesResult:
    """Run every backend on every image: a first pass with new shapes, then rounds of passes.

    Args:
        inputs: the images.
        processes: name -> backend's process.
        config: the options.
        scratch: directory for the input files.
        advance: called after each image of the first pass.

    Raises:
        InputError: an image cannot be read.
        EngineryError: enginery's runner, or a backend named in `against`, fails on an image.
    """
    files: list[Path] = []
    shapes: list[list[int]] = []
    prepare_ms: list[float] = []
    for index, image in enumerate(inputs.files):
        before = time.perf_counter()
        feeds = inputs.feeds(image)
        prepare_ms.append((time.perf_counter() - before) * 1e3)
        shapes.append(list(feeds[inputs.spec.name].shape))
        files.append(save_feeds(feeds, scratch / f"image-{index}.npz"))

    def cold_run(name: str, file: Path) -> float:
        processes[name].request("prepare", feeds=str(file), seconds=0)
        (time_ms,) = processes[name].request("turn", runs=1, cold=True)["times_ms"]
        return float(time_ms)

    first = {name: [0.0] * len(files) for name in processes}
    problems: dict[str, str] = {}
    for index, file in enumerate(files):
        # Reverse the order for every other image, so that no backend always follows the same one.
        order = list(first)
        if index % 2:
            order.reverse()
        for name in order:
            try:
                first[name][index] = cold_run(name, file)
            except EngineryError as error:
                if name not in optional_backends(processes):
                    raise
                problems[name] = f"{inputs.files[index].name}: {error.message}"
                del first[name]
        advance()
    passes: dict[str, list[list[float]]] = {name: [] for name in first}

    def run_pass(name: str, _: int) -> list[float]:
        times = [cold_run(name, file) for file in files]
        passes[name].append(times)
        return [sum(times)]

    rounds = run_rounds(
        {name: partial(run_pass, name) for name in first},
        dict.fromkeys(first, 1),
        round_limits(config),
        may_fail=optional_backends(processes),
    )
    remaining = list(rounds.turns)
    images = [
        ImageTimes(
            file=image.name,
            shape=shape,
            first_ms={name: first[name][index] for name in remaining},
            median_ms={name: median(times[index] for times in passes[name]) for name in remaining},
        )
        for index, (image, shape) in enumerate(zip(inputs.files, shapes, strict=True))
    ]
    return ImagesResult(
        folder=config.images,
        images=images,
        shapes=len({tuple(shape) for shape in shapes}),
        prepare_ms=median(prepare_ms),
        first_total_ms={name: sum(first[name]) for name in remaining},
        totals={
            name: latency(turns, confidence=config.confidence)
            for name, turns in rounds.turns.items()
        },
        comparisons=compare_pairs(rounds.turns, plans_of(processes), config),
        passes=max(len(turns) for turns in rounds.turns.values()),
        layout=inputs.layout,
        problems=problems | rounds.failed,
    )
