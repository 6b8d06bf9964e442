"""Compute only the tokens that are not padding, in graphs with ONNX Runtime's fused attention.

    pack_tokens(model)    # 6: the number of attentions that are packed

The tokens of all rows become one sequence (token_count, hidden), and each attention gets the
cumulative lengths of the rows: RemovePadding, PackedAttention and RestorePadding of com.microsoft,
which have kernels on CUDA only. As in the fused graph, padding is on the right: the mask is a
number of tokens per row. Outputs are 0 at padding.

Source: onnxruntime/docs/ContribOperators.md, and transformers/convert_to_packing_mode.py, whose
conversion also takes nodes that need all positions.
"""

from __future__ import annotations

import onnx_ir as ir

from enginery.passes.ir.nodes import NameAllocator

_DOMAIN = "com.microsoft"
_INPUT, _WEIGHTS, _BIAS, _COUNTS = range(4)
_KEPT = ("num_heads", "scale", "qkv_hidden_sizes")
_BY_TOKEN = frozenset(
    {"Add", "BiasGelu", "Cast", "FastGelu", "Gelu", "LayerNormalization", "MatMul"}
    | {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Tanh"}
)
"""Ops that treat each token alike, if their other inputs are weights of at most two dims."""


def pack_tokens(model: ir.Model) -> int:
    """Pack the tokens between the first attention and the nodes that need all positions.

    Returns:
        The number of packed attentions; 0, and the model is unchanged, if the graph has none or one
        of them cannot be packed: with a bias, a past, a causal mask or without numbers of tokens.
    """
    attentions = [node for node in model.graph if _is_attention(node)]
    if not attentions or not all(_can_be_packed(node, attentions[0]) for node in attentions):
        return 0
    packing = _Packing(model, attentions[0])
    for node in list(model.graph):
        packing.convert(node)
    packing.restore_outputs()
    model.graph.sort()
    return len(attentions)


class _Packing:
    """The values that are packed, while the nodes are converted in their order."""

    def __init__(self, model: ir.Model, first: ir.Node) -> None:
        self._graph = model.graph
        self._names = NameAllocator(model)
        hidden = _input_of(first, _INPUT)
        counts = _input_of(first, _COUNTS)
        removed = self._append("RemovePadding", [hidden, counts], hidden, outputs=4)
        # RemovePadding returns the tokens, token_offset, cumulated_seq_len and max_seq_len.
        self._offsets, self._lengths = removed[1], removed[2]
        self._packed: dict[ir.Value, ir.Value] = {hidden: removed[0]}
        self._restored: dict[ir.Value, ir.Value] = {hidden: hidden}
        self._shapes: dict[ir.Value, ir.Shape | None] = {}

    def convert(self, node: ir.Node) -> None:
        """Give a node packed inputs if it treats each token alike, else restored ones."""
        if node.op_type == "RemovePadding" or not any(v in self._packed for v in node.inputs):
            return
        if _is_attention(node):
            self._convert_attention(node)
            return
        by_token = self._treats_tokens_alike(node)
        for index, value in enumerate(node.inputs):
            if value is not None and value in self._packed:
                replacement = self._packed[value] if by_token else self._restore(value)
                node.replace_input_with(index, replacement)
        if by_token:
            for output in node.outputs:
                self._packed[output] = output
                # The shape holds only with padding; `_restore` needs it.
                self._shapes[output], output.shape = output.shape, None

    def restore_outputs(self) -> None:
        """Restore the graph's outputs, which keep their names."""
        for index, output in enumerate(self._graph.outputs):
            if output in self._packed:
                name = output.name
                restored = self._restore(output)
                output.name = self._names(f"{name}_packed")
                restored.name = name
                self._graph.outputs[index] = restored

    def _convert_attention(self, node: ir.Node) -> None:
        output = node.outputs[0]
        inputs = [self._packed[_input_of(node, _INPUT)], node.inputs[_WEIGHTS], node.inputs[_BIAS]]
        attributes = [node.attributes[name] for name in _KEPT if name in node.attributes]
        (packed,) = self._append(
            "PackedAttention",
            [*inputs, self._offsets, self._lengths],
            output,
            attributes=attributes,
        )
        ir.convenience.replace_all_uses_with(output, packed, replace_graph_outputs=True)
        self._graph.remove(node, safe=True)
        packed.name = output.name
        self._packed[packed] = packed
        self._shapes[packed] = output.shape

    def _treats_tokens_alike(self, node: ir.Node) -> bool:
        """Return True if the node has the packed layout in and out."""
        if node.op_type not in _BY_TOKEN or any(o in self._graph.outputs for o in node.outputs[1:]):
            return False
        others = [v for v in node.inputs if v is not None and v not in self._packed]
        first = node.inputs[0]
        # With the tokens on its right side, a product sums over them.
        if node.op_type == "MatMul" and first not in self._packed:
            return False
        # A weight of three dims could have a row for each position.
        return all(v.const_value is not None and len(v.const_value.shape) <= 2 for v in others)

    def _restore(self, value: ir.Value) -> ir.Value:
        """Return the value with padding, (batch, sequence, hidden)."""
        if value not in self._restored:
            inputs = [self._packed[value], self._offsets]
            (restored,) = self._append("RestorePadding", inputs, value)
            restored.shape = self._shapes.get(value, value.shape)
            self._restored[value] = restored
        return self._restored[value]

    def _append(
        self,
        op_type: str,
        inputs: list[ir.Value | None],
        like: ir.Value,
        *,
        outputs: int = 1,
        attributes: list[ir.Attr] | None = None,
    ) -> tuple[ir.Value, ...]:
        """Append a node, to be sorted later; its first output has the type of another value."""
        name = self._names(f"packing/{op_type}")
        node = ir.Node(_DOMAIN, op_type, inputs, attributes or (), num_outputs=outputs, name=name)
        for index, output in enumerate(node.outputs):
            output.name = self._names(f"{name}_output_{index}")
            output.type = like.type if index == 0 else ir.TensorType(ir.DataType.INT32)
        self._graph.append(node)
        return tuple(node.outputs)


def _input_of(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise ValueError(f"{node.name}: input {index} is missing.")
    return value


def _is_attention(node: ir.Node) -> bool:
    return bool(node.domain == _DOMAIN and node.op_type == "Attention")


def _can_be_packed(node: ir.Node, first: ir.Node) -> bool:
    """Return True if an attention has weights, a bias and the numbers of tokens, and no more."""
    inputs = node.inputs
    if len(inputs) <= _COUNTS or any(value is None for value in inputs[: _COUNTS + 1]):
        return False
    counts = _input_of(node, _COUNTS)
    return (
        len(first.inputs) > _COUNTS
        # The tokens are packed once, so all attentions must agree on which they are.
        and counts is first.inputs[_COUNTS]
        and _has_one_dim(counts)
        and all(value is None for value in inputs[_COUNTS + 1 :])
        # PackedAttention has neither attribute.
        and not any(_flag(node, name) for name in ("unidirectional", "do_rotary"))
    )


def _has_one_dim(counts: ir.Value) -> bool:
    """Return True for a number per row: the sum of a mask over its positions."""
    if counts.shape is not None:
        return len(counts.shape) == 1
    producer = counts.producer()
    keepdims = producer.attributes.get("keepdims") if producer else None
    return (
        producer is not None
        and producer.op_type == "ReduceSum"
        and keepdims is not None
        and not keepdims.as_int()
    )


def _flag(node: ir.Node, name: str) -> bool:
    attribute = node.attributes.get(name)
    return attribute is not None and bool(attribute.as_int())
