"""Read the operators between an attention's two products, whoever exported the graph.

    scores = MatMul (query, keys)   probabilities = Softmax (…scores…)
    context = MatMul (probabilities, values)

Scores go through scales, a cap, biases and masks on their way to the Softmax. The search for a
decoder's caches and the search for any attention read them by the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

SCALES = frozenset({"Mul", "Div"})
_AFTER_SOFTMAX = frozenset({"Cast", "Dropout", "Identity"})
_MAX_STEPS = 24
# Shapes and the numbers computed from them have a few elements.
_MAX_ELEMENTS = 16


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


def users(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that read a value's elements, not only its shape."""
    for use in value.uses():
        if use.node.op_type != "Shape":
            yield use.node


def scalar_operand(node: ir.Node, value: ir.Value) -> ir.Value | None:
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


def scaled(value: ir.Value) -> tuple[ir.Value, tuple[str, ir.Value]] | None:
    """Return the value before a multiplication with a scalar, and the scalar."""
    node = value.producer()
    if node is None or node.op_type not in SCALES:
        return None
    sides = (0, 1) if node.op_type == "Mul" else (0,)
    for side in sides:
        source = node.inputs[side]
        if source is not None and (scale := scalar_operand(node, source)) is not None:
            return source, (node.op_type, scale)
    return None


def score_step(node: ir.Node, value: ir.Value) -> list[ScoreStep] | None:
    """Return the step that a node does with the scores: none for a Cast.

    None for another operator.
    """
    if node.op_type in ("Cast", "Identity"):
        return []
    if node.op_type == "Tanh":
        return [ScoreStep("cap", node, None)]
    if node.op_type == "Where":
        condition, kept, other = node.inputs
        if condition is not None and value in (kept, other):
            return [ScoreStep("mask", node, condition, inverted=value is other)]
    elif node.op_type in SCALES:
        if (scale := scalar_operand(node, value)) is not None:
            return [ScoreStep("scale", node, scale)]
    elif node.op_type == "Add":
        other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
        if other is not None:
            return [ScoreStep("bias", node, other)]
    return None


def path_to_product(value: ir.Value | None, depth: int = _MAX_STEPS) -> list[ir.Node] | None:
    """Return the nodes from the product of queries and keys to a value; None if there is none.

    An Add is followed to the side that leads to such a product.
    """
    node = None if value is None else value.producer()
    if node is None or depth == 0 or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "MatMul":
        computed = all(x is not None and x.const_value is None for x in node.inputs)
        return [node] if computed else None
    if node.op_type in ("Add", "Mul", "Where"):
        sources = list(node.inputs[1:] if node.op_type == "Where" else node.inputs)
    elif node.op_type in ("Cast", "Div", "Identity", "Reshape"):
        sources = [node.inputs[0]]
    else:
        return None
    for source in sources:
        if source is not None and (path := path_to_product(source, depth - 1)) is not None:
            return [*path, node]
    return None


def product_after(softmax: ir.Node) -> tuple[ir.Node | None, ir.Value]:
    """Return the MatMul that reads the probabilities, and the value that it reads.

    None in place of the MatMul if another operator follows the value. NaN of masked rows may be
    replaced before.
    """
    value = softmax.outputs[0]
    for _ in range(_MAX_STEPS):
        # PyTorch's export replaces the NaN of rows that are masked as a whole by 0:
        # Where (IsNaN (p), 0, p).
        nodes = [node for node in users(value) if node.op_type != "IsNaN"]
        if len(nodes) != 1:
            break
        (node,) = nodes
        if node.op_type == "MatMul" and node.inputs[0] is value:
            return node, value
        if node.op_type not in _AFTER_SOFTMAX and not replaces_nan(node, value):
            break
        value = node.outputs[0]
    return None, value


def replaces_nan(node: ir.Node, value: ir.Value) -> bool:
    """Return True for a Where that replaces a value where it is NaN."""
    condition = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return (
        node.op_type == "Where"
        and condition is not None
        and condition.op_type == "IsNaN"
        and condition.inputs[0] is value
    )


def read_number(value: ir.Value | None) -> float | None:
    """Return a scalar that is constant, or computed from sizes that are fixed; else None.

    >>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
    ... g (float[b, s, 16] x) => (float y) <int64[1] last = {-1}> {
    ...   shape = Shape (x)  size = Gather (shape, last)  width = Cast <to = 1> (size)
    ...   y = Sqrt (width) }''')
    >>> read_number(model.graph.outputs[0])
    4.0
    """
    array = None if value is None else _evaluate(value, _MAX_STEPS)
    if array is None or array.size != 1:
        return None
    number = float(array.reshape(-1)[0])
    return None if math.isnan(number) else number


def _evaluate(value: ir.Value, depth: int) -> NDArray[Any] | None:
    """Compute a value from constants and fixed sizes, as float64; a size that varies is NaN."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        small = tensor.size <= _MAX_ELEMENTS
        return np.asarray(tensor.numpy(), np.float64) if small else None
    node = value.producer()
    if node is None or depth == 0 or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Shape":
        return _sizes(node)
    inputs = [None if x is None else _evaluate(x, depth - 1) for x in node.inputs]
    if any(array is None for array in inputs):
        return None
    return _compute(node, [array for array in inputs if array is not None])


def _sizes(node: ir.Node) -> NDArray[Any] | None:
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if shape is None:
        return None
    sizes = [float(dim) if isinstance(dim, int) else math.nan for dim in shape]
    end = node.attributes.get_int("end", len(sizes))
    return np.array(sizes[node.attributes.get_int("start", 0) : end])


def _compute(node: ir.Node, inputs: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Apply one of the operators by which exporters compute a scale."""
    first = inputs[0]
    with np.errstate(all="ignore"):
        match node.op_type, len(inputs):
            # All elements are taken, so the layout does not matter: the result is a scalar.
            case (("Cast" | "Identity" | "Reshape" | "Squeeze" | "Unsqueeze"), _):
                return first.reshape(-1)
            case "Sqrt", 1:
                return np.asarray(np.sqrt(first))
            case "Reciprocal", 1:
                return np.asarray(1 / first)
            case "Mul", 2:
                return np.asarray(first * inputs[1])
            case "Div", 2:
                return np.asarray(first / inputs[1])
            case "Pow", 2:
                return np.asarray(first ** inputs[1])
            case "Gather", 2 if first.ndim == 1:
                return first.take(inputs[1].astype(np.int64))
            case "Slice", 3 | 4 if first.ndim == 1:
                start, end = int(inputs[1].item()), int(min(inputs[2].item(), first.size))
                return first[start:end]
    return None
