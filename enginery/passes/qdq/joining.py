"""Find the tensors between quantized convolutions that stay in INT8 for the CPU.

>>> from enginery.passes.qdq.layers import find_layers
>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[n, 2, 4, 4] x) => (float[n, 2, 4, 4] y) <float[2, 2, 1, 1] w = {1, 2, 3, 4}> {
... a = Conv (x, w)   b = Sigmoid (a)   c = Mul (a, b)   y = Conv (c, w) }''')
>>> joining_tensors(model, find_layers(model))
{'b': 'b'}

ONNX Runtime adds, multiplies and concatenates in INT8 if all that a node reads and writes is
quantized (`QLinearAdd`, `QLinearMul`, `QLinearConcat`, `QLinearSigmoid`, …); nodes that only move
numbers then move bytes. Otherwise each convolution's output is dequantized, and the next one's
input quantized again, which may take longer than INT8 saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from enginery.passes.qdq.layers import Layer, activated_output

_COMPUTED = ("Add", "Mul", "Concat", "Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool")
"""Operators with a kernel for uint8 that writes another scale than it reads."""
_MOVED = (
    "MaxPool",
    "Reshape",
    "Transpose",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Slice",
    "Split",
    "Resize",
)
"""Operators whose outputs hold numbers of the first input, in the same scale."""
_ONNX = ("", "ai.onnx")


def joining_tensors(model: ir.Model, layers: Sequence[Layer]) -> dict[str, str]:
    """Return the tensors that lie between convolutions and can be in INT8.

    Args:
        model: the FP32 graph.
        layers: the layers that are quantized.

    Returns:
        Tensor -> the one that has its range: itself, or the one that it is moved from. What the
        convolutions read is included if it is moved from another.
    """
    convolutions = [layer for layer in layers if not layer.linear]
    read = {layer.activation for layer in convolutions}
    written = {layer.activated_output for layer in convolutions}
    ranges: dict[str, str] = {name: name for name in read | written}
    for node in model.graph:
        sources = [value.name or "" for value in node.inputs if value is not None]
        if moves_numbers(node) and sources[0] in ranges:
            # The other outputs of a MaxPool are indices, which are not quantized.
            moved = node.outputs if node.op_type == "Split" else node.outputs[:1]
            for output in moved:
                ranges[output.name or ""] = ranges[sources[0]]
        # ONNX Runtime has an INT8 kernel for such a node only if all that it reads is quantized.
        elif _computes(node) and all(name in ranges for name in sources):
            name = activated_output(node).name or ""
            ranges.setdefault(name, name)
    needed = set(read)
    # Backwards from what convolutions read: a tensor that leads to none is not between two.
    for node in reversed(model.graph):
        outputs = {value.name for value in node.outputs}
        if _computes(node):
            outputs.add(activated_output(node).name)
        if (moves_numbers(node) or _computes(node)) and outputs & needed:
            needed |= {value.name for value in node.inputs if value is not None}
    return {
        name: source
        for name, source in ranges.items()
        if name in needed and (name not in read | written or source != name)
    }


def moves_numbers(node: ir.Node) -> bool:
    """Return True for a node whose outputs hold numbers of its first input, and no others."""
    # Between pixels, a Resize computes new numbers, for which ONNX Runtime has no kernel for bytes.
    nearest = node.attributes.get_string("mode", "nearest") == "nearest"
    return node.domain in _ONNX and node.op_type in _MOVED and nearest


def _computes(node: ir.Node) -> bool:
    return node.domain in _ONNX and node.op_type in _COMPUTED
