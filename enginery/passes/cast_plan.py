"""Which nodes of a graph become narrow, and which stay FP32 for what reason.

    >>> plan = plan_cast(model, ir.DataType.FLOAT16, keep={"/encoder/ReduceMean"}, low_io=False)
    >>> plan.kept["/block.0/SelfAttention/Log"]
    'its values become integers'

The types of a node follow its op's schema: what may not be FP16 (Range, the scales of Resize) stays
FP32. So do positions and angles, and cheap nodes between FP32 nodes, which would need two Casts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from enginery.passes.low_precision import SCHEMA_NAMES
from enginery.passes.nodes import all_graphs
from enginery.passes.op_types import NO_FLOAT_PORTS, FloatPorts, float_ports, opset_of
from enginery.passes.positions import find_position_nodes

# Work worth a Cast on both sides: these run on tensor cores, or are what attention is fused from.
_HEAVY = frozenset({
    "MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "MultiHeadAttention",
    "Softmax", "LSTM", "GRU", "QuantizeLinear", "DequantizeLinear",
})  # fmt: skip


@dataclass
class CastPlan:
    """The decision for every node."""

    ports: dict[ir.Node, FloatPorts] = field(default_factory=dict)
    """The ports that become narrow; none for a node that stays as it is."""
    kept: dict[str, str] = field(default_factory=dict)
    """FP32 nodes with the reason."""

    def is_low_input(self, node: ir.Node, index: int) -> bool:
        """Whether the node's input of this index is to be narrow."""
        ports = self.ports[node]
        return ports.any and ports.inputs[index]

    def is_low_output(self, value: ir.Value, low_inputs: Collection[ir.Value]) -> bool:
        """Whether the value will be narrow where it is made."""
        producer, index = value.producer(), value.index()
        if producer is None or index is None:
            return value in low_inputs
        return any(self.ports[producer].outputs[index : index + 1])


def plan_cast(
    model: ir.Model, low: ir.DataType, *, keep: Collection[str], low_io: bool
) -> CastPlan:
    """Decides for every node of the model, whose values must have their types.

    Args:
        model: is not changed.
        low: the narrow type.
        keep: names of nodes that stay FP32.
        low_io: the graph's inputs will be narrow, too.
    """
    plan = CastPlan()
    graphs = list(all_graphs(model.graph))
    for graph in graphs:
        _plan_graph(plan, graph, low, keep, dict(model.opset_imports))
    _fill_gaps(plan, graphs)
    _plan_consumers(plan, graphs, list(model.graph.inputs) if low_io else [])
    return plan


def _plan_graph(
    plan: CastPlan,
    graph: ir.Graph,
    low: ir.DataType,
    keep: Collection[str],
    opsets: dict[str, int],
) -> None:
    positions = find_position_nodes(graph)
    for node in graph:
        ports = float_ports(node, opset_of(node, opsets))
        plan.ports[node] = NO_FLOAT_PORTS
        name = node.name or ""
        if not ports.any:
            continue
        if name in keep:
            plan.kept[name] = "asked for"
        elif name in positions:
            plan.kept[name] = positions[name]
        elif not ports.allows(SCHEMA_NAMES[low]):
            plan.kept[name] = f"{node.op_type} has no {SCHEMA_NAMES[low]} in this opset"
        else:
            plan.ports[node] = ports


def _fill_gaps(plan: CastPlan, graphs: Iterable[ir.Graph]) -> None:
    """A cheap node between FP32 nodes alone joins them: a Cast on each side costs more."""
    nodes = [node for graph in graphs for node in graph]
    changed = True
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
    """A node that makes no floats (a comparison, Shape) reads them as they are made."""
    for node in (node for graph in graphs for node in graph):
        ports = plan.ports[node]
        # A pair of Q and DQ has scales of one type, so Q follows DQ.
        if not ports.any or any(ports.outputs) or node.op_type == "QuantizeLinear":
            continue
        sources = _float_sources(plan, node)
        if not sources or not all(plan.is_low_output(value, low_inputs) for value in sources):
            plan.ports[node] = NO_FLOAT_PORTS


def _float_sources(plan: CastPlan, node: ir.Node) -> list[ir.Value]:
    """The computed values that enter the node's float ports."""
    return [
        value
        for value, follows in zip(node.inputs, plan.ports[node].inputs, strict=True)
        if follows and value is not None and value.const_value is None
    ]
