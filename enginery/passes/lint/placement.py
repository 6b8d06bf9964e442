"""Lint rules for TensorRT on the placement of Q/DQ nodes.

Each rule takes a `LintGraph` and yields findings.

Sources: TensorRT developer guide, "Q/DQ layer-placement recommendations"; the layers of engines
that TensorRT for RTX 1.7 built from such graphs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from enginery.passes.lint.findings import LintFinding
from enginery.passes.lint.graph import (
    DEQUANTIZE,
    PRODUCTS,
    QUANTIZE,
    LintGraph,
    constant_value,
    input_at,
    is_constant,
    label,
)

# Operators that gain nothing from INT8, lose precision, or are part of a fusion that Q/DQ prevents.
_FLOAT_ONLY = (
    "LayerNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "Softmax",
    "Gather",
    "Where",
    "Gelu",
    "Erf",
    "Tanh",
    "Sigmoid",
)


def unpaired_nodes(graph: LintGraph) -> Iterator[LintFinding]:
    """Find a QuantizeLinear without a DequantizeLinear, the reverse, and pairs that differ."""
    for node in graph.nodes_of(QUANTIZE):
        other = next((u for u in node.outputs[0].consumers() if u.op_type != DEQUANTIZE), None)
        if other is not None or node.outputs[0].is_graph_output():
            into = f"{other.op_type} {label(other)}" if other else "an output of the graph"
            yield LintFinding(
                "unpaired",
                "warning",
                label(node),
                f"feeds {into} instead of a DequantizeLinear; "
                "TensorRT builds INT8 layers only from complete Q/DQ pairs.",
                "Put the DequantizeLinear directly after it.",
            )
    for node in graph.nodes_of(DEQUANTIZE):
        value = input_at(node, 0)
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type == QUANTIZE:
            yield from _differences(producer, node)
        # A constant is a weight that was quantized when the graph was written.
        elif not is_constant(value):
            source = f"the output of {producer.op_type}" if producer else "an input of the graph"
            yield LintFinding(
                "unpaired",
                "warning",
                label(node),
                f"reads {source} instead of a QuantizeLinear; "
                "TensorRT builds INT8 layers only from complete Q/DQ pairs.",
                "Put the QuantizeLinear directly before it.",
            )


def _differences(quantize: ir.Node, dequantize: ir.Node) -> Iterator[LintFinding]:
    first, second = constant_value(input_at(quantize, 1)), constant_value(input_at(dequantize, 1))
    # Scales that the graph computes are unknown here.
    if first is None or second is None:
        return
    if first.dtype != second.dtype:
        yield LintFinding(
            "scale-type",
            "warning",
            label(dequantize),
            f"its scale is {second.dtype.name}, but that of its QuantizeLinear is "
            f"{first.dtype.name}, so the pair changes the type of the tensor.",
            "Store both scales in the type of the tensor that is quantized.",
        )
    elif first.shape != second.shape or not np.array_equal(first, second):
        yield LintFinding(
            "scale",
            "warning",
            label(dequantize),
            "its scale differs from that of its QuantizeLinear, so the pair scales the values.",
            "Use the same scale in both.",
        )


def channel_axes(graph: LintGraph) -> Iterator[LintFinding]:
    """Find per-channel scales along an axis that a GEMM or convolution sums over."""
    for node in graph.nodes_of(DEQUANTIZE):
        value, scale = input_at(node, 0), constant_value(input_at(node, 1))
        # One scale, or one for each block, has no axis of channels.
        if value is None or scale is None or scale.size <= 1 or "block_size" in node.attributes:
            continue
        if _quantized_activation(value):
            yield LintFinding(
                "channel-axis",
                "warning",
                label(node),
                f"has {scale.size} scales for an activation; TensorRT multiplies in INT8 only with "
                "one scale, and otherwise in floating point.",
                "Quantize activations per tensor.",
            )
            continue
        # The default of ONNX is 1.
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        shape = value.shape
        if shape is None or not -len(shape) <= axis < len(shape):
            continue
        # Such a node is invalid; in the other cases, the layer is only slow.
        if isinstance(shape[axis], int) and shape[axis] != scale.size:
            yield LintFinding(
                "channel-axis",
                "error",
                label(node),
                f"has {scale.size} scales along axis {axis} of a weight of shape "
                f"{list(shape)}, expected {shape[axis]}.",
                "Quantize the weight again.",
            )
            continue
        for use in node.outputs[0].uses():
            expected = _output_axis(use.node, use.idx, len(shape))
            if expected is not None and axis % len(shape) != expected:
                yield LintFinding(
                    "channel-axis",
                    "warning",
                    label(node),
                    f"its scales are along axis {axis} of the weight of {use.node.op_type} "
                    f"{label(use.node)}, which sums over that axis; TensorRT dequantizes the "
                    "weight and multiplies in floating point.",
                    f"Quantize per channel along axis {expected}, or per tensor.",
                )


def _quantized_activation(value: ir.Value) -> bool:
    """Return True for the output of a QuantizeLinear that reads a computed value, not a weight."""
    producer = value.producer()
    return (
        producer is not None
        and producer.op_type == QUANTIZE
        and not is_constant(input_at(producer, 0))
    )


def _output_axis(node: ir.Node, index: int, rank: int) -> int | None:
    """Return the weight's axis of output channels; None if this input is not a weight."""
    if index != 1 or node.op_type not in PRODUCTS:
        return None
    # Weights are (out, in, …) for Conv, (in, out, …) for ConvTranspose, and (in, out) for products,
    # with transB (out, in).
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    transposed = node.op_type == "Gemm" and "transB" in node.attributes
    return 0 if transposed and node.attributes["transB"].as_int() else rank - 1


def misplaced_nodes(graph: LintGraph) -> Iterator[LintFinding]:
    """Find Q/DQ nodes from which TensorRT gains nothing, or which prevent a fusion."""
    for node in graph.nodes_of(QUANTIZE):
        producer = node.inputs[0].producer() if node.inputs[0] is not None else None
        if producer is None:
            continue
        consumers = [
            consumer for pair in node.outputs[0].consumers() for consumer in _consumer_types(pair)
        ]
        others = [consumer for consumer in consumers if consumer not in PRODUCTS]
        if producer.op_type in PRODUCTS and others:
            yield LintFinding(
                "output-qdq",
                "warning",
                label(node),
                f"rounds the output of {producer.op_type} to INT8 for {others[0]}; between the two "
                "products of an attention, this prevents the fused kernel.",
                "Quantize only inputs: OpTypesToExcludeOutputQuantization of quantize_static.",
            )
        elif producer.op_type == "Softmax" and others:
            yield _misplaced(node, producer.op_type)
    for node in graph.nodes_of(DEQUANTIZE):
        for user in node.outputs[0].consumers():
            if user.op_type in _FLOAT_ONLY:
                yield _misplaced(node, user.op_type)


def _consumer_types(dequantize: ir.Node) -> list[str]:
    """Return the operators that read a DequantizeLinear; `the caller` for a graph output."""
    output = dequantize.outputs[0]
    op_types = [user.op_type for user in output.consumers()]
    return [*op_types, "the caller"] if output.is_graph_output() else op_types


def _misplaced(node: ir.Node, operator: str) -> LintFinding:
    return LintFinding(
        "misplaced-qdq",
        "warning",
        label(node),
        f"quantizes around {operator}, which TensorRT computes in floating point: "
        "this loses precision and fusions and gains nothing.",
        "Quantize only MatMul, Gemm and Conv: op_types_to_quantize of quantize_static.",
    )
