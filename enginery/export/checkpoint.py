"""Compare what a checkpoint has with what the graphs need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import ExportError


def untrained_weights(model: Any) -> dict[str, NDArray[np.float32]]:
    """Return the weights by name that the files lack, which are random numbers."""
    names = getattr(model, "untrained_weights", ())
    return {
        n: weight.detach().cpu().float().numpy()
        for n, weight in model.named_parameters()
        if n in names
    }


def require_trained(
    untrained: Mapping[str, NDArray[np.float32]], graphs: list[Path], source: Path, task: str
) -> None:
    """Raise ExportError if a graph has weights that the model's files lack.

    A pooler that no output reads, for example, is in no graph. Tracing renames weights that it
    transposes, so matrices are found by their values.
    """
    if not untrained:
        return  # no weight to compare, so the graphs need not be read
    random: list[str] = []
    for path in graphs:
        tensors = load_graph(path).graph.initializer
        names = {tensor.name for tensor in tensors}
        shapes = {weight.shape for weight in untrained.values() if weight.ndim > 1}
        shapes |= {shape[::-1] for shape in shapes}
        matrices = [
            numpy_helper.to_array(tensor, str(path.parent)).astype(np.float32)
            for tensor in tensors
            if tuple(tensor.dims) in shapes
        ]
        random += [
            name
            for name, weight in untrained.items()
            if name in names
            or (
                weight.ndim > 1
                and any(np.array_equal(m, w) for m in matrices for w in (weight, weight.T))
            )
        ]
    if random := sorted(set(random)):
        raise ExportError(
            f"{source} has no weights for {task}: {', '.join(random[:4])}"
            f"{', …' if len(random) > 4 else ''} would be random numbers.",
            do="Name the task that the model was trained for: --task, or --task auto.",
            option="task",
        )
