"""Leave the rows of an attention that no position attends to as they are.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (bool[b, 1, s, t] visible, float[b, 1, s, t] scores, float[b, 1, t, 8] v)
...   => (float[b, 1, s, 8] y) <float lowest = {-3e38}, float one = {1}, float zero = {0},
...     int64[1] axis = {-1}> {
...   shown = Cast <to = 1> (visible)  count = ReduceSum (shown, axis)  none = Less (count, one)
...   hidden = Not (visible)  unseen = Cast <to = 1> (hidden)  mask = Mul (unseen, lowest)
...   masked = Add (scores, mask)  weights = Softmax <axis = -1> (masked)
...   context = MatMul (weights, v)  y = Where (none, zero, context)
... }''')
>>> keep_unattended_rows(model)
1
>>> [node.op_type for node in model.graph]
['Not', 'Cast', 'Mul', 'Add', 'Softmax', 'MatMul']

transformers' exporter sets a row to zero that sees no position: one of padding. PyTorch's eager
attention averages all positions there, since masks are the lowest number and not infinity. Nobody
reads such rows, and without the nodes for them a mask has no readers but the scores.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.passes.ir.nodes import constant_numbers


def keep_unattended_rows(model: ir.Model) -> int:
    """Remove the nodes that set rows without visible positions to zero, where masks are finite.

    Returns:
        The number of attentions that they were removed from.
    """
    count = 0
    for node in list(model.graph):
        context = _zeroed(node)
        if context is None:
            continue
        result = node.outputs[0]
        if result.is_graph_output():
            context.name, result.name = result.name, f"{result.name}_zeroed"
            model.graph.outputs[model.graph.outputs.index(result)] = context
        result.replace_all_uses_with(context)
        count += 1
    RemoveUnusedNodesPass()(model)
    return count


def _zeroed(node: ir.Node) -> ir.Value | None:
    """Return the context of an attention of which a node sets rows to zero; None for others."""
    if node.op_type != "Where":
        return None
    condition, zero, context = node.inputs
    is_zero = (numbers := constant_numbers(zero)) is not None and not any(numbers)
    count = _operand(condition, "Less", 0)
    seen = _operand(_operand(count, "ReduceSum", 0), "Cast", 0)
    masked = _operand(_operand(context, "MatMul", 0), "Softmax", 0)
    if not is_zero or seen is None or masked is None:
        return None
    mask = _operand(masked, "Add", 1)
    return context if mask is not None and _is_finite(mask) else None


def _is_finite(mask: ir.Value) -> bool:
    """Return True for a mask that hides positions by a number, which is not infinity."""
    node = mask.producer()
    if node is None or node.op_type not in ("Mul", "Where"):
        return False
    hidden = node.inputs[-1]
    filled = hidden.producer() if hidden is not None else None
    if filled is not None and filled.op_type == "Expand":
        hidden = filled.inputs[0]
    numbers = constant_numbers(hidden)
    return numbers is not None and bool(np.isfinite(numbers).all())


def _operand(value: ir.Value | None, op_type: str, index: int) -> ir.Value | None:
    """Return an input of the node that computes a value, if it has this type."""
    node = value.producer() if value is not None else None
    return node.inputs[index] if node is not None and node.op_type == op_type else None
