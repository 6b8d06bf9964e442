"""Find the attention of a decoder: the operators between its cache and what comes of it.

Keys and values go through views (Transpose, Reshape, and Expand where heads share them), scores
through a scale, a cap, biases and masks; two products and a Softmax stand between:

    scores = MatMul (query, keys)   probabilities = Softmax (…scores…)
    context = MatMul (probabilities, values)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from enginery.passes.generation.sizes import UnsuitableGraphError

_VIEWS = frozenset({"Cast", "Expand", "Identity", "Reshape", "Transpose", "Unsqueeze"})
_SCALES = frozenset({"Mul", "Div"})
_AFTER_SOFTMAX = frozenset({"Cast", "Dropout", "Identity"})
_MAX_STEPS = 24


@dataclass(frozen=True)
class ScoreStep:
    """One operator between the scores and the Softmax."""

    kind: str
    """`scale` (Mul, Div), `cap` (Tanh), `bias` (Add), or `mask` (Where)."""
    node: ir.Node
    operand: ir.Value | None
    """The other input of Mul, Div or Add, and the condition of Where."""
    inverted: bool = False
    """For a mask: whether scores stay where the condition is False."""


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
    while (scaled := _scaled(query)) is not None:
        query, scale = scaled
        scales.append(scale)
    steps, softmax = _steps_to_softmax(scores)
    context = _product_after(softmax)
    if context.inputs[1] is None or not _comes_from(context.inputs[1], values):
        raise UnsuitableGraphError(f"{context.name}, which does not multiply {values.name}")
    return Attention(query, scores, context, tuple(scales), tuple(steps))


def users(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that read a value's elements, not only its shape."""
    for use in value.uses():
        if use.node.op_type != "Shape":
            yield use.node


def _product_of_keys(keys: ir.Value) -> tuple[ir.Node, list[tuple[str, ir.Value]]]:
    """Return the MatMul of queries and keys, and the scalars that the keys are multiplied with."""
    value, scales = keys, list[tuple[str, ir.Value]]()
    for _ in range(_MAX_STEPS):
        node = _only_user(value)
        if node.op_type == "MatMul" and node.inputs[1] is value:
            return node, scales
        if node.op_type in _SCALES and (scale := _scalar_operand(node, value)) is not None:
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


def _scalar_operand(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """Return the other input of Mul or Div if it is a scalar by its shape or its computation."""
    other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    # A number that is divided by the value does not scale it.
    if other is None or (node.op_type == "Div" and node.inputs[0] is not value):
        return None
    return other if is_scalar(other) else None


def is_scalar(value: ir.Value, depth: int = 12) -> bool:
    """Return True for a number that is constant or computed from sizes."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return bool(tensor.size == 1)
    node = value.producer()
    if node is None or depth == 0:
        return False
    # PyTorch's export computes the scale from the size of the queries' last dim.
    if node.op_type == "Shape":
        return True
    inputs = [operand for operand in node.inputs if operand is not None]
    # Their other inputs are indices, axes or shapes.
    if node.op_type in ("Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape"):
        inputs = inputs[:1]
    return all(is_scalar(operand, depth - 1) for operand in inputs)


def _scaled(value: ir.Value) -> tuple[ir.Value, tuple[str, ir.Value]] | None:
    """Return the value before a multiplication with a scalar, and the scalar."""
    node = value.producer()
    if node is None or node.op_type not in _SCALES:
        return None
    sides = (0, 1) if node.op_type == "Mul" else (0,)
    for side in sides:
        source = node.inputs[side]
        if source is not None and (scale := _scalar_operand(node, source)) is not None:
            return source, (node.op_type, scale)
    return None


def _steps_to_softmax(scores: ir.Node) -> tuple[list[ScoreStep], ir.Node]:
    value, steps = scores.outputs[0], list[ScoreStep]()
    for _ in range(_MAX_STEPS):
        node = _only_user(value)
        if node.op_type == "Softmax":
            return steps, node
        steps += _score_step(node, value)
        value = node.outputs[0]
    raise UnsuitableGraphError(f"{value.name}, where a Softmax was expected")


def _score_step(node: ir.Node, value: ir.Value) -> list[ScoreStep]:
    """Return the step that a node does with the scores: none for a Cast."""
    if node.op_type in ("Cast", "Identity"):
        return []
    if node.op_type == "Tanh":
        return [ScoreStep("cap", node, None)]
    if node.op_type == "Where":
        condition, kept, other = node.inputs
        if condition is not None and value in (kept, other):
            return [ScoreStep("mask", node, condition, inverted=value is other)]
    elif node.op_type in _SCALES:
        if (scale := _scalar_operand(node, value)) is not None:
            return [ScoreStep("scale", node, scale)]
    elif node.op_type == "Add":
        other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
        if other is not None:
            return [ScoreStep("bias", node, other)]
    raise UnsuitableGraphError(f"{node.name} ({node.op_type}) between scores and Softmax")


def _product_after(softmax: ir.Node) -> ir.Node:
    """Return the MatMul that reads the probabilities; NaN of masked rows may be replaced before."""
    value = softmax.outputs[0]
    for _ in range(_MAX_STEPS):
        # PyTorch's export replaces the NaN of rows that are masked as a whole by 0:
        # Where (IsNaN (p), 0, p).
        nodes = [node for node in users(value) if node.op_type != "IsNaN"]
        if len(nodes) != 1:
            break
        (node,) = nodes
        if node.op_type == "MatMul" and node.inputs[0] is value:
            return node
        if node.op_type not in _AFTER_SOFTMAX and not _replaces_nan(node, value):
            break
        value = node.outputs[0]
    raise UnsuitableGraphError(f"{value.name}, where a product with the values was expected")


def _replaces_nan(node: ir.Node, value: ir.Value) -> bool:
    condition = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return (
        node.op_type == "Where"
        and condition is not None
        and condition.op_type == "IsNaN"
        and condition.inputs[0] is value
    )


def _comes_from(value: ir.Value, source: ir.Value) -> bool:
    for _ in range(_MAX_STEPS):
        if value is source:
            return True
        node = value.producer()
        if node is None or node.op_type not in _VIEWS or node.inputs[0] is None:
            return False
        value = node.inputs[0]
    return False
