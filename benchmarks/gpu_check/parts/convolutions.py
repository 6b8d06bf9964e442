"""Measure a ResNet on images of a dozen sizes: the cost of cuDNN's kernel search at each new size.

For each `cudnn_conv_algo_search`, a new session is opened. After an uncounted run that loads cuDNN,
the first run and the steady time at every size are measured. The CPU runs the same for comparison.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_check.settings import CONVOLUTIONS, SEARCHES
from benchmarks.gpu_check.work import Work
from enginery.core.artifact.artifact import Artifact
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.tolerance import Tolerance
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.specification import ProviderSpec, parse_providers

_RUNS = 7
_WARM_SIZE = (96, 96)
"""A size that none of the measured images has."""


def run(work: Work) -> None:
    """Measure the CPU, and then each kind of search, whose outputs are compared with the CPU's."""
    work.case("cpu", partial(_measure, work, "cpu", parse_providers("cpu")))
    # The one that takes longest is the last, so that the others are measured whatever it takes.
    for search in reversed(SEARCHES):
        work.case(search, partial(_search, work, search))


def _search(work: Work, search: str) -> None:
    if not work.on_gpu:
        work.note(f"{search}: left out, cuDNN needs an NVIDIA GPU")
        return
    specs = parse_providers("cuda", [f"cuda.cudnn_conv_algo_search={search}"])
    found = _measure(work, search, specs)
    artifact = work.artifact("onnx")
    with OrtRunner(artifact, providers="cpu") as runner:
        expected = [
            next(iter(runner(_image(artifact, size)).values())) for size in work.settings.images
        ]
    _compare(work, search, expected, found)


def _measure(work: Work, name: str, specs: tuple[ProviderSpec, ...]) -> list[NDArray[Any]]:
    """Measure first and steady times; return the outputs."""
    artifact = work.artifact("onnx")
    first_ms, steady_ms = [], []
    answers: list[NDArray[Any]] = []
    with OrtRunner(artifact, providers=specs) as runner:
        runner(_image(artifact, _WARM_SIZE))
        feeds = [_image(artifact, size) for size in work.settings.images]
        for one in feeds:
            before = time.perf_counter()
            (answer,) = runner(one).values()
            first_ms.append((time.perf_counter() - before) * 1e3)
            answers.append(answer)
        for one in feeds:
            runner(one)
            steady_ms.append(median(_timed(runner, one) for _ in range(_RUNS)))
    sizes = [list(size) for size in work.settings.images]
    row = {"search": name, "images": sizes, "first_ms": first_ms, "ms": steady_ms}
    work.add("searches", row)
    return answers


def _compare(
    work: Work, search: str, expected: list[NDArray[Any]], found: list[NDArray[Any]]
) -> None:
    """Compare with the CPU by FP16's tolerance: TF32 convolutions have as many mantissa bits."""
    pairs = list(zip(expected, found, strict=False))
    cosines = [_cosine(one, other) for one, other in pairs]
    least = Tolerance.for_precision("fp16").min_cosine
    work.check(
        f"{CONVOLUTIONS} on cuda, {search}, equals the CPU",
        passed=bool(pairs) and min(cosines) >= least,
        found=f"cosine {min(cosines, default=0.0):.6f} over {len(pairs)} sizes, "
        f"expected at least {least:.6f}",
    )


def _cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    left, right = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    found = float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))
    return found if np.isfinite(found) else -1.0


def _timed(runner: OrtRunner, feeds: Feeds) -> float:
    before = time.perf_counter()
    runner(feeds)
    return (time.perf_counter() - before) * 1e3


def _image(artifact: Artifact, size: tuple[int, int]) -> Feeds:
    record = artifact.manifest.graphs[0]
    limits = FeedLimits.from_artifact(artifact)
    sizes = {"batch": 1, "height": size[0], "width": size[1]}
    return make_feeds(record.inputs, sizes, limits, seed=5)
