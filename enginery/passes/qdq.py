"""Explicit quantization: QuantizeLinear and DequantizeLinear just where TensorRT fuses them.

Takes an `onnx_ir.Model` in FP32; leaves it with INT8 or FP8 weights and Q/DQ pairs.

    >>> chosen = [layer for layer in find_layers(model) if not layer.skip_reason]
    >>> insert_qdq(model, chosen, ranges)
    QdqSummary(layers=36, activations=24, smoothed=24)

The placement is TensorRT's: the activation and the weight that enter a MatMul, Gemm or Conv, both
symmetric; no bias and no output, which would part the GEMM from what follows it. Source: TensorRT
developer guide, "Q/DQ layer-placement recommendations".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.passes.layers import Layer, constant_tensor, following_add, operands
from enginery.passes.scheme import INT8, Scheme, Vector

MIN_SCALE = 2.0**-20
"""FP16 still holds four significand bits here; a channel of zeros needs some scale."""


@dataclass(frozen=True)
class ActivationQuantParams:
    """How an activation is quantized: round((x * multiplier + offset) / scale)."""

    scale: float
    multiplier: Vector | None = None
    """(K,); None for no scaling of single channels."""
    offset: Vector | None = None
    """(K,), after the multiplier; None for no shift."""


@dataclass(frozen=True)
class QdqSummary:
    """What `insert_qdq` did."""

    layers: int
    activations: int
    smoothed: int
    """Activations whose channels are scaled or shifted first."""


def insert_qdq(
    model: ir.Model,
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationQuantParams],
    *,
    scheme: Scheme = INT8,
    bias_deltas: Mapping[str, Vector] | None = None,
) -> QdqSummary:
    """Quantizes the layers, in place.

    Args:
        model: with a float32 graph of opset 13 or later, 19 for FP8.
        layers: those to quantize, as `find_layers` gave them.
        ranges: by activation.
        scheme: the type of the numbers.
        bias_deltas: by layer, (N,): what is added to its bias besides what its offset demands.
    """
    graph = model.graph
    nodes = {node.name: node for node in graph}
    chosen = {layer.name: layer for layer in layers}
    quantized: dict[str, ir.Value] = {}
    for node in [nodes[name] for name in nodes if name in chosen]:
        layer = chosen[node.name or ""]
        params = ranges[layer.activation]
        source, weight = operands(node)
        if layer.activation not in quantized:
            quantized[layer.activation] = _quantize_activation(graph, node, source, params, scheme)
        scaled = scale_weight(layer, weight, params)
        delta = bias_shift(layer, scaled, params)
        if bias_deltas is not None and layer.name in bias_deltas:
            delta = delta + bias_deltas[layer.name]
        if np.any(delta):
            add_to_bias(graph, node, layer, delta)
        node.replace_input_with(0, quantized[layer.activation])
        steps = _channel_scales(layer, scaled, scheme)
        if _has_shared_scale(layer, scheme):
            # TensorRT moves the split into the weights and then multiplies in float, unless their
            # scale is one number. The channels' own scales go behind the product instead.
            shared, factors = _split_scales(steps)
            weights = _quantize_weight(graph, node, layer, scaled, scheme, shared, factors)
            node.replace_input_with(1, weights)
            _scale_output(graph, node, layer, factors)
        else:
            weights = _quantize_weight(graph, node, layer, scaled, scheme, steps)
            node.replace_input_with(1, weights)
    used = [ranges[name] for name in quantized]
    smoothed = sum(r.multiplier is not None or r.offset is not None for r in used)
    return QdqSummary(layers=len(chosen), activations=len(quantized), smoothed=smoothed)


def scale_weight(layer: Layer, weight: Vector, params: ActivationQuantParams) -> Vector:
    """The weight that gives the same product with the scaled activation: W[k] / multiplier[k]."""
    if params.multiplier is None:
        return weight
    shape = (1, -1) if layer.weight_axis == 0 else (-1, 1)
    return np.asarray(weight / params.multiplier.reshape(shape), dtype=np.float32)


def bias_shift(layer: Layer, scaled: Vector, params: ActivationQuantParams) -> Vector:
    """(N,): what the bias takes up for the offset of the activation, -offset @ W."""
    if params.offset is None:
        return np.zeros(layer.out_channels, dtype=np.float32)
    matrix = scaled.T if layer.weight_axis == 0 else scaled
    return np.asarray(-(params.offset.astype(np.float64) @ matrix), dtype=np.float32)


def weight_scales(layer: Layer, weight: Vector, scheme: Scheme) -> Vector:
    """(N,), or () for one scale: the step of each output channel, exactly as the graph has it."""
    steps = _channel_scales(layer, weight, scheme)
    if _has_shared_scale(layer, scheme):
        shared, factors = _split_scales(steps)
        return np.asarray(shared * factors, dtype=np.float32)
    return steps


def _channel_scales(layer: Layer, weight: Vector, scheme: Scheme) -> Vector:
    others = tuple(axis for axis in range(weight.ndim) if axis != layer.weight_axis)
    max_abs = np.abs(weight).max(axis=others if scheme.per_channel else None)
    return fp16_scale(max_abs / scheme.largest)


def _has_shared_scale(layer: Layer, scheme: Scheme) -> bool:
    return scheme.per_channel and layer.split and layer.linear


def _split_scales(steps: Vector) -> tuple[Vector, Vector]:
    """One scale for all channels, and (N,) what each channel's own is of it."""
    shared = fp16_scale(np.exp(np.log(steps).mean()))
    return shared, (steps / shared).astype(np.float16).astype(np.float32)


def fp16_scale(scale: Any) -> Vector:
    """Scales that FP16 holds exactly, none below `MIN_SCALE`: the graph may be cast later."""
    floored = np.maximum(np.asarray(scale, dtype=np.float32), MIN_SCALE)
    return floored.astype(np.float16).astype(np.float32)


def fake_quantize_weight(layer: Layer, weight: Vector, scheme: Scheme) -> Vector:
    """The weight as the quantized layer has it, in float32: rounded to the scheme's numbers."""
    steps = _broadcast(layer, weight, weight_scales(layer, weight, scheme))
    return np.asarray(scheme.nearest(weight / steps) * steps, dtype=np.float32)


def _broadcast(layer: Layer, weight: Vector, steps: Vector) -> Vector:
    shape = [1] * weight.ndim
    shape[layer.weight_axis] = -1
    return steps.reshape(shape)


def add_to_bias(graph: ir.Graph, node: ir.Node, layer: Layer, delta: Vector) -> None:
    """Adds a vector (N,) to what the layer gives out: to its bias, where it has one."""
    holder = node if layer.op_type in ("Gemm", "Conv") else following_add(node)
    if layer.bias and holder is not None:
        index = next(
            i for i, value in enumerate(holder.inputs) if value and value.name == layer.bias
        )
        tensor = constant_tensor(holder.inputs[index])
        total = delta if tensor is None else tensor.numpy().astype(np.float32) + delta
        holder.replace_input_with(index, _add_initializer(graph, f"{layer.name}/bias", total))
        return
    shape = (-1, 1, 1) if layer.op_type == "Conv" else (-1,)
    vector = _add_initializer(graph, f"{layer.name}/bias", delta.reshape(shape))
    output = node.outputs[0]
    made = _node("Add", [output, vector], f"{layer.name}/add_bias", like=output)
    graph.insert_after(node, made)
    _replace_uses(graph, output, [made])


def _scale_output(graph: ir.Graph, node: ir.Node, layer: Layer, factors: Vector) -> None:
    """Multiplies the product's channels, before the bias."""
    output = node.outputs[0]
    factor = _add_initializer(graph, f"{layer.name}/weight_factors", factors)
    made = [_node("Mul", [output, factor], f"{layer.name}/scale_output", like=output)]
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        scaled = [made[0].outputs[0], node.inputs[2]]
        made.append(_node("Add", scaled, f"{layer.name}/add_bias", like=output))
        node.resize_inputs(2)
    graph.insert_after(node, made)
    _replace_uses(graph, output, made)


def _replace_uses(graph: ir.Graph, old: ir.Value, made: Sequence[ir.Node]) -> None:
    """Everything that took `old` takes the last new node's output, graph outputs included."""
    new = made[-1].outputs[0]
    for use in list(old.uses()):
        if use.node not in made:
            use.node.replace_input_with(use.idx, new)
    for index, value in enumerate(graph.outputs):
        if value is old:
            old.name, new.name = f"{old.name}/product", old.name
            graph.outputs[index] = new


def _quantize_activation(
    graph: ir.Graph,
    before: ir.Node,
    source: ir.Value,
    params: ActivationQuantParams,
    scheme: Scheme,
) -> ir.Value:
    """Inserts scaling, shift and Q/DQ before the first layer that takes them."""
    name, value = source.name or "", source
    made = []
    if params.multiplier is not None:
        factor = _add_initializer(graph, f"{name}/multiplier", params.multiplier)
        made.append(_node("Mul", [value, factor], f"{name}/scale_channels", like=source))
        value = made[-1].outputs[0]
    if params.offset is not None:
        shift = _add_initializer(graph, f"{name}/offset", params.offset)
        made.append(_node("Add", [value, shift], f"{name}/shift_channels", like=source))
        value = made[-1].outputs[0]
    step = _add_initializer(graph, f"{name}/scale", fp16_scale(params.scale).reshape(()))
    zero = _add_initializer(graph, f"{name}/zero_point", scheme.zeros(()))
    made.append(_node("QuantizeLinear", [value, step, zero], f"{name}/quantize", like=source,
                      dtype=scheme.dtype))  # fmt: skip
    made.append(_node("DequantizeLinear", [made[-1].outputs[0], step, zero],
                      f"{name}/dequantize", like=source))  # fmt: skip
    graph.insert_before(before, made)
    return made[-1].outputs[0]


def _quantize_weight(
    graph: ir.Graph,
    before: ir.Node,
    layer: Layer,
    weight: Vector,
    scheme: Scheme,
    steps: Vector,
    factors: Vector | None = None,
) -> ir.Value:
    """Stores the quantized weight, with a DequantizeLinear before the layer.

    `steps` is (N,), or one number with `factors` (N,) that multiply the layer's output.
    """
    whole = steps if factors is None else np.asarray(steps * factors, dtype=np.float32)
    numbers = scheme.stored(weight / _broadcast(layer, weight, whole))
    rounded = _add_initializer(graph, f"{layer.name}/weight", numbers)
    step = _add_initializer(graph, f"{layer.name}/weight_scale", steps)
    zero = _add_initializer(graph, f"{layer.name}/weight_zero_point", scheme.zeros(steps.shape))
    made = _node("DequantizeLinear", [rounded, step, zero], f"{layer.name}/dequantize_weight",
                 attributes={"axis": layer.weight_axis} if steps.ndim else {})  # fmt: skip
    made.outputs[0].shape = ir.Shape(weight.shape)
    graph.insert_before(before, made)
    return made.outputs[0]


def _add_initializer(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    # Not ascontiguousarray, which makes a vector of a scalar.
    tensor = ir.tensor(np.asarray(array, order="C"), name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


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
