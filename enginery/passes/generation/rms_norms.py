"""Compute RMS normalizations, and the sums before them, in one kernel each.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[b, s, 2] x, float[b, s, 2] y) => (float[b, s, 2] z, float[b, s, 2] sum)
... <float[2] w = {1, 1}> {
...   sum = Add (x, y)  z = SimplifiedLayerNormalization <epsilon = 0.00001> (sum, w) }''')
>>> fuse_residuals(model, Builder(model, "residual"))
1
>>> [node.op_type for node in model.graph]
['SkipSimplifiedLayerNormalization']

ONNX Runtime fuses the two for LayerNormalization when it loads a graph, not for this one. It fuses
the normalization itself, too, but then no sum with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.passes.ir.builder import Builder
from enginery.passes.ir.nodes import constant_numbers
from enginery.passes.ir.op_types import MICROSOFT

_NORM, _FUSED = "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"


def fuse_norms(model: ir.Model, build: Builder) -> int:
    """Fuse `weight * (x / sqrt (mean (x²) + epsilon))` over the last dim.

    Returns:
        The number of normalizations that were fused.
    """
    fused = 0
    for node in list(model.graph):
        parts = _normalized(node)
        if parts is None:
            continue
        source, weight, epsilon, chain = parts
        # stash_type 1: the statistics stay FP32, also after a cast to FP16.
        (new,) = build.node(
            _NORM, [source, weight], {"axis": -1, "epsilon": epsilon, "stash_type": 1}
        )
        old = node.outputs[0]
        new.type, new.shape = old.type, old.shape
        build.note_origins(new, [part.name for part in (node, *chain)])
        old.replace_all_uses_with(new)
        fused += 1
    model.graph.sort()
    RemoveUnusedNodesPass()(model)
    return fused


def _normalized(node: ir.Node) -> tuple[ir.Value, ir.Value, float, list[ir.Node]] | None:
    """Return what a product with a weight normalizes, the weight, epsilon, and the nodes before.

    None if it does not normalize.
    """
    if node.op_type != "Mul" or node.outputs[0].is_graph_output():
        return None
    # Either factor may be the weight.
    for weight, scaled in (node.inputs, node.inputs[::-1]):
        tensor = None if weight is None else ir.convenience.get_const_tensor(weight)
        ratio = None if scaled is None else scaled.producer()
        if weight is None or tensor is None or len(tensor.shape) != 1 or ratio is None:
            continue
        source = ratio.inputs[0]
        # Backwards along the divisor: x / Sqrt (Add (ReduceMean (Pow (x, 2)), epsilon)).
        chain = _chain_before(ratio, 1, ("Div", "Sqrt", "Add", "ReduceMean", "Pow"))
        if chain is None or source is None or chain[-1].inputs[0] is not source:
            continue
        _, _, add, mean, power = chain
        epsilon, exponent = (constant_numbers(part.inputs[1]) for part in (add, power))
        axes = None if len(mean.inputs) < 2 else constant_numbers(mean.inputs[1])
        keepdims = mean.attributes.get_int("keepdims", 1)
        if epsilon and len(epsilon) == 1 and (exponent, axes, keepdims) == ([2.0], [-1], 1):
            return source, weight, float(epsilon[0]), chain
    return None


def _chain_before(node: ir.Node, index: int, kinds: Sequence[str]) -> list[ir.Node] | None:
    """Return nodes of these types, each the producer of an input of the one before."""
    chain: list[ir.Node] = []
    current: ir.Node | None = node
    for kind in kinds:
        if current is None or current.op_type != kind:
            return None
        chain.append(current)
        value = current.inputs[index if len(chain) == 1 else 0]
        current = None if value is None else value.producer()
    return chain


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
        build.note_origins(fused[0], [sums.name, norm.name])
        # The fourth output is the sum, which later layers add to.
        for old, new in ((norm.outputs[0], fused[0]), (total, fused[3])):
            new.type, new.shape = old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            if new.is_graph_output():
                new.name, old.name = old.name, build.names(f"{old.name}/apart")
        # An empty name leaves an optional output out.
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
