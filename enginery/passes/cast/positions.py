"""Find the nodes that compute positions, angles and counts, for which FP16 is too coarse.

FP16 represents integers exactly only up to 2048. T5 sorts distances into buckets by a logarithm
that is cast to an integer; rotary embeddings compute the sine of position times frequency; the new
size of an image is a rounded product. Such values stay FP32, and so do all nodes that compute
nothing but such values. These tensors are small, so FP16 would save no time.

The search starts from the consumers. A node is kept if its float outputs do not depend on data, and
are read only by Casts to integers or by nodes that are kept already. Data are the float inputs of
the graph and float tables in which integers look something up. Sin and Cos are kept if their input
does not depend on data.

>>> from enginery.passes.ir.nodes import infer_types
>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (int64[n] i) => (int64[n] j) {
...   f = Cast <to: int = 1> (i)  h = Log (f)  j = Cast <to: int = 7> (h) }''')
>>> infer_types(model)
>>> find_position_nodes(model.graph)
{'Log_1': 'its values become integers', 'Cast_1': 'its values become integers'}
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from enginery.passes.ir.op_types import FLOAT, has_subgraph

_ANGLES = ("Sin", "Cos")
# They look up rows of a float table, so their output is data.
_LOOKUPS = ("Gather", "GatherND", "GatherElements")


def find_position_nodes(graph: ir.Graph) -> dict[str, str]:
    """Return the names of such nodes of one graph, with the reason. Values must have types."""
    nodes = list(graph)
    data = _data_values(graph, nodes)
    reasons_by_node: dict[str, str] = {}
    outputs = set(graph.outputs)
    # Backwards: whether a node is kept follows from its consumers.
    for node in reversed(nodes):
        floats = [value for value in node.outputs if value.dtype == FLOAT]
        if not floats or has_subgraph(node):
            continue
        if node.op_type in _ANGLES and node.inputs[0] not in data:
            reasons_by_node[node.name or ""] = "an angle computed from positions"
            continue
        # What the graph returns is read by code that is not known here.
        if any(value in outputs for value in floats):
            continue
        reasons = [_reason(value, data, reasons_by_node) for value in floats]
        if all(reasons):
            reasons_by_node[node.name or ""] = reasons[0]
    return reasons_by_node


def _data_values(graph: ir.Graph, nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """Return the float values that depend on a float input or on a lookup in a float table."""
    data = {value for value in graph.inputs if value.dtype == FLOAT}
    for node in nodes:
        looks_up = (
            node.op_type in _LOOKUPS
            and node.inputs[0] is not None
            and node.inputs[0].dtype == FLOAT
            and node.inputs[0].is_initializer()
        )
        # A branch may read values of this graph that are not among the node's inputs.
        unknown = has_subgraph(node)
        if looks_up or unknown or any(value in data for value in node.inputs):
            data.update(value for value in node.outputs if value.dtype == FLOAT)
    return data


def _reason(value: ir.Value, data: set[ir.Value], reasons_by_node: dict[str, str]) -> str:
    """Return why all uses of a value need FP32, or '' if one does not."""
    reason = ""
    for use in value.uses():
        node = use.node
        # The nodes of a branch are searched on their own, so their reasons are not known here.
        if has_subgraph(node) or node.graph is not value.graph:
            return ""
        if node.name in reasons_by_node:
            # The node is kept, but data that it reads is not a position.
            if value in data:
                return ""
            reason = reasons_by_node[node.name]
        elif value not in data and _becomes_integers(node):
            reason = "its values become integers"
        else:
            return ""
    return reason


def _becomes_integers(node: ir.Node) -> bool:
    return node.op_type == "Cast" and all(
        value.dtype is not None and value.dtype.is_integer() for value in node.outputs
    )
