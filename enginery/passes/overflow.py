"""Which nodes FP16 would break, by the ranges that were measured: the islands that stay FP32.

    >>> islands = find_islands(model.graph, ranges)
    >>> islands["/block.3/layer_norm/Pow"].reason
    'its output reaches 1.2e+06, FP16 ends at 65504'

A tensor beyond FP16 stays FP32, and with it the node that makes it and the nodes that read it. So
does a node whose inner sum leaves the range, and one that divides by or takes the root of numbers
that FP16 rounds to few bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from enginery.passes.low_precision import (
    FP16_MAX,
    FP16_MIN_NORMAL,
    is_mask_constant,
    out_of_range,
)
from enginery.passes.op_types import FLOAT, has_subgraph
from enginery.passes.ranges import TensorRange

HEADROOM = 2.0
"""Inputs that were not measured may reach further than those that were."""

# The result is a mean; FP16 hardware may hold the sum before it is divided.
_MEANS = frozenset({"ReduceMean", "GlobalAveragePool", "AveragePool"})
_NORMS = frozenset({"LayerNormalization", "InstanceNormalization", "GroupNormalization",
                    "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
                    "SkipSimplifiedLayerNormalization", "LpNormalization"})  # fmt: skip
# Which input a relative error in small numbers matters to.
_SENSITIVE = {"Div": 1, "Reciprocal": 0, "Sqrt": 0, "Log": 0}
# They hand numbers on as they are, so that a tiny one is as good as zero to what comes after.
_MASK_FLOOR_SHARE = 0.5


@dataclass(frozen=True)
class Island:
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
        if (limits := out_of_range(tensor)) and is_mask_constant(tensor)
    ]
    return max(lowest) * _MASK_FLOOR_SHARE if lowest else -math.inf


def find_islands(graph: ir.Graph, ranges: Mapping[str, TensorRange]) -> dict[str, Island]:
    """The nodes of the graph that stay FP32, by name.

    Args:
        graph: the FP32 graph, its values with types.
        ranges: by tensor name, of the graph's inputs and node outputs.
    """
    islands: dict[str, Island] = {}
    for node in graph:
        found = _in_range_problem(node, ranges)
        if found is not None and not has_subgraph(node):
            islands[node.name or ""] = found
    return islands


def _in_range_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Island | None:
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


def _sum_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Island | None:
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
    if node.op_type in _NORMS and before.row_variance * HEADROOM > FP16_MAX:
        reason = (
            f"the variance inside reaches {before.row_variance:.3g}, FP16 ends at {FP16_MAX:.0f}"
        )
        return _island(node, source, before, reason)
    return None


def _small_problem(node: ir.Node, ranges: Mapping[str, TensorRange]) -> Island | None:
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
    limits = out_of_range(tensor)
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


def _island(node: ir.Node, value: ir.Value, found: TensorRange, reason: str) -> Island:
    return Island(
        node.name or "", node.op_type, value.name or "", found.largest, found.smallest, reason
    )
