"""A graph without the rounding of its precision, to compare it more closely.

Rounding hides other faults: an error that is smaller cannot be told from it. So validate runs the
graph once more without what the comparison of the weights has checked one by one:

- Quantized: activations skip QuantizeLinear and DequantizeLinear, weights are the reference's, and
  biases lack the correction of the calibration. The rest stays as it is, in FP16 or FP32, smoothing
  of the activations included.
- FP16 and BF16: the graph computes in FP32, with the reference's weights. Constants that are powers
  of a size, rounded, such as a scale of attention, are these powers; others stay rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.passes.cast.low_precision import LOW_TYPES, cast_array, read_values
from enginery.passes.cast.widening import widen
from enginery.passes.ir.graph_file import write_graph
from enginery.validate.weights.quantized import QuantizedLayer
from enginery.validate.weights.stored import constant_past_casts, find_sizes

Array = NDArray[Any]
Weights = Mapping[str, Callable[[], Array]]
"""Name of a weight -> a function that reads the reference's."""

FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True)
class ExactLayer:
    """A quantized layer, and the weight that the reference has there."""

    layer: QuantizedLayer
    read_weight: Callable[[], Array]
    """The weight with the shape of the stored one, and without smoothing."""


@dataclass(frozen=True)
class ExactTable:
    """A quantized embedding table, and the parameter that the reference has there."""

    value: ir.Value
    """The initializer of its numbers."""
    scale: ir.Value
    """The initializer of its scales."""
    read: Callable[[], Array]
    """Read the parameter, with the shape of the table."""


def write_unquantized(
    model: ir.Model,
    layers: Sequence[ExactLayer],
    joining: Sequence[ir.Node],
    tables: Sequence[ExactTable],
    path: Path,
) -> None:
    """Write a graph without the quantization of these layers; the model is changed.

    Args:
        model: the graph.
        layers: its quantized layers.
        joining: DequantizeLinear nodes that no layer reads.
        tables: its quantized embedding tables.
        path: where to write the ONNX file.

    Raises:
        OSError: it cannot be written.
    """
    for exact in layers:
        _restore_weight(model, exact)
        _restore_bias(model, exact.layer)
        if exact.layer.dequantizer is not None:
            _bypass(model, exact.layer.dequantizer)
    for dequantizer in joining:
        _bypass(model, dequantizer)
    for table in tables:
        scales = constant_past_casts(table.scale)
        assert scales is not None  # noqa: S101  it is an initializer
        _replace(model, table.value, table.read(), FLOAT)
        # The nodes that dequantize stay, and multiply by 1.
        _replace(model, table.scale, np.ones(scales.shape.numpy(), np.float32), FLOAT)
    RemoveUnusedNodesPass()(model)
    _write(model, path)


_POWERS = (0.5, -0.5, 0.25, -0.25)
"""Powers of a size that scale the scores of an attention."""
_OF_ACTIVATIONS = (math.sqrt(2 / math.pi), 0.044715, 1.702)
"""Constants of approximations of GELU."""


def write_in_fp32(model: ir.Model, low: ir.DataType, weights: Weights, path: Path) -> None:
    """Write an FP16 or BF16 graph in FP32; the model is changed.

    Args:
        model: the graph. Its inputs keep their dtypes, and its outputs become FP32.
        low: FP16 or BF16.
        weights: the weights that are the reference's.
        path: where to write the ONNX file.

    Raises:
        OSError: it cannot be written.
    """
    sizes = sorted(find_sizes(model))
    numbers = (*_OF_ACTIVATIONS, *(size**power for power in _POWERS for size in sizes))
    # Reversed, so that of several numbers that round alike, the first is taken.
    exact = {float(low.numpy().type(number)): number for number in reversed(numbers)}

    def convert(name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol | None:
        if tensor.dtype == low or (tensor.dtype == FLOAT and name in weights):
            return _in_fp32(name, tensor, weights, exact)
        return None

    widen(model, convert, low={low}, keep_inputs=True)
    _write(model, path)


def _in_fp32(
    name: str, tensor: ir.TensorProtocol, weights: Weights, exact: Mapping[float, float]
) -> ir.LazyTensor:
    def read() -> ir.TensorProtocol:
        values = weights[name]() if name in weights else read_values(tensor)
        if values.size == 1:
            number = float(values.reshape(()))
            values = np.full(values.shape, exact.get(number, number))
        return ir.tensor(np.asarray(values, np.float32, order="C"), name=name)

    return ir.LazyTensor(read, FLOAT, ir.Shape(tensor.shape.numpy()), name=name)


def _write(model: ir.Model, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_graph(model, path)


def _restore_weight(model: ir.Model, exact: ExactLayer) -> None:
    layer, weight = exact.layer, exact.read_weight()
    # Activations are still smoothed, and products still scaled: the weight takes up the inverse.
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
        # What smoothing has added stays, as smoothing does.
        plain = layer.bias.values - layer.delta
        if (stored := constant_past_casts(layer.bias_value)) is not None:
            _replace(model, layer.bias_value, plain.reshape(stored.shape.numpy()), stored.dtype)


def _bypass(model: ir.Model, dequantizer: ir.Node) -> None:
    """Let everything read what is quantized in place of what is dequantized."""
    quantized, old = dequantizer.inputs[0], dequantizer.outputs[0]
    quantizer = quantized.producer() if quantized is not None else None
    if quantizer is None or not (old.uses() or old.is_graph_output()):
        return
    # In a mixed graph, a pair may also convert floats.
    plain = ir.node("Cast", [quantizer.inputs[0]], {"to": int(_dtype(dequantizer.inputs[1]))})
    new, name = plain.outputs[0], f"{old.name}/unquantized"
    if old.is_graph_output():
        old.name, name = name, old.name
        new.shape, new.type = old.shape, old.type
    new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    model.graph.insert_after(dequantizer, plain)


def _dtype(value: ir.Value | None) -> ir.DataType:
    """Return the dtype of a constant, which may be behind a Cast."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", int(FLOAT)))
    tensor = constant_past_casts(value)
    return FLOAT if tensor is None else tensor.dtype


def _replace(model: ir.Model, old: ir.Value, array: Array, kind: ir.DataType) -> None:
    """Put an initializer in the place of a value."""
    values = cast_array(array, kind) if kind in LOW_TYPES.values() else array
    name = f"{old.name}/unquantized"
    tensor = ir.tensor(np.asarray(values, order="C"), dtype=kind, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(kind), const_value=tensor)
    model.graph.register_initializer(value)
    old.replace_all_uses_with(value)
