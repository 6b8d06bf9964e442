"""Give attentions of rank 3, whose heads are rows of the batch, a dim of one head.

`torch.nn.MultiheadAttention` computes (batch * heads, positions, head_dim), as do some models.
Afterwards they are (batch * heads, 1, positions, head_dim), which `find` knows:

    MatMul (q, k) → MatMul (Transpose (Reshape (q)), …)

The Reshapes and Transpositions end in the layout (rows, positions, hidden) that the fused operators
take, so that none of them is left.
"""

from __future__ import annotations

import onnx_ir as ir

from enginery.passes.attention.scores import path_to_product, product_after
from enginery.passes.ir.builder import Builder
from enginery.passes.ir.op_types import FLOAT

_HEADS_FIRST = (0, 2, 1, 3)
_SWAPPED = (0, 2, 1)
_COMBINING = frozenset({"Add", "Mul", "Div", "Where"})
_Factors = tuple[ir.Value, ir.Value, ir.Value]
"""Queries, keys, (rows, head_dim, positions), and values."""
_STEPS = _COMBINING | {"Cast", "Identity"}


def add_head_dims(model: ir.Model, build: Builder) -> None:
    """Rewrite all such attentions of the main graph, which is to be sorted afterwards.

    Args:
        model: the model, whose values have types and shapes.
        build: appends the nodes.
    """
    for softmax in list(model.graph):
        if softmax.op_type != "Softmax" or _rank(softmax.outputs[0]) != 3:
            continue
        if softmax.attributes.get_int("axis", -1) not in (-1, 2):
            continue
        path = path_to_product(softmax.inputs[0])
        context, _ = product_after(softmax)
        if path is None or context is None or not _are_steps(path[1:]):
            continue
        factors = _factors(path[0], context)
        if factors is not None:
            _add_head_dim(build, [*path, softmax], context, factors)


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _are_steps(nodes: list[ir.Node]) -> bool:
    """Return True if nodes only combine the scores with what has no more dims."""
    inputs = [value for node in nodes for value in node.inputs]
    known = all((rank := _rank(value)) is not None and rank <= 3 for value in inputs)
    return known and all(node.op_type in _STEPS for node in nodes)


def _factors(scores: ir.Node, context: ir.Node) -> _Factors | None:
    """Return queries, keys and values; None if one has other dims, or no fixed width.

    A result that is an output of the graph would need another name.
    """
    query, keys, values = scores.inputs[0], scores.inputs[1], context.inputs[1]
    if query is None or keys is None or values is None or context.outputs[0].is_graph_output():
        return None
    for value, axis in ((query, 2), (keys, 1), (values, 2)):
        shape = value.shape
        if shape is None or len(shape) != 3 or value.dtype != FLOAT:
            return None
        if not isinstance(shape[axis], int):
            return None
    return query, keys, values


def _add_head_dim(
    build: Builder, steps: list[ir.Node], context: ir.Node, factors: _Factors
) -> None:
    scores = steps[0]
    query, keys, values = factors
    scores.replace_input_with(0, _with_head(build, query))
    by_head = _with_head(build, _swapped(build, keys))
    scores.replace_input_with(1, _transposed(build, by_head, (0, 1, 3, 2)))
    context.replace_input_with(1, _with_head(build, values))
    computed = {scores.outputs[0]}
    for node in steps[1:]:
        if node.op_type in _COMBINING:
            for index, operand in enumerate(node.inputs):
                if operand is not None and operand not in computed and _rank(operand) == 3:
                    node.replace_input_with(index, _unsqueezed(build, operand))
        computed.add(node.outputs[0])
    _insert_head(scores.outputs[0])
    for node in steps[1:]:
        _insert_head(node.outputs[0])
    softmax = steps[-1]
    softmax.attributes["axis"] = ir.AttrInt64("axis", -1)
    value = softmax.outputs[0]
    while value is not context.inputs[0]:
        # NaN of masked rows is replaced in between.
        following = [use.node for use in value.uses()]
        for node in following:
            _insert_head(node.outputs[0])
        value = next(node for node in following if node.op_type != "IsNaN").outputs[0]
    result = context.outputs[0]
    rows, positions, _ = query.shape or ir.Shape([None, None, None])
    width = values.shape[2] if values.shape else -1
    readers = list(result.uses())
    _insert_head(result)
    by_position = _transposed(build, result, _HEADS_FIRST)
    merged = build("Reshape", by_position, build.ints(0, 0, int(width)))
    merged.type, merged.shape = result.type, ir.Shape([rows, positions, width])
    for use in readers:
        use.node.replace_input_with(use.idx, merged)


def _with_head(build: Builder, value: ir.Value) -> ir.Value:
    """Return (rows, positions, width) as (rows, 1, positions, width)."""
    rows, positions, width = value.shape or ir.Shape([None, None, None])
    split = build("Reshape", value, build.ints(0, 0, 1, int(width)))
    split.type, split.shape = value.type, ir.Shape([rows, positions, 1, width])
    return _transposed(build, split, _HEADS_FIRST)


def _swapped(build: Builder, value: ir.Value) -> ir.Value:
    """Return the transposition of the last two of three dims, by the node that made it if any."""
    node = value.producer()
    order = None
    if node is not None and node.op_type == "Transpose" and _rank(node.inputs[0]) == 3:
        order = node.attributes.get_ints("perm")
    if order is None or node is None or node.inputs[0] is None:
        return _transposed(build, value, _SWAPPED)
    composed = tuple(order[axis] for axis in _SWAPPED)
    if composed == (0, 1, 2):
        return node.inputs[0]
    return _transposed(build, node.inputs[0], composed)


def _transposed(build: Builder, value: ir.Value, order: tuple[int, ...]) -> ir.Value:
    result = build("Transpose", value, perm=order)
    result.type = value.type
    if value.shape is not None:
        result.shape = ir.Shape([value.shape[axis] for axis in order])
    return result


def _unsqueezed(build: Builder, value: ir.Value) -> ir.Value:
    result = build("Unsqueeze", value, build.ints(1))
    result.type, result.shape = value.type, value.shape
    _insert_head(result)
    return result


def _insert_head(value: ir.Value) -> None:
    """Give a value of rank 3 a dim of one head."""
    if value.shape is not None and len(value.shape) == 3:
        first, *others = value.shape
        value.shape = ir.Shape([first, 1, *others])
