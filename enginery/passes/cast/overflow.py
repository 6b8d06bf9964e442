"""Find the nodes that must stay FP32 in an FP16 graph, from the measured ranges of its tensors.

>>> from enginery.passes.ir.nodes import infer_types
>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[n] x) => (float[n] y) { y = Exp (x) }''')
>>> infer_types(model)
>>> ranges = {"x": TensorRange(12.0, 1.0, 0.0, 8), "y": TensorRange(1.6e5, 2.7, 0.0, 8)}
>>> find_fp32_nodes(model.graph, ranges)["Exp_1"].reason
'its output reaches 1.6e+05, but the largest FP16 number is 65504'

Each node is checked on its own, and stays FP32 in these cases:

- One of its inputs or outputs, times `HEADROOM`, exceeds FP16. So both the producer and the
  consumers of a large tensor stay FP32.
- A sum inside the node exceeds FP16 although its inputs and outputs do not: the sum of a mean, the
  squares or the variance of a norm, the sum under a logarithm. It is computed from the measured
  values.
- It divides by, or takes the root or logarithm of, values so small that FP16 represents them with
  few bits (subnormal numbers).
- Its range is unknown: no input took its branch of an If, or it is in the body of a Loop or a Scan.

Sums inside MatMul, Gemm and Conv are assumed to be FP32, see `_range_problem`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from enginery.passes.cast.low_precision import (
    FP16_MAX,
    FP16_MIN_NORMAL,
    is_mask_constant,
    overflow_limits,
)
from enginery.passes.ir.nodes import all_graphs
from enginery.passes.ir.op_types import FLOAT, has_subgraph
from enginery.passes.ranges.tensor_range import TensorRange

HEADROOM = 2.0
"""A safety factor: other inputs can yield larger values than the measured ones."""
_LOG_SUM_MAX = math.log(FP16_MAX / HEADROOM)
_LIMIT = f"but the largest FP16 number is {FP16_MAX:.0f}"

# They compute a mean; a kernel may hold the sum in FP16 before it divides.
_MEANS = frozenset({"ReduceMean", "GlobalAveragePool", "AveragePool"})
_NORMS = frozenset(
    {
        "LayerNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "SkipLayerNormalization",
        "MeanVarianceNormalization",
    }
)
# They divide by the root of the mean of squares, without subtracting the mean before.
_SQUARE_NORMS = frozenset(
    {"RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
)
# TensorRT's parser expands them to Exp, ReduceSum and Log, without subtracting the maximum before.
_LOG_SUMS = frozenset({"ReduceLogSum", "ReduceLogSumExp"})
# The index of the input whose relative error matters even if its values are small.
_SENSITIVE = {"Div": 1, "Reciprocal": 0, "Sqrt": 0, "Log": 0}
# Values at or below this fraction of a mask constant count as masked: a score is added to the mask.
_MASK_FLOOR_SHARE = 0.5


@dataclass(frozen=True)
class Fp32Node:
    """A node that stays FP32, with the measurement that requires it."""

    node: str
    op_type: str
    tensor: str
    """The measured tensor: an input or output of the node."""
    largest: float
    smallest: float
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Return the entry for reports/optimization.json; a number that is not finite is null."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def mask_floor(model: ir.Model) -> float:
    """Return half the highest mask constant of a model: values at or below it come from a mask.

    Return -inf if the graph has no such constant; then only -inf counts as masked.
    """
    lowest = [
        limits[0]
        for graph in model.graphs()
        for tensor in _constants(graph)
        if (limits := overflow_limits(tensor)) and is_mask_constant(tensor)
    ]
    return max(lowest) * _MASK_FLOOR_SHARE if lowest else -math.inf


def find_fp32_nodes(graph: ir.Graph, ranges: Mapping[str, TensorRange]) -> dict[str, Fp32Node]:
    """Return the nodes of the graph and of its subgraphs that stay FP32, by name.

    Args:
        graph: the FP32 graph, whose values have types.
        ranges: the ranges of the graph's inputs and node outputs by name, see `measure_ranges`.
    """
    fp32_nodes: dict[str, Fp32Node] = {}
    for node in graph:
        if not has_subgraph(node):
            fp32_node = _unmeasured(node, ranges) or _range_problem(node, ranges)
            if fp32_node is not None:
                fp32_nodes[node.name or ""] = fp32_node
            continue
        for attribute in node.attributes.values():
            for inner in subgraphs_of(attribute):
                # Values in the body of a Loop or a Scan are computed anew in each iteration and
                # have no ranges.
                fp32_nodes |= (
                    find_fp32_nodes(inner, ranges)
                    if node.op_type == "If"
                    else {fp32.node: fp32 for fp32 in _unmeasurable(inner, node)}
                )
    return fp32_nodes


def subgraphs_of(attribute: ir.Attr) -> list[ir.Graph]:
    """Return the graphs in an attribute of a node."""
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []


def _unmeasured(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Fp32Node | None:
    """Return the node if none of the inputs gave it a value."""
    for value in node.outputs:
        tensor_range = ranges.get(value.name or "")
        if value.dtype == FLOAT and tensor_range is not None and not tensor_range.elements:
            return _fp32_node(
                node, value, tensor_range, "no input reached it, so its range is unknown"
            )
    return None


def _unmeasurable(graph: ir.Graph, outer: ir.Node) -> Iterator[Fp32Node]:
    """Yield every node in the body of a Loop or a Scan, which cannot be measured."""
    unknown = TensorRange(math.nan, math.nan, math.nan, 0)
    reason = f"it is in the body of {outer.op_type} {outer.name}, where ranges cannot be measured"
    for node in (node for inner in all_graphs(graph) for node in inner):
        value = next((value for value in node.outputs if value.dtype == FLOAT), None)
        if value is not None and not has_subgraph(node):
            yield _fp32_node(node, value, unknown, reason)


def _range_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Fp32Node | None:
    """Return the node if its inputs, outputs or inner values do not fit FP16."""
    # Outputs first: of two tensors that are too large, the report names the node's own.
    for role, values in (("output", node.outputs), ("input", node.inputs)):
        for value in values:
            if value is None or value.dtype != FLOAT:
                continue
            tensor_range = ranges.get(value.name or "")
            if tensor_range is None and value.const_value is not None:
                tensor_range = _constant_range(value.const_value)
            if tensor_range is not None and tensor_range.largest * HEADROOM > FP16_MAX:
                reason = f"its {role} reaches {tensor_range.largest:.3g}, {_LIMIT}"
                return _fp32_node(node, value, tensor_range, reason)
    # Sums inside MatMul, Gemm and Conv are assumed to be FP32, so only their output is checked.
    # ONNX Runtime's CUDA provider computes FP16 products with CUBLAS_COMPUTE_32F unless the
    # environment variable ORT_CUDA_GEMM_OPTIONS changes that
    # (github.com/microsoft/onnxruntime/pull/7253). TensorRT's strong typing fixes the types of
    # tensors, but its documentation does not name the accumulator type of a kernel, and the kernel
    # is chosen on the GPU. Validation of the engine detects a sum that overflows there; `keep_fp32`
    # repairs it.
    return _sum_problem(node, ranges) or _small_problem(node, ranges)


def _sum_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Fp32Node | None:
    """Return the node if a sum inside it exceeds FP16 although its inputs and outputs fit."""
    source = node.inputs[0] if node.inputs else None
    if source is None or source.dtype != FLOAT:
        return None
    before = ranges.get(source.name or "")
    after = ranges.get(node.outputs[0].name or "")
    if before is None or after is None:
        return None
    if node.op_type in _MEANS and after.elements:
        # A kernel may hold the sum in FP16 before it divides by the number of summed elements.
        total = after.largest * before.elements / after.elements
        if total > FP16_MAX:
            reason = f"the sum of its mean reaches {total:.3g}, {_LIMIT}"
            return _fp32_node(node, source, before, reason)
    # Its result is the root of the sum that has to fit.
    if node.op_type == "ReduceL2" and after.largest**2 * HEADROOM > FP16_MAX:
        reason = f"its sum of squares reaches {after.largest**2:.3g}, {_LIMIT}"
        return _fp32_node(node, source, before, reason)
    # The sum is the exponential of the result, so the result has the logarithm of the limit.
    if node.op_type in _LOG_SUMS and after.largest > _LOG_SUM_MAX:
        reason = (
            f"its logarithm of a sum has the magnitude {after.largest:.3g}; FP16 holds sums with "
            f"logarithms up to {_LOG_SUM_MAX:.3g}"
        )
        return _fp32_node(node, source, before, reason)
    # LpNormalization takes the root of the sum of squares, the norms that of their mean.
    square = before.row_mean_square * (_width(source) if node.op_type == "LpNormalization" else 1)
    if node.op_type in (*_SQUARE_NORMS, "LpNormalization") and square * HEADROOM > FP16_MAX:
        reason = f"its inner squares reach {square:.3g}, {_LIMIT}"
        return _fp32_node(node, source, before, reason)
    if node.op_type in _NORMS and before.row_variance * HEADROOM > FP16_MAX:
        reason = f"its inner variance reaches {before.row_variance:.3g}, {_LIMIT}"
        return _fp32_node(node, source, before, reason)
    return None


def _width(value: ir.Value) -> int:
    """Return the size of the last axis; 1 if the graph does not state it."""
    last = value.shape[-1] if value.shape is not None and len(value.shape) else 1
    return last if isinstance(last, int) else 1


def _small_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Fp32Node | None:
    """Return the node if it is sensitive to values below FP16's normal range, and has them."""
    index = _SENSITIVE.get(node.op_type)
    # A negative power divides by its base.
    if node.op_type == "Pow" and _is_negative(node.inputs[1]):
        index = 0
    if index is None or index >= len(node.inputs):
        return None
    value = node.inputs[index]
    tensor_range = ranges.get(value.name or "") if value is not None else None
    if value is None or tensor_range is None or not 0 < tensor_range.smallest < FP16_MIN_NORMAL:
        return None
    reason = (
        f"its input has values of {tensor_range.smallest:.3g}; "
        f"FP16 loses bits below {FP16_MIN_NORMAL:.3g}"
    )
    return _fp32_node(node, value, tensor_range, reason)


def _is_negative(exponent: ir.Value | None) -> bool:
    tensor = exponent.const_value if exponent is not None else None
    return tensor is not None and bool((tensor.numpy() < 0).any())


def _constant_range(tensor: ir.TensorProtocol) -> TensorRange | None:
    """Return the range of a constant if it exceeds FP16 and is not a mask, which is clamped."""
    limits = overflow_limits(tensor)
    if limits is None or is_mask_constant(tensor):
        return None
    return TensorRange(max(-limits[0], limits[1]), 0.0, 0.0, tensor.size)


def _constants(graph: ir.Graph) -> Iterable[ir.TensorProtocol]:
    for value in graph.initializers.values():
        if value.dtype == FLOAT and value.const_value is not None:
            yield value.const_value
    for node in graph:
        # Constant and ConstantOfShape hold their tensor as an attribute.
        attribute = node.attributes.get("value")
        if attribute is not None and attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            if tensor.dtype == FLOAT:
                yield tensor


def _fp32_node(node: ir.Node, value: ir.Value, tensor_range: TensorRange, reason: str) -> Fp32Node:
    return Fp32Node(
        node.name or "",
        node.op_type,
        value.name or "",
        tensor_range.largest,
        tensor_range.smallest,
        reason,
    )
