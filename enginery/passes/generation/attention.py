"""Find the attention of a decoder: the operators between its cache and what comes of it.

Keys and values go through views (Transpose, Reshape, and Expand where heads share them), scores
through a scale, a cap, biases and masks; two products and a Softmax stand between:

    scores = MatMul (query, keys)   probabilities = Softmax (…scores…)
    context = MatMul (probabilities, values)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from enginery.passes.attention.scores import (
    SCALES,
    ScoreStep,
    product_after,
    scalar_operand,
    scaled,
    score_step,
    users,
)
from enginery.passes.generation.sizes import UnsuitableGraphError

_VIEWS = frozenset({"Cast", "Expand", "Identity", "Reshape", "Transpose", "Unsqueeze"})
_MAX_STEPS = 24


@dataclass(frozen=True)
class Attention:
    """One attention. All values belong to the graph in which it was found."""

    query: ir.Value
    """(batch, heads, sequence, head_dim), before scales."""
    scores: ir.Node
    context: ir.Node
    """Its output is (batch, heads, sequence, head_dim)."""
    scales: tuple[tuple[str, ir.Value], ...]
    """The scalars of the query's and the keys' side, as `Mul` or `Div`."""
    steps: tuple[ScoreStep, ...] = field(default=())


def find_attention(keys: ir.Value, values: ir.Value) -> Attention:
    """Return the attention that reads keys and values of (batch, heads, positions, head_dim).

    Raises:
        UnsuitableGraphError: it is not built as expected.
    """
    scores, scales = _product_of_keys(keys)
    query = scores.inputs[0]
    if query is None or scores.inputs[1] is None:
        raise UnsuitableGraphError(f"{scores.name}, whose second input are not the keys")
    # PyTorch's export multiplies queries and keys by the root of the scale each.
    while (before := scaled(query)) is not None:
        query, scale = before
        scales.append(scale)
    steps, softmax = _steps_to_softmax(scores)
    context, probabilities = product_after(softmax)
    if context is None:
        raise UnsuitableGraphError(
            f"{probabilities.name}, where a product with the values was expected"
        )
    if context.inputs[1] is None or not _comes_from(context.inputs[1], values):
        raise UnsuitableGraphError(f"{context.name}, which does not multiply {values.name}")
    return Attention(query, scores, context, tuple(scales), tuple(steps))


def _product_of_keys(keys: ir.Value) -> tuple[ir.Node, list[tuple[str, ir.Value]]]:
    """Return the MatMul of queries and keys, and the scalars that the keys are multiplied with."""
    value, scales = keys, list[tuple[str, ir.Value]]()
    for _ in range(_MAX_STEPS):
        node = _only_user(value)
        if node.op_type == "MatMul" and node.inputs[1] is value:
            return node, scales
        if node.op_type in SCALES and (scale := scalar_operand(node, value)) is not None:
            scales.append((node.op_type, scale))
        elif node.op_type not in _VIEWS or node.inputs[0] is not value:
            raise UnsuitableGraphError(f"{node.name} ({node.op_type}) after {keys.name}")
        value = node.outputs[0]
    raise UnsuitableGraphError(f"{value.name}, where a product with {keys.name} was expected")


def _only_user(value: ir.Value) -> ir.Node:
    nodes = list(users(value))
    if len(nodes) != 1:
        raise UnsuitableGraphError(f"{value.name}, which {len(nodes)} nodes read, expected one")
    return nodes[0]


def _steps_to_softmax(scores: ir.Node) -> tuple[list[ScoreStep], ir.Node]:
    value, steps = scores.outputs[0], list[ScoreStep]()
    for _ in range(_MAX_STEPS):
        node = _only_user(value)
        if node.op_type == "Softmax":
            return steps, node
        step = score_step(node, value)
        if step is None:
            raise UnsuitableGraphError(f"{node.name} ({node.op_type}) between scores and Softmax")
        steps += step
        value = node.outputs[0]
    raise UnsuitableGraphError(f"{value.name}, where a Softmax was expected")


def _comes_from(value: ir.Value, source: ir.Value) -> bool:
    for _ in range(_MAX_STEPS):
        if value is source:
            return True
        node = value.producer()
        if node is None or node.op_type not in _VIEWS or node.inputs[0] is None:
            return False
        value = node.inputs[0]
    return False
