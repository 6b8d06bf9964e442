"""Store embedding tables in INT8, with a scale for each row.

A table may be half of a model's weights: 47 of the 90 MB of all-MiniLM-L6-v2. Only the rows that
are read are dequantized:

    ids ─┬─ Gather (table, INT8) ── Cast ── Mul ──
         └─ Gather (scales) ─────────────────┘

>>> model = ir.from_onnx_text('''<ir_version: 10, opset_import: ["" : 20]>
... g (int64[n] ids) => (float[n, 2] y) <float[3, 2] table = {1, 2, 3, 4, 5, 6}> {
... y = Gather (table, ids) }''')
>>> quantize_embeddings(model, min_elements=6)
['table']
>>> [node.op_type for node in model.graph]
['Gather', 'Gather', 'Cast', 'Mul']
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from enginery.passes.ir.nodes import add_initializer
from enginery.passes.qdq.scheme import INT8

_MIN_ELEMENTS = 1 << 18
"""A megabyte in FP32; smaller tables are not worth the nodes."""
_SUFFIXES = ("_quantized", "_scale")
"""Of the names of the new initializers; ONNX Runtime's quantizer uses the same."""


def quantize_embeddings(model: ir.Model, *, min_elements: int = _MIN_ELEMENTS) -> list[str]:
    """Quantize the tables that only Gather nodes of the main graph read, in place.

    Args:
        model: a graph whose tables are FP32.
        min_elements: smaller tables stay as they are.

    Returns:
        The names of the tables.
    """
    table_names = []
    for table in list(model.graph.initializers.values()):
        if _is_table(table, model.graph, min_elements):
            _quantize(model.graph, table)
            table_names.append(table.name or "")
    return table_names


def _is_table(value: ir.Value, graph: ir.Graph, min_elements: int) -> bool:
    tensor, uses = value.const_value, value.uses()
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
        return False
    if tensor.size < min_elements or value.is_graph_input() or value.is_graph_output():
        return False
    if not uses or not all(_reads_rows(use.node, graph) and use.idx == 0 for use in uses):
        return False
    clashes = {f"{value.name}{suffix}" for suffix in _SUFFIXES} & graph.initializers.keys()
    # The scale of a row with an infinity would be infinite, too.
    return not clashes and bool(np.isfinite(tensor.numpy()).all())


def _reads_rows(node: ir.Node, graph: ir.Graph) -> bool:
    axis = node.attributes.get_int("axis", 0)
    is_gather = node.op_type == "Gather" and node.domain in ("", "ai.onnx")
    return is_gather and axis in (0, -2) and node.graph is graph


def _quantize(graph: ir.Graph, table: ir.Value) -> None:
    assert table.const_value is not None  # noqa: S101  `_is_table` has checked it
    values = np.asarray(table.const_value.numpy(), dtype=np.float32)
    largest = np.abs(values).max(axis=1, keepdims=True)
    limits, steps = np.finfo(np.float32), np.float32(INT8.largest)
    # A row of zeros may have any scale but 0.
    scales = np.where(largest > 0, largest / steps, np.float32(1))
    # Not subnormal, and not so large that the largest step overflows FP32.
    scales = np.clip(scales, limits.tiny, np.nextafter(limits.max / steps, np.float32(0)))
    arrays = (INT8.stored(values / scales), scales)
    stored, scale = (
        add_initializer(graph, f"{table.name}{suffix}", array)
        for suffix, array in zip(_SUFFIXES, arrays, strict=True)
    )
    for node in [use.node for use in table.uses()]:
        stem = node.outputs[0].name  # unlike nodes, values have unique names
        rows, factors = (
            ir.node("Gather", [value, node.inputs[1]], {"axis": 0}, name=f"{stem}/{role}")
            for value, role in ((stored, "quantized"), (scale, "scales"))
        )
        floats = ir.node("Cast", rows.outputs, {"to": int(ir.DataType.FLOAT)}, name=f"{stem}/cast")
        product = ir.node("Mul", [floats.outputs[0], factors.outputs[0]], name=f"{stem}/dequantize")
        for new_node in (rows, factors, floats, product):
            new_node.outputs[0].name = f"{new_node.name}_output"
        old, new = node.outputs[0], product.outputs[0]
        new.shape, new.type = old.shape, old.type
        # The graph's output keeps its name.
        if old.is_graph_output():
            old.name, new.name = f"{old.name}/unquantized", old.name
        graph.insert_before(node, [rows, factors, floats, product])
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    graph.initializers.pop(table.name or "")
