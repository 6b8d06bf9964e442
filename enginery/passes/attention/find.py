"""Find scaled dot-product attention in a graph, from each Softmax outwards.

    scores = MatMul (query, keys)        query (batch, heads, sequence, head_dim),
                                         keys (batch, heads, head_dim, positions)
    probabilities = Softmax (…scores…)   scales, biases and masks in between
    context = MatMul (probabilities, values)

Exporters differ in the order of scales and transpositions, and in what computes the masks; this
much is the same in all of them. Where heads share keys and values, the graph has expanded them
before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from enginery.passes.attention.scores import (
    SCALES,
    ScoreStep,
    path_to_product,
    product_after,
    read_number,
    score_step,
)
from enginery.passes.ir.op_types import FLOAT

_MAX_STEPS = 24
HEADS_FIRST = (0, 2, 1, 3)
"""The permutation between (batch, heads, sequence, …) and (batch, sequence, heads, …)."""
# What is masked by a Where gets this number or less. Then a score that is added to it changes
# nothing: half a unit in the last place of 1e30 is above all scores.
_MASKED = -1e30


@dataclass(frozen=True)
class Factor:
    """An input of a product, before it is transposed and scaled."""

    source: ir.Value
    order: tuple[int, ...]
    """The axes of `source` in the order of (batch, heads, sequence, head_dim)."""
    scale: float = 1.0


@dataclass(frozen=True)
class Bias:
    """What is added to the scores."""

    value: ir.Value
    """What is added; the condition of a mask."""
    filled: float | None = None
    """For a mask: what scores become where they are masked."""
    inverted: bool = False
    """For a mask: whether scores stay where the condition is False."""
    windows: bool = False
    """Whether scores are reshaped to (batch, windows, heads, sequence, positions) before, and back
    after."""


@dataclass(frozen=True)
class FoundAttention:
    """One attention. All values belong to the graph in which it was found."""

    query: Factor
    keys: Factor
    values: Factor
    scale: float
    heads: int
    biases: tuple[Bias, ...]
    zeroes_nan: bool
    """Whether a row of probabilities that are NaN, of which all is masked, becomes 0."""
    nodes: tuple[ir.Node, ...]
    """The nodes from the product of query and keys to the product with values."""

    @property
    def scores(self) -> ir.Value:
        """The product of query and keys, (batch, heads, sequence, positions)."""
        return self.nodes[0].outputs[0]

    @property
    def context(self) -> ir.Value:
        """The result, (batch, heads, sequence, head_dim)."""
        return self.nodes[-1].outputs[0]


def find_attentions(model: ir.Model) -> Iterator[FoundAttention]:
    """Yield the attentions of a model's main graph. Its values must have types and shapes."""
    for node in list(model.graph):
        if node.op_type == "Softmax" and _over_last_axis(node):
            attention = _find(node)
            if attention is not None:
                yield attention


def _over_last_axis(softmax: ir.Node) -> bool:
    shape = softmax.outputs[0].shape
    last = (-1,) if shape is None else (-1, len(shape) - 1)
    return softmax.attributes.get_int("axis", -1) in last


def _find(softmax: ir.Node) -> FoundAttention | None:
    context, _ = product_after(softmax)
    path = path_to_product(softmax.inputs[0])
    if context is None or path is None:
        return None
    scores = path[0]
    query, keys = _factor(scores.inputs[0]), _factor(scores.inputs[1])
    # A scale of the values stays in front of the operator, which has none for them.
    values = _factor(context.inputs[1], scaled=False)
    if query is None or keys is None or values is None:
        return None
    # The keys' product reads them transposed, (batch, heads, head_dim, positions).
    *outer, width, positions = keys.order
    keys = replace(keys, order=(*outer, positions, width))
    steps = _read_steps(path)
    heads = _common_heads(query, keys, values)
    if steps is None or heads is None:
        return None
    scale, biases = steps
    scale *= query.scale * keys.scale
    between = _between(softmax, context)
    if between is None:
        return None
    nodes = (*path, softmax, *between, context)
    # 0 stands for the operator's default, and less is refused.
    if not 0 < scale < math.inf or not _only_inside(nodes) or not _is_single_precision(nodes):
        return None
    zeroes = any(node.op_type == "Where" for node in between)
    return FoundAttention(query, keys, values, scale, heads, biases, zeroes, nodes)


def _read_steps(path: list[ir.Node]) -> tuple[float, tuple[Bias, ...]] | None:
    """Return the scale and the biases between the scores and the Softmax; None for other steps."""
    scale, biases = 1.0, list[Bias]()
    windows = False
    value = path[0].outputs[0]
    for node in path[1:]:
        if node.op_type == "Reshape":
            # Swin adds a mask by window: (batch, windows, heads, …) and back.
            windows = not windows
            if not (_splits_windows(node) if windows else _has_rank(node.outputs[0], 4)):
                return None
            step: list[ScoreStep] | None = []
        else:
            step = score_step(node, value)
        if step is None:
            return None
        value = node.outputs[0]
        for part in step:
            if part.kind == "scale":
                factor = _scale_of(part)
                # A bias before the scale would have to be scaled as well.
                if factor is None or biases:
                    return None
                scale *= factor
            elif (bias := _bias_of(part)) is not None:
                if windows and not _is_by_window(bias.value):
                    return None
                biases.append(replace(bias, windows=windows))
            else:
                return None
    return None if windows else (scale, tuple(biases))


def _splits_windows(reshape: ir.Node) -> bool:
    """Return True for a Reshape to five dims that splits the first of four alone."""
    rows = None if reshape.inputs[0] is None else reshape.inputs[0].shape
    split = reshape.outputs[0].shape
    if rows is None or split is None or (len(rows), len(split)) != (4, 5):
        return False
    return all(same_dim(a, b) for a, b in zip(rows[1:], split[2:], strict=True))


def _is_by_window(mask: ir.Value) -> bool:
    """Return True for (1, windows, 1, sequence, positions) of fixed sizes."""
    shape = mask.shape
    if shape is None or len(shape) != 5 or (shape[0], shape[2]) != (1, 1):
        return False
    return all(isinstance(size, int) for size in shape)


def _has_rank(value: ir.Value, rank: int) -> bool:
    return value.shape is not None and len(value.shape) == rank


def _scale_of(step: ScoreStep) -> float | None:
    number = read_number(step.operand)
    if number is None or (step.node.op_type == "Div" and number == 0):
        return None
    return 1 / number if step.node.op_type == "Div" else number


def _bias_of(step: ScoreStep) -> Bias | None:
    if step.operand is None or step.kind == "cap":
        return None
    if step.kind == "bias":
        return Bias(step.operand)
    filled = read_number(step.node.inputs[1 if step.inverted else 2])
    # What is filled in replaces the scores, and would only be added to them.
    if filled is None or filled > _MASKED:
        return None
    return Bias(step.operand, filled, step.inverted)


def _between(softmax: ir.Node, context: ir.Node) -> list[ir.Node] | None:
    """Return the nodes that only replace NaN, or do nothing; None if one does more."""
    nodes, value = list[ir.Node](), softmax.outputs[0]
    while value is not context.inputs[0]:
        readers = [use.node for use in value.uses()]
        nodes += [node for node in readers if node.op_type == "IsNaN"]
        following = next(node for node in readers if node.op_type != "IsNaN")
        zeroes = following.op_type == "Where" and read_number(following.inputs[1]) == 0
        if following.op_type == "Cast" and not _keeps_type(following):
            return None
        if following.op_type == "Where" and not zeroes:
            return None
        nodes.append(following)
        value = following.outputs[0]
    return nodes


def _keeps_type(cast: ir.Node) -> bool:
    return cast.inputs[0] is not None and cast.inputs[0].dtype == cast.outputs[0].dtype


def _is_single_precision(nodes: tuple[ir.Node, ...]) -> bool:
    types = {node.outputs[0].dtype for node in nodes if node.op_type != "IsNaN"}
    return types <= {FLOAT, None}


def _only_inside(nodes: tuple[ir.Node, ...]) -> bool:
    """Return True if only these nodes read what all but the last compute."""
    inside = set(nodes)
    return all(
        not value.is_graph_output() and all(use.node in inside for use in value.uses())
        for node in nodes[:-1]
        for value in node.outputs
    )


def _factor(value: ir.Value | None, *, scaled: bool = True) -> Factor | None:
    """Return the value of rank 4 before transpositions and scales."""
    if value is None or not _has_rank(value, 4):
        return None
    order: tuple[int, ...] = (0, 1, 2, 3)
    scale = 1.0
    for _ in range(_MAX_STEPS):
        node = value.producer()
        if node is None or node.domain not in ("", "ai.onnx"):
            break
        if node.op_type == "Transpose":
            perm = node.attributes.get_ints("perm")
            if perm is None or len(perm) != len(order) or node.inputs[0] is None:
                break
            order, value = tuple(perm[axis] for axis in order), node.inputs[0]
        elif (source := _before_transposition(node)) is not None:
            order, value = tuple((0, 1, 3, 2)[axis] for axis in order), source
        elif scaled and (before := unscaled(node)) is not None:
            value, scale = before[0], scale * before[1]
        else:
            break
    return Factor(value, order, scale)


def _before_transposition(node: ir.Node) -> ir.Value | None:
    """Return the (batch, heads, a, b) of which a Reshape is the transposition of the last two dims.

    torch's dynamo exporter reshapes to three dims before, and back to four after.
    """
    swap = None if node.op_type != "Reshape" or not node.inputs[0] else node.inputs[0].producer()
    if swap is None or swap.op_type != "Transpose" or swap.inputs[0] is None:
        return None
    first = swap.inputs[0].producer()
    if first is None or first.op_type != "Reshape" or first.inputs[0] is None:
        return None
    if tuple(swap.attributes.get_ints("perm") or ()) != (0, 2, 1):
        return None
    source, joined, result = first.inputs[0].shape, swap.inputs[0].shape, node.outputs[0].shape
    if source is None or joined is None or result is None or len(source) != 4:
        return None
    if len(joined) != 3 or len(result) != 4 or not same_dim(source[1], result[1]):
        return None
    pairs = zip((*source[2:], *source[2:]), (*joined[1:], result[3], result[2]), strict=True)
    return first.inputs[0] if all(same_dim(a, b) for a, b in pairs) else None


def before_repeat(factor: Factor) -> ir.Value | None:
    """Return (batch, groups, positions, head_dim), of which heads repeat each group; else None.

    The repetition is `Reshape (Expand (…))`, over a dim that is inserted behind the groups.
    """
    merged = factor.source.producer()
    if merged is None or merged.op_type != "Reshape" or factor.order != (0, 1, 2, 3):
        return None
    repeated = None if merged.inputs[0] is None else merged.inputs[0].producer()
    if repeated is None or repeated.op_type != "Expand" or repeated.inputs[0] is None:
        return None
    inserted = repeated.inputs[0].producer()
    if inserted is None or inserted.op_type not in ("Reshape", "Unsqueeze"):
        return None
    source, result = inserted.inputs[0], factor.source
    if source is None or source.shape is None or result.shape is None or len(source.shape) != 4:
        return None
    before, after = inserted.outputs[0].shape, repeated.outputs[0].shape
    if before is None or after is None or len(before) != 5 or len(after) != 5:
        return None
    groups, width, heads = source.shape[1], source.shape[3], result.shape[1]
    fits = (before[1], before[2], before[4]) == (groups, 1, width) == (after[1], 1, after[4])
    known = isinstance(groups, int) and isinstance(heads, int) and isinstance(width, int)
    return source if fits and known and heads > groups and width == result.shape[3] else None


def unscaled(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return what a Mul or Div scales by a number, and the number; None if it does not."""
    if node.op_type not in SCALES:
        return None
    first, second = node.inputs
    if first is not None and (number := read_number(second)) is not None:
        if node.op_type == "Mul":
            return first, number
        return (first, 1 / number) if number else None
    if node.op_type == "Mul" and second is not None and (number := read_number(first)) is not None:
        return second, number
    return None


def _common_heads(*factors: Factor) -> int | None:
    """Return the number of heads that all factors have; None if it varies, or is unknown.

    MatMul repeats keys and values of size 1 along the batch or the heads, the fused operators do
    not.
    """
    heads = {fixed_dim(factor.source, factor.order[1]) for factor in factors}
    # What a Reshape leaves over is unknown where shape inference lost the sizes before it. Heads
    # that are repeated are the one of an Unsqueeze, which is known.
    heads.discard(None)
    batches = set[int | None]()
    for factor in factors:
        shape = factor.source.shape
        batch = None if shape is None else shape[factor.order[0]]
        batches.add(batch if isinstance(batch, int) else None)
    return heads.pop() if len(heads) == 1 and len(batches) == 1 else None


def fixed_dim(value: ir.Value, axis: int) -> int | None:
    """Return the size of an axis if it is fixed, by the value's shape or by the Reshape before."""
    size = None if value.shape is None else value.shape[axis]
    if isinstance(size, int):
        return size
    node = value.producer()
    if node is None or node.op_type != "Reshape" or node.inputs[1] is None:
        return None
    parts = shape_parts(node.inputs[1])
    if parts is not None and axis < len(parts) and (parts[axis] or 0) > 0:
        return parts[axis]
    return _left_over(node, axis)


def _left_over(reshape: ir.Node, axis: int) -> int | None:
    """Return the size of the axis that gets all elements that the axes around it leave."""
    source = None if reshape.inputs[0] is None else reshape.inputs[0].shape
    result = reshape.outputs[0].shape
    if source is None or result is None or len(source) <= axis:
        return None
    if not all(same_dim(a, b) for a, b in zip(source[:axis], result[:axis], strict=True)):
        return None
    before = [dim for dim in source[axis:] if isinstance(dim, int)]
    after = [dim for dim in result[axis + 1 :] if isinstance(dim, int)]
    if len(before) < len(source) - axis or len(after) < len(result) - axis - 1 or 0 in after:
        return None
    return math.prod(before) // math.prod(after)


def same_dim(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim) -> bool:
    """Return True if two dims are known to be equal."""
    return first == second and (isinstance(first, int) or first.value is not None)


def shape_parts(shape: ir.Value) -> list[int | None] | None:
    """Return the sizes that a shape is made of, None for those that are computed."""
    tensor = ir.convenience.get_const_tensor(shape)
    if tensor is not None:
        return [int(size) for size in tensor.numpy().reshape(-1)]
    node = shape.producer()
    if node is None or node.op_type != "Concat":
        return None
    sizes: list[int | None] = []
    for part in node.inputs:
        constant = None if part is None else ir.convenience.get_const_tensor(part)
        if constant is not None:
            sizes += [int(size) for size in constant.numpy().reshape(-1)]
        elif part is not None and part.shape is not None and part.shape[0] == 1:
            sizes.append(None)
        else:
            return None
    return sizes
