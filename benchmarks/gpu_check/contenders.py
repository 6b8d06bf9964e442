"""Who runs FP16 at one shape: our runner in its ways, and PyTorch in its; on host and on device.

    >>> for contender in ours(runners, feeds, "cuda"):
    ...     contender.run()

On `host`, numpy arrays go in and come out. On `device`, torch tensors of the GPU go in, and the
outputs stay there. Every run is complete when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_check.pytorch import tensors_of, wait
from enginery.core.model.feeds import Feeds
from enginery.runtime.onnxruntime.runner import OrtRunner

PLAIN, BOUND, GRAPH = "enginery, no IOBinding", "enginery, IOBinding", "enginery, CUDA graph"
EAGER, SDPA, COMPILED = "PyTorch eager", "PyTorch SDPA", "torch.compile"
PLACES = ("host", "device")


@dataclass(frozen=True)
class Contender:
    """One way of running a model."""

    side: str
    """One of the names above."""
    place: str
    run: Callable[[], object]

    @property
    def ours(self) -> bool:
        return self.side in (PLAIN, BOUND, GRAPH)

    @property
    def name(self) -> str:
        return f"{self.side}, {self.place}"


def ours(runners: Mapping[str, OrtRunner], feeds: Feeds, device: str) -> Iterator[Contender]:
    """Our runner in each of its ways; without IOBinding there is nothing on the device."""
    tensors = tensors_of(feeds, device)
    for side, runner in runners.items():
        yield Contender(side, "host", lambda runner=runner: runner(feeds))
        if side != PLAIN:
            yield Contender(side, "device", lambda runner=runner: runner.run_on_device(tensors))


def theirs(models: Mapping[str, Any], feeds: Feeds, device: str) -> Iterator[Contender]:
    """PyTorch's models; the one output that our graph has is what is brought back."""
    tensors = tensors_of(feeds, device)
    for side, model in models.items():
        yield Contender(side, "host", _host_run(model, feeds, device))
        yield Contender(side, "device", _device_run(model, tensors, device))


def _host_run(model: Any, feeds: Feeds, device: str) -> Callable[[], object]:
    def run() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            # Copying to the host waits for the GPU.
            return model(**tensors_of(feeds, device)).last_hidden_state.cpu().numpy()

    return run


def _device_run(
    model: Any, tensors: Mapping[str, torch.Tensor], device: str
) -> Callable[[], object]:
    def run() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            found = model(**tensors).last_hidden_state
        wait(device)
        return found

    return run
