"""Iterate over all nodes of a model, subgraphs included; add names, types and initializers.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[n] x) => (float[n] y) { h = Relu (x)  y = Relu (h) }''')
>>> infer_types(model)
>>> [(node.name, str(node.outputs[0].dtype)) for node in all_nodes(model)]
[('Relu_1', 'FLOAT'), ('Relu_2', 'FLOAT')]
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import ShapeInferencePass

from enginery.passes.ir.op_types import has_subgraph, infer_missing_types


def all_graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yield a graph and the subgraphs of its nodes, outermost first."""
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
    """Yield the nodes of all graphs of a model."""
    return (node for graph in all_graphs(model.graph) for node in graph)


def infer_types(model: ir.Model, *, sizes: bool = False) -> None:
    """Infer the type and, if known, the shape of every value; name nodes that have no name.

    Args:
        model: the model, changed in place.
        sizes: follow sizes through the operators that compute shapes, so that more are known.
    """
    ensure_unique_node_names(model)
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.ERROR)
    norms = [node for node in all_nodes(model) if node.op_type == "SimplifiedLayerNormalization"]
    try:
        # ONNX knows the shapes of LayerNormalization, not of ONNX Runtime's RMS normalization.
        for node in norms:
            node.op_type = "LayerNormalization"
        # Not strict: ONNX has no schemas for ONNX Runtime's own ops, which graphs may contain.
        infer = ShapeInferencePass(check_type=False, strict_mode=False, data_prop=sizes)
        infer(model)
        if sizes and _complete_reshapes(model.graph):
            infer(model)
    finally:
        for node in norms:
            node.op_type = "SimplifiedLayerNormalization"
        logger.setLevel(level)
    for graph in all_graphs(model.graph):
        infer_missing_types(graph, dict(model.opset_imports))


def _complete_reshapes(graph: ir.Graph) -> bool:
    """Set the sizes of Reshapes' outputs that follow from the other dims; return True if any was.

    ONNX infers what a -1 stands for only if all other dims are numbers. The number of heads, in
    (batch, sequence, 384) to (batch, sequence, -1, 64), follows from dims of the same name as well.
    """
    is_changed = False
    for node in graph:
        source = node.inputs[0].shape if node.op_type == "Reshape" and node.inputs[0] else None
        result = node.outputs[0].shape
        if source is None or result is None:
            continue
        before, after = list(source), list(result)
        for dim in source:
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None and dim in after:
                before.remove(dim)
                after.remove(dim)
        sizes = [dim for dim in after if isinstance(dim, int)]
        unknown = [dim for dim in after if not isinstance(dim, int)]
        if len(unknown) != 1 or not all(isinstance(dim, int) and dim for dim in before):
            continue
        count, rest = divmod(math.prod(map(int, before)), max(math.prod(sizes), 1))
        if count and not rest:
            index = next(i for i, dim in enumerate(result) if dim == unknown[0])
            node.outputs[0].shape = ir.Shape([*result[:index], count, *result[index + 1 :]])
            is_changed = True
    return is_changed


def clear_shapes(model: ir.Model) -> None:
    """Remove the shapes of intermediate values; ONNX Runtime infers those that it needs.

    If a graph says that both inputs of an Add before a LayerNormalization have the same symbolic
    shape, ONNX Runtime fuses the two to SkipLayerNormalization. On one thread, that kernel takes
    four times as long as theirs (ONNX Runtime 1.31, AVX-512).
    """
    interface = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    for node in all_nodes(model):
        for value in node.outputs:
            if id(value) not in interface:
                value.shape = None


def ensure_unique_node_names(model: ir.Model) -> None:
    """Give every node a unique name, because nodes that stay FP32 are identified by name."""
    names = {node.name for node in all_nodes(model) if node.name}
    seen: set[str] = set()
    for node in all_nodes(model):
        if not node.name or node.name in seen:
            stem, count = node.name or node.op_type, 1
            while f"{stem}_{count}" in names:
                count += 1
            node.name = f"{stem}_{count}"
            names.add(node.name)
        seen.add(node.name)


_BF16_OPSET = 22


def raise_opset_for_bf16(model: ir.Model) -> None:
    """Raise opset 20 or 21 to 22, the first in which convolution and pooling accept BF16.

    Between opsets 20 and 22 operators only gained types, except GroupNormalization, whose
    semantics changed. A model that contains it keeps its opset.
    """
    opset = model.opset_imports.get("", 1)
    changed = any(node.op_type == "GroupNormalization" for node in all_nodes(model))
    if 20 <= opset < _BF16_OPSET and not changed:
        model.opset_imports[""] = _BF16_OPSET


def constant_numbers(value: ir.Value | None) -> list[Any] | None:
    """Return the numbers of an initializer or a Constant node in a row; None if computed."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy().reshape(-1).tolist()


def add_initializer(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Add an array to a graph as an initializer."""
    # Not ascontiguousarray, which turns a scalar into a vector.
    tensor = ir.tensor(np.asarray(array, order="C"), name=name)
    value = ir.Value(
        name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


class NameAllocator:
    """Allocates unique names for new nodes and values."""

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
        """Return the name, with a number appended if it is taken."""
        candidate, count = name, 1
        while candidate in self._taken:
            candidate, count = f"{name}_{count}", count + 1
        self._taken.add(candidate)
        return candidate
