"""Nodes that compute positions, angles and counts: FP16 is too coarse for them, and no faster.

    >>> find_position_nodes(model.graph)
    {'/block.0/SelfAttention/Log': 'its values become integers', …}

FP16 counts to 2048 without gaps. T5 buckets distances by a logarithm that is then cut to an
integer; rotary embeddings take the sine of position times frequency; an image's new size is a
product that is rounded. A value that only such results are made of stays FP32, and so does what
makes it.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from enginery.passes.op_types import FLOAT, has_subgraph

_ANGLES = ("Sin", "Cos")
# These look something up in float weights, or multiply by them: what comes out is data.
_LOOKUPS = ("Gather", "GatherND", "GatherElements")


def find_position_nodes(graph: ir.Graph) -> dict[str, str]:
    """The names of such nodes of one graph, with the reason. Values must have their types."""
    nodes = list(graph)
    data = _data_values(graph, nodes)
    kept: dict[str, str] = {}
    outputs = set(graph.outputs)
    for node in reversed(nodes):
        floats = [value for value in node.outputs if value.dtype == FLOAT]
        if not floats or has_subgraph(node):
            continue
        if node.op_type in _ANGLES and node.inputs[0] not in data:
            kept[node.name or ""] = "an angle made of positions"
            continue
        if any(value in outputs for value in floats):
            continue
        reasons = [_reason(value, data, kept) for value in floats]
        if all(reasons):
            kept[node.name or ""] = reasons[0]
    return kept


def _data_values(graph: ir.Graph, nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """Float values that depend on a float input or on a table looked up by an integer input."""
    data = {value for value in graph.inputs if value.dtype == FLOAT}
    for node in nodes:
        looks_up = (
            node.op_type in _LOOKUPS
            and node.inputs[0] is not None
            and node.inputs[0].dtype == FLOAT
            and node.inputs[0].is_initializer()
        )
        unknown = has_subgraph(node)
        if looks_up or unknown or any(value in data for value in node.inputs):
            data.update(value for value in node.outputs if value.dtype == FLOAT)
    return data


def _reason(value: ir.Value, data: set[ir.Value], kept: dict[str, str]) -> str:
    """Why every use of a value wants FP32; empty where one does not."""
    reason = ""
    for use in value.uses():
        node = use.node
        if has_subgraph(node) or node.graph is not value.graph:
            return ""
        if node.name in kept:
            # An angle is kept whatever it is made of, but data must not become angles' cones.
            if value in data:
                return ""
            reason = kept[node.name]
        elif value not in data and _becomes_integers(node):
            reason = "its values become integers"
        else:
            return ""
    return reason


def _becomes_integers(node: ir.Node) -> bool:
    return node.op_type == "Cast" and all(
        value.dtype is not None and value.dtype.is_integer() for value in node.outputs
    )
