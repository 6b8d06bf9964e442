"""Compare enginery's runner with torch.compile, in each of its modes, at each shape.

A mode at a shape is a case. The modes that compile fastest come first. Each shape is compiled
separately (`dynamic=False`), and earlier compilations are discarded. A compilation for which there
is no time is left for a later run, which finds the kernels that inductor has cached.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.gpu_check import pytorch
from benchmarks.gpu_check.inputs import full_rows
from benchmarks.gpu_check.settings import Point
from benchmarks.gpu_check.variants import (
    COMPILED,
    enginery_variants,
    measure,
    open_runners,
    pytorch_variants,
    say_medians,
)
from benchmarks.gpu_check.work import OutOfTimeError, Work
from enginery.core.model.feeds import Feeds

COMPILE_SECONDS = 240.0
"""Longest compilation; it ends before the process of a case that takes too long is ended."""
_FOR_ROUNDS = 20.0
"""Seconds that the measurement needs after the compilation."""
_WARM_RUNS = 4
"""The first run compiles, the next ones capture a CUDA graph."""


def run(work: Work) -> None:
    """Measure every mode at every point."""
    pytorch.require_device(work.device)
    for mode in work.settings.compile_modes:
        for point in work.settings.points:
            name = f"{point[0]}×{point[1]}, {mode}"
            needed = 1.0 if work.quick else _FOR_ROUNDS + 10
            work.case(name, partial(_measure, work, mode, point), seconds=needed)


def _measure(work: Work, mode: str, point: Point) -> None:
    artifact = work.artifact("fp16")
    source = Path(work.results.artifacts(work.model)["source"])
    feeds = full_rows(artifact, point)
    model = pytorch.load_text_model(source, "sdpa", "fp16", work.device)
    limit = work.left() - (0.0 if work.quick else _FOR_ROUNDS)
    before = time.monotonic()
    try:
        with within(min(limit, COMPILE_SECONDS)):
            compiled = compile_for(model, mode, feeds, work.device)
    except TimeoutError as error:
        if limit < COMPILE_SECONDS:
            raise OutOfTimeError(f"the compilation took {error}") from error
        work.note(f"not compiled: {error}")
        return
    except Exception as error:  # a failure of the compiler is none of enginery
        work.note(f"not compiled: {type(error).__name__}: {error}")
        return
    seconds = time.monotonic() - before
    left_out: dict[str, str] = {}
    runners = open_runners(work, artifact, left_out)
    with ExitStack() as stack:
        for runner in runners.values():
            stack.enter_context(runner)
        variants = [
            *enginery_variants(runners, feeds, work.device),
            *pytorch_variants({COMPILED: compiled}, feeds, work.device),
        ]
        found = measure(work, variants, left_out)
    row = {"model": work.model, "batch": point[0], "sequence": point[1], "mode": mode}
    work.add("compiled", {**row, "compile_seconds": seconds, **found})
    say_medians(work, f"{point[0]}×{point[1]}, {mode}", found)


def compile_for(model: Any, mode: str, feeds: Feeds, device: str) -> Any:
    """Compile a model for the shape of the feeds and run it until it is ready.

    Args:
        model: a PyTorch model.
        mode: a mode of inductor, or `aot_eager`, which needs no C++ compiler.
        feeds: its inputs.
        device: cpu or cuda.
    """
    # Else the number of shapes that one function may be compiled for is reached.
    torch._dynamo.reset()  # noqa: SLF001  there is no other way
    options = {"backend": mode} if mode == "aot_eager" else {"mode": mode}
    found = torch.compile(model, dynamic=False, **options)
    tensors = pytorch.tensors_of(feeds, device)
    for _ in range(_WARM_RUNS):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            found(**tensors)
    pytorch.wait(device)
    return found


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds; repeatedly, as some code catches it."""

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
