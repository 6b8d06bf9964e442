"""Plan a cast: decide which nodes use the low precision, and which stay FP32 and why.

The plan is made in three steps:

1. A node uses the low precision if its op's schema allows it. It stays FP32 if `keep` names it, if
   it computes positions, angles or integers to compare (`passes/cast/positions.py`), or if the
   schema does not allow the type (Range, the scales of Resize).
2. A cheap node whose producers and consumers all stay FP32 stays FP32 too: the two Casts around it
   would cost more than FP16 saves. This repeats until nothing changes.
3. A node without float outputs (a comparison, Shape) reads its inputs in the type in which they are
   computed, so that it needs no Cast. A QuantizeLinear uses the low precision like its
   DequantizeLinear, because both share one scale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from enginery.passes.cast.low_precision import SCHEMA_NAMES
from enginery.passes.cast.positions import LARGEST_EXACT, find_position_nodes
from enginery.passes.ir.nodes import all_graphs
from enginery.passes.ir.op_types import NO_FLOAT_PORTS, FloatPorts, float_ports, opset_of

# Worth a Cast on both sides: they run on tensor cores, or attention kernels are fused from them.
_HEAVY = frozenset(
    {
        "MatMul",
        "Gemm",
        "Conv",
        "ConvTranspose",
        "Einsum",
        "Attention",
        "MultiHeadAttention",
        "Softmax",
        "LSTM",
        "GRU",
        "QuantizeLinear",
        "DequantizeLinear",
    }
)


@dataclass
class CastPlan:
    """The decision for every node of a model."""

    ports: dict[ir.Node, FloatPorts] = field(default_factory=dict)
    """The inputs and outputs to cast; `NO_FLOAT_PORTS` for a node that stays as it is."""
    kept: dict[str, str] = field(default_factory=dict)
    """The nodes that stay FP32, with the reason."""

    def is_low_input(self, node: ir.Node, index: int) -> bool:
        """Return True if the node reads this input in the low precision."""
        ports = self.ports[node]
        # `any` first, because the ports of a node that stays FP32 are empty.
        return ports.any and ports.inputs[index]

    def is_low_output(self, value: ir.Value, low_inputs: Collection[ir.Value]) -> bool:
        """Return True if the value is computed in the low precision, or among `low_inputs`."""
        producer, index = value.producer(), value.index()
        if producer is None or index is None:
            return value in low_inputs
        # A slice, because the ports of a node that stays FP32 are empty.
        return any(self.ports[producer].outputs[index : index + 1])


def plan_cast(
    model: ir.Model, low: ir.DataType, *, keep: Collection[str], low_io: bool
) -> CastPlan:
    """Decide for every node of the model. Its values must have types.

    Args:
        model: the FP32 model; it is not changed.
        low: the low-precision type.
        keep: names of nodes that stay FP32.
        low_io: True if the graph's inputs are cast too.
    """
    plan = CastPlan()
    graphs = list(all_graphs(model.graph))
    positions = find_position_nodes(model.graph, largest_exact=LARGEST_EXACT[low])
    reasons = positions | dict.fromkeys(keep, "listed in keep_fp32")
    for graph in graphs:
        _plan_graph(plan, graph, low, reasons, dict(model.opset_imports))
    _fill_gaps(plan, graphs)
    _plan_consumers(plan, graphs, list(model.graph.inputs) if low_io else [])
    return plan


def _plan_graph(
    plan: CastPlan,
    graph: ir.Graph,
    low: ir.DataType,
    reasons: Mapping[str, str],
    opsets: dict[str, int],
) -> None:
    for node in graph:
        ports = float_ports(node, opset_of(node, opsets))
        plan.ports[node] = NO_FLOAT_PORTS
        name = node.name or ""
        # A node without floats has nothing to keep, so the report does not list it.
        if not ports.any:
            continue
        if name in reasons:
            plan.kept[name] = reasons[name]
        elif not ports.allows(SCHEMA_NAMES[low]):
            plan.kept[name] = f"{node.op_type} has no {SCHEMA_NAMES[low]} in this opset"
        else:
            plan.ports[node] = ports


def _fill_gaps(plan: CastPlan, graphs: Iterable[ir.Graph]) -> None:
    """Keep cheap nodes between FP32 nodes in FP32 (step 2)."""
    nodes = [node for graph in graphs for node in graph]
    changed = True
    # Each node that becomes FP32 may enclose the next.
    while changed:
        changed = False
        for node in nodes:
            if plan.ports[node].any and _in_a_gap(plan, node):
                plan.ports[node] = NO_FLOAT_PORTS
                plan.kept[node.name or ""] = "between FP32 nodes"
                changed = True


def _in_a_gap(plan: CastPlan, node: ir.Node) -> bool:
    sources = [value.producer() for value in _float_sources(plan, node)]
    users = [use.node for value in node.outputs for use in value.uses()]
    return (
        node.op_type not in _HEAVY
        and bool(sources)
        and bool(users)
        and not any(value.is_graph_output() for value in node.outputs)
        and all(source is not None and source.name in plan.kept for source in sources)
        and all(user.name in plan.kept for user in users)
    )


def _plan_consumers(
    plan: CastPlan, graphs: Iterable[ir.Graph], low_inputs: Collection[ir.Value]
) -> None:
    """Let nodes without float outputs read their inputs in the type they have (step 3)."""
    for node in (node for graph in graphs for node in graph):
        ports = plan.ports[node]
        # A Q/DQ pair shares one scale, so both have the same type.
        if not ports.any or any(ports.outputs) or node.op_type == "QuantizeLinear":
            continue
        sources = _float_sources(plan, node)
        if not sources or not all(plan.is_low_output(value, low_inputs) for value in sources):
            plan.ports[node] = NO_FLOAT_PORTS


def _float_sources(plan: CastPlan, node: ir.Node) -> list[ir.Value]:
    """Return the computed values that the node's float inputs read."""
    return [
        value
        for value, follows in zip(node.inputs, plan.ports[node].inputs, strict=True)
        # A constant is stored in the type of its readers, so it never needs a Cast.
        if follows and value is not None and value.const_value is None
    ]
