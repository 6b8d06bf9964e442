"""Every node of a model, inner graphs included; names and types that all of them have.

>>> infer_types(model)
>>> [node.name for graph in all_graphs(model.graph) for node in graph]
['/embeddings/Gather', …]
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from enginery.passes.op_types import has_subgraph, infer_missing_types


def all_graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """A graph and the graphs inside its nodes, outermost first."""
    yield graph
    for node in graph:
        if has_subgraph(node):
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    yield from all_graphs(attribute.as_graph())
                elif attribute.type == ir.AttributeType.GRAPHS:
                    for inner in attribute.as_graphs():
                        yield from all_graphs(inner)


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes of all graphs."""
    return (node for graph in all_graphs(model.graph) for node in graph)


def infer_types(model: ir.Model) -> None:
    """Gives every value its type and, where known, its shape; nodes that lack a name get one."""
    ensure_unique_node_names(model)
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        # Lenient: graphs with ONNX Runtime's own ops pass here, too, and ONNX knows nothing of
        # those.
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    finally:
        logger.setLevel(level)
    for graph in all_graphs(model.graph):
        infer_missing_types(graph, dict(model.opset_imports))


def ensure_unique_node_names(model: ir.Model) -> None:
    """Every node gets a name that no other has: islands are named by it."""
    taken = {node.name for node in all_nodes(model) if node.name}
    seen: set[str] = set()
    for node in all_nodes(model):
        if not node.name or node.name in seen:
            stem, count = node.name or node.op_type, 1
            while f"{stem}_{count}" in taken:
                count += 1
            node.name = f"{stem}_{count}"
            taken.add(node.name)
        seen.add(node.name)


_BF16_OPSET = 22


def raise_opset_for_bf16(model: ir.Model) -> None:
    """Convolution and pooling have BF16 from opset 22 on.

    From 20 to 22 ops gained types; GroupNormalization alone changed its meaning.
    """
    opset = model.opset_imports.get("", 1)
    changed = any(node.op_type == "GroupNormalization" for node in all_nodes(model))
    if 20 <= opset < _BF16_OPSET and not changed:
        model.opset_imports[""] = _BF16_OPSET


class NameAllocator:
    """Names for new nodes and values that no other has."""

    def __init__(self, model: ir.Model) -> None:
        self._taken = {
            name
            for node in all_nodes(model)
            for name in (node.name, *(value.name for value in node.outputs))
            if name
        }
        for graph in all_graphs(model.graph):
            self._taken |= set(graph.initializers)
            self._taken |= {value.name or "" for value in graph.inputs}

    def __call__(self, name: str) -> str:
        """The name, with a number where it is taken."""
        candidate, count = name, 1
        while candidate in self._taken:
            candidate, count = f"{name}_{count}", count + 1
        self._taken.add(candidate)
        return candidate
