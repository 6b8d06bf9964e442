"""Run torch.compile within a time limit, with the strongest mode for which there is time.

    compiler = Compiler("inductor", modes=("max-autotune", "reduce-overhead"))
    compiled = compiler.compile(model, feeds, "cuda", seconds=90)
    compiled.mode, round(compiled.seconds)  # ('max-autotune', 41)

Each shape is compiled separately (`dynamic=False`), and earlier compilations are discarded.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from benchmarks.gpu_check.pytorch import tensors_of, wait
from benchmarks.gpu_check.work import describe_error
from enginery.core.errors import ProviderError
from enginery.core.model.feeds import Feeds

STRONGEST, FALLBACK = "max-autotune", "reduce-overhead"
_LEAST_SECONDS = {STRONGEST: 45.0}
"""Minimum time to start a mode: it tries many kernels."""
_WARM_RUNS = 4
"""The first run compiles, the next ones capture a CUDA graph."""


@dataclass(frozen=True)
class Compiled:
    """A model compiled for one shape."""

    model: Any
    mode: str
    seconds: float
    tried: tuple[str, ...]
    """Modes that failed, with the reasons."""


@dataclass
class Compiler:
    """Compile models, and estimate the time of each mode from earlier compilations."""

    backend: str
    modes: tuple[str, ...] = (STRONGEST, FALLBACK)
    took: dict[str, float] = field(default_factory=dict)
    """Mode -> seconds of its last compilation."""

    def __post_init__(self) -> None:
        if self.backend != "inductor":
            self.modes = (self.backend,)  # it has none of inductor's

    def compile(self, model: Any, feeds: Feeds, device: str, *, seconds: float) -> Compiled:
        """Compile a model for the shape of the feeds and run it until it is ready.

        A mode that fails or runs out of time is not tried at later shapes. The strongest mode may
        use half of the time, so that the next one has the other half.

        Raises:
            ProviderError: no mode succeeded in time.
        """
        tried: list[str] = []
        began = time.monotonic()
        for mode in self.modes:
            last = mode == self.modes[-1]
            limit = max(0.0, seconds - (time.monotonic() - began)) * (1.0 if last else 0.5)
            took = self.took.get(mode, 0.0)
            needed = max(1.3 * took, _LEAST_SECONDS.get(mode, 0.0))
            if limit <= needed:
                tried.append(f"{mode}: {limit:.0f} s are left, expected {needed:.0f} s")
                continue
            started = time.monotonic()
            try:
                with within(limit):
                    found = self._compiled(model, mode, feeds, device)
            except Exception as error:
                tried.append(f"{mode}: {describe_error(error)}")
                self.modes = tuple(other for other in self.modes if other != mode or last)
                self.took[mode] = max(took, time.monotonic() - started)
                continue
            self.took[mode] = time.monotonic() - started
            return Compiled(found, mode, self.took[mode], tuple(tried))
        raise ProviderError(f"not compiled: {'; '.join(tried)}.")

    def _compiled(self, model: Any, mode: str, feeds: Feeds, device: str) -> Any:
        # Else the number of shapes that one function may be compiled for is reached.
        torch._dynamo.reset()  # noqa: SLF001  there is no other way
        options = {"mode": mode} if self.backend == "inductor" else {}
        found = torch.compile(model, backend=self.backend, dynamic=False, **options)
        tensors = tensors_of(feeds, device)
        for _ in range(_WARM_RUNS):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.inference_mode():
                found(**tensors)
        wait(device)
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
