"""The backends that run FP16 at one shape: enginery's runner and PyTorch, each in several ways.

On `host`, inputs and outputs are numpy arrays. On `device`, inputs are torch tensors on the GPU,
and outputs stay there. Every run is synchronized.
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
class Variant:
    """A way of running a model."""

    side: str
    """One of the names above."""
    place: str
    run: Callable[[], object]

    @property
    def is_enginery(self) -> bool:
        return self.side in (PLAIN, BOUND, GRAPH)

    @property
    def name(self) -> str:
        return f"{self.side}, {self.place}"


def enginery_variants(
    runners: Mapping[str, OrtRunner], feeds: Feeds, device: str
) -> Iterator[Variant]:
    """Return the ways of enginery's runner; without IOBinding it runs on `host` only."""
    tensors = tensors_of(feeds, device)
    for side, runner in runners.items():
        yield Variant(side, "host", lambda runner=runner: runner(feeds))
        if side != PLAIN:
            yield Variant(side, "device", lambda runner=runner: runner.run_on_device(tensors))


def pytorch_variants(models: Mapping[str, Any], feeds: Feeds, device: str) -> Iterator[Variant]:
    """Return PyTorch's models; only the output that the graph has is copied back."""
    tensors = tensors_of(feeds, device)
    for side, model in models.items():
        yield Variant(side, "host", _host_run(model, feeds, device))
        yield Variant(side, "device", _device_run(model, tensors, device))


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
