"""Compute linear layers on (batch, sequence, features) without reshaping to rows and back.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[b, s, 2] x) => (float[b, s, 3] y) <float[2, 3] w, float[3] bias,
...     int64[2] rows = {-1, 2}, int64[1] first = {0}, int64[1] second = {1}, int64[1] last = {3}> {
...   r = Reshape (x, rows)  p = Gemm (r, w, bias)
...   sizes = Shape (x)  batch = Gather (sizes, first)  length = Gather (sizes, second)
...   shape = Concat <axis = 0> (batch, length, last)  y = Reshape (p, shape)
... }''')
>>> remove_row_reshapes(model)
1
>>> [node.op_type for node in model.graph]
['MatMul', 'Add']

PyTorch's `Conv1D`, the linear layer of GPT-2, is exported as `Reshape, Gemm, Reshape` and a dozen
nodes that compute the two shapes. One `MatMul` and one `Add` give the same numbers. A layer whose
bias is zero may come without it.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from enginery.passes.ir.nodes import NameAllocator, constant_numbers


def remove_row_reshapes(model: ir.Model) -> int:
    """Replace `Reshape, Gemm, Reshape` by `MatMul, Add` if the leading dims come back as they were.

    Returns:
        The number of layers that were replaced.
    """
    names = NameAllocator(model)
    matches = [
        (gemm, states, back)
        for gemm in model.graph
        if gemm.op_type == "Gemm" and (states := _states_before_rows(gemm)) is not None
        if (back := _reshape_back(gemm, states)) is not None
    ]
    for gemm, states, back in matches:
        weight, *bias = gemm.inputs[1:]
        tape = Tape()
        product = result = tape.op("MatMul", [states, weight], name=gemm.name)
        if bias:
            product.name = names(f"{gemm.name}_product")
            result = tape.op("Add", [product, bias[0]], name=names(f"{gemm.name}_bias"))
        ir.convenience.replace_nodes_and_values(
            model.graph, back, [back, gemm], tape.nodes, [back.outputs[0]], [result]
        )
        product.type, product.shape = result.type, result.shape
    RemoveUnusedNodesPass()(model)
    return len(matches)


def remove_idle_reshapes(model: ir.Model) -> int:
    """Remove Reshapes to the shape that a value has, by the names of its dims.

    Returns:
        The number of Reshapes that were removed.
    """
    idle = [
        node
        for node in model.graph
        if node.op_type == "Reshape" and not node.outputs[0].is_graph_output()
        if (dims := _dims(node.outputs[0])) and dims == _dims(node.inputs[0])
    ]
    for node in idle:
        source = node.inputs[0]
        if source is not None:
            node.outputs[0].replace_all_uses_with(source)
    RemoveUnusedNodesPass()(model)
    return len(idle)


def _states_before_rows(gemm: ir.Node) -> ir.Value | None:
    """Return the value of shape (batch, sequence, features) that a plain Gemm reads as rows."""
    # MatMul and Add have neither factors nor transposed operands.
    scaled = any(gemm.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))
    transposed = any(gemm.attributes.get_int(name, 0) for name in ("transA", "transB"))
    if scaled or transposed:
        return None
    rows, weight, *bias = gemm.inputs
    flatten = rows.producer() if rows is not None else None
    if flatten is None or flatten.op_type != "Reshape":
        return None
    states = flatten.inputs[0]
    ranks = [_rank(value) for value in (states, weight, *bias)]
    return states if ranks in ([3, 2, 1], [3, 2]) else None


def _reshape_back(gemm: ir.Node, states: ir.Value) -> ir.Node | None:
    """Return the Reshape of a Gemm's result to the first two sizes of `states` and its columns.

    There are as many rows as these sizes give, so each row is one position of `states`.
    """
    users = gemm.outputs[0].consumers()
    if len(users) != 1 or users[0].op_type != "Reshape" or gemm.outputs[0].is_graph_output():
        return None
    columns, result = gemm.inputs[1].shape[1], users[0].outputs[0]
    # Dims of the graph's outputs are only declared; torch has derived those of values inside.
    if not result.is_graph_output() and _dims(result) == [*_dims(states)[:2], columns]:
        return users[0]
    shape = users[0].inputs[1]
    joined = shape.producer() if shape is not None else None
    if joined is None or joined.op_type != "Concat" or len(joined.inputs) != 3:
        return None
    *leading, last = joined.inputs
    same = all(_is_size(value, states, axis) for axis, value in enumerate(leading))
    return users[0] if same and constant_numbers(last) == [columns] else None


def _dims(value: ir.Value | None) -> list[int | str]:
    """Return the sizes of a value and the names of those that vary; empty if one is not known.

    Dims of the same name have the same size in one graph.
    """
    shape = value.shape if value is not None else None
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape or ()]
    return [dim for dim in dims if dim is not None] if None not in dims else []


def _is_size(value: ir.Value | None, states: ir.Value, axis: int) -> bool:
    """Return True if a value is the size of one dim, as a vector of one number."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Unsqueeze":
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "Gather":
        return False
    sizes, index = node.inputs
    shape = sizes.producer() if sizes is not None else None
    return (
        shape is not None
        and shape.op_type == "Shape"
        and shape.inputs[0] is states
        and not shape.attributes
        and constant_numbers(index) == [axis]
    )


def _rank(value: ir.Value | None) -> int | None:
    return len(value.shape) if value is not None and value.shape is not None else None
