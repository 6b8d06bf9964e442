"""Measure a ResNet on images of a dozen sizes: the cost of cuDNN's kernel search at each new size.

For each `cudnn_conv_algo_search`, a new session is opened. After an uncounted run that loads cuDNN,
the first run and the steady time at every size are measured. The CPU runs the same for comparison.
"""

from __future__ import annotations

import time
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
    """Measure the CPU, whose outputs are the reference, and then each kind of search."""
    work.found["images"] = [list(size) for size in work.settings.images]
    work.found["searches"] = {}
    artifact = work.artifact(CONVOLUTIONS, "onnx")
    if artifact is None:
        return
    expected: list[NDArray[Any]] | None = None
    with work.step(f"{CONVOLUTIONS} on the CPU"):
        expected = _measure(work, artifact, "cpu", parse_providers("cpu"))
    # The one that takes longest is the last, so that the others are measured whatever it takes.
    for search in reversed(SEARCHES) if work.on_gpu else ():
        with work.step(f"{CONVOLUTIONS} on cuda, {search}"):
            specs = parse_providers("cuda", [f"cuda.cudnn_conv_algo_search={search}"])
            found = _measure(work, artifact, search, specs)
            if expected is not None:
                _compare(work, search, expected, found)
    if not work.on_gpu:
        work.note(f"{', '.join(SEARCHES)}: left out, cuDNN needs an NVIDIA GPU")


def _measure(
    work: Work, artifact: Artifact, name: str, specs: tuple[ProviderSpec, ...]
) -> list[NDArray[Any]]:
    """Measure first and steady times; return the outputs at the sizes for which there was time."""
    found: dict[str, Any] = {"first_ms": [], "ms": []}
    work.found["searches"][name] = found
    answers: list[NDArray[Any]] = []
    with OrtRunner(artifact, providers=specs) as runner:
        runner(_image(artifact, _WARM_SIZE))
        feeds = [_image(artifact, size) for size in work.settings.images]
        for one in feeds:
            if work.left() < 10:
                work.note(f"{name}: {len(feeds) - len(answers)} sizes left out, no time left")
                break
            before = time.perf_counter()
            (answer,) = runner(one).values()
            found["first_ms"].append((time.perf_counter() - before) * 1e3)
            answers.append(answer)
            work.save()
        for one in feeds[: len(answers)]:
            if work.left() < 5:
                work.note(f"{name}: steady times of some sizes left out, no time left")
                break
            runner(one)
            found["ms"].append(median(_timed(runner, one) for _ in range(_RUNS)))
    work.save()
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
