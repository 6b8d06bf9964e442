"""Compute a decoder's logits for the last position alone.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[b, s, 2] x) => (float[b, s, 3] logits) <float[2, 3] w = {1, 2, 3, 4, 5, 6}>
... { logits = MatMul (x, w) }''')
>>> keep_last_position(model)
True
>>> str(model.graph.outputs[0].shape)
'[b,1,3]'

Generation reads the logits of the last position. Those of all positions are large: 100 MB for a
prompt of 64 tokens in 8 rows with GPT-2's vocabulary.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from enginery.passes.ir.nodes import NameAllocator

LOGITS = "logits"

# Operators between a head and the logits that treat every position alike: a bias, a scale, a cap.
_POINTWISE = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Sub", "Tanh"})
_PRODUCTS = frozenset({"MatMul", "Gemm"})
_END = np.iinfo(np.int64).max


def keep_last_position(model: ir.Model) -> bool:
    """Compute the logits of the last position only: (batch, 1, vocabulary).

    The other positions are cut off before the head, the product with the vocabulary.

    Returns:
        False if the head was not found, and the logits are cut instead.
    """
    graph = model.graph
    logits = _logits(model)
    path, states = path_to_head(logits)
    names = NameAllocator(model)
    tape = Tape(graph)

    def constant(number: int) -> ir.Value:
        return tape.initializer(ir.tensor(np.array([number], np.int64)), name=names("last/bound"))

    def cut(value: ir.Value) -> ir.Value:
        bounds = [constant(number) for number in (-1, _END, 1)]
        node_name = names("last/Slice")
        output = tape.op("Slice", [value, *bounds], name=node_name)
        output.name = names(f"{node_name}_output")
        output.type = value.type
        output.shape = _one_position(value.shape)
        return output

    # Without a head, the logits of all positions are computed and cut.
    if states is None:
        name, shape = logits.name, logits.shape
        last = cut(logits)
        logits.name = names("all_logits")
        last.name = name
        last.shape = _one_position(shape)
        graph.outputs[graph.outputs.index(logits)] = last
        return False
    path[-1].replace_input_with(data_input(path[-1]), cut(states))
    # The Slice was appended at the end, behind the head that reads it.
    graph.sort()
    for node in path:
        for value in node.outputs:
            value.shape = _one_position(value.shape)
    return True


def _logits(model: ir.Model) -> ir.Value:
    return next(value for value in model.graph.outputs if value.name == LOGITS)


def path_to_head(logits: ir.Value) -> tuple[list[ir.Node], ir.Value | None]:
    """Return the nodes from the logits back to the product with the vocabulary, and its input.

    The input is None if the head was not found.
    """
    path: list[ir.Node] = []
    node = logits.producer()
    while node is not None and len(path) < 16:
        path.append(node)
        index = data_input(node)
        value = node.inputs[index] if index >= 0 else None
        if node.op_type in _PRODUCTS and value is not None:
            has_positions = value.shape is not None and len(value.shape) == 3
            return path, value if has_positions else None
        if node.op_type not in _POINTWISE or value is None or len(value.uses()) > 1:
            break
        node = value.producer()
    return path, None


def data_input(node: ir.Node) -> int:
    """Return the index of the node's only input that depends on the graph's; -1 if not one."""
    indices = [
        i for i, value in enumerate(node.inputs) if value is not None and not _is_fixed(value)
    ]
    return indices[0] if len(indices) == 1 else -1


def _is_fixed(value: ir.Value, depth: int = 8) -> bool:
    """Return True if a value is computed from weights and constants alone."""
    if value.is_initializer() and not value.is_graph_input():
        return True
    node = value.producer()
    if node is None or depth == 0:
        return False
    return all(_is_fixed(operand, depth - 1) for operand in node.inputs if operand is not None)


def _one_position(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None or len(shape) != 3 else ir.Shape([shape[0], 1, shape[2]])
