"""Compute the sum before an RMS normalization in the normalization's kernel.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[b, s, 2] x, float[b, s, 2] y) => (float[b, s, 2] z, float[b, s, 2] sum)
... <float[2] w = {1, 1}> {
...   sum = Add (x, y)  z = SimplifiedLayerNormalization <epsilon = 0.00001> (sum, w) }''')
>>> fuse_residuals(model, Builder(model, "residual"))
1
>>> [node.op_type for node in model.graph]
['SkipSimplifiedLayerNormalization']

ONNX Runtime fuses the two for LayerNormalization when it loads a graph, not for this one.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.passes.generation.builder import Builder
from enginery.passes.ir.op_types import MICROSOFT

_NORM, _FUSED = "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"


def fuse_residuals(model: ir.Model, build: Builder) -> int:
    """Fuse each RMS normalization with the sum of two computed values before it.

    Returns:
        The number of normalizations that were fused.
    """
    norms = [(node, sums) for node in model.graph if (sums := _sum_before(node)) is not None]
    for norm, sums in norms:
        total = sums.outputs[0]
        fused = build.node(
            _FUSED,
            [*sums.inputs, norm.inputs[1]],
            {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
            domain=MICROSOFT,
            outputs=4,
        )
        for old, new in ((norm.outputs[0], fused[0]), (total, fused[3])):
            new.type, new.shape = old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            if new.is_graph_output():
                new.name, old.name = old.name, build.names(f"{old.name}/apart")
        for unused in fused[1:3]:
            unused.name = ""
    model.graph.sort()
    RemoveUnusedNodesPass()(model)
    return len(norms)


def _sum_before(norm: ir.Node) -> ir.Node | None:
    """Return the Add of two computed values, (batch, sequence, hidden), that a norm reads.

    None if it reads something else.
    """
    if norm.op_type != _NORM or norm.attributes.get_int("axis", -1) not in (-1, 2):
        return None
    source = norm.inputs[0]
    sums = None if source is None else source.producer()
    if sums is None or sums.op_type != "Add" or len(norm.outputs) > 1:
        return None
    shapes = [None if value is None else value.shape for value in (*sums.inputs, sums.outputs[0])]
    ranks = {None if shape is None else len(shape) for shape in shapes}
    computed = all(value is not None and value.const_value is None for value in sums.inputs)
    return sums if computed and ranks == {3} else None
