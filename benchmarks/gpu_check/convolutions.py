"""A ResNet on images of a dozen sizes: what cuDNN's search for kernels costs at each new size.

>>> run(work)
>>> work.found["searches"]["EXHAUSTIVE"]["first_ms"][0], work.found["searches"]["cpu"]["ms"][0]
(812.0, 21.4)

For each way of searching (`cudnn_conv_algo_search`) a new session, one uncounted run that loads
cuDNN, the first run at every size, then the steady time at each. The CPU runs the same beside.
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
from enginery.core.model.files import ModelConfig
from enginery.core.precision import Tolerance
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.specification import ProviderSpec, parse_providers

_RUNS = 7
_WARM_SIZE = (96, 96)
"""Of none of the images that are measured."""


def run(work: Work) -> None:
    """Measures the CPU, which is the reference of the answers too, then each way of searching."""
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
        work.note(f"{', '.join(SEARCHES)}: left out, cuDNN is for NVIDIA's GPUs")


def _measure(
    work: Work, artifact: Artifact, name: str, specs: tuple[ProviderSpec, ...]
) -> list[NDArray[Any]]:
    """First and steady times; returns the answers of the sizes that there was time for."""
    found: dict[str, Any] = {"first_ms": [], "ms": []}
    work.found["searches"][name] = found
    answers: list[NDArray[Any]] = []
    with OrtRunner(artifact, providers=specs) as runner:
        runner(_image(artifact, _WARM_SIZE))
        feeds = [_image(artifact, size) for size in work.settings.images]
        for one in feeds:
            if work.left() < 10:
                work.note(f"{name}: {len(feeds) - len(answers)} sizes left out, the time is spent")
                break
            before = time.perf_counter()
            (answer,) = runner(one).values()
            found["first_ms"].append((time.perf_counter() - before) * 1e3)
            answers.append(answer)
            work.save()
        for one in feeds[: len(answers)]:
            if work.left() < 5:
                work.note(f"{name}: steady times of some sizes left out, the time is spent")
                break
            runner(one)
            found["ms"].append(median(_timed(runner, one) for _ in range(_RUNS)))
    work.save()
    return answers


def _compare(
    work: Work, search: str, expected: list[NDArray[Any]], found: list[NDArray[Any]]
) -> None:
    """Against the CPU, by FP16's tolerance: convolutions multiply in TF32, which has its bits."""
    pairs = list(zip(expected, found, strict=False))
    cosines = [_cosine(one, other) for one, other in pairs]
    least = Tolerance.for_precision("fp16").min_cosine
    work.check(
        f"{CONVOLUTIONS} on cuda, {search}, answers as the CPU does",
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
    limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    sizes = {"batch": 1, "height": size[0], "width": size[1]}
    return make_feeds(record.inputs, sizes, limits, seed=5)
