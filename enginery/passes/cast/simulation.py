"""Simulate an FP16 or BF16 graph on the CPU: FP32 arithmetic that rounds every value.

ONNX Runtime has FP16 kernels for few ops on the CPU. It runs the others in FP32 and removes the
Casts between two of them, so an overflow that yields infinity on a GPU does not show. It does not
run BF16 at all. So two Casts, to the low precision and back, follow every value. ONNX Runtime keeps
such pairs. Sums inside an op are FP32, as on tensor cores.

`simulate_cast` takes the FP32 graph before `cast_graph`, `simulate_low_precision` the graph after
it, or any other in FP16 or BF16.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

from enginery.passes.cast.low_precision import cast_array, low_precision_type, read_values
from enginery.passes.cast.plan import CastPlan, plan_cast
from enginery.passes.cast.widening import widen
from enginery.passes.ir.nodes import (
    NameAllocator,
    all_graphs,
    infer_types,
    raise_opset_for_bf16,
)
from enginery.passes.ir.op_types import FLOAT

_MOVES = frozenset(
    {
        "Concat",
        "Constant",
        "Expand",
        "Gather",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
        "Where",
    }
)
"""Operators whose results are some of their inputs, which are rounded already."""


def simulate_cast(
    model: ir.Model,
    precision: Literal["fp16", "bf16"],
    *,
    keep_fp32: Collection[str] = (),
    io_dtype: Literal["fp32", "same"] = "fp32",
) -> None:
    """Make an FP32 graph round as `cast_graph` would, in place; the arguments are the same.

    Values keep the names that they have in the cast graph. The types of inputs and outputs stay
    FP32; with `io_dtype="same"` their values are rounded.

    Raises:
        OptionError: the precision is neither `fp16` nor `bf16`.
    """
    low = low_precision_type(precision)
    if model.functions:
        InlinePass()(model)
    # A Constant node has one type; an initializer can have a rounded copy.
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    opset = model.opset_imports.get("", 1)
    if low == ir.DataType.BFLOAT16:
        raise_opset_for_bf16(model)
    infer_types(model)
    plan = plan_cast(model, low, keep=frozenset(keep_fp32), low_io=io_dtype == "same")
    # Only the plan needs the newer schemas.
    model.opset_imports[""] = opset
    new_name = NameAllocator(model)
    for graph in list(all_graphs(model.graph)):
        nodes = list(graph)
        for value in list(graph.initializers.values()):
            _round_weight(value, plan, graph, low, new_name)
        low_io = io_dtype == "same" and graph is model.graph
        for value in list(graph.inputs):
            _round_input(value, plan, graph, low, new_name, all_uses=low_io)
        for node in nodes:
            attribute = node.attributes.get("value")
            if node.op_type == "ConstantOfShape" and attribute and any(plan.ports[node].outputs):
                rounded = round_tensor(attribute.as_tensor(), low)
                node.attributes["value"] = ir.AttrTensor("value", rounded)
            # Filled up, because the ports of a node that stays FP32 are empty.
            low_outputs = [*plan.ports[node].outputs, *[False] * len(node.outputs)]
            for value, follows in zip(node.outputs, low_outputs, strict=False):
                if not value.name:  # an optional output that nothing reads
                    continue
                if follows or (low_io and value.dtype == FLOAT and value.is_graph_output()):
                    _round_output(value, graph, low, new_name, all_uses=follows, plan=plan)
                else:
                    # The cast graph casts an FP32 result for the low-precision nodes that read it.
                    _round_input(value, plan, graph, low, new_name)


def simulate_low_precision(model: ir.Model) -> None:
    """Make an FP16 or BF16 graph compute in FP32 and round what it computes, in place.

    Inputs keep their types; FP16 and BF16 outputs become FP32.
    """
    new_name = NameAllocator(model)
    for value, low in widen(model, keep_inputs=True).items():
        producer = value.producer()
        # Nodes that only move numbers move rounded ones.
        if producer is None or producer.graph is None or producer.op_type in _MOVES:
            continue
        if not value.uses() and not value.is_graph_output():  # an optional output
            continue
        down, up = _cast_pair(value, low, new_name)
        rounded = up.outputs[0]
        producer.graph.insert_after(producer, [down, up])
        value.replace_all_uses_with(rounded, replace_graph_outputs=True)
        # The first Cast was one of the uses, and would read its own result.
        down.replace_input_with(0, value)
        if rounded.is_graph_output():
            name, value.name = value.name, new_name(f"{value.name}_exact")
            rounded.name = name


def round_tensor(tensor: ir.TensorProtocol, low: ir.DataType) -> ir.LazyTensor:
    """Round the values of an FP32 tensor to a low-precision type; it stays FP32."""

    def convert() -> ir.TensorProtocol:
        values = cast_array(read_values(tensor), low).astype(np.float32)
        return ir.Tensor(values, dtype=FLOAT, name=tensor.name)

    return ir.LazyTensor(convert, FLOAT, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _round_weight(
    value: ir.Value, plan: CastPlan, graph: ir.Graph, low: ir.DataType, new_name: NameAllocator
) -> None:
    tensor = value.const_value
    if value.dtype != FLOAT or tensor is None or value.is_graph_input():
        return
    uses = list(value.uses())
    low_uses = [use for use in uses if plan.is_low_input(use.node, use.idx)]
    if not low_uses:
        return
    # Nodes of both types may read a weight; then there is a rounded copy beside it.
    if len(low_uses) == len(uses) and not value.is_graph_output():
        value.const_value = round_tensor(tensor, low)
        return
    copy = ir.Value(
        name=new_name(f"{value.name}_rounded"),
        shape=value.shape,
        type=ir.TensorType(FLOAT),
        const_value=round_tensor(tensor, low),
    )
    graph.register_initializer(copy)
    for use in low_uses:
        use.node.replace_input_with(use.idx, copy)


def _round_input(
    value: ir.Value,
    plan: CastPlan,
    graph: ir.Graph,
    low: ir.DataType,
    new_name: NameAllocator,
    *,
    all_uses: bool = False,
) -> None:
    """Round an FP32 value for the low-precision nodes that read it, or for all uses."""
    if value.dtype != FLOAT:
        return
    low_uses = [use for use in value.uses() if all_uses or plan.is_low_input(use.node, use.idx)]
    if not low_uses:
        return
    down, up = _cast_pair(value, low, new_name)
    rounded = up.outputs[0]
    producer = value.producer()
    # The graph stays sorted: an input has no producer, so its Casts come first.
    if producer is not None:
        graph.insert_after(producer, [down, up])
    elif len(graph):
        graph.insert_before(graph[0], [down, up])
    for use in low_uses:
        use.node.replace_input_with(use.idx, rounded)


def _round_output(
    value: ir.Value,
    graph: ir.Graph,
    low: ir.DataType,
    new_name: NameAllocator,
    *,
    all_uses: bool,
    plan: CastPlan,
) -> None:
    """Round a node's output; the rounded value takes over its name.

    Without `all_uses` the node is FP32, so only the graph's output and low-precision nodes get the
    rounded value.
    """
    producer = value.producer()
    if producer is None:
        return
    name = value.name
    uses = [use for use in value.uses() if all_uses or plan.is_low_input(use.node, use.idx)]
    down, up = _cast_pair(value, low, new_name)
    graph.insert_after(producer, [down, up])
    rounded = up.outputs[0]
    for use in uses:
        use.node.replace_input_with(use.idx, rounded)
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = rounded
    # In the cast graph, this is the name of the value in the low precision.
    value.name = new_name(f"{name}_exact")
    rounded.name = name


def _cast_pair(
    value: ir.Value, low: ir.DataType, new_name: NameAllocator
) -> tuple[ir.Node, ir.Node]:
    """Create a Cast to the low-precision type and a Cast back to FP32."""
    lowered = ir.Value(
        name=new_name(f"{value.name}_lowered"), shape=value.shape, type=ir.TensorType(low)
    )
    rounded = ir.Value(
        name=new_name(f"{value.name}_rounded"), shape=value.shape, type=ir.TensorType(FLOAT)
    )
    down = ir.node(
        "Cast", [value], {"to": int(low)}, outputs=[lowered], name=new_name(f"{value.name}_down")
    )
    up = ir.node(
        "Cast", [lowered], {"to": int(FLOAT)}, outputs=[rounded], name=new_name(f"{value.name}_up")
    )
    return down, up
