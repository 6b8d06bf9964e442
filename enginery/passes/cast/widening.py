"""Make an FP16 or BF16 graph compute in FP32, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from enginery.passes.cast.low_precision import LOW_TYPES, read_values
from enginery.passes.ir.nodes import all_graphs, infer_types
from enginery.passes.ir.op_types import FLOAT

LOW = frozenset(LOW_TYPES.values())
_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype")
"""Attributes that hold the type of a node's output."""

Convert = Callable[[str, ir.TensorProtocol], ir.TensorProtocol | None]


def to_fp32(name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol | None:
    """Return an FP16 or BF16 tensor in FP32, converted each time it is read; None for others."""
    if tensor.dtype not in LOW:
        return None

    def read() -> ir.TensorProtocol:
        return ir.tensor(read_values(tensor).astype(np.float32), name=name)

    return ir.LazyTensor(read, FLOAT, ir.Shape(tensor.shape.numpy()), name=name)


def widen(
    model: ir.Model,
    convert: Convert = to_fp32,
    *,
    low: Collection[ir.DataType] = LOW,
    keep_inputs: bool = False,
) -> dict[ir.Value, ir.DataType]:
    """Make every FP16 and BF16 value FP32, in place.

    Args:
        model: the graph; its functions are inlined.
        convert: maps the name of a constant and its tensor to the FP32 tensor that takes its place;
            None if it stays. A `Constant` has the name of its output.
        low: the types that become FP32.
        keep_inputs: leave the types of the graph's inputs as they are, and cast the inputs.

    Returns:
        What changed, and its type before: values that nodes compute, inputs and constants.
    """
    if model.functions:
        InlinePass()(model)
    infer_types(model)
    changed = {}
    for graph in all_graphs(model.graph):
        values = [value for node in graph for value in node.outputs]
        # Only the main graph's inputs come from the caller; those of a subgraph are FP32 by now.
        if not keep_inputs or graph is not model.graph:
            values = [*graph.inputs, *values]
        for value in values:
            if value.dtype is not None and value.dtype in low:
                changed[value], value.dtype = value.dtype, FLOAT
        for name, value in graph.initializers.items():
            if value.const_value is not None and (wide := convert(name, value.const_value)):
                changed[value] = value.const_value.dtype
                value.const_value, value.dtype = wide, FLOAT
        for node in graph:
            _widen_attributes(node, convert, low)
    if keep_inputs:
        _cast_inputs(model.graph, low)
    return changed


def _widen_attributes(node: ir.Node, convert: Convert, low: Collection[ir.DataType]) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR:
            if wide := convert(node.outputs[0].name or "", attribute.as_tensor()):
                node.attributes[name] = ir.AttrTensor(name, wide)
        elif name in _TYPE_ATTRIBUTES and attribute.value in map(int, low):
            node.attributes[name] = ir.AttrInt64(name, int(FLOAT))


def _cast_inputs(graph: ir.Graph, low: Collection[ir.DataType]) -> None:
    for value in graph.inputs:
        if value.dtype in low:
            cast = ir.node("Cast", [value], {"to": int(FLOAT)})
            cast.outputs[0].name = f"{value.name}/in_fp32"
            for use in list(value.uses()):
                if use.node is not cast:
                    use.node.replace_input_with(use.idx, cast.outputs[0])
            graph.insert_before(graph[0], cast)
