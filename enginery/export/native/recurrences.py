"""Lower the recurrence of a state space model as an ONNX Scan.

In eager PyTorch it is a loop in Python over the positions, of which an exporter would write the
steps of the example. The models of Mamba's kind call the package mambapy instead, if their layers
are told to: its `pscan` computes the states of all positions at once. Here a scan of torch is in
its place, for which torch has a translation to ONNX.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._higher_order_ops.scan import scan

_PACKAGE, _MODULE = "mambapy", "mambapy.pscan"
_SWITCH = "use_mambapy"
_IS_AVAILABLE = "is_mambapy_available"


def scan_states(decays: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Return the states of all positions: `state = decay * state + update`, from 0.

    The signature and the shapes are those of `pscan` of mambapy.

    Args:
        decays: (batch, positions, channels, state).
        updates: of the same shape.

    Returns:
        The states, of the same shape.
    """

    def step(state: torch.Tensor, current: Any) -> tuple[torch.Tensor, torch.Tensor]:
        decay, update = current
        state = decay * state + update
        return state, state.clone()  # a scan may not return one tensor twice

    by_position = decays.transpose(0, 1), updates.transpose(0, 1)
    _, states = scan(step, torch.zeros_like(updates[:, 0]), by_position)
    result: torch.Tensor = states.transpose(0, 1)
    return result


@contextmanager
def exportable_scans(module: torch.nn.Module) -> Iterator[None]:
    """Let the layers of a state space model compute their states in a scan."""
    layers = [part for part in module.modules() if hasattr(part, _SWITCH)]
    if not layers:
        yield
        return
    package, implementation = ModuleType(_PACKAGE), ModuleType(_MODULE)
    vars(implementation)["pscan"] = scan_states
    with ExitStack() as patches:
        patches.enter_context(_imported({_PACKAGE: package, _MODULE: implementation}))
        for name in {type(layer).__module__ for layer in layers}:
            code = sys.modules[name]
            if hasattr(code, _IS_AVAILABLE):
                patches.enter_context(patch.object(code, _IS_AVAILABLE, lambda: True))
        for layer in layers:
            patches.enter_context(patch.object(layer, _SWITCH, True))
        yield


@contextmanager
def _imported(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Let modules be imported. What else is imported in between stays, unlike with `patch.dict`."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
