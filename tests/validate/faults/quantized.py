"""The faults of a quantized graph (Q/DQ), by name."""

from __future__ import annotations

import numpy as np
import onnx

from tests.validate.faults.fault import Edit, Fault, faults
from tests.validate.faults.graph_editor import GraphEditor

MODELS = ("text", "vit", "resnet")


def weights(g: GraphEditor) -> list[onnx.NodeProto]:
    """Return the DequantizeLinear nodes of weights, in graph order."""
    return [node for node in g.nodes(op="DequantizeLinear") if g.array(node.input[0]) is not None]


def activations(g: GraphEditor) -> list[onnx.NodeProto]:
    """Return the QuantizeLinear nodes of activations, in graph order."""
    return g.nodes(op="QuantizeLinear")


def _nth(found: list[onnx.NodeProto], place: float) -> onnx.NodeProto:
    return found[int(place * (len(found) - 1))]


def weight_values(change, place: float = 0.5) -> Edit:
    return lambda g: g.change_array(_nth(weights(g), place).input[0], change)


def weight_scale(change, place: float = 0.5) -> Edit:
    return lambda g: g.change_array(_nth(weights(g), place).input[1], change)


def every_weight_scale(change) -> Edit:
    def edit(g: GraphEditor) -> None:
        for node in weights(g):
            g.change_array(node.input[1], change)

    return edit


def activation_scale(factor: float, place: float = 0.5) -> Edit:
    return lambda g: g.change_array(_nth(activations(g), place).input[1], lambda a: a * factor)


def every_activation_scale(factor: float) -> Edit:
    def edit(g: GraphEditor) -> None:
        for name in {node.input[1] for node in activations(g)}:
            g.change_array(name, lambda a: a * factor)

    return edit


def one_channel(factor: float):
    return lambda scale: scale * np.where(np.arange(scale.size) == 3, factor, 1)


def dequantized_only(factor: float) -> Edit:
    """Multiply the scale of a DequantizeLinear that its QuantizeLinear does not share."""

    def edit(g: GraphEditor) -> None:
        quantize = _nth(activations(g), 0.5)
        (node,) = g.consumers(quantize.output[0])
        scale = g.array(node.input[1])
        node.input[1] = g.constant((scale * factor).astype(scale.dtype))

    return edit


def zero_point(offset: int, *, dequantized: bool = False) -> Edit:
    """Move the zero point of an activation, on one side or on both."""

    def edit(g: GraphEditor) -> None:
        quantize = _nth(activations(g), 0.5)
        nodes = g.consumers(quantize.output[0])
        point = g.constant(np.int8(g.array(quantize.input[2]) + offset))
        for node in nodes if dequantized else [quantize, *nodes]:
            node.input[2] = point

    return edit


def unsigned(point: int) -> Edit:
    """Quantize an activation to uint8; with zero point 128 that is the same as int8."""

    def edit(g: GraphEditor) -> None:
        quantize = _nth(activations(g), 0.5)
        zero = g.constant(np.uint8(point))
        for node in [quantize, *g.consumers(quantize.output[0])]:
            node.input[2] = zero

    return edit


def weight_zero_point(g: GraphEditor) -> None:
    node = _nth(weights(g), 0.5)
    node.input[2] = g.constant(g.array(node.input[2]) + np.int8(1))


def _per_tensor(g: GraphEditor, node: onnx.NodeProto) -> None:
    values, scale = g.array(node.input[0]).astype(np.float32), g.array(node.input[1])
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    shape = [-1 if dim == axis else 1 for dim in range(values.ndim)]
    wide = values * scale.astype(np.float32).reshape(shape)
    one = np.abs(wide).max() / 127
    g.set_array(node.input[0], np.rint(wide / one).astype(np.int8))
    g.set_array(node.input[1], np.full_like(scale, one))


def per_tensor(place: float | None) -> Edit:
    """Quantize weights anew with one scale for all channels; all weights if `place` is None."""

    def edit(g: GraphEditor) -> None:
        for node in weights(g) if place is None else [_nth(weights(g), place)]:
            _per_tensor(g, node)

    return edit


def in_bits(bits: int) -> Edit:
    step = 2 ** (8 - bits)

    def edit(g: GraphEditor) -> None:
        for node in weights(g):
            g.change_array(node.input[0], lambda a: np.clip(np.rint(a / step) * step, -127, 127))

    return edit


def other_layers_scale(g: GraphEditor) -> None:
    first, second = _nth(activations(g), 0.4), _nth(activations(g), 0.6)
    for node in [first, *g.consumers(first.output[0])]:
        node.input[1] = second.input[1]


def other_layers_weight_scale(g: GraphEditor) -> None:
    nodes = weights(g)
    shapes = [g.array(node.input[1]).shape for node in nodes]
    first, second = next(
        (a, b)
        for i, a in enumerate(nodes)
        for j, b in enumerate(nodes)
        if i < j and shapes[i] == shapes[j]
    )
    first.input[1], second.input[1] = second.input[1], first.input[1]


def smoothing(change, place: float = 0.5) -> Edit:
    """Edit the vector that smooths an activation; the weights keep the inverse."""

    def edit(g: GraphEditor) -> None:
        node = _nth(g.nodes(".*/scale_channels"), place)
        g.change_array(node.input[1], change)

    return edit


def offset(change, place: float = 0.5) -> Edit:
    """Edit the vector that shifts an activation; the bias keeps what undoes it."""

    def edit(g: GraphEditor) -> None:
        node = _nth(g.nodes(".*/shift_channels"), place)
        g.change_array(node.input[1], change)

    return edit


def bias_correction(factor: float, pattern: str) -> Edit:
    """Multiply the correction of one bias: what it has beyond the original and the shift."""

    def edit(g: GraphEditor) -> None:
        product = g.node(pattern)
        (add,) = g.consumers(product.output[0])
        index = next(i for i, name in enumerate(add.input) if g.array(name) is not None)
        bias = g.array(add.input[index]).astype(np.float32)
        original_add = g.original.node(f"^{add.name}")
        original = next(
            array for name in original_add.input if (array := g.original.array(name)) is not None
        )
        dequantize = g.producer(product.input[1])
        matrix = g.array(dequantize.input[0]).astype(np.float32)
        matrix *= g.array(dequantize.input[1]).astype(np.float32)
        shift = g.producer(g.producer(g.producer(product.input[0]).input[0]).input[0])
        moved = 0.0
        if shift.name.endswith("shift_channels"):
            moved = g.array(shift.input[1]).astype(np.float32) @ matrix
        correction = bias - (original - moved)
        g.set_array(
            add.input[index],
            (bias + (factor - 1) * correction).astype(g.array(add.input[index]).dtype),
        )

    return edit


def bias_as_before(pattern: str) -> Edit:
    """Put the original bias in place of the corrected and shifted one."""

    def edit(g: GraphEditor) -> None:
        (add,) = g.consumers(g.node(pattern).output[0])
        original_add = g.original.node(f"^{add.name}")
        index = next(i for i, name in enumerate(add.input) if g.array(name) is not None)
        original = next(
            array for name in original_add.input if (array := g.original.array(name)) is not None
        )
        g.change_array(add.input[index], lambda _: original)

    return edit


def not_quantized(g: GraphEditor) -> None:
    """Remove one pair of QuantizeLinear and DequantizeLinear."""
    quantize = _nth(activations(g), 0.5)
    for node in g.consumers(quantize.output[0]):
        g.replace(node.output[0], lambda _: quantize.input[0])


def quantized_twice(factor: float) -> Edit:
    def edit(g: GraphEditor) -> None:
        quantize = _nth(activations(g), 0.5)
        scale = g.array(quantize.input[1])
        other = g.constant((scale * factor).astype(scale.dtype))
        for node in g.consumers(quantize.output[0]):
            g.replace(
                node.output[0],
                lambda x: g.op(
                    "DequantizeLinear",
                    g.op("QuantizeLinear", x, other, quantize.input[2]),
                    other,
                    quantize.input[2],
                ),
            )

    return edit


def _swap_first(array: np.ndarray) -> None:
    array[[0, 1]] = array[[1, 0]]


def _element(array: np.ndarray) -> None:
    array.reshape(-1)[7] = -array.reshape(-1)[7]


_FACTORS = (0.25, 0.5, 0.9, 1.1, 2, 4)
_UP, _DOWN = r"layer\.0/intermediate/dense/MatMul", r"layer\.0/output/dense/MatMul"

QUANTIZED_FAULTS: list[Fault] = [
    *faults(
        "activation scales",
        {
            **{f"one activation scale × {f}": activation_scale(f) for f in _FACTORS},
            **{f"all activation scales × {f}": every_activation_scale(f) for f in _FACTORS},
            "first activation scale × 2": activation_scale(2, 0),
            "last activation scale × 2": activation_scale(2, 1),
            "dequantized with scale × 1.1": dequantized_only(1.1),
            "dequantized with scale × 1.02": dequantized_only(1.02),
            "zero point + 1": zero_point(1),
            "zero point + 20": zero_point(20),
            "zero point + 64": zero_point(64),
            "zero point + 1 when dequantized": zero_point(1, dequantized=True),
            "zero point + 10 when dequantized": zero_point(10, dequantized=True),
            "activation unsigned from 0": unsigned(0),
            "activation unsigned from 64": unsigned(64),
            "activation scale of another layer": other_layers_scale,
            "quantized twice, scale × 1.5": quantized_twice(1.5),
            "quantized twice, scale × 0.5": quantized_twice(0.5),
        },
        models=MODELS,
        precisions=("int8",),
    ),
    *faults(
        "weight scales",
        {
            "one channel's scale × 1.1": weight_scale(one_channel(1.1)),
            "one channel's scale × 2": weight_scale(one_channel(2)),
            "one channel's scale × 100": weight_scale(one_channel(100)),
            "one channel's scale × 0": weight_scale(one_channel(0)),
            "one channel's scale NaN": weight_scale(one_channel(np.nan)),
            "one layer's scales × 1.1": weight_scale(lambda s: s * 1.1),
            "one layer's scales × 1.02": weight_scale(lambda s: s * 1.02),
            "one layer's scales × 2": weight_scale(lambda s: s * 2),
            "one layer's scales reversed": weight_scale(lambda s: s[::-1]),
            "one layer's scales rolled": weight_scale(lambda s: np.roll(s, 1)),
            "one layer's scales their mean": weight_scale(lambda s: s * 0 + s.mean()),
            "all scales × 1.02": every_weight_scale(lambda s: s * 1.02),
            "all scales their mean": every_weight_scale(lambda s: s * 0 + s.mean()),
            "one weight per tensor": per_tensor(0.5),
            "all weights per tensor": per_tensor(None),
            "weight scales of another layer": other_layers_weight_scale,
            "weight zero point + 1": weight_zero_point,
        },
        models=MODELS,
        precisions=("int8",),
    ),
    *faults(
        "INT8 weights",
        {
            "two INT8 rows swapped": weight_values(_swap_first),
            "one INT8 element negated": weight_values(_element),
            "INT8 weight negated": weight_values(np.negative),
            "INT8 weight + 1": weight_values(lambda a: a + 1),
            "INT8 wraps at 127": weight_values(lambda a: np.where(a == 127, -128, a)),
            "INT8 wraps at 64": weight_values(lambda a: (a + 64) % 128 - 64),
            "INT8 clipped at 64": weight_values(lambda a: np.clip(a, -64, 64)),
            "INT8 clipped at 100": weight_values(lambda a: np.clip(a, -100, 100)),
            "INT8 truncated": weight_values(lambda a: np.trunc(a * 0.995)),
            "all weights in 7 bits": in_bits(7),
            "all weights in 6 bits": in_bits(6),
            "all weights in 4 bits": in_bits(4),
            "pair removed": not_quantized,
        },
        models=MODELS,
        precisions=("int8",),
    ),
    *faults(
        "smoothing and correction",
        {
            "smoothing dropped": smoothing(np.ones_like),
            "smoothing inverted": smoothing(lambda m: 1 / m),
            "smoothing rolled": smoothing(lambda m: np.roll(m, 1)),
            "one smoothing factor × 2": smoothing(one_channel(2)),
            "offset dropped": offset(np.zeros_like),
            "offset negated": offset(np.negative),
            "one offset doubled": offset(one_channel(2)),
            **{
                f"bias correction {what}, {where}": bias_correction(factor, pattern)
                for where, pattern in {"up": _UP, "down": _DOWN}.items()
                for what, factor in {"dropped": 0, "doubled": 2, "negated": -1}.items()
            },
            "original bias, up": bias_as_before(_UP),
            "original bias, down": bias_as_before(_DOWN),
        },
        models=("text", "vit"),
        precisions=("int8",),
    ),
]
