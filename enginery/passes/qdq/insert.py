"""Insert QuantizeLinear and DequantizeLinear nodes where TensorRT fuses them into layers.

>>> from enginery.passes.qdq.layers import find_layers
>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
>>> insert_qdq(model, find_layers(model), {"x": ActivationQuantParams(scale=0.05)})
QdqSummary(layers=1, activations=1, smoothed=0)
>>> [node.op_type for node in model.graph]
['QuantizeLinear', 'DequantizeLinear', 'DequantizeLinear', 'MatMul']

The activation and the weight of a MatMul, Gemm or Conv are quantized. Biases and outputs are not:
Q/DQ nodes behind a GEMM would separate it from the ops that TensorRT fuses into it. Source:
TensorRT developer guide, "Q/DQ layer-placement recommendations".

For the CPU, the output of a Conv is quantized as well, behind its ReLU, and everything reads that:
ONNX Runtime multiplies a convolution in INT8 only between quantized tensors (`QLinearConv`). What
lies between convolutions can be quantized, too. A Gemm is multiplied in INT8 only if another node
adds the bias. Source: ONNX Runtime,
core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc.

An activation can be scaled and shifted per channel before it is quantized (SmoothQuant). The weight
and the bias then take up the inverse, so that the layer computes the same:
x @ W + b = (x * m + o) @ (W / m) + (b - o @ (W / m)).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from enginery.passes.ir.nodes import add_initializer
from enginery.passes.qdq.joining import moves_numbers
from enginery.passes.qdq.layers import Layer, constant_tensor, following_add, operands
from enginery.passes.qdq.scales import (
    ActivationQuantParams,
    bias_shift,
    broadcast_scales,
    channel_scales,
    fp16_scale,
    has_shared_scale,
    scale_weight,
    split_scales,
)
from enginery.passes.qdq.scheme import INT8, Scheme, Vector

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm")
"""Operators whose weights ONNX Runtime quantizes by itself."""
_ACTIVATIONS = ("Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Mul")


@dataclass(frozen=True)
class QdqSummary:
    """The numbers of layers and activations that `insert_qdq` quantized."""

    layers: int
    activations: int
    smoothed: int
    """Activations whose channels are scaled or shifted before they are quantized."""


def insert_qdq(
    model: ir.Model,
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationQuantParams],
    *,
    scheme: Scheme = INT8,
    bias_deltas: Mapping[str, Vector] | None = None,
    joining: Collection[str] = (),
) -> QdqSummary:
    """Quantize the layers in place.

    Args:
        model: an FP32 model of opset 13 or later, for FP8 of opset 19 or later.
        layers: the layers to quantize, see `find_layers`.
        ranges: the parameters of each tensor that is quantized, by name; see `quantized_tensors`.
        scheme: the quantized type.
        bias_deltas: vectors (N,) by layer, to add to the bias besides the one for the offset.
        joining: other tensors to quantize, see `joining_tensors`.
    """
    graph = model.graph
    nodes = {node.name: node for node in graph}
    chosen = {layer.name: layer for layer in layers}
    quantized: dict[str, ir.Value] = {}
    # ONNX Runtime multiplies a convolution in INT8 only between quantized tensors.
    if scheme.unsigned:
        quantized = _quantize_around_convolutions(graph, layers, joining, ranges, scheme)
    for node in [nodes[name] for name in nodes if name in chosen]:
        layer = chosen[node.name or ""]
        params = ranges[layer.activation]
        source, weight = operands(node)
        # Layers that read one activation share its Q and DQ.
        if layer.activation not in quantized:
            quantized[layer.activation] = _quantize_activation(graph, node, source, params, scheme)
        scaled = scale_weight(layer, weight, params)
        delta = bias_shift(layer, scaled, params)
        if bias_deltas is not None and layer.name in bias_deltas:
            delta = delta + bias_deltas[layer.name]
        if np.any(delta):
            add_to_bias(graph, node, layer, delta)
        node.replace_input_with(0, quantized[layer.activation])
        # ONNX Runtime multiplies a Gemm in INT8 only if another node adds the bias. With a shared
        # scale, the product is scaled before the bias is added.
        if layer.op_type == "Gemm" and (has_shared_scale(layer, scheme) or scheme.unsigned):
            _separate_bias(graph, node, layer)
        dequantized, factors = _quantize_weight(graph, node, layer, scaled, scheme)
        node.replace_input_with(1, dequantized)
        if factors is not None:
            _scale_output(graph, node, layer, factors)
    if scheme.unsigned:
        _keep_in_float(graph, chosen)
    used = [ranges[name] for name in quantized]
    smoothed = sum(r.multiplier is not None or r.offset is not None for r in used)
    return QdqSummary(layers=len(chosen), activations=len(quantized), smoothed=smoothed)


def quantize_residuals(model: ir.Model) -> list[str]:
    """Let residual additions after convolutions read their other input in INT8, in place.

    Where a quantized layer reads an activation x, and x is added to the output of a convolution,
    the addition gets the dequantized x as well. TensorRT then fuses the dequantization into the
    addition and keeps x in one byte; otherwise it also writes x in FP16, and reads that.

    Args:
        model: a graph with Q/DQ nodes, as `insert_qdq` has left it.

    Returns:
        The names of the additions.
    """
    position = {node: index for index, node in enumerate(model.graph)}
    additions = []
    for node in list(model.graph):
        quantizer = node.inputs[0].producer() if node.inputs and node.inputs[0] else None
        if node.op_type != "DequantizeLinear" or quantizer is None:
            continue
        source = quantizer.inputs[0] if quantizer.op_type == "QuantizeLinear" else None
        if source is None:
            continue
        for use in list(source.uses()):
            # The graph is sorted: only a later node may read this DequantizeLinear.
            if _is_residual(use.node, source) and position[node] < position[use.node]:
                use.node.replace_input_with(use.idx, node.outputs[0])
                additions.append(use.node.name or "")
    return additions


def _is_residual(node: ir.Node, value: ir.Value | None) -> bool:
    """Return True if a node adds a value to what a convolution and its activation compute."""
    others = [other for other in node.inputs if other is not value]
    return node.op_type == "Add" and len(others) == 1 and _is_convolved(others[0])


def _is_convolved(value: ir.Value | None, depth: int = 3) -> bool:
    """Return True for the output of a convolution, or of an activation function behind it."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type == "Conv":
        return producer is not None
    if not depth or producer.op_type not in _ACTIVATIONS:
        return False
    # SiLU is x * sigmoid(x): both factors come from the convolution.
    operands = producer.inputs if producer.op_type == "Mul" else producer.inputs[:1]
    return all(_is_convolved(operand, depth - 1) for operand in operands)


def add_to_bias(graph: ir.Graph, node: ir.Node, layer: Layer, delta: Vector) -> None:
    """Add a vector (N,) to the layer's output: to its bias, or with a new Add if it has none."""
    holder = node if layer.op_type in ("Gemm", "Conv") else following_add(node)
    if layer.bias and holder is not None:
        index = next(
            i for i, value in enumerate(holder.inputs) if value and value.name == layer.bias
        )
        tensor = constant_tensor(holder.inputs[index])
        total = delta if tensor is None else tensor.numpy().astype(np.float32) + delta
        holder.replace_input_with(index, add_initializer(graph, f"{layer.name}/bias", total))
        return
    vector = add_initializer(graph, f"{layer.name}/bias", delta)
    if layer.op_type == "Conv":  # its output has the channels elsewhere than the last axis
        # A bias that the graph computes is not in `layer.bias`; the vector is added to it at run
        # time.
        computed = node.inputs[2] if len(node.inputs) > 2 else None
        if computed is not None:
            addition = _node("Add", [computed, vector], f"{layer.name}/add_bias", like=computed)
            graph.insert_before(node, addition)
            vector = addition.outputs[0]
        node.resize_inputs(3)
        node.replace_input_with(2, vector)
        return
    output = node.outputs[0]
    addition = _node("Add", [output, vector], f"{layer.name}/add_bias", like=output)
    graph.insert_after(node, addition)
    _replace_uses(graph, output, [addition])


def _scale_output(graph: ir.Graph, node: ir.Node, layer: Layer, factors: Vector) -> None:
    """Multiply the channels of the product by factors (N,), before the bias is added."""
    output = node.outputs[0]
    factor = add_initializer(graph, f"{layer.name}/weight_factors", factors)
    product = _node("Mul", [output, factor], f"{layer.name}/scale_output", like=output)
    graph.insert_after(node, product)
    _replace_uses(graph, output, [product])


def _separate_bias(graph: ir.Graph, node: ir.Node, layer: Layer) -> None:
    """Add the bias of a Gemm with a node of its own."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return
    output = node.outputs[0]
    addition = _node("Add", [output, node.inputs[2]], f"{layer.name}/separate_bias", like=output)
    node.resize_inputs(2)
    graph.insert_after(node, addition)
    _replace_uses(graph, output, [addition])


def _keep_in_float(graph: ir.Graph, quantized: Collection[str]) -> None:
    """Put a Max of one operand, which changes nothing, before layers that are not quantized.

    Between quantized tensors, ONNX Runtime would quantize their weights, with one scale for all
    channels. It does so only directly behind a DequantizeLinear, which it moves past nodes that
    only move numbers. Source: its optimizers WeightBiasQuantization and QDQPropagation.
    """
    for node in list(graph):
        if node.op_type not in _WEIGHTED or node.name in quantized or node.inputs[0] is None:
            continue
        source = node.inputs[0]
        if constant_tensor(node.inputs[1]) is not None and _is_dequantized(source):
            max_node = _node("Max", [source], f"{node.outputs[0].name}/float_input", like=source)
            graph.insert_before(node, max_node)
            node.replace_input_with(0, max_node.outputs[0])


def _is_dequantized(value: ir.Value | None) -> bool:
    """Return True for the output of a DequantizeLinear, also if it has been moved since."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type == "DequantizeLinear":
            return True
        if not moves_numbers(producer):
            return False
        value = producer.inputs[0]
    return False


def _replace_uses(
    graph: ir.Graph, old: ir.Value, new_nodes: Sequence[ir.Node], *, outputs: bool = True
) -> None:
    """Replace all uses of `old` with the output of the last new node, also as a graph output."""
    new = new_nodes[-1].outputs[0]
    for use in list(old.uses()):
        if use.node not in new_nodes:
            use.node.replace_input_with(use.idx, new)
    for index, value in enumerate(graph.outputs):
        if outputs and value is old:
            old.name, new.name = f"{old.name}/product", old.name
            graph.outputs[index] = new


def _quantize_activation(
    graph: ir.Graph,
    before: ir.Node,
    source: ir.Value,
    params: ActivationQuantParams,
    scheme: Scheme,
) -> ir.Value:
    """Insert scaling, shift, Q and DQ before the first layer that reads the activation."""
    nodes = _quantizers(graph, source, params, scheme)
    graph.insert_before(before, nodes)
    return nodes[-1].outputs[0]


def _quantize_around_convolutions(
    graph: ir.Graph,
    layers: Sequence[Layer],
    joining: Collection[str],
    ranges: Mapping[str, ActivationQuantParams],
    scheme: Scheme,
) -> dict[str, ir.Value]:
    """Insert Q and DQ where tensors are made; everything reads the result. Return it, by name.

    These are what convolutions read and write, and the tensors of `joining`. Outputs of the graph
    stay in floating point unless a convolution writes them.
    """
    convolutions = [layer for layer in layers if not layer.linear]
    written = {layer.activated_output for layer in convolutions}
    names = {*(layer.activation for layer in convolutions), *written, *joining}
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    dequantized = {}
    for value in [value for value in values if value.name in names]:
        name = value.name or ""
        nodes = _quantizers(graph, value, ranges[name], scheme)
        producer = value.producer()
        if producer is None:
            graph.insert_before(graph[0], nodes)
        else:
            graph.insert_after(producer, nodes)
        _replace_uses(graph, value, nodes, outputs=name in written)
        dequantized[name] = nodes[-1].outputs[0]
    return dequantized


def _quantizers(
    graph: ir.Graph, source: ir.Value, params: ActivationQuantParams, scheme: Scheme
) -> list[ir.Node]:
    """Return the nodes that scale, shift, quantize and dequantize a tensor."""
    name, value = source.name or "", source
    nodes = []
    # SmoothQuant: the weight and the bias of each layer take up the inverse.
    if params.multiplier is not None:
        factor = add_initializer(graph, f"{name}/multiplier", params.multiplier)
        nodes.append(_node("Mul", [value, factor], f"{name}/scale_channels", like=source))
        value = nodes[-1].outputs[0]
    if params.offset is not None:
        shift = add_initializer(graph, f"{name}/offset", params.offset)
        nodes.append(_node("Add", [value, shift], f"{name}/shift_channels", like=source))
        value = nodes[-1].outputs[0]
    # The graph may be cast to FP16 later, so the scale must be a number of FP16.
    scale = add_initializer(graph, f"{name}/scale", fp16_scale(params.scale).reshape(()))
    # Q/DQ nodes derive their type from the zero point.
    zero = add_initializer(graph, f"{name}/zero_point", params.stored_zero_point(scheme))
    nodes.append(
        _node(
            "QuantizeLinear",
            [value, scale, zero],
            f"{name}/quantize",
            like=source,
            dtype=scheme.activation_dtype,
        )
    )
    nodes.append(
        _node(
            "DequantizeLinear",
            [nodes[-1].outputs[0], scale, zero],
            f"{name}/dequantize",
            like=source,
        )
    )
    return nodes


def _quantize_weight(
    graph: ir.Graph,
    before: ir.Node,
    layer: Layer,
    weight: Vector,
    scheme: Scheme,
) -> tuple[ir.Value, Vector | None]:
    """Store the quantized weight and insert a DequantizeLinear before the layer.

    Returns:
        The dequantized weight, and the factors (N,) that the layer's output has to be multiplied
        by; None if it has the scales of all channels.
    """
    scales = by_channel = channel_scales(layer, weight, scheme)
    factors = None
    if has_shared_scale(layer, scheme):
        # TensorRT splits such a weight and then multiplies in floating point, unless the weight
        # has a single scale. So the scales of the channels are applied to the product instead.
        scales, factors = split_scales(scales)
        # Round with the scales that take effect.
        by_channel = np.asarray(scales * factors, dtype=np.float32)
    numbers = scheme.stored(weight / broadcast_scales(layer, weight, by_channel))
    rounded = add_initializer(graph, f"{layer.name}/weight", numbers)
    scale = add_initializer(graph, f"{layer.name}/weight_scale", scales)
    zero = add_initializer(graph, f"{layer.name}/weight_zero_point", scheme.zeros(scales.shape))
    dequantize = _node(
        "DequantizeLinear",
        [rounded, scale, zero],
        f"{layer.name}/dequantize_weight",
        attributes={"axis": layer.weight_axis} if scales.ndim else {},
    )
    dequantize.outputs[0].shape = ir.Shape(weight.shape)
    graph.insert_before(before, dequantize)
    return dequantize.outputs[0], factors


def _node(
    op_type: str,
    inputs: Sequence[ir.Value],
    name: str,
    *,
    like: ir.Value | None = None,
    dtype: ir.DataType = ir.DataType.FLOAT,
    attributes: Mapping[str, int] | None = None,
) -> ir.Node:
    node = ir.node(op_type, inputs, attributes=dict(attributes or {}), name=name)
    output = node.outputs[0]
    output.name = f"{name}_output"
    output.type = ir.TensorType(dtype)
    output.shape = None if like is None else like.shape
    return node
