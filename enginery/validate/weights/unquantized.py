"""A quantized graph without its quantization, to compare it as closely as any other.

Rounding to INT8 hides other faults: an error that it exceeds cannot be told from it. So validate
also runs the graph as it is but for three things, which the comparison of the weights has checked
one by one: activations skip QuantizeLinear and DequantizeLinear, weights are the reference's, and
biases lack the correction of the calibration. What remains is the graph around the quantization,
smoothing of the activations included, and its tolerance is that of its floats, FP16 or FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.passes.cast.low_precision import LOW_TYPES, cast_array
from enginery.passes.ir.graph_file import write_graph
from enginery.validate.weights.quantized import QuantizedLayer
from enginery.validate.weights.stored import constant_tensor

Array = NDArray[Any]


@dataclass(frozen=True)
class ExactLayer:
    """A quantized layer, and the weight that the reference has there."""

    layer: QuantizedLayer
    weight: Array
    """With the shape of the stored weight, and without smoothing."""


def write_unquantized(model: ir.Model, layers: Sequence[ExactLayer], path: Path) -> None:
    """Write a graph without the quantization of these layers.

    Args:
        model: the quantized graph; it is changed.
        layers: its quantized layers.
        path: where to write the ONNX file.

    Raises:
        OSError: it cannot be written.
    """
    for exact in layers:
        _restore_weight(model, exact)
        _restore_bias(model, exact.layer)
        _restore_activation(model, exact.layer)
    RemoveUnusedNodesPass()(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_graph(model, path)


def _restore_weight(model: ir.Model, exact: ExactLayer) -> None:
    layer, weight = exact.layer, exact.weight
    if layer.node.op_type != "Conv" and layer.params.multiplier is not None:
        weight = weight / _by_channel(layer.params.multiplier, 1 - layer.output_axis)
    if layer.factors is not None:
        weight = weight / _by_channel(layer.factors, layer.output_axis)
    dequantizer = layer.weight_dequantizer
    _replace(model, dequantizer.outputs[0], weight, _dtype(dequantizer.inputs[1]))


def _by_channel(vector: Array, axis: int) -> Array:
    return vector.reshape(-1, 1) if axis == 0 else vector


def _restore_bias(model: ir.Model, layer: QuantizedLayer) -> None:
    if layer.bias is not None and layer.bias_value is not None and np.any(layer.delta):
        plain = layer.bias.values - layer.delta
        if (stored := constant_tensor(layer.bias_value)) is not None:
            _replace(model, layer.bias_value, plain.reshape(stored.shape.numpy()), stored.dtype)


def _restore_activation(model: ir.Model, layer: QuantizedLayer) -> None:
    dequantizer = layer.dequantizer
    quantized = dequantizer.inputs[0] if dequantizer is not None else None
    quantizer = quantized.producer() if quantized is not None else None
    if dequantizer is None or quantizer is None or not dequantizer.outputs[0].uses():
        return
    # In a mixed graph, a pair may also convert floats.
    plain = ir.node("Cast", [quantizer.inputs[0]], {"to": int(_dtype(dequantizer.inputs[1]))})
    plain.outputs[0].name = f"{dequantizer.outputs[0].name}/unquantized"
    dequantizer.outputs[0].replace_all_uses_with(plain.outputs[0])
    model.graph.insert_after(dequantizer, plain)


def _dtype(value: ir.Value | None) -> ir.DataType:
    """Return the dtype of a constant, which may be behind a Cast."""
    made = value.producer() if value is not None else None
    if made is not None and made.op_type == "Cast":
        return ir.DataType(made.attributes.get_int("to", int(ir.DataType.FLOAT)))
    tensor = constant_tensor(value)
    return ir.DataType.FLOAT if tensor is None else tensor.dtype


def _replace(model: ir.Model, old: ir.Value, array: Array, kind: ir.DataType) -> None:
    """Put an initializer in the place of a value."""
    values = cast_array(array, kind) if kind in LOW_TYPES.values() else array
    name = f"{old.name}/unquantized"
    tensor = ir.tensor(np.asarray(values, order="C"), dtype=kind, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(kind), const_value=tensor)
    model.graph.register_initializer(value)
    old.replace_all_uses_with(value)
