"""Build and run an FP16 engine of MiniLM with each flavor of TensorRT that is installed.

A flavor that is not installed, or that does not support this GPU, is not a failed check. A flavor
that is supported and fails to build, run or agree is.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.gpu_check.inputs import text_feeds
from benchmarks.gpu_check.work import Work
from enginery import build_engine, optimize_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ProviderError
from enginery.core.tolerance import Tolerance
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.availability import unavailable_reason
from enginery.runtime.providers.gpus import CudaGpu, visible_gpus
from enginery.runtime.tensorrt.options import FLAVORS, Flavor

_POINTS = ((1, 16), (8, 128))
_QUICK_POINTS = ((1, 8), (2, 16))


def run(work: Work) -> None:
    """Try each flavor."""
    for flavor in FLAVORS.values():
        work.case(flavor.name, partial(_try, work, flavor))


def _try(work: Work, flavor: Flavor) -> None:
    onnx = work.artifact("onnx")
    if (gpu := unsupported(flavor)) is not None:
        outcome = _refusal(work, onnx, flavor, gpu)
    elif reason := skip_reason(flavor):
        outcome = reason
        work.note(f"{flavor.title}: {reason}")
    else:
        outcome = _build_and_run(work, onnx, flavor)
    work.add("flavors", [flavor.name, outcome])


def skip_reason(flavor: Flavor) -> str:
    """Return why a flavor is not expected to run here; empty if it is."""
    if find_spec(flavor.module) is None:
        return f"not installed: the module {flavor.module} was not found ({flavor.install})"
    if unavailable := unavailable_reason(flavor.provider):
        return f"not run: {unavailable.reason} ({unavailable.do})"
    return ""


def unsupported(flavor: Flavor) -> CudaGpu | None:
    """Return the GPU if the flavor is installed and does not support it."""
    if find_spec(flavor.module) is None or not flavor.capabilities:
        return None
    try:
        gpu = visible_gpus()[0]
    except ProviderError:
        return None  # `skip_reason` says so
    return None if gpu.compute_capability in flavor.capabilities else gpu


def _refusal(work: Work, onnx: Artifact, flavor: Flavor, gpu: CudaGpu) -> str:
    """Return the error of the build stage; a build that succeeds is a failed check."""
    name = f"{flavor.title} rejects {gpu.name}"
    try:
        build_engine(
            onnx, flavor=flavor.name, capability="current", profile=("batch=1,sequence=16",)
        )
    except ProviderError as error:
        work.check(name, passed=gpu.compute_capability in error.message, found=error.message)
        return f"rejected: {error.message}"
    work.check(name, passed=False, found=f"an engine was built for {gpu.compute_capability}")
    return "built for a GPU that it does not support"


def _build_and_run(work: Work, onnx: Artifact, flavor: Flavor) -> str:
    """Build an engine, and compare it with FP32; return its build time and latency in words."""
    points = _QUICK_POINTS if work.quick else _POINTS
    (_, _), (rows, length) = points
    fp16 = optimize_model(onnx, target="tensorrt", precision="fp16")
    before = time.monotonic()
    built = build_engine(
        fp16,
        flavor=flavor.name,
        capability="current",
        profile=(f"batch=1:{rows}:{rows},sequence={points[0][1]}:{length}:{length}",),
    )
    seconds = time.monotonic() - before
    least = Tolerance.for_precision("fp16").min_cosine
    cosines = []
    with (
        OrtRunner(built, providers=[flavor.name]) as engine,
        OrtRunner(onnx, providers=[work.provider]) as reference,
    ):
        for point in points:
            feeds = text_feeds(onnx, point)
            kept = feeds["attention_mask"].astype(bool)
            (ours,), (theirs,) = engine(feeds).values(), reference(feeds).values()
            cosines.append(_cosine(ours[kept], theirs[kept]))
        milliseconds = _median_ms(engine, feeds)
    outcome = f"built in {seconds:.1f} s, {milliseconds:.3f} ms at {rows}×{length}"
    work.check(
        f"{flavor.title} builds and runs {work.model}",
        passed=min(cosines) >= least,
        found=f"{outcome}, cosine {min(cosines):.6f} to FP32 on {work.provider}, expected at "
        f"least {least:.6f}",
    )
    return outcome


def _cosine(one: Any, other: Any) -> float:
    left, right = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    found = float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))
    return found if np.isfinite(found) else -1.0


def _median_ms(runner: OrtRunner, feeds: Any) -> float:
    times = []
    for _ in range(30):
        before = time.perf_counter()
        runner(feeds)
        times.append((time.perf_counter() - before) * 1e3)
    return float(np.median(times[5:]))
