"""Compare what a checkpoint has with what the model and its graphs need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ExportError
from enginery.export.used_weights import weights_in_graphs
from enginery.runtime.pytorch.checkpoint import (
    CHANGES_ANSWERS,
    UnusedTensor,
    describe_names,
    find_renamed,
)


def check_unused(model: Any, source: Path, *, allow_unused: bool) -> list[str]:
    """Return notes on the tensors of the checkpoint that no weight of the model took.

    Args:
        model: the model, as `load_pytorch` returns it.
        source: its directory.
        allow_unused: accept those that change answers.

    Raises:
        ExportError: the weights have other names than the model's, or tensors that change its
            answers are not in it.
    """
    unused: Sequence[UnusedTensor] = getattr(model, "unused_tensors", ())
    missing = getattr(model, "untrained_weights", ())
    renamed = find_renamed(missing, unused)
    if 2 * len(renamed) > len(missing):
        name, expected = next(iter(renamed.items()))
        raise ExportError(
            f"{len(renamed)} weights of {source} have other names than the model's: {name}, "
            f"expected {expected}.",
            do=f"Save what {type(model).__name__} reads: the model itself, not what wraps it "
            "(model.module of DataParallel, model._orig_mod of torch.compile, merge_and_unload() "
            "of PEFT); or name another --task.",
        )
    adapters = [tensor.name for tensor in unused if tensor.kind == "adapter"]
    lost = [tensor.name for tensor in unused if tensor.kind in CHANGES_ANSWERS]
    if lost and not allow_unused:
        name = type(model).__name__
        merge = "merge the adapter (merge_and_unload() of PEFT) and save the model"
        other = "correct config.json, or name the class that has them in `architectures`"
        raise ExportError(
            f"{source} has tensors that {name} does not use, so its answers would differ: "
            f"{describe_names(lost)}.",
            do=f"Either {merge if adapters else other}; or leave them out with --allow-unused.",
            option="allow_unused",
        )
    notes = []
    if lost:
        notes.append(f"left out, as allow_unused says: {describe_names(lost)}")
    heads = [tensor for tensor in unused if tensor.kind == "head"]
    if heads:
        owners = ", ".join(dict.fromkeys(tensor.owner for tensor in heads if tensor.owner))
        notes.append(
            f"{type(model).__name__} does not use {describe_names([t.name for t in heads])}"
            + (f", which {owners} has" if owners else "")
        )
    if constants := [tensor.name for tensor in unused if tensor.kind in ("constant", "zeros")]:
        notes.append(f"of no effect in the checkpoint: {describe_names(constants)}")
    return notes


def untrained_weights(model: Any) -> dict[str, NDArray[np.float32]]:
    """Return the weights by name that the files lack, which are random numbers."""
    names = getattr(model, "untrained_weights", ())
    return {
        n: weight.detach().cpu().float().numpy()
        for n, weight in model.named_parameters()
        if n in names
    }


def require_trained(
    untrained: Mapping[str, NDArray[np.float32]],
    graphs: list[Path],
    source: Path,
    task: str,
    unused: Sequence[UnusedTensor] = (),
) -> None:
    """Raise ExportError if a graph has weights that the model's files lack.

    A pooler that no output reads, for example, is in no graph.
    """
    if not untrained:
        return  # no weight to compare, so the graphs need not be read
    if random := sorted(set(weights_in_graphs(untrained, graphs))):
        raise ExportError(
            f"{source} has no weights for {task}: {', '.join(random[:4])}"
            f"{', …' if len(random) > 4 else ''} would be random numbers."
            + (f" No weight took {describe_names([t.name for t in unused])}." if unused else ""),
            do="Name the task that the model was trained for: --task, or --task auto.",
            option="task",
        )
