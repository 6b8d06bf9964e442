"""Compute the end of a decoder for the last position alone, and choose tokens in the graph.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[b, s, 2] x) => (float[b, s, 3] logits) <float[2, 3] w = {1, 2, 3, 4, 5, 6}>
... { logits = MatMul (x, w) }''')
>>> keep_last_position(model)
True
>>> add_choices(model)
>>> [(value.name, str(value.shape)) for value in model.graph.outputs]
[('logits', '[b,1,3]'), ('next_tokens', '[b]'), ('top_log_probs', '[b,k]'), ('top_tokens', '[b,k]')]

A prompt of 64 tokens in 8 rows has 100 MB of logits with GPT-2's vocabulary, of which generation
reads the last position. What it needs of them is small: the best token, or for beam search the best
few with their log-probabilities. A session that computes only the outputs that are fetched pays for
no others.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from enginery.passes.ir.nodes import NameAllocator

LOGITS = "logits"
NEXT_TOKENS, TOP_LOG_PROBS, TOP_TOKENS = "next_tokens", "top_log_probs", "top_tokens"
COUNT = "top_count"
"""Optional input: the number of the best tokens; by default `DEFAULT_COUNT`."""
DEFAULT_COUNT = 8

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
    path, states = _path_to_head(logits)
    names = NameAllocator(model)
    tape = Tape(graph)

    def constant(number: int) -> ir.Value:
        return tape.initializer(ir.tensor(np.array([number], np.int64)), name=names("last/bound"))

    def cut(value: ir.Value) -> ir.Value:
        bounds = [constant(number) for number in (-1, _END, 1)]
        node_name = names("last/Slice")
        found = tape.op("Slice", [value, *bounds], name=node_name)
        found.name = names(f"{node_name}_output")
        found.type = value.type
        found.shape = _one_position(value.shape)
        return found

    if states is None:
        name, shape = logits.name, logits.shape
        last = cut(logits)
        logits.name = names("all_logits")
        last.name = name
        last.shape = _one_position(shape)
        graph.outputs[graph.outputs.index(logits)] = last
        return False
    path[-1].replace_input_with(_data_input(path[-1]), cut(states))
    graph.sort()
    for node in path:
        for value in node.outputs:
            value.shape = _one_position(value.shape)
    return True


def add_choices(model: ir.Model) -> None:
    """Add outputs with the best tokens of the last position.

    `next_tokens` int64 (batch), and `top_log_probs` float32 and `top_tokens` int64 (batch, k),
    best first. Expects logits of one position.
    """
    graph = model.graph
    logits = _logits(model)
    names = NameAllocator(model)
    tape = Tape(graph)
    batch = logits.shape[0] if logits.shape is not None else "batch"

    def op(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node_name = names(f"choice/{op_type}")
        found = tape.op(op_type, inputs, attributes, name=node_name)
        found.name = names(f"{node_name}_output")
        return found

    one = tape.initializer(ir.tensor(np.array([1], np.int64)), name=names("choice/axis"))
    scores = op("Squeeze", logits, one)
    if logits.dtype != ir.DataType.FLOAT:
        scores = op("Cast", scores, to=ir.DataType.FLOAT)
    count = ir.Value(
        name=COUNT,
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([1]),
        const_value=ir.tensor(np.array([DEFAULT_COUNT], np.int64), name=COUNT),
    )
    graph.inputs.append(count)
    graph.initializers[COUNT] = count
    node_name = names("choice/TopK")
    values, tokens = tape.op_multi_out(
        "TopK", [op("LogSoftmax", scores, axis=-1), count], {"axis": -1}, num_outputs=2,
        name=node_name,
    )  # fmt: skip
    chosen = op("ArgMax", scores, axis=-1, keepdims=0)
    for value, name, dtype, dims in (
        (chosen, NEXT_TOKENS, ir.DataType.INT64, [batch]),
        (values, TOP_LOG_PROBS, ir.DataType.FLOAT, [batch, "k"]),
        (tokens, TOP_TOKENS, ir.DataType.INT64, [batch, "k"]),
    ):
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(dims)
        graph.outputs.append(value)


def _logits(model: ir.Model) -> ir.Value:
    return next(value for value in model.graph.outputs if value.name == LOGITS)


def _path_to_head(logits: ir.Value) -> tuple[list[ir.Node], ir.Value | None]:
    """Return the nodes from the logits back to the product with the vocabulary, and its input.

    The input is None if the head was not found.
    """
    path: list[ir.Node] = []
    node = logits.producer()
    while node is not None and len(path) < 16:
        path.append(node)
        place = _data_input(node)
        value = node.inputs[place] if place >= 0 else None
        if node.op_type in _PRODUCTS and value is not None:
            has_positions = value.shape is not None and len(value.shape) == 3
            return path, value if has_positions else None
        if node.op_type not in _POINTWISE or value is None or len(value.uses()) > 1:
            break
        node = value.producer()
    return path, None


def _data_input(node: ir.Node) -> int:
    """Return the index of the node's only input that depends on the graph's; -1 if not one."""
    found = [i for i, value in enumerate(node.inputs) if value is not None and not _is_fixed(value)]
    return found[0] if len(found) == 1 else -1


def _is_fixed(value: ir.Value, depth: int = 8) -> bool:
    """Return True if a value is computed from weights and constants alone."""
    if value.is_initializer() and not value.is_graph_input():
        return True
    node = value.producer()
    if node is None or depth == 0:
        return False
    return all(_is_fixed(each, depth - 1) for each in node.inputs if each is not None)


def _one_position(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None or len(shape) != 3 else ir.Shape([shape[0], 1, shape[2]])
