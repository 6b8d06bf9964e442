"""Replace scaled dot-product attention by one operator of ONNX Runtime.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[b, 4, s, 8] q, float[b, 4, 8, s] k, float[b, 4, s, 8] v, float[b, 1, s, s] mask)
... => (float[b, 4, s, 8] y) <float scale = {0.35}> {
...   scores = MatMul (q, k)  scaled = Mul (scores, scale)  masked = Add (scaled, mask)
...   probabilities = Softmax <axis = -1> (masked)  y = MatMul (probabilities, v) }''')
>>> fuse_attention(model, "cpu")
Counter({'Attention': 1})

For CUDA, that is com.microsoft's MultiHeadAttention, for which there are kernels of many kinds. On
the CPU it is faster without a bias only, where it does not hold the scores as a whole. With one,
ONNX's own Attention of opset 23 is: it reads heads where they lie in (batch, positions, hidden),
and takes shared heads as they are. Both against the unfused graph on one thread of an AMD EPYC with
ONNX Runtime 1.31, 12 heads of 32, in times as fast:

    rows × positions       8 × 64   8 × 128   1 × 512
    MultiHeadAttention, bias       0.91      1.03      1.12
    Attention, bias                1.13      1.22      1.17
    MultiHeadAttention, no bias    0.93      1.40      1.37
    Attention, no bias             0.93      1.26      1.14

Contracts: onnxruntime/docs/ContribOperators.md, onnx/docs/Operators.md#Attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.passes.attention.bias import BiasWriter, Infinity, infinity_of
from enginery.passes.attention.find import (
    HEADS_FIRST,
    Factor,
    FoundAttention,
    before_repeat,
    find_attentions,
    fixed_dim,
    same_dim,
    shape_parts,
    unscaled,
)
from enginery.passes.attention.heads import add_head_dims
from enginery.passes.ir.builder import Builder
from enginery.passes.ir.nodes import all_nodes, infer_types
from enginery.passes.ir.op_types import MICROSOFT

Target = Literal["cpu", "cuda"]
ATTENTIONS = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})
"""Operators that compute a whole attention, ONNX's own and ONNX Runtime's."""

_PREFIX = "attention"
_AFTER_SOFTMAX = frozenset({"Cast", "Dropout", "Identity", "Reshape", "Where"})
_IN_PLACE = (0, 1, 2, 3)
_ATTENTION_OPSET, _ATTENTION_IR_VERSION = 23, 11
_OLDEST_OPSET = 18
# Operators whose meaning changed between these opsets; all others gained types and attributes.
_CHANGED = frozenset({"DFT", "GridSample", "GroupNormalization"})


def fuse_attention(model: ir.Model, target: Target) -> Counter[str]:
    """Fuse all attentions of the main graph that ONNX Runtime's operators can compute.

    Returns:
        The number of attentions that were fused, by operator.
    """
    infer_types(model, sizes=True)
    build = Builder(model, _PREFIX)
    add_head_dims(model, build)
    standard = target == "cpu" and _can_raise_opset(model)
    writer = _AttentionWriter(build, standard=standard)
    counts = Counter(writer.write(attention) for attention in find_attentions(model))
    if counts["Attention"]:
        model.opset_imports[""] = max(model.opset_imports[""], _ATTENTION_OPSET)
        model.ir_version = max(model.ir_version, _ATTENTION_IR_VERSION)
    model.graph.sort()
    RemoveUnusedNodesPass()(model)
    return counts


def count_fused(model: Any) -> int:
    """Count the nodes of an `onnx.ModelProto` that are a whole attention."""
    return sum(node.op_type in ATTENTIONS for node in model.graph.node)


def count_unfused(model: Any) -> int:
    """Count the Softmaxes of an `onnx.ModelProto` that a product follows, behind views."""
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    count = 0
    for node in model.graph.node:
        names = [*node.output] if node.op_type == "Softmax" else []
        while names:
            following = readers.get(names.pop(), [])
            if any(reader.op_type == "MatMul" for reader in following):
                count += 1
                break
            names += [x.output[0] for x in following if x.op_type in _AFTER_SOFTMAX]
    return count


def _can_raise_opset(model: ir.Model) -> bool:
    if model.opset_imports.get("", 1) < _OLDEST_OPSET or model.functions:
        return False
    return not any(node.op_type in _CHANGED for node in all_nodes(model))


class _AttentionWriter:
    """Appends fused attentions to a graph, which is to be sorted afterwards."""

    def __init__(self, build: Builder, *, standard: bool) -> None:
        self._build = build
        self._biases = BiasWriter(self._build)
        self._standard = standard

    def write(self, attention: FoundAttention) -> str:
        """Replace one attention; return the operator that computes it."""
        factors = (attention.query, attention.keys, attention.values)
        flat = all(factor.order == HEADS_FIRST for factor in factors)
        if self._standard and (attention.biases or not flat):
            self._write_standard(attention, flat=flat)
            return "Attention"
        self._write_multi_head(attention)
        return "MultiHeadAttention"

    def _write_standard(self, attention: FoundAttention, *, flat: bool) -> None:
        attributes: dict[str, float | int] = {}
        scale = attention.scale
        if flat:
            query, query_scale = self._flat(attention.query, attention.heads)
            keys, key_scale = self._flat(attention.keys, attention.heads)
            values, _ = self._flat(attention.values, attention.heads, scaled=False)
            scale *= query_scale * key_scale
            attributes = {"q_num_heads": attention.heads, "kv_num_heads": attention.heads}
        else:
            query = self._heads_first(attention.query)
            shared = [before_repeat(factor) for factor in (attention.keys, attention.values)]
            groups = {None if value is None else fixed_dim(value, 1) for value in shared}
            keys, values = (
                value
                # The operator repeats heads by itself, if keys and values have the same number.
                if value is not None and len(groups) == 1
                else self._heads_first(factor)
                for value, factor in zip(shared, (attention.keys, attention.values), strict=True)
            )
        # The operator gives 0 for a row of which all is masked by -inf or by FP32's lowest number.
        # With a finite number, such a row is the mean of all values.
        bias = self._biases.write(attention, query, keys, raised=True)
        inputs = [query, keys, values, *([bias] if bias is not None else [])]
        (output,) = self._build.node("Attention", inputs, {**attributes, "scale": scale})
        self._name(output, attention)
        if flat:
            self._replace_flat(attention, output)
        else:
            output.type, output.shape = attention.context.type, attention.context.shape
            attention.context.replace_all_uses_with(output, replace_graph_outputs=True)

    def _write_multi_head(self, attention: FoundAttention) -> None:
        build = self._build
        query, query_scale = self._flat(attention.query, attention.heads)
        keys, values, key_scale = self._keys_and_values(attention)
        bias = self._biases.write(attention, query, keys, raised=False)
        (output,) = build.node(
            "MultiHeadAttention",
            [query, keys, values, *([None, None, bias] if bias is not None else [])],
            {"num_heads": attention.heads, "scale": attention.scale * query_scale * key_scale},
            domain=MICROSOFT,
        )
        self._name(output, attention)
        if attention.zeroes_nan and bias is not None and infinity_of(bias) is not Infinity.NEVER:
            # A row of which all is masked is 0, and would be NaN.
            unknown = build("IsNaN", output)
            output = build("Where", unknown, build.constant(np.array(0, np.float32)), output)
        self._replace_flat(attention, output)

    def _name(self, output: ir.Value, attention: FoundAttention) -> None:
        """Name a node after the product with values, by which it may be kept in FP32."""
        node, product = output.producer(), attention.nodes[-1]
        if node is not None and product.name:
            node.name, product.name = product.name, f"{product.name}/replaced"

    def _keys_and_values(self, attention: FoundAttention) -> tuple[ir.Value, ir.Value, float]:
        """Return keys and values in a layout that both have without copies, and the keys' scale."""
        if all(factor.order == HEADS_FIRST for factor in (attention.keys, attention.values)):
            keys, scale = self._flat(attention.keys, attention.heads)
            values, _ = self._flat(attention.values, attention.heads, scaled=False)
            return keys, values, scale
        return self._heads_first(attention.keys), self._heads_first(attention.values), 1.0

    def _heads_first(self, factor: Factor) -> ir.Value:
        """Return a value as (batch, heads, positions, head_dim)."""
        if factor.order == _IN_PLACE:
            return factor.source
        return self._transpose(factor.source, factor.order)

    def _flat(self, factor: Factor, heads: int, *, scaled: bool = True) -> tuple[ir.Value, float]:
        """Return a value as (batch, positions, hidden), and a scale that was taken out of it."""
        by_position = tuple(factor.order[axis] for axis in HEADS_FIRST)
        source = factor.source
        if by_position != _IN_PLACE:
            source = self._transpose(source, by_position)
        width = fixed_dim(factor.source, factor.order[3])
        flat = _before_split(source, heads, width)
        if flat is None:
            hidden = -1 if width is None else heads * width
            flat = self._build("Reshape", source, self._build.ints(0, 0, hidden))
            flat.type = source.type
            dims = [None, None] if source.shape is None else list(source.shape[:2])
            flat.shape = ir.Shape([*dims, None if width is None else hidden])
        scale = 1.0
        while scaled and (node := flat.producer()) is not None:
            before = unscaled(node)
            if before is None:
                break
            flat, scale = before[0], scale * before[1]
        return flat, scale

    def _transpose(self, value: ir.Value, order: Sequence[int]) -> ir.Value:
        result = self._build("Transpose", value, perm=tuple(order))
        result.type = value.type
        if value.shape is not None:
            result.shape = ir.Shape([value.shape[axis] for axis in order])
        return result

    def _replace_flat(self, attention: FoundAttention, output: ir.Value) -> None:
        """Let what reads the context read the output of the fused operator.

        It is (batch, sequence, hidden) already, to which most graphs transpose and reshape.
        """
        build, context = self._build, attention.context
        width = fixed_dim(attention.values.source, attention.values.order[3])
        output.type = attention.context.type
        split = build("Reshape", output, build.ints(0, 0, attention.heads, width or -1))
        split.type = output.type
        shape = context.shape
        if shape is not None:
            split.shape = ir.Shape([shape[axis] for axis in HEADS_FIRST])
            output.shape = ir.Shape(
                [shape[0], shape[2], None if width is None else attention.heads * width]
            )
        for use in list(context.uses()):
            node = use.node
            perm = node.attributes.get_ints("perm") if node.op_type == "Transpose" else None
            if perm is None or tuple(perm) != HEADS_FIRST or node.outputs[0].is_graph_output():
                continue
            for reader in list(node.outputs[0].uses()):
                if _merges_heads(reader.node, split, attention.heads, width):
                    reader.node.outputs[0].replace_all_uses_with(output)
            node.outputs[0].replace_all_uses_with(split)
        if context.uses() or context.is_graph_output():
            heads_first = self._transpose(split, HEADS_FIRST)
            context.replace_all_uses_with(heads_first, replace_graph_outputs=True)


def _before_split(value: ir.Value, heads: int, width: int | None) -> ir.Value | None:
    """Return the (batch, positions, hidden) whose last dim is split into heads; else None."""
    node = value.producer()
    if node is None or node.op_type != "Reshape" or width is None:
        return None
    source, target = node.inputs
    if source is None or source.shape is None or target is None:
        return None
    fits = len(source.shape) == 3 and source.shape[2] == heads * width
    return source if fits and _keeps_leading(source, value, target) else None


def _merges_heads(node: ir.Node, split: ir.Value, heads: int, width: int | None) -> bool:
    """Return True for a Reshape of (batch, sequence, heads, width) to (batch, sequence, hidden)."""
    if node.op_type != "Reshape" or width is None or node.outputs[0].is_graph_output():
        return False
    merged, target = node.outputs[0], node.inputs[1]
    if merged.shape is None or len(merged.shape) != 3 or target is None:
        return False
    return fixed_dim(merged, 2) == heads * width and _keeps_leading(split, merged, target)


def _keeps_leading(source: ir.Value, result: ir.Value, target: ir.Value) -> bool:
    """Return True if a Reshape leaves the first two dims as they are."""
    parts = shape_parts(target)
    if parts is not None and parts[0] == 0 and parts[1] in (0, -1):
        return True
    if source.shape is None or result.shape is None:
        return False
    # The number of elements stays, so that one of the two follows from the other and the rest.
    return any(same_dim(a, b) for a, b in zip(source.shape[:2], result.shape[:2], strict=True))
