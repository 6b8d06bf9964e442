"""The faults of the layers of a transformer, by name.

Names of nodes are those of BERT and ViT, so that one edit serves both; layers are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import ml_dtypes
import numpy as np
from onnx import NodeProto, TensorProto

from tests.validate.faults.fault import (
    FLOATS,
    TRANSFORMERS,
    Edit,
    Fault,
    bypassed,
    cast_through,
    element,
    every_layer,
    faults,
    in_8_bit,
    multiplied,
    noisy,
    on_operand,
    on_output,
    on_weight,
    stepped,
    swap_columns,
    swap_inputs,
    swap_rows,
    through,
    together,
)
from tests.validate.faults.graph_editor import GraphEditor, set_attribute


def attention(name: str, layer: int | str = 1) -> str:
    """Return a pattern for a node of the attention of a layer, or of all of them (`r"\\d+"`)."""
    return rf"layer\.{layer}/attention/(?:self|attention)/{name}"


EVERY = r"\d+"
QUERY, KEY, VALUE = (attention(f"{name}/MatMul") for name in ("query", "key", "value"))
PROJECTION = r"layer\.1/attention/output/dense/MatMul"
UP = r"layer\.1/intermediate/dense/MatMul"
DOWN = r"layer\.1/output/dense/MatMul"
RESIDUAL_1 = r"layer\.1/(?:attention/output/)?Add"
RESIDUAL_2 = r"layer\.1/output/Add"
NORM = r"layer\.1/(?:attention/output/LayerNorm|layernorm_after)/LayerNormalization"
OTHER_NORM = r"layer\.0/(?:attention/output/LayerNorm|layernorm_after)/LayerNormalization"
GELU = r"layer\.1/intermediate/intermediate_act_fn/Gelu"


def heads(g: GraphEditor) -> int:
    return 12 if any(value.name == "input_ids" for value in g.graph.input) else 2


def flush_subnormals(array: np.ndarray) -> np.ndarray:
    return np.where(np.abs(array) < 2.0**-14, 0, array)


def flip_bit(node: str, bits: dict[str, int]) -> Edit:
    """Flip one bit of one element; `bits` has the place for each dtype."""

    def edit(g: GraphEditor) -> None:
        name = g.weight(node)
        array = g.array(name)
        unsigned = array.view(f"u{array.dtype.itemsize}")
        unsigned[2, 1] ^= unsigned.dtype.type(1 << bits[array.dtype.name])
        g.set_array(name, array)

    return edit


# Normalization and activation


def layer_norm(
    g: GraphEditor, node: str, *, axes=(-1,), centered=True, unbiased=False, epsilon=None
) -> None:
    """Compute a LayerNormalization from its formula, with deviations."""
    found = g.node(node)
    x, scale, bias = found.input
    eps = next(a.f for a in found.attribute if a.name == "epsilon")
    eps = eps if epsilon is None else epsilon
    over = np.int64(axes)
    mean = g.op("ReduceMean", x, over)
    difference = g.op("Sub", x, mean)
    variance = g.op("ReduceMean", g.op("Mul", difference, difference), over)
    if unbiased:
        count = g.op("CastLike", g.size(x, -1), x)
        variance = g.op("Mul", variance, g.op("Div", count, g.op("Sub", count, 1.0)))
    spread = g.op("Sqrt", g.op("Add", variance, np.float32(eps)))
    normal = g.op("Div", difference if centered else x, spread)
    result = g.op("Add", g.op("Mul", normal, scale), bias)
    g.replace(found.output[0], lambda _: result)


def norm(**deviation) -> Edit:
    return lambda g: layer_norm(g, NORM, **deviation)


def epsilon(value: float) -> Edit:
    def edit(g: GraphEditor) -> None:
        for node in g.nodes(op="LayerNormalization"):
            set_attribute(node, "epsilon", value)

    return edit


def activation(build: Callable[[GraphEditor, str], str], pattern: str = GELU) -> Edit:
    def edit(g: GraphEditor) -> None:
        for node in g.nodes(pattern):
            result = build(g, node.input[0])
            g.replace(node.output[0], lambda _, result=result: result)

    return edit


def tanh_gelu(g: GraphEditor) -> None:
    set_attribute(g.node(GELU), "approximate", "tanh")


def erf_gelu(g: GraphEditor, x: str, root: float = 2**0.5) -> str:
    halves = g.op("Mul", x, 0.5)
    return g.op("Mul", halves, g.op("Add", g.op("Erf", g.op("Div", x, root)), 1.0))


def manual_softmax(g: GraphEditor, name: str, *, subtract=False) -> None:
    """Compute a softmax from its formula, without subtracting the maximum."""

    def build(g, x):
        x = g.op("Sub", x, g.op("ReduceMax", x, np.int64([-1]))) if subtract else x
        powers = g.op("Exp", x)
        return g.op("Div", powers, g.op("ReduceSum", powers, np.int64([-1])))

    activation(build, name)(g)


# Attention


def score_factor(g: GraphEditor, factor: str | np.ndarray | float) -> None:
    """Multiply the scores of every layer, before the mask is added."""
    for node in g.nodes(attention("MatMul", EVERY)):
        scale = factor if not isinstance(factor, str) else None
        g.replace(
            node.output[0],
            lambda x, scale=scale: g.op(
                "Mul", x, g.op("CastLike", factor, x) if scale is None else np.float32(scale)
            ),
        )


def head_vector(g: GraphEditor, values: dict[int, float]) -> np.ndarray:
    vector = np.ones((1, heads(g), 1, 1), np.float32)
    for head, value in values.items():
        vector[0, head] = value
    return vector


def permute_heads(g: GraphEditor, x: str) -> str:
    order = np.arange(heads(g))
    order[:2] = 1, 0
    return g.op("Gather", x, order, axis=1)


_WITH_WEIGHTS = ("MatMul", "Add", "Mul", "LayerNormalization", "QuantizeLinear", "DequantizeLinear")


def swap_layers(first: int, second: int) -> Edit:
    """Exchange two layers with all their weights.

    In a quantized graph, the search may have left out other products in the second one; then it is
    the next layer with the same nodes as the first.
    """

    def edit(g: GraphEditor) -> None:
        mine = _layer_nodes(g, first)
        following = (_layer_nodes(g, index) for index in count(second))
        theirs = next(nodes for nodes in following if nodes.keys() == mine.keys() or not nodes)
        for name, a in mine.items():
            b = theirs[name]
            if a.op_type not in _WITH_WEIGHTS:
                continue
            for index, pair in enumerate(zip(a.input, b.input, strict=True)):
                if all(g.array(tensor) is not None for tensor in pair):
                    b.input[index], a.input[index] = pair

    return edit


def _layer_nodes(g: GraphEditor, index: int) -> dict[str, NodeProto]:
    """Return the nodes of a layer by their names within it."""
    prefix = rf"layer.{index}/"
    return {n.name.partition(prefix)[2]: n for n in g.nodes(rf".*/layer\.{index}/.*")}


def _bias(node: str) -> str:
    return node.removesuffix("MatMul") + "Add"


_BITS = {
    "lowest mantissa bit": {"float32": 0, "float16": 0, "int8": 0},
    "highest mantissa bit": {"float32": 22, "float16": 9, "int8": 5},
    "lowest exponent bit": {"float32": 23, "float16": 10, "int8": 6},
    "highest exponent bit": {"float32": 30, "float16": 14, "int8": 6},
    "sign bit": {"float32": 31, "float16": 15, "int8": 7},
}

TRANSFORMER_FAULTS: list[Fault] = [
    *faults(
        "attention",
        {
            "scores × 0.7": lambda g: score_factor(g, 0.7),
            "scores × 1.001": lambda g: score_factor(g, 1.001),
            "scores × 1.02": lambda g: score_factor(g, 1.02),
            "scale by the hidden size": lambda g: score_factor(g, heads(g) ** -0.5),
            "scale left out in one layer": multiplied(attention("MatMul"), 32**0.5),
            "one head's scale": lambda g: g.replace_output(
                attention("MatMul"), lambda x: g.op("Mul", x, head_vector(g, {1: 1.2}))
            ),
            "one head of zeros": lambda g: g.replace_output(
                attention("MatMul_1"), lambda x: g.op("Mul", x, head_vector(g, {1: 0}))
            ),
            "two heads swapped": on_output(attention("MatMul_1"), permute_heads),
            "heads not transposed back": lambda g: set_attribute(
                g.node(attention("Transpose_3")), "perm", [0, 1, 2, 3]
            ),
            "softmax over queries": lambda g: set_attribute(
                g.node(attention("Softmax")), "axis", 2
            ),
            "softmax over heads": lambda g: set_attribute(g.node(attention("Softmax")), "axis", 1),
            "softmax left out": bypassed(attention("Softmax")),
            "softmax without maximum": lambda g: manual_softmax(g, attention("Softmax", EVERY)),
            "weights of attention not normalized": multiplied(attention("Softmax"), 1.05),
            "query and key swapped": together(
                swap_inputs(QUERY, KEY), swap_inputs(_bias(QUERY), _bias(KEY), (0,))
            ),
            "query and value swapped": together(
                swap_inputs(QUERY, VALUE), swap_inputs(_bias(QUERY), _bias(VALUE), (0,))
            ),
            "key and value swapped": together(
                swap_inputs(KEY, VALUE), swap_inputs(_bias(KEY), _bias(VALUE), (0,))
            ),
            "query of the layer before": swap_inputs(QUERY, attention("query/MatMul", 0)),
            "dropout left on": multiplied(attention("Softmax"), 1 / 0.9),
        },
        models=TRANSFORMERS,
    ),
    *faults(
        "normalization",
        {
            "epsilon 1e-3": epsilon(1e-3),
            "epsilon 1e-5": epsilon(1e-5),
            "epsilon 1e-6": epsilon(1e-6),
            "norm over the sequence": norm(axes=(1,)),
            "norm over sequence and features": norm(axes=(1, 2)),
            "norm without mean": norm(centered=False),
            "norm with n - 1": norm(unbiased=True),
            "norm with epsilon 0": norm(epsilon=0),
            "gamma of ones": on_operand(NORM, 1, np.ones_like),
            "beta of zeros": on_operand(NORM, 2, np.zeros_like),
            "gamma of the layer before": swap_inputs(NORM, OTHER_NORM, (1,)),
            "beta of the layer before": swap_inputs(NORM, OTHER_NORM, (2,)),
            "gamma and beta swapped": lambda g: g.node(NORM).input.extend(
                [g.node(NORM).input.pop(1)]
            ),
            "one gamma times 1.1": on_operand(
                NORM, 1, lambda a: a * np.where(np.arange(a.size) == 5, 1.1, 1)
            ),
            "norm left out": bypassed(NORM),
        },
        models=TRANSFORMERS,
    ),
    *faults(
        "activation",
        {
            "tanh GELU in one layer": tanh_gelu,
            "quick GELU in one layer": activation(
                lambda g, x: g.op("Mul", x, g.op("Sigmoid", g.op("Mul", x, 1.702)))
            ),
            "ReLU for GELU in one layer": activation(lambda g, x: g.op("Relu", x)),
            "GELU without the root of 2": activation(partial(erf_gelu, root=1.0)),
            "GELU left out": bypassed(GELU),
            "SiLU for GELU": activation(lambda g, x: g.op("Mul", x, g.op("Sigmoid", x))),
        },
        models=TRANSFORMERS,
    ),
    *faults(
        "residuals",
        {
            "first residual dropped": bypassed(RESIDUAL_1),
            "second residual dropped": bypassed(RESIDUAL_2),
            "first residual doubled": lambda g: g.replace_input(
                RESIDUAL_1, 1, lambda x: g.op("Mul", x, 2.0)
            ),
            "second residual doubled": lambda g: g.replace_input(
                RESIDUAL_2, 1, lambda x: g.op("Mul", x, 2.0)
            ),
            "attention left out": bypassed(RESIDUAL_1, 1),
            "feed-forward left out": bypassed(RESIDUAL_2, 1),
            "feed-forward × 1.01": multiplied(_bias(DOWN), 1.01),
            "dropout on a residual": multiplied(_bias(DOWN), 0.9),
        },
        models=TRANSFORMERS,
    ),
    *faults(
        "biases",
        {
            f"{name} {what}": on_operand(_bias(node), 0, change)
            for name, node in {
                "query bias": QUERY,
                "key bias": KEY,
                "value bias": VALUE,
                "projection bias": PROJECTION,
                "up bias": UP,
                "down bias": DOWN,
            }.items()
            for what, change in {"dropped": np.zeros_like, "twice": lambda a: 2 * a}.items()
        },
        models=TRANSFORMERS,
    ),
    *faults(
        "weights",
        {
            "one element × 0": on_weight(UP, element(lambda x: 0)),
            "one element × 2": on_weight(UP, element(lambda x: 2 * x)),
            "one element negated": on_weight(UP, element(lambda x: -x)),
            "two rows swapped": on_weight(UP, swap_rows),
            "two columns swapped": on_weight(UP, swap_columns),
            "rows rolled": on_weight(UP, lambda a: np.roll(a, 1, axis=0)),
            "one column of zeros": on_weight(UP, lambda a: a * (np.arange(a.shape[1]) != 3)),
            "square weight transposed": on_weight(QUERY, lambda a: a.T),
            "weight negated": on_weight(PROJECTION, np.negative),
            "weights of two layers swapped": swap_inputs(UP, UP.replace("1", "0", 1)),
            "layers exchanged": swap_layers(0, 1),
            **{f"flipped {name}": flip_bit(DOWN, bits) for name, bits in _BITS.items()},
        },
        models=TRANSFORMERS,
    ),
    *faults(
        "weights",
        {
            "one element NaN": on_weight(UP, element(lambda x: np.nan)),
            "one element infinite": on_weight(UP, element(lambda x: np.inf)),
            "one weight in 8 bit": on_weight(UP, in_8_bit),
            "one weight in 8 bit per channel": on_weight(UP, partial(in_8_bit, per_channel=True)),
            "one weight in bf16": on_weight(UP, through(ml_dtypes.bfloat16)),
            "one weight stale by 1e-2": on_weight(UP, noisy(1e-2)),
            "one weight stale by 1e-3": on_weight(UP, noisy(1e-3)),
            "one weight stale by 1e-4": on_weight(UP, noisy(1e-4)),
            "all weights stale by 1e-3": every_layer(
                lambda g, node: g.change_array(g.weight(node), noisy(1e-3)), ".*/dense/MatMul"
            ),
            "all weights in 8 bit": every_layer(
                lambda g, node: g.change_array(g.weight(node), in_8_bit), ".*/dense/MatMul"
            ),
        },
        models=TRANSFORMERS,
        precisions=FLOATS,
    ),
    *faults(
        "weights",
        {
            "one weight in fp16": on_weight(UP, through(np.float16)),
            "all weights in fp16": every_layer(
                lambda g, node: g.change_array(g.weight(node), through(np.float16)),
                ".*/dense/MatMul",
            ),
            "hidden state through fp16": on_output(_bias(UP), cast_through(TensorProto.FLOAT16)),
            "hidden state through bf16": on_output(_bias(UP), cast_through(TensorProto.BFLOAT16)),
        },
        models=TRANSFORMERS,
        precisions=("fp32",),
    ),
]


def _there_and_back(factor: float):
    return lambda g, x: g.op("Div", g.op("Mul", x, factor), factor)


def _in_parts(count: int) -> Callable[[GraphEditor, str], None]:
    """Add up the parts of a product one after the other, in the type of the graph."""

    def edit(g: GraphEditor, name: str) -> None:
        node = g.node(name)
        x, weight = node.input
        columns = np.array_split(np.arange(g.array(g.weight(name)).shape[0]), count)
        total = ""
        for some in columns:
            product = g.op(
                "MatMul", g.op("Gather", x, some, axis=-1), g.op("Gather", weight, some, axis=0)
            )
            total = g.op("Add", total, product) if total else product
        g.replace(node.output[0], lambda _: total)

    return edit


FP16_FAULTS: list[Fault] = [
    *faults(
        "half precision on a GPU",
        {
            "activation overflows": on_output(_bias(UP), _there_and_back(30000.0)),
            "scores overflow": on_output(attention("MatMul"), _there_and_back(60000.0)),
            "activation underflows": on_output(_bias(UP), _there_and_back(1e-7)),
            "all norms overflow": every_layer(
                lambda g, node: on_output(node, _there_and_back(60000.0))(g), ".*LayerNormalization"
            ),
        },
        models=TRANSFORMERS,
        precisions=("fp16",),
        harmful_on_gpu=True,
    ),
    *faults(
        "half precision",
        {
            "norm in fp16": norm(),
            "all norms in fp16 with epsilon 0": every_layer(
                lambda g, node: layer_norm(g, node, epsilon=0), ".*LayerNormalization"
            ),
            "sums of 8 parts in fp16": every_layer(_in_parts(8), ".*/output/dense/MatMul"),
            "sums of 64 parts in fp16": every_layer(_in_parts(64), ".*/output/dense/MatMul"),
            "subnormals flushed": on_weight(UP, flush_subnormals),
            "small weights flushed": on_weight(UP, lambda a: np.where(np.abs(a) < 1e-3, 0, a)),
            "activation in bf16": on_output(_bias(UP), cast_through(TensorProto.BFLOAT16)),
            "all activations in bf16": every_layer(
                lambda g, node: on_output(node, cast_through(TensorProto.BFLOAT16))(g),
                ".*/dense/Add",
            ),
            "activation in 8 bit": on_output(_bias(UP), stepped(1 / 16)),
        },
        models=TRANSFORMERS,
        precisions=("fp16",),
    ),
]
