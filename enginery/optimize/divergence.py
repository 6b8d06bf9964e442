"""Find the nodes at which a cast graph diverges from its FP32 source.

Both graphs run on one batch, and all their inner tensors are compared, in groups. So the nodes are
found without a bisection of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.model.feeds import Feeds
from enginery.optimize.comparison import cast_feeds, drop_padding, input_types
from enginery.passes.ir.graph_file import read_graph
from enginery.passes.ir.nodes import all_nodes, infer_types
from enginery.passes.ir.op_types import FLOAT, has_subgraph
from enginery.passes.ranges.measure import float_tensors
from enginery.runtime.onnxruntime.tracing import GraphTracer

# The number of inner tensors that are compared in one run.
_GROUP = 64
_LAYERS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


@dataclass(frozen=True)
class Divergence:
    """A node whose output differs between the two graphs."""

    node: str
    tensor: str
    """The name of the output."""
    error: float
    """The relative error of the output, see `relative_error`."""
    before: float
    """The largest relative error at the node's inputs."""
    fixed: bool = False
    """True if the node is FP32 already."""


def find_divergences(
    fp32: Path, simulated: Path, feeds: Feeds, *, fixed: Collection[str]
) -> list[Divergence]:
    """Return the nodes at which the cast graph diverges from the FP32 graph, the worst first.

    If nodes with finite inputs have outputs that are not finite, these nodes are returned, in graph
    order: they overflow. Otherwise these are the nodes whose outputs have a larger error than their
    inputs, in descending order of the difference. Nodes in the branches of an If are included.

    Args:
        fp32: the FP32 graph.
        simulated: the graph that simulates the cast, see `simulate_cast`.
        feeds: one batch.
        fixed: names of nodes that are FP32 already. They are marked in the result, because keeping
            them in FP32 again cannot help: the error comes from a cast at their inputs or outputs.
    """
    reference, cast_graph = read_graph(fp32), read_graph(simulated)
    infer_types(reference)
    simulated_names = {value.name for node in all_nodes(cast_graph) for value in node.outputs}
    nodes = [value.producer() for value in float_tensors(reference.graph)]
    nodes = list(dict.fromkeys(node for node in nodes if node is not None))
    names = [
        value.name or ""
        for node in nodes
        for value in node.outputs
        if value.dtype == FLOAT and value.name in simulated_names
    ]
    errors = _relative_errors(fp32, simulated, names, feeds)
    candidates = []
    for node in nodes:
        inputs = [value.name for value in node.inputs if value is not None]
        outputs = [value.name or "" for value in node.outputs if value.name in errors]
        # The nodes inside the branches of an If are candidates themselves.
        if not outputs or has_subgraph(node):
            continue
        before = max((errors.get(name or "", 0.0) for name in inputs), default=0.0)
        error = max(errors[name] for name in outputs)
        candidates.append(
            Divergence(node.name or "", outputs[0], error, before, node.name in fixed)
        )
    # Infinite behind finite inputs: the node overflows, and others only pass it on.
    broken = [c for c in candidates if math.isinf(c.error) and math.isfinite(c.before)]
    if broken:
        return broken
    # Behind a node that adds an error, errors are large, too: what counts is what a node adds.
    added = [c for c in candidates if c.error > c.before and math.isfinite(c.error)]
    return sorted(added, key=lambda c: c.before - c.error)


def measure_layer_errors(fp32: Path, simulated: Path, feeds: Feeds) -> dict[str, float]:
    """Return the relative error of each matrix product and convolution, in graph order.

    The error of a layer contains that of the layers before it. Layers inside of an If or a Loop,
    and those whose error is not finite, are left out.

    Args:
        fp32: the FP32 graph.
        simulated: the graph that simulates the cast.
        feeds: one batch.
    """
    cast_names = {value.name for node in read_graph(simulated).graph for value in node.outputs}
    layers = {
        node.outputs[0].name or "": node.name or ""
        for node in read_graph(fp32).graph
        if node.op_type in _LAYERS and node.outputs[0].name in cast_names
    }
    errors = _relative_errors(fp32, simulated, list(layers), feeds)
    return {layers[name]: error for name, error in errors.items() if math.isfinite(error)}


def _relative_errors(
    fp32: Path, simulated: Path, names: Sequence[str], feeds: Feeds
) -> dict[str, float]:
    """Return the relative error of each float tensor of these names."""
    errors: dict[str, float] = {}
    types = input_types(simulated)
    # All inner tensors together may take far more memory than the model.
    for start in range(0, len(names), _GROUP):
        group = names[start : start + _GROUP]
        with GraphTracer(fp32, group) as trace:
            expected = {name: drop_padding(array, feeds) for name, array in trace(feeds).items()}
        with GraphTracer(simulated, group) as trace:
            actual = {
                name: drop_padding(array, feeds)
                for name, array in trace(cast_feeds(feeds, types)).items()
            }
        errors |= {
            name: relative_error(actual[name], expected[name])
            for name in group
            if expected[name].dtype.kind == "f"
        }
    return errors


def relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the root mean square of the difference, divided by that of the reference.

    Masked values do not count. The error is infinite if the shapes differ, or if a value is finite
    only in the reference.
    """
    if actual.shape != expected.shape:
        return math.inf  # another branch ran, or other elements were selected
    reference = expected.astype(np.float64)
    values = actual.astype(np.float64)
    # Softmax yields 0 for all values that a mask has moved beyond FP16's range.
    masked = (reference < -65504 / 2) & (values < -65504 / 2)
    finite = np.isfinite(reference) & ~masked
    if not np.isfinite(values[finite]).all():
        return math.inf
    if not finite.any():
        return 0.0
    difference = values[finite] - reference[finite]
    scale = math.sqrt(float(np.mean(reference[finite] ** 2)))
    return math.sqrt(float(np.mean(difference**2))) / scale if scale else 0.0
