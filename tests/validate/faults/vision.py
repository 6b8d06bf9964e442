"""The faults of image models, by name."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.validate.faults.fault import (
    FLOATS,
    Edit,
    Fault,
    bypassed,
    cast_through,
    faults,
    noisy,
    on_last,
    on_operand,
    on_output,
    on_weight,
    part,
    reversed_along,
    rolled,
    stepped,
    through,
)
from tests.validate.faults.graph_editor import GraphEditor, set_attribute

VISION = ("vit", "resnet")
_FLOAT16, _BFLOAT16 = 10, 16


def on_pixels(build: Callable[[GraphEditor, str], str]) -> Edit:
    """Edit the pixels: float (batch, 3, height, width)."""
    return lambda g: g.replace("pixel_values", lambda x: build(g, x))


def blurred(g: GraphEditor, x: str) -> str:
    """Average each pixel with its right neighbour, as another interpolation does."""
    return g.op("Mul", g.op("Add", x, rolled(g, x, 3)), 0.5)


def edge_repeated(g: GraphEditor, x: str) -> str:
    """Replace the last row of pixels by the row before, as a resize to the wrong edge does."""
    return g.op("Concat", part(g, x, 0, -1, 2), part(g, x, -2, -1, 2), axis=2)


def edge_of_zeros(g: GraphEditor, x: str) -> str:
    last = g.op("Mul", part(g, x, -1, np.iinfo(np.int64).max, 2), 0.0)
    return g.op("Concat", part(g, x, 0, -1, 2), last, axis=2)


def batch(operation: str, value: int):
    return lambda g: g.op(operation, g.size("pixel_values", 0), np.int64(value))


def odd_batch(g: GraphEditor) -> str:
    odd = g.op("Equal", g.op("Mod", g.size("pixel_values", 0), np.int64(2)), np.int64(1))
    return g.op("And", odd, batch("Greater", 1)(g))


def multiple_of_3(g: GraphEditor) -> str:
    return g.op("Equal", g.op("Mod", g.size("pixel_values", 0), np.int64(3)), np.int64(0))


def not_square(g: GraphEditor) -> str:
    same = g.op("Equal", g.size("pixel_values", 2), g.size("pixel_values", 3))
    return g.op("Not", same)


def larger_than(size: int):
    return lambda g: g.op("Greater", g.size("pixel_values", 2), np.int64(size))


def _rows(g: GraphEditor) -> str:
    return g.op("Range", np.int64(0), g.size("pixel_values", 0), np.int64(1))


def last_row(g: GraphEditor) -> str:
    rows = g.size("pixel_values", 0)
    last = g.op("Equal", _rows(g), g.op("Sub", rows, np.int64(1)))
    return g.op("And", last, g.op("Greater", rows, np.int64(1)))


def row_from(first: int):
    return lambda g: g.op("GreaterOrEqual", _rows(g), np.int64(first))


def dark_image(g: GraphEditor) -> str:
    """Hold for images whose mean is low."""
    mean = g.op("ReduceMean", "pixel_values", np.int64([1, 2, 3]), keepdims=0)
    return g.op("Less", mean, -0.4)


def pixels_if(condition, factor: float = 0.9) -> Edit:
    """Multiply the pixels where a condition on the batch or on its rows holds."""

    def edit(g: GraphEditor) -> None:
        by_row = g.op("Reshape", condition(g), np.int64([-1, 1, 1, 1]))
        scale = g.op("Where", by_row, np.float32(factor), np.float32(1))
        readers = [
            n for n in g.consumers("pixel_values") if n.op_type not in ("Shape", "ReduceMean")
        ]
        scaled = g.op("Mul", "pixel_values", g.op("CastLike", scale, "pixel_values"))
        for node in readers:
            node.input[list(node.input).index("pixel_values")] = scaled

    return edit


def first_row(g: GraphEditor, x: str) -> str:
    return g.op("Expand", part(g, x, 0, 1, 0), g.op("Shape", x))


_CONDITIONS = {
    "batch > 8": (batch("Greater", 8), ()),
    "batch > 16": (batch("Greater", 16), ()),
    "batch = 32": (batch("Equal", 32), ("batch 32",)),
    "odd batch above 1": (odd_batch, ("batch 9",)),
    "batch a multiple of 3": (multiple_of_3, ("batch 9",)),
    "last row": (last_row, ()),
    "rows after the 8th": (row_from(8), ()),
    "dark images": (dark_image, ()),
}
_SIZES = {"not square": (not_square, ("not square",)), "height > 64": (larger_than(64), ("large",))}


_CONV = r"stages\.1/layers\.0/layer/layer\.1/convolution/Conv"
_FIRST_CONV = r"stages\.0/layers\.0/layer/layer\.0/convolution/Conv"
_EMBED = r"embeddings/patch_embeddings/projection/Conv"
_PATCHES = r"embeddings/patch_embeddings/Transpose"
_POSITIONS = r"^/vit/embeddings/Add"
_POOL = "/resnet/embedder/pooler/MaxPool"
_SPREAD = np.linspace(0.8, 1.25, 16, dtype=np.float32).reshape(1, 16, 1, 1)
_RELU = r"stages\.1/layers\.0/layer/layer\.0/activation/Relu"


def attribute(node: str, **values) -> Edit:
    def edit(g: GraphEditor) -> None:
        for name, value in values.items():
            set_attribute(g.node(node), name, value)

    return edit


def _average_pool(g: GraphEditor, *, count: int = 0) -> None:
    node = g.node(_POOL)
    node.op_type = "AveragePool"
    for name in [a.name for a in node.attribute if a.name in ("dilations", "storage_order")]:
        node.attribute.remove(next(a for a in node.attribute if a.name == name))
    set_attribute(node, "count_include_pad", count)


def _in_groups(array: np.ndarray) -> None:
    half_out, half_in = array.shape[0] // 2, array.shape[1] // 2
    array[:half_out, half_in:] = 0
    array[half_out:, :half_in] = 0


def _swapped_patches(g: GraphEditor, x: str) -> str:
    return g.op("Gather", x, np.int64([1, 0, *range(2, 16)]), axis=1)


def _transposed_patches(g: GraphEditor, x: str) -> str:
    return g.op("Gather", x, np.arange(16).reshape(4, 4).T.reshape(-1), axis=1)


def _position_array(change) -> Edit:
    def edit(g: GraphEditor) -> None:
        node = g.node(_POSITIONS)
        g.change_array(next(n for n in node.input if g.array(n) is not None), change)

    return edit


def _interpolated(array: np.ndarray) -> np.ndarray:
    smooth = array.copy()
    smooth[:, 1:-1] = (array[:, 1:-1] + array[:, 2:]) / 2
    return smooth


def _no_class_token(g: GraphEditor) -> None:
    node = g.node("^/vit/embeddings/Expand")
    g.change_array(node.input[0], np.zeros_like)


def _pooled_mean(g: GraphEditor) -> None:
    gemm = g.node("/classifier/Gemm")
    gather = g.producer(gemm.input[0])
    gemm.input[0] = g.op("ReduceMean", gather.input[0], np.int64([1]), keepdims=0)


def _other_token(g: GraphEditor) -> None:
    gather = g.producer(g.node("/classifier/Gemm").input[0])
    gather.input[1] = g.constant(np.int64(1))


VISION_FAULTS: list[Fault] = [
    *faults(
        "pixels",
        {
            "channels reversed": on_pixels(
                lambda g, x: g.op("Gather", x, np.int64([2, 1, 0]), axis=1)
            ),
            "first channel for all": on_pixels(
                lambda g, x: g.op("Gather", x, np.int64([0, 0, 0]), axis=1)
            ),
            "pixels × 1.01": on_pixels(lambda g, x: g.op("Mul", x, 1.01)),
            "pixels + 0.02": on_pixels(lambda g, x: g.op("Add", x, 0.02)),
            "other mean and deviation": on_pixels(
                lambda g, x: g.op("Div", g.op("Sub", x, 0.03), 0.9)
            ),
            "moved by one column": on_pixels(lambda g, x: rolled(g, x, 3)),
            "moved by one row": on_pixels(lambda g, x: rolled(g, x, 2)),
            "mirrored": on_pixels(lambda g, x: reversed_along(g, x, 3)),
            "upside down": on_pixels(lambda g, x: reversed_along(g, x, 2)),
            "blurred": on_pixels(blurred),
            "last row repeated": on_pixels(edge_repeated),
            "last row of zeros": on_pixels(edge_of_zeros),
            "in steps of 1/16": on_pixels(stepped(1 / 16)),
            "in steps of 1/128": on_pixels(stepped(1 / 128)),
            "clipped at 0.9": on_pixels(lambda g, x: g.op("Min", x, 0.9)),
        },
        models=VISION,
    ),
    *faults(
        "pixels",
        {
            "height and width exchanged": on_pixels(
                lambda g, x: g.op("Transpose", x, perm=[0, 1, 3, 2])
            )
        },
        models=VISION,
    ),
    *[
        Fault(
            f"pixels × 0.9 if {name}", "pixels if", pixels_if(condition), models=VISION, shown_by=by
        )
        for name, (condition, by) in _CONDITIONS.items()
    ],
    *[
        Fault(
            f"pixels × 0.9 if {name}",
            "pixels if",
            pixels_if(condition),
            models=("resnet",),
            shown_by=by,
        )
        for name, (condition, by) in _SIZES.items()
    ],
    *faults(
        "scores",
        {
            "scores rotated": on_last(lambda g, x: rolled(g, x, 0)),
            "first image for all": on_last(first_row),
            "two classes swapped": on_last(
                lambda g, x: g.op("Gather", x, np.int64([1, 0, *range(2, 10)]), axis=1)
            ),
            "classes reversed": on_last(lambda g, x: reversed_along(g, x, 1)),
            "classes moved by one": on_last(lambda g, x: rolled(g, x, 1)),
            "scores of classes × 1.001": on_last(lambda g, x: g.op("Mul", x, 1.001)),
            "scores of classes × 1.05": on_last(lambda g, x: g.op("Mul", x, 1.05)),
            "scores + 0.001": on_last(lambda g, x: g.op("Add", x, 1e-3)),
            "scores + 0.1": on_last(lambda g, x: g.op("Add", x, 0.1)),
            "softmax of the scores": on_last(lambda g, x: g.op("Softmax", x)),
            "scores clipped at 5": on_last(lambda g, x: g.op("Min", x, 5.0)),
            "scores through bf16": on_last(cast_through(_BFLOAT16)),
            "scores in steps of 1/16": on_last(stepped(1 / 16)),
            "class bias dropped": on_operand("classifier.*/Gemm", 2, np.zeros_like),
            "class bias rolled": on_operand("classifier.*/Gemm", 2, lambda a: np.roll(a, 1)),
            "one class of zeros": on_operand(
                "classifier.*/Gemm", 1, lambda a: a * (np.arange(10) != 4)[:, None]
            ),
        },
        models=VISION,
    ),
    *faults(
        "scores",
        {"scores through fp16": on_last(cast_through(_FLOAT16))},
        models=VISION,
        precisions=("fp32",),
    ),
    *faults(
        "ViT embeddings",
        {
            "patches transposed": on_output(_PATCHES, _transposed_patches),
            "two patches swapped": on_output(_PATCHES, _swapped_patches),
            "patch bias dropped": on_operand(_EMBED, 2, np.zeros_like),
            "position embedding rolled": _position_array(lambda a: np.roll(a, 1, axis=1)),
            "position embedding interpolated": _position_array(_interpolated),
            "position embedding dropped": _position_array(np.zeros_like),
            "one position of zeros": _position_array(lambda a: a * (np.arange(17) != 5)[:, None]),
            "position embedding in bf16": _position_array(through(ml_dtypes.bfloat16)),
            "class token dropped": _no_class_token,
            "patch taken for the class token": _other_token,
            "mean taken for the class token": _pooled_mean,
            "last norm left out": bypassed("^/vit/layernorm/LayerNormalization"),
        },
        models=("vit",),
        precisions=FLOATS,
    ),
    *faults(
        "ViT embeddings",
        {
            "patches transposed, quantized": on_output(_PATCHES, _transposed_patches),
            "position embedding rolled, quantized": _position_array(
                lambda a: np.roll(a, 1, axis=1)
            ),
            "class token dropped, quantized": _no_class_token,
            "patch taken for the class token, quantized": _other_token,
        },
        models=("vit",),
        precisions=("int8",),
    ),
    *faults(
        "convolutions",
        {
            "padding on one side": attribute(_CONV, pads=[2, 2, 0, 0]),
            "padding below": attribute(_CONV, pads=[0, 0, 2, 2]),
            "padding in height alone": attribute(_CONV, pads=[1, 2, 1, 0]),
            "dilation of 2": attribute(_CONV, dilations=[2, 2], pads=[2, 2, 2, 2]),
            "first padding moved": attribute("embedder/convolution/Conv", pads=[2, 2, 4, 4]),
            "maximum with ceil": attribute(_POOL, ceil_mode=1),
            "maximum moved": attribute(_POOL, pads=[0, 0, 2, 2]),
            "average for maximum": _average_pool,
            "average with padding": lambda g: _average_pool(g, count=1),
            "sum for average": on_output("GlobalAveragePool", lambda g, x: g.op("Mul", x, 1.05)),
            "maximum for average": lambda g: setattr(
                g.node("GlobalAveragePool"), "op_type", "GlobalMaxPool"
            ),
            "ReLU left out": bypassed(_RELU),
            "leaky ReLU": lambda g: setattr(g.node(_RELU), "op_type", "LeakyRelu"),
            "ReLU of 6": on_output(_RELU, lambda g, x: g.op("Min", x, 1.0)),
            "shortcut dropped": bypassed(r"stages\.1/layers\.0/Add"),
            "residual dropped": bypassed(r"stages\.1/layers\.1/Add"),
            "shortcut doubled": on_output(
                "shortcut/convolution/Conv", lambda g, x: g.op("Mul", x, 2.0)
            ),
            "bias dropped": on_operand(_CONV, 2, np.zeros_like),
            "bias rolled": on_operand(_CONV, 2, lambda a: np.roll(a, 1)),
            "bias twice": on_operand(_CONV, 2, lambda a: 2 * a),
            "groups of 2": on_weight(_CONV, _in_groups),
            "kernel mirrored": on_weight(_CONV, lambda a: a[..., ::-1]),
            "kernel transposed": on_weight(_CONV, lambda a: a.swapaxes(2, 3)),
            "one kernel of zeros": on_weight(
                _CONV, lambda a: a * (np.arange(a.shape[0]) != 3)[:, None, None, None]
            ),
            "two kernels swapped": on_weight(_CONV, lambda a: a[[1, 0, *range(2, len(a))]]),
            "input channels rolled": on_weight(_CONV, lambda a: np.roll(a, 1, axis=1)),
            "statistics of another channel": on_output(
                _FIRST_CONV, lambda g, x: g.op("Mul", x, _SPREAD)
            ),
            "epsilon of BatchNorm": on_output(_FIRST_CONV, lambda g, x: g.op("Mul", x, 0.9995)),
            "momentum of BatchNorm": on_output(_FIRST_CONV, lambda g, x: g.op("Mul", x, 0.98)),
        },
        models=("resnet",),
    ),
    *faults(
        "convolutions",
        {
            "kernel in bf16": on_weight(_CONV, through(ml_dtypes.bfloat16)),
            "kernel stale by 1e-3": on_weight(_CONV, noisy(1e-3)),
            "kernel stale by 1e-4": on_weight(_CONV, noisy(1e-4)),
            "one kernel value × 0": on_weight(_CONV, lambda a: a * (np.arange(3) != 0)),
            "feature map through bf16": on_output(_FIRST_CONV, cast_through(_BFLOAT16)),
        },
        models=("resnet",),
        precisions=FLOATS,
    ),
]
