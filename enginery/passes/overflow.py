"""Which nodes FP16 would break, by the ranges that were measured: the islands that stay FP32.

    >>> islands = find_fp32_nodes(model.graph, ranges)
    >>> islands["/block.3/layer_norm/Pow"].reason
    'its output reaches 1.2e+06, FP16 ends at 65504'

A tensor beyond FP16 stays FP32, and with it the node that makes it and the nodes that read it. So
does a node whose inner sum leaves the range, and one that divides by or takes the root of numbers
that FP16 rounds to few bits. What was not measured stays FP32: a branch of an If that no input
took, and the body of a Loop or a Scan.

Sums inside MatMul, Gemm and Conv are taken as FP32, and only what comes out is held to the range.
ONNX Runtime's CUDA provider computes FP16 products with CUBLAS_COMPUTE_32F unless the environment
variable ORT_CUDA_GEMM_OPTIONS says otherwise (github.com/microsoft/onnxruntime/pull/7253).
TensorRT's strong typing fixes the types of tensors; its documentation does not say which
accumulator a kernel has, and the kernel is chosen on the GPU. A sum that leaves FP16 on the way is
for the validation of the engine to see, and for `keep_fp32` to mend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from enginery.passes.low_precision import (
    FP16_MAX,
    FP16_MIN_NORMAL,
    is_mask_constant,
    overflow_limits,
)
from enginery.passes.nodes import all_graphs
from enginery.passes.op_types import FLOAT, has_subgraph
from enginery.passes.ranges import TensorRange

HEADROOM = 2.0
"""Inputs that were not measured may reach further than those that were."""
_LOG_SUM_MAX = math.log(FP16_MAX / HEADROOM)

# The result is a mean; FP16 hardware may hold the sum before it is divided.
_MEANS = frozenset({"ReduceMean", "GlobalAveragePool", "AveragePool"})
_NORMS = frozenset({"LayerNormalization", "InstanceNormalization", "GroupNormalization",
                    "SkipLayerNormalization", "MeanVarianceNormalization"})  # fmt: skip
# They divide by the root of a mean of squares, from which no mean was taken away before.
_SQUARE_NORMS = frozenset({"RMSNormalization", "SimplifiedLayerNormalization",
                           "SkipSimplifiedLayerNormalization"})  # fmt: skip
# TensorRT's parser makes Exp, ReduceSum and Log of them, without taking the maximum away before.
_LOG_SUMS = frozenset({"ReduceLogSum", "ReduceLogSumExp"})
# Which input a relative error in small numbers matters to.
_SENSITIVE = {"Div": 1, "Reciprocal": 0, "Sqrt": 0, "Log": 0}
# They hand numbers on as they are, so that a tiny one is as good as zero to what comes after.
_MASK_FLOOR_SHARE = 0.5


@dataclass(frozen=True)
class Fp32Node:
    """One node that stays FP32, and the measurement that says so."""

    node: str
    op_type: str
    tensor: str
    """The tensor that was measured."""
    largest: float
    smallest: float
    reason: str

    def as_json(self) -> dict[str, Any]:
        """For reports/optimization.json; an infinite number becomes null."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def mask_floor(model: ir.Model) -> float:
    """Half the mildest mask constant: what lies at or below it was put there by a mask.

    -inf where the graph has no such constant: then only infinities are masks.
    """
    lowest = [
        limits[0]
        for graph in model.graphs()
        for tensor in _constants(graph)
        if (limits := overflow_limits(tensor)) and is_mask_constant(tensor)
    ]
    return max(lowest) * _MASK_FLOOR_SHARE if lowest else -math.inf


def find_fp32_nodes(graph: ir.Graph, ranges: Mapping[str, TensorRange]) -> dict[str, Fp32Node]:
    """The nodes of the graph that stay FP32, by name; those in branches and bodies too.

    Args:
        graph: the FP32 graph, its values with types.
        ranges: by tensor name, of the graph's inputs and node outputs, see `measure_ranges`.
    """
    islands: dict[str, Fp32Node] = {}
    for node in graph:
        if not has_subgraph(node):
            found = _unmeasured(node, ranges) or _in_range_problem(node, ranges)
            if found is not None:
                islands[node.name or ""] = found
            continue
        for attribute in node.attributes.values():
            for inner in subgraphs_of(attribute):
                islands |= find_fp32_nodes(inner, ranges) if node.op_type == "If" else {
                    found.node: found for found in _unmeasurable(inner, node)
                }  # fmt: skip
    return islands


def subgraphs_of(attribute: ir.Attr) -> list[ir.Graph]:
    """The graphs that an attribute of a node holds."""
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []


def _unmeasured(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Fp32Node | None:
    """A node that no number went through, on any input."""
    for value in node.outputs:
        found = ranges.get(value.name or "")
        if value.dtype == FLOAT and found is not None and not found.elements:
            return _island(node, value, found, "no input gave it a number: its range is unknown")
    return None


def _unmeasurable(graph: ir.Graph, outer: ir.Node) -> Iterator[Fp32Node]:
    """Every node of a body that cannot be measured."""
    unknown = TensorRange(math.nan, math.nan, math.nan, 0)
    reason = f"it is inside the {outer.op_type} {outer.name}, where ranges cannot be measured"
    for node in (node for inner in all_graphs(graph) for node in inner):
        value = next((value for value in node.outputs if value.dtype == FLOAT), None)
        if value is not None and not has_subgraph(node):
            yield _island(node, value, unknown, reason)


def _in_range_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Fp32Node | None:
    """Why a node cannot be FP16, if it cannot."""
    for what, values in (("output", node.outputs), ("input", node.inputs)):
        for value in values:
            if value is None or value.dtype != FLOAT:
                continue
            found = ranges.get(value.name or "")
            if found is None and value.const_value is not None:
                found = _constant_range(value.const_value)
            if found is not None and found.largest * HEADROOM > FP16_MAX:
                reason = f"its {what} reaches {found.largest:.3g}, FP16 ends at {FP16_MAX:.0f}"
                return _island(node, value, found, reason)
    return _sum_problem(node, ranges) or _small_problem(node, ranges)


def _sum_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Fp32Node | None:
    """Sums inside a node that leave FP16's range although its inputs and outputs do not."""
    source = node.inputs[0] if node.inputs else None
    if source is None or source.dtype != FLOAT:
        return None
    before = ranges.get(source.name or "")
    after = ranges.get(node.outputs[0].name or "")
    if before is None or after is None:
        return None
    if node.op_type in _MEANS and after.elements:
        total = after.largest * before.elements / after.elements
        if total > FP16_MAX:
            reason = f"the sum before its mean reaches {total:.3g}, FP16 ends at {FP16_MAX:.0f}"
            return _island(node, source, before, reason)
    if node.op_type == "ReduceL2" and after.largest**2 * HEADROOM > FP16_MAX:
        reason = f"its sum of squares reaches {after.largest**2:.3g}, FP16 ends at {FP16_MAX:.0f}"
        return _island(node, source, before, reason)
    if node.op_type in _LOG_SUMS and after.largest > _LOG_SUM_MAX:
        reason = (
            f"it is the logarithm of a sum and reaches {after.largest:.3g} from zero; FP16 holds "
            f"sums with logarithms up to {_LOG_SUM_MAX:.3g}"
        )
        return _island(node, source, before, reason)
    square = before.row_mean_square * (_width(source) if node.op_type == "LpNormalization" else 1)
    if node.op_type in (*_SQUARE_NORMS, "LpNormalization") and square * HEADROOM > FP16_MAX:
        reason = f"the squares inside come to {square:.3g}, FP16 ends at {FP16_MAX:.0f}"
        return _island(node, source, before, reason)
    if node.op_type in _NORMS and before.row_variance * HEADROOM > FP16_MAX:
        reason = (
            f"the variance inside reaches {before.row_variance:.3g}, FP16 ends at {FP16_MAX:.0f}"
        )
        return _island(node, source, before, reason)
    return None


def _width(value: ir.Value) -> int:
    """The size of the last axis, as far as the graph says it."""
    last = value.shape[-1] if value.shape is not None and len(value.shape) else 1
    return last if isinstance(last, int) else 1


def _small_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Fp32Node | None:
    """Numbers below FP16's normal range, where their relative error counts."""
    index = _SENSITIVE.get(node.op_type)
    if node.op_type == "Pow" and _is_negative(node.inputs[1]):
        index = 0
    if index is None or index >= len(node.inputs):
        return None
    value = node.inputs[index]
    found = ranges.get(value.name or "") if value is not None else None
    if value is None or found is None or not 0 < found.smallest < FP16_MIN_NORMAL:
        return None
    reason = (
        f"its input has numbers of {found.smallest:.3g}; FP16 loses bits below "
        f"{FP16_MIN_NORMAL:.3g}"
    )
    return _island(node, value, found, reason)


def _is_negative(exponent: ir.Value | None) -> bool:
    tensor = exponent.const_value if exponent is not None else None
    return tensor is not None and bool((tensor.numpy() < 0).any())


def _constant_range(tensor: ir.TensorProtocol) -> TensorRange | None:
    """The range of a stored tensor, if it is beyond FP16 and no mask; that one is clamped."""
    limits = overflow_limits(tensor)
    if limits is None or is_mask_constant(tensor):
        return None
    return TensorRange(max(-limits[0], limits[1]), 0.0, 0.0, tensor.size)


def _constants(graph: ir.Graph) -> Iterable[ir.TensorProtocol]:
    for value in graph.initializers.values():
        if value.dtype == FLOAT and value.const_value is not None:
            yield value.const_value
    for node in graph:
        attribute = node.attributes.get("value")
        if attribute is not None and attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            if tensor.dtype == FLOAT:
                yield tensor


def _island(node: ir.Node, value: ir.Value, found: TensorRange, reason: str) -> Fp32Node:
    return Fp32Node(
        node.name or "", node.op_type, value.name or "", found.largest, found.smallest, reason
    )
