"""Find the weights that a model's own answers depend on and its graphs do not.

A graph may have fewer outputs than the model: CLIP's tower without its projection is valid and
answers another question. Which weights an output depends on is read off PyTorch's autograd graph,
of a run that keeps no activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch.autograd.graph import saved_tensors_hooks

from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import ExportError
from enginery.core.model.files import ModelConfig


class UsedWeights:
    """Collect the weights on which the outputs of graphs, and those of the model itself, depend."""

    def __init__(self, *, is_on: bool = True) -> None:
        """Start without weights; if it is not on, none are collected."""
        self._is_on = is_on
        self._weights: dict[int, Any] = {}
        self._in_graphs: set[int] = set()
        self._poolers: set[int] = set()
        """Weights that `pooler_output` alone depends on, where another output is the vector."""
        self.notes: list[str] = []
        """Why the weights in use are not known."""

    def add(
        self, model: Any, inputs: Mapping[str, Any], file: str, *, outputs: Sequence[str] = ()
    ) -> None:
        """Run the module that a graph is traced from, with the graph's outputs and with its own.

        Args:
            model: the module, with Optimum's `forward` as an attribute if it is that one's graph.
            inputs: what the graph is traced with.
            file: name of the graph.
            outputs: the graph's outputs; empty for all that the module returns.
        """
        if not self._is_on:
            return
        # Nothing is computed backwards, so no activation has to be kept.
        nothing_kept = saved_tensors_hooks(lambda _: None, lambda kept: kept)
        try:
            with torch.enable_grad(), nothing_kept:
                traced = model(**inputs)
                traced = {name: traced[name] for name in outputs} if outputs else traced
                self._in_graphs |= {id(weight) for weight in _reached(traced)}
                results = type(model).forward(model, **inputs)
                reached = {id(weight): weight for weight in _reached(results)}
                self._weights |= reached
                if _has_spare_pooler(model, results):
                    spared = {n: tensor for n, tensor in results.items() if n != "pooler_output"}
                    self._poolers |= reached.keys() - {id(weight) for weight in _reached(spared)}
        except Exception as error:  # a model of any class may fail in any way
            self.notes.append(f"{file}: which weights are in use is not known: {error}")

    def left_out(self, model: Any, graphs: Sequence[Path]) -> tuple[list[str], list[str]]:
        """Return the weights that only the model's own outputs depend on, by name, sorted.

        A weight can be in a graph although no gradient reaches it: before an argmax, for example.

        Returns:
            Weights that change the features, and those of a pooler that nothing reads.
        """
        missing = self._weights.keys() - self._in_graphs
        weights = {n: w for n, w in model.named_parameters() if id(w) in missing}
        poolers = {
            name
            for name, weight in weights.items()
            if id(weight) in self._poolers or "pooler" in name.split(".")
        }
        needed = {
            n: w.detach().cpu().float().numpy() for n, w in weights.items() if n not in poolers
        }
        lost: list[str] = []
        if needed:
            # The exporter keeps one of several equal vectors, under any of their names.
            kept = set(weights_in_graphs(needed, graphs, by_value=1))
            modules = {name.rpartition(".")[0] for name in needed.keys() - kept}
            lost = sorted(name for name in needed if name.rpartition(".")[0] in modules)
        return lost, sorted(poolers)


def require_used(model: Any, used: UsedWeights, graphs: Sequence[Path], *, do: str) -> list[str]:
    """Return notes on poolers that are in no graph.

    Features without a projection are of another space. BERT's pooler is left from pretraining, and
    no embedding is read from it.

    Args:
        model: the model.
        used: the weights that its outputs depend on.
        graphs: the ONNX files.
        do: what to do about another weight that is in no graph.

    Raises:
        ExportError: there is such a weight.
    """
    random = getattr(model, "untrained_weights", ())
    lost, poolers = (
        [name for name in names if name not in random] for names in used.left_out(model, graphs)
    )
    if lost:
        raise ExportError(
            f"the outputs of {type(model).__name__} depend on weights that are in no graph: "
            f"{', '.join(lost[:4])}{', …' if len(lost) > 4 else ''}.",
            do=do,
        )
    notes = list(used.notes)
    if poolers:
        notes.append(f"left out, because no output depends on it: {', '.join(poolers)}")
    return notes


def _has_spare_pooler(model: Any, results: Any) -> bool:
    """Return True if a model's vector is made of its last hidden state, not by its pooler."""
    names_encoder = ModelConfig(architectures=(type(model).__name__,)).names_encoder
    return isinstance(results, Mapping) and "last_hidden_state" in results and not names_encoder


def _reached(outputs: Any) -> Iterator[Any]:
    """Yield the parameters that outputs depend on."""
    pending = [tensor.grad_fn for tensor in _tensors(outputs) if tensor.grad_fn is not None]
    known = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):  # where a gradient would be accumulated
            yield node.variable
        following = {after for after, _ in node.next_functions if after is not None} - known
        known |= following
        pending += following


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def weights_in_graphs(
    weights: Mapping[str, NDArray[np.float32]], graphs: Sequence[Path], *, by_value: int = 2
) -> list[str]:
    """Return the names of the weights that a graph has, once for each graph.

    Args:
        weights: the weights by name.
        graphs: the ONNX files.
        by_value: number of dims from which on weights are found by their values, too: tracing
            renames matrices that it transposes. Vectors are often equal, all zeros for example.
    """
    names: list[str] = []
    for path in graphs:
        tensors = load_graph(path).graph.initializer
        known = {tensor.name for tensor in tensors}
        # The dynamo exporter traces a wrapper, whose only part is the model.
        known |= {name.removeprefix("model.") for name in known}
        shapes = {weight.shape for weight in weights.values() if weight.ndim >= by_value}
        shapes |= {shape[::-1] for shape in shapes}
        arrays = [
            numpy_helper.to_array(tensor, str(path.parent)).astype(np.float32)
            for tensor in tensors
            if tuple(tensor.dims) in shapes
        ]
        names += [
            name
            for name, weight in weights.items()
            if name in known
            or (
                weight.ndim >= by_value
                and any(np.array_equal(m, w) for m in arrays for w in (weight, weight.T))
            )
        ]
    return names
