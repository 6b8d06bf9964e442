"""Find the nodes that compute positions, angles and counts, for which FP16 is too coarse.

FP16 represents integers exactly only up to 2048, BF16 up to 256. T5 sorts distances into buckets by
a logarithm that is cast to an integer; rotary embeddings compute the sine of position times
frequency; the new size of an image is a rounded product; an exporter may compare token ids as
floats. Such values stay FP32, and so do all nodes that compute nothing but such values. These
tensors are small, so FP16 would save no time.

The search starts from the consumers. A node is kept if its float outputs do not depend on data, and

- are read only by Casts to integers or by nodes that are kept already, or
- may be larger than the largest exact integer, and are read, among others, by a comparison or
  another op that tells neighbouring integers apart.

Data are the float inputs of the graph, but for points in an image, and float tables in which
integers look something up. Sin and Cos are kept if their input does not depend on data.

>>> from enginery.passes.ir.nodes import infer_types
>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (int64[n] i) => (int64[n] j) {
...   f = Cast <to: int = 1> (i)  h = Log (f)  j = Cast <to: int = 7> (h) }''')
>>> infer_types(model)
>>> find_position_nodes(model.graph)
{'Log_1': 'its values become integers', 'Cast_1': 'its values become integers'}
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from enginery.passes.ir.nodes import all_graphs
from enginery.passes.ir.op_types import FLOAT, has_subgraph

LARGEST_EXACT = {ir.DataType.FLOAT16: 2048, ir.DataType.BFLOAT16: 256}
"""Largest integer up to which a type represents every integer."""

_ANGLES = ("Sin", "Cos")
_POINTS = "input_points"
"""Input of a model that segments: positions of up to 1024 pixels, where FP16 has steps of half a
pixel."""
# They look up rows of a float table, so their output is data.
_LOOKUPS = ("Gather", "GatherND", "GatherElements")
_EXACT = frozenset(
    {
        "ArgMax",
        "ArgMin",
        "Ceil",
        "Equal",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "Hardmax",
        "Less",
        "LessOrEqual",
        "Mod",
        "NonZero",
        "OneHot",
        "Round",
        "Sign",
        "TopK",
        "Unique",
    }
)
"""Ops whose result changes if an integer is replaced by its neighbour."""
_MOVES = frozenset(
    {
        "Cast",
        "Expand",
        "Gather",
        "Identity",
        "Neg",
        "Abs",
        "Reshape",
        "Slice",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
"""Ops whose results have the magnitudes of their first input."""
_LARGEST_CONSTANT = 1 << 16
"""Elements of the largest constant that is read for its magnitude."""
_TYPES_OF_TEXTS = 16
"""More than the values of `token_type_ids` in any model: there are two, in XLNet three."""


def find_position_nodes(graph: ir.Graph, *, largest_exact: int = 2048) -> dict[str, str]:
    """Return the names of such nodes of a graph and its subgraphs, with the reason.

    Args:
        graph: the graph, whose values have types.
        largest_exact: integers up to this one are exact in the low precision.
    """
    graphs = list(all_graphs(graph))
    data: set[ir.Value] = set()
    # Forwards: a branch reads values of the graph around it.
    for part in graphs:
        _add_data_values(part, data)
    reasons_by_node: dict[str, str] = {}
    # Backwards, and branches before what surrounds them: whether a node is kept follows from its
    # consumers.
    for part in reversed(graphs):
        outputs = set(part.outputs)
        for node in reversed(list(part)):
            floats = [value for value in node.outputs if value.dtype == FLOAT]
            if not floats or has_subgraph(node):
                continue
            if node.op_type in _ANGLES and node.inputs[0] not in data:
                reasons_by_node[node.name or ""] = "an angle computed from positions"
                continue
            # Of an op such as Floor, whose own result is small, what it reads counts.
            read = node.inputs if _needs_exact_integers(node) else ()
            integers = [v for v in read if v is not None and v.dtype == FLOAT and v not in data]
            if any(_largest_magnitude(value) > largest_exact for value in integers) or any(
                _is_compared(value, data, reasons_by_node, largest_exact) for value in floats
            ):
                reasons_by_node[node.name or ""] = _COMPARED
                continue
            # What the graph returns is read by code that is not known here.
            if any(value in outputs for value in floats):
                continue
            reasons = [_reason(value, data, reasons_by_node) for value in floats]
            if all(reasons):
                reasons_by_node[node.name or ""] = reasons[0]
    return reasons_by_node


_COMPARED = "its values are integers that are compared"


def _is_compared(
    value: ir.Value, data: set[ir.Value], reasons_by_node: dict[str, str], largest_exact: int
) -> bool:
    """Return True if a node needs a value exactly, and the low precision may not have it."""
    if value in data:
        return False
    needed = any(
        _needs_exact_integers(use.node) or reasons_by_node.get(use.node.name or "") == _COMPARED
        for use in value.uses()
    )
    return needed and _largest_magnitude(value) > largest_exact


def _needs_exact_integers(node: ir.Node) -> bool:
    if node.op_type == "Cast":  # to bool: whether a difference is 0
        return all(value.dtype == ir.DataType.BOOL for value in node.outputs)
    return node.op_type in _EXACT and node.domain == ""


def _largest_magnitude(value: ir.Value | None, steps: int = 8) -> float:
    """Return a bound of the magnitudes of a value, as far as a few nodes before it show one."""
    if value is None or not steps:
        return math.inf
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        small = 0 < tensor.size <= _LARGEST_CONSTANT
        return float(np.abs(tensor.numpy().astype(np.float64)).max()) if small else math.inf
    if value.dtype == ir.DataType.BOOL:
        return 1.0
    node = value.producer()
    if node is None:
        return _largest_input(value)
    if node.op_type == "Sign":
        return 1.0
    bounds = [_largest_magnitude(source, steps - 1) for source in node.inputs]
    if node.op_type in _MOVES:
        return bounds[0]
    if node.op_type in ("Concat", "Max", "Min"):
        return max(bounds)
    if node.op_type in ("Where", "Clip") and len(bounds) == 3:
        return max(bounds[1:])
    if node.op_type in ("Add", "Sub"):
        return sum(bounds)
    if node.op_type == "Mul":
        return math.prod(bounds)
    return bounds[1] if node.op_type == "Mod" else math.inf


def _largest_input(value: ir.Value) -> float:
    name = value.name or ""
    if name.endswith("mask"):  # 0 or 1
        return 1.0
    return float(_TYPES_OF_TEXTS) if name == "token_type_ids" else math.inf


def _add_data_values(graph: ir.Graph, data: set[ir.Value]) -> None:
    """Add the float values of a graph that depend on a float input or on a lookup in a table."""
    data.update(v for v in graph.inputs if v.dtype == FLOAT and v.name != _POINTS)
    for node in graph:
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


def _reason(value: ir.Value, data: set[ir.Value], reasons_by_node: dict[str, str]) -> str:
    """Return why all uses of a value need FP32, or '' if one does not."""
    reason = ""
    for use in value.uses():
        node = use.node
        # The nodes of a branch are searched on their own, so their reasons are not known here.
        if has_subgraph(node) or node.graph is not value.graph:
            return ""
        if node.op_type == "Shape":  # reads no numbers
            continue
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
