"""The copies between host and GPU, measured apart from what the GPU computes.

>>> measure_copies(session, feeds, device="cuda", seconds=1.0)
Copies(in_ms=0.04, device_ms=0.91, out_ms=0.12)

The inputs are copied once into the device's memory, the graph runs there through IOBinding with
its outputs left there, and the outputs are copied back; each part is timed by itself, the device
waited for at the end of each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from enginery.bench.backends.warmup import Clock
from enginery.core.model.feeds import Feeds

_LEAST = 5


@dataclass(frozen=True)
class Copies:
    """Medians in milliseconds of one inference's parts."""

    in_ms: float
    device_ms: float
    out_ms: float

    @property
    def share(self) -> float:
        """Of the whole that is copying."""
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
    """Runs through IOBinding for some seconds, at least five times.

    Args:
        session: an `onnxruntime.InferenceSession`.
        feeds: its inputs, on the host.
        device: `cuda`, or `cuda:1` for another GPU; `cpu` has nothing to copy.
        seconds: no run starts after these.
        outputs: their names; all where none is named.
        clock: seconds, ascending.
    """
    import onnxruntime as ort

    kind, _, number = device.partition(":")
    index = int(number or 0)
    names = list(outputs) or [output.name for output in session.get_outputs()]
    parts: list[tuple[float, float, float]] = []
    began = clock()
    # The first run plans memory and chooses kernels; it is not counted.
    while len(parts) <= _LEAST or clock() - began < seconds:
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
