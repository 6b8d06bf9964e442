"""Where a cast graph parts from the FP32 one that it was made from.

Takes the paths of both and one batch; leaves nothing on disk.

    >>> find_divergences(fp32, simulated, batches[0], fixed=islands)[0]
    Divergence(node='/layer.2/Pow', tensor='/layer.2/Pow_output_0', error=inf, before=3.1e-4, …)

Errors are those of single tensors, so that a graph need not be cut apart to find the node.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.optimize.comparison import cast_feeds, drop_padding, input_types
from enginery.passes.graph_file import read_graph
from enginery.passes.nodes import all_nodes, infer_types
from enginery.passes.op_types import FLOAT, has_subgraph
from enginery.passes.ranges import float_tensors
from enginery.runtime.tracing import GraphTracer

Feeds = Mapping[str, NDArray[Any]]

# Inner tensors of both graphs that are compared in one run.
_GROUP = 64


@dataclass(frozen=True)
class Divergence:
    """A node whose output is off."""

    node: str
    tensor: str
    error: float
    """Root mean square of the difference over that of the tensor; infinite for NaN."""
    before: float
    """The largest such error at the node's inputs."""
    fixed: bool = False
    """The node is FP32 already."""


def find_divergences(
    fp32: Path, simulated: Path, feeds: Feeds, *, fixed: Collection[str]
) -> list[Divergence]:
    """The nodes where the cast graph leaves the FP32 one, the most telling first.

    Those whose outputs are not finite, in the graph's order; or else those that add to the error,
    by how much. Nodes in the branches of an If are among them. Those that are FP32 already
    (`fixed`) are marked: no cast of theirs is at fault, only one behind or before them.
    """
    reference, other = read_graph(fp32), read_graph(simulated)
    infer_types(reference)
    made = {value.name for node in all_nodes(other) for value in node.outputs}
    nodes = [value.producer() for value in float_tensors(reference.graph)]
    nodes = list(dict.fromkeys(node for node in nodes if node is not None))
    names = [value.name or "" for node in nodes for value in node.outputs
             if value.dtype == FLOAT and value.name in made]  # fmt: skip
    errors: dict[str, float] = {}
    types = input_types(simulated)
    for start in range(0, len(names), _GROUP):
        group = names[start : start + _GROUP]
        with GraphTracer(fp32, group) as trace:
            expected = {name: drop_padding(array, feeds) for name, array in trace(feeds).items()}
        with GraphTracer(simulated, group) as trace:
            found = {name: drop_padding(array, feeds)
                     for name, array in trace(cast_feeds(feeds, types)).items()}  # fmt: skip
        errors |= {name: relative_error(found[name], expected[name])
                   for name in group if expected[name].dtype.kind == "f"}  # fmt: skip
    candidates = []
    for node in nodes:
        inputs = [value.name for value in node.inputs if value is not None]
        outputs = [value.name or "" for value in node.outputs if value.name in errors]
        if not outputs or has_subgraph(node):
            continue
        before = max((errors.get(name or "", 0.0) for name in inputs), default=0.0)
        error = max(errors[name] for name in outputs)
        candidates.append(
            Divergence(node.name or "", outputs[0], error, before, node.name in fixed)
        )
    broken = [c for c in candidates if math.isinf(c.error) and math.isfinite(c.before)]
    if broken:
        return broken
    added = [c for c in candidates if c.error > c.before and math.isfinite(c.error)]
    return sorted(added, key=lambda c: c.before - c.error)


def relative_error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Root mean square of the difference over that of the reference, masks left out.

    Infinite where one side is not finite and the other is: a mask that was clamped is. Infinite,
    too, where the shapes differ.
    """
    if found.shape != expected.shape:
        return math.inf  # another branch was taken, or other elements were picked
    reference = expected.astype(np.float64)
    values = found.astype(np.float64)
    # What a mask pushed out of FP16's range is the same to Softmax, wherever it lies.
    masked = (reference < -65504 / 2) & (values < -65504 / 2)
    finite = np.isfinite(reference) & ~masked
    if not np.isfinite(values[finite]).all():
        return math.inf
    if not finite.any():
        return 0.0
    difference = values[finite] - reference[finite]
    scale = math.sqrt(float(np.mean(reference[finite] ** 2)))
    return math.sqrt(float(np.mean(difference**2))) / scale if scale else 0.0
