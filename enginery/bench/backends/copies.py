"""Times of the copies between host and GPU, separate from the computation.

    measure_copies(session, feeds, device="cuda", seconds=1.0)
    # Copies(in_ms=0.04, device_ms=0.91, out_ms=0.12)

A run through IOBinding has three parts: the inputs are copied to the device, the graph runs with
inputs and outputs on the device, and the outputs are copied back. Each part is timed separately
and ends with a synchronization.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from enginery.bench.backends.warmup import Clock
from enginery.core.model.feeds import Feeds

_MIN_RUNS = 5


@dataclass(frozen=True)
class Copies:
    """Median times of the parts of a run, in milliseconds."""

    in_ms: float
    device_ms: float
    out_ms: float

    @property
    def share(self) -> float:
        """Share of the time spent on copies, 0 to 1."""
        return (self.in_ms + self.out_ms) / (self.in_ms + self.device_ms + self.out_ms)


def measure_copies(
    session: Any,
    feeds: Feeds,
    *,
    device: str,
    seconds: float,
    outputs: Sequence[str] = (),
    clock: Clock = time.perf_counter,
) -> Copies:
    """Run through IOBinding for some seconds, at least five times.

    Args:
        session: an `onnxruntime.InferenceSession`.
        feeds: the inputs, in host memory.
        device: `cuda`, or `cuda:1` for another GPU; on `cpu` nothing is copied.
        seconds: no run starts after this time.
        outputs: names of the outputs; empty for all.
        clock: returns seconds.
    """
    import onnxruntime as ort

    kind, _, number = device.partition(":")
    index = int(number or 0)
    names = list(outputs) or [output.name for output in session.get_outputs()]
    parts: list[tuple[float, float, float]] = []
    began = clock()
    # The first run is not counted: it plans memory and chooses kernels.
    while len(parts) <= _MIN_RUNS or clock() - began < seconds:
        binding = session.io_binding()
        start = clock()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, kind, index))
        binding.synchronize_inputs()
        for name in names:
            binding.bind_output(name, kind, index)
        copied = clock()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        computed = clock()
        binding.copy_outputs_to_cpu()
        done = clock()
        parts.append(((copied - start) * 1e3, (computed - copied) * 1e3, (done - computed) * 1e3))
    return Copies(*(median(column) for column in zip(*parts[1:], strict=True)))
