"""An FP16 or BF16 graph as FP32 arithmetic that rounds every value, so that a CPU can tell.

Takes a clean FP32 model; leaves it with a pair of Casts behind everything that `cast_graph` would
make narrow, under the names that the values have there.

    >>> simulate_cast(model, "fp16", keep_fp32=islands)
    >>> write_graph(model, scratch / "simulated.onnx")

ONNX Runtime has FP16 kernels for few ops on the CPU. It runs the others in FP32, and takes out the
casts between two of them: an overflow that a GPU would make infinite is not seen. BF16 it does not
run at all. A pair of Casts that is written in the graph it keeps. Sums inside an op are FP32 here,
as tensor cores have them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

from enginery.passes.cast_plan import CastPlan, plan_cast
from enginery.passes.low_precision import cast_array, low_precision_type, read_values
from enginery.passes.nodes import NameAllocator, all_graphs, infer_types, raise_opset_for_bf16
from enginery.passes.op_types import FLOAT


def simulate_cast(
    model: ir.Model,
    precision: Literal["fp16", "bf16"],
    *,
    keep_fp32: Collection[str] = (),
    io_dtype: Literal["fp32", "same"] = "fp32",
) -> None:
    """Edits the graph in place; the arguments are those of `cast_graph`.

    The types of inputs and outputs stay FP32 in any case; with `same` their values are rounded.
    Raises OptionError for a precision that is not narrow.
    """
    low = low_precision_type(precision)
    if model.functions:
        InlinePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    opset = model.opset_imports.get("", 1)
    if low == ir.DataType.BFLOAT16:
        raise_opset_for_bf16(model)
    infer_types(model)
    plan = plan_cast(model, low, keep=frozenset(keep_fp32), low_io=io_dtype == "same")
    # The plan needed the newer schemas; FP32 does not.
    model.opset_imports[""] = opset
    unused = NameAllocator(model)
    for graph in list(all_graphs(model.graph)):
        nodes = list(graph)
        for value in list(graph.initializers.values()):
            _round_weight(value, plan, graph, low, unused)
        low_io = io_dtype == "same" and graph is model.graph
        for value in list(graph.inputs):
            _round_input(value, plan, graph, low, unused, all_uses=low_io)
        for node in nodes:
            given = node.attributes.get("value")
            if node.op_type == "ConstantOfShape" and given and any(plan.ports[node].outputs):
                rounded = round_tensor(given.as_tensor(), low)
                node.attributes["value"] = ir.AttrTensor("value", rounded)
            narrow = [*plan.ports[node].outputs, *[False] * len(node.outputs)]
            for value, follows in zip(node.outputs, narrow, strict=False):
                if follows or (low_io and value.dtype == FLOAT and value.is_graph_output()):
                    _round_output(value, graph, low, unused, all_uses=follows, plan=plan)
                else:
                    # An FP32 node's result is cast for the narrow nodes that read it.
                    _round_input(value, plan, graph, low, unused)


def round_tensor(tensor: ir.TensorProtocol, low: ir.DataType) -> ir.LazyTensor:
    """The FP32 tensor with the values that a narrow type has, still as FP32."""

    def convert() -> ir.TensorProtocol:
        values = cast_array(read_values(tensor), low).astype(np.float32)
        return ir.Tensor(values, dtype=FLOAT, name=tensor.name)

    return ir.LazyTensor(convert, FLOAT, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _round_weight(
    value: ir.Value, plan: CastPlan, graph: ir.Graph, low: ir.DataType, unused: NameAllocator
) -> None:
    tensor = value.const_value
    if value.dtype != FLOAT or tensor is None or value.is_graph_input():
        return
    uses = list(value.uses())
    narrow = [use for use in uses if plan.is_low_input(use.node, use.idx)]
    if not narrow:
        return
    if len(narrow) == len(uses) and not value.is_graph_output():
        value.const_value = round_tensor(tensor, low)
        return
    copy = ir.Value(
        name=unused(f"{value.name}_rounded"),
        shape=value.shape,
        type=ir.TensorType(FLOAT),
        const_value=round_tensor(tensor, low),
    )
    graph.register_initializer(copy)
    for use in narrow:
        use.node.replace_input_with(use.idx, copy)


def _round_input(
    value: ir.Value,
    plan: CastPlan,
    graph: ir.Graph,
    low: ir.DataType,
    unused: NameAllocator,
    *,
    all_uses: bool = False,
) -> None:
    """Rounds a value that is FP32 itself for the narrow nodes that read it, or for all."""
    if value.dtype != FLOAT:
        return
    narrow = [use for use in value.uses() if all_uses or plan.is_low_input(use.node, use.idx)]
    if not narrow:
        return
    down, up = _cast_pair(value, low, unused)
    rounded = up.outputs[0]
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, [down, up])
    elif len(graph):
        graph.insert_before(graph[0], [down, up])
    for use in narrow:
        use.node.replace_input_with(use.idx, rounded)


def _round_output(
    value: ir.Value,
    graph: ir.Graph,
    low: ir.DataType,
    unused: NameAllocator,
    *,
    all_uses: bool,
    plan: CastPlan,
) -> None:
    """Rounds a node's result, which gives its name to the rounded one.

    Not `all_uses`: the node is FP32, and only the graph's output and narrow nodes see it rounded.
    """
    producer = value.producer()
    if producer is None:
        return
    name = value.name
    uses = [use for use in value.uses() if all_uses or plan.is_low_input(use.node, use.idx)]
    down, up = _cast_pair(value, low, unused)
    graph.insert_after(producer, [down, up])
    rounded = up.outputs[0]
    for use in uses:
        use.node.replace_input_with(use.idx, rounded)
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = rounded
    value.name = unused(f"{name}_exact")
    rounded.name = name


def _cast_pair(value: ir.Value, low: ir.DataType, unused: NameAllocator) -> tuple[ir.Node, ir.Node]:
    """Down to the narrow type and up again."""
    narrow = ir.Value(
        name=unused(f"{value.name}_narrow"), shape=value.shape, type=ir.TensorType(low)
    )
    rounded = ir.Value(
        name=unused(f"{value.name}_rounded"), shape=value.shape, type=ir.TensorType(FLOAT)
    )
    down = ir.node(
        "Cast", [value], {"to": int(low)}, outputs=[narrow], name=unused(f"{value.name}_down")
    )
    up = ir.node(
        "Cast", [narrow], {"to": int(FLOAT)}, outputs=[rounded], name=unused(f"{value.name}_up")
    )
    return down, up
