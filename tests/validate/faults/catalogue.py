"""The faults of a transformer and of its text inputs, by name.

An exporter, an optimizer, a quantizer or a cast could make each of them. Names of nodes are those
of BERT and ViT, so that one edit serves both; layers are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import ml_dtypes
import numpy as np
import onnx

from tests.validate.faults.graph_editor import GraphEditor, set_attribute

Edit = Callable[[GraphEditor], None]
FLOATS = ("fp32", "fp16")
ALL = ("fp32", "fp16", "int8")
TEXT = ("text",)
TRANSFORMERS = ("text", "vit")

RARE = 29346
"""A token that neither the built-in sentences nor the held-out texts have."""
FUNCTION = 3853
"""The token "function"."""


@dataclass(frozen=True)
class Fault:
    """One fault, and where it applies."""

    name: str
    kind: str
    edit: Edit
    precisions: tuple[str, ...] = ALL
    models: tuple[str, ...] = TEXT
    shown_by: tuple[str, ...] = ()
    """Held-out inputs beside the usual ones that show it, by their names in `effect.py`."""

    def plant(self, model: onnx.ModelProto, original: onnx.ModelProto) -> None:
        """Edit a model in place.

        Args:
            model: the graph of an artifact.
            original: the FP32 graph of the same model.
        """
        editor = GraphEditor(model, original)
        self.edit(editor)
        editor.finish()


def attention(name: str, layer: int | str = 1) -> str:
    """Return a pattern for a node of the attention of a layer, or of all of them (`r"\\d+"`)."""
    return rf"layer\.{layer}/attention/(?:self|attention)/{name}"


EVERY = r"\d+"
EMBEDDINGS = "/embeddings/word_embeddings/Gather"
POSITIONS = "/embeddings/position_embeddings/Gather"
TYPES = "/embeddings/token_type_embeddings/Gather"
MASK = "/Where_1_output_0"
"""The mask as it is added to the scores: (batch, 1, sequence, sequence)."""
MASK_FILL = "/Constant_12_output_0"
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


# Edits that many faults share


def multiplied(value_of: str, factor) -> Edit:
    """Multiply the output of a node."""
    return lambda g: g.replace_output(value_of, lambda x: g.op("Mul", x, np.float32(factor)))


def on_output(node: str, build: Callable[[GraphEditor, str], str]) -> Edit:
    return lambda g: g.replace_output(node, lambda x: build(g, x))


def on_last(build: Callable[[GraphEditor, str], str]) -> Edit:
    """Edit the graph's first output."""
    return lambda g: g.replace(g.graph.output[0].name, lambda x: build(g, x))


def on_weight(node: str, change) -> Edit:
    return lambda g: g.change_array(g.weight(node), change)


def on_operand(node: str, index: int, change) -> Edit:
    return lambda g: g.change_array(g.node(node).input[index], change)


def bypassed(node: str, index: int = 0) -> Edit:
    return lambda g: g.bypass(node, index)


def every_layer(edit: Callable[[GraphEditor, str], None], pattern: str) -> Edit:
    """Apply an edit to each node that matches."""

    def apply(g: GraphEditor) -> None:
        for node in [n.name for n in g.nodes(pattern)]:
            edit(g, f"^{node}")

    return apply


def swap_inputs(first: str, second: str, indices=(1,)) -> Edit:
    """Swap inputs of two nodes."""

    def edit(g: GraphEditor) -> None:
        a, b = g.node(first), g.node(second)
        for index in indices:
            a.input[index], b.input[index] = b.input[index], a.input[index]

    return edit


def together(*edits: Edit) -> Edit:
    def edit(g: GraphEditor) -> None:
        for one in edits:
            one(g)

    return edit


def element(change, row=2, column=1):
    """Return a change of one element of a weight."""

    def edit(array: np.ndarray) -> None:
        array[row, column] = change(array[row, column])

    return edit


def swap_rows(array: np.ndarray) -> None:
    array[[0, 1]] = array[[1, 0]]


def swap_columns(array: np.ndarray) -> None:
    array[:, [0, 1]] = array[:, [1, 0]]


def through(dtype):
    return lambda array: array.astype(dtype).astype(np.float32)


def in_8_bit(array: np.ndarray, *, per_channel: bool = False) -> np.ndarray:
    scale = np.abs(array).max(axis=0 if per_channel else None, keepdims=True) / 127
    return np.rint(array / scale) * scale


def noisy(relative: float):
    def change(array: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(0).standard_normal(array.shape)
        return array * (1 + relative * noise)

    return change


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


_WITH_WEIGHTS = (
    "MatMul",
    "Add",
    "Mul",
    "LayerNormalization",
    "QuantizeLinear",
    "DequantizeLinear",
)


def swap_layers(first: int, second: int) -> Edit:
    """Exchange two layers with all their weights."""

    def edit(g: GraphEditor) -> None:
        names = [n.name for n in g.nodes(rf".*/layer\.{first}/.*")]
        for name in names:
            other = name.replace(f"layer.{first}/", f"layer.{second}/")
            a, b = g.node(f"^{name}"), g.node(f"^{other}")
            if a.op_type not in _WITH_WEIGHTS:
                continue
            for index, (mine, theirs) in enumerate(zip(a.input, b.input, strict=True)):
                if g.array(mine) is not None and g.array(theirs) is not None:
                    a.input[index], b.input[index] = theirs, mine

    return edit


# Masks, positions, token types


def on_mask(build: Callable[[GraphEditor, str], str]) -> Edit:
    """Edit the attention mask as it comes in: int64 (batch, sequence)."""
    return lambda g: g.replace("attention_mask", lambda m: build(g, m))


def part(g: GraphEditor, x: str, start: int, end: int, axis: int) -> str:
    return g.op("Slice", x, np.int64([start]), np.int64([end]), np.int64([axis]))


END = np.iinfo(np.int64).max


def rolled(g: GraphEditor, x: str, axis: int) -> str:
    """Move everything by one along an axis; the last comes first."""
    return g.op("Concat", part(g, x, -1, END, axis), part(g, x, 0, -1, axis), axis=axis)


def reversed_along(g: GraphEditor, x: str, axis: int) -> str:
    step = np.int64([-1])
    return g.op("Slice", x, np.int64([END]), np.int64([-END]), np.int64([axis]), step)


def first_row(g: GraphEditor, x: str) -> str:
    return g.op("Expand", part(g, x, 0, 1, 0), g.op("Shape", x))


def mask_after_softmax(g: GraphEditor) -> None:
    for node in g.nodes(attention("Add", EVERY)):
        g.replace(node.output[0], lambda _, node=node: node.input[0])
    mask = g.op("Unsqueeze", "attention_mask", np.int64([1, 2]))
    for node in g.nodes(attention("Softmax", EVERY)):
        g.replace(node.output[0], lambda x: g.op("Mul", x, g.op("CastLike", mask, x)))


def positions(build: Callable[[GraphEditor, str], str]) -> Edit:
    """Edit the position ids: int64 (1, sequence)."""
    return lambda g: g.replace_input(POSITIONS, 1, lambda ids: build(g, ids))


def clamped(last: int):
    return lambda g, ids: g.op("Min", ids, np.int64(last))


def embedding(table: str, row: int, change: str | float) -> Edit:
    """Damage one row of an embedding: a factor, "neighbour" or "noise"."""

    def apply(array: np.ndarray) -> None:
        if change == "neighbour":
            array[row] = array[row - 1]
        elif change == "noise":
            array[row] += np.random.default_rng(0).normal(0, array.std(), array.shape[1])
        else:
            array[row] *= change

    return on_operand(table, 0, apply)


# Conditions on the shape and the padding


def _number(value: int):
    return np.int64(value)


def batch(operation: str, value: int):
    return lambda g: g.op(operation, g.size("input_ids", 0), _number(value))


def length(operation: str, value: int):
    return lambda g: g.op(operation, g.size("input_ids", 1), _number(value))


def multiple(axis: int, divisor: int, rest: int = 0):
    def condition(g: GraphEditor) -> str:
        return g.op(
            "Equal", g.op("Mod", g.size("input_ids", axis), _number(divisor)), _number(rest)
        )

    return condition


def both(first, second):
    return lambda g: g.op("And", first(g), second(g))


def prime_length(g: GraphEditor) -> str:
    numbers = np.arange(1024)
    primes = [n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)) for n in numbers]
    return g.op("Gather", g.constant(np.array(primes)), g.size("input_ids", 1))


def _tokens(g: GraphEditor) -> str:
    """Return the number of real tokens of each row: int64 (batch,)."""
    return g.op("ReduceSum", "attention_mask", np.int64([1]), keepdims=0)


def padded_by_half(g: GraphEditor) -> str:
    doubled = g.op("Mul", _tokens(g), _number(2))
    return g.op("Less", doubled, g.size("input_ids", 1))


def padded(g: GraphEditor) -> str:
    return g.op("Less", _tokens(g), g.size("input_ids", 1))


def one_token(g: GraphEditor) -> str:
    return g.op(
        "And",
        g.op("Equal", _tokens(g), _number(1)),
        g.op("Greater", g.size("input_ids", 1), _number(1)),
    )


def _row_numbers(g: GraphEditor) -> str:
    return g.op("Range", _number(0), g.size("input_ids", 0), _number(1))


def last_row(g: GraphEditor) -> str:
    rows = g.size("input_ids", 0)
    last = g.op("Equal", _row_numbers(g), g.op("Sub", rows, _number(1)))
    return g.op("And", last, g.op("Greater", rows, _number(1)))


def row_from(first: int):
    return lambda g: g.op("GreaterOrEqual", _row_numbers(g), _number(first))


CONDITIONS: dict[str, tuple[Callable[[GraphEditor], str], tuple[str, ...]]] = {
    "batch > 16": (batch("Greater", 16), ()),
    "batch > 32": (batch("Greater", 32), ()),
    "batch = 32": (batch("Equal", 32), ("batch 32",)),
    "odd batch above 1": (both(multiple(0, 2, 1), batch("Greater", 1)), ("batch 9",)),
    "batch a multiple of 3": (multiple(0, 3), ("batch 9",)),
    "batch a multiple of 5": (multiple(0, 5), ()),
    "length 1": (length("Equal", 1), ("length 1",)),
    "length 2": (length("Equal", 2), ("length 2",)),
    "length prime": (prime_length, ("length 97",)),
    "length = 100": (length("Equal", 100), ("length 100",)),
    "length = 256": (length("Equal", 256), ("length 256",)),
    "length > 64": (length("Greater", 64), ()),
    "length 65 to 511": (both(length("Greater", 64), length("Less", 512)), ()),
    "length > 128": (length("Greater", 128), ()),
    "length > 256": (length("Greater", 256), ()),
    "length > 300": (length("Greater", 300), ()),
    "length a multiple of 7": (multiple(1, 7), ("length 98",)),
    "row padded by more than half": (padded_by_half, ()),
    "row padded at all": (padded, ()),
    "row of one token": (one_token, ("one token",)),
    "last row": (last_row, ()),
    "rows after the 16th": (row_from(16), ()),
}


def weak_scores_if(condition, factor: float = 0.7) -> Edit:
    """Multiply the scores by a factor where a condition on the batch or on its rows holds."""

    def edit(g: GraphEditor) -> None:
        holds = condition(g)
        by_row = g.op("Reshape", holds, np.int64([-1, 1, 1, 1]))
        score_factor(g, g.op("Where", by_row, np.float32(factor), np.float32(1)))

    return edit


def weak_attention_if(condition, factor: float = 0.7) -> Edit:
    """Multiply what attention returns in every layer where a condition holds."""

    def edit(g: GraphEditor) -> None:
        by_row = g.op("Reshape", condition(g), np.int64([-1, 1, 1, 1]))
        scale = g.op("Where", by_row, np.float32(factor), np.float32(1))
        for node in g.nodes(attention("MatMul_1", EVERY)):
            g.replace(node.output[0], lambda x: g.op("Mul", x, g.op("CastLike", scale, x)))

    return edit


def no_mask_if(condition) -> Edit:
    def edit(g: GraphEditor) -> None:
        by_row = g.op("Reshape", condition(g), np.int64([-1, 1, 1, 1]))
        g.replace(MASK, lambda m: g.op("Where", by_row, 0.0, m))

    return edit


def constant_positions_if_batched(g: GraphEditor, ids: str) -> str:
    zeros = g.op("Mul", ids, _number(0))
    return g.op("Where", batch("Greater", 1)(g), zeros, ids)


def baked(*, batch_size: int = 0, sequence: int = 0):
    """Fix the batch or the sequence of the output, as a traced shape does."""

    def build(g: GraphEditor, x: str) -> str:
        target = [batch_size or 0, sequence or 0, 384]
        if batch_size:
            target[1] = -1
        if sequence:
            target[0] = -1
        return g.op("Reshape", x, np.int64(target))

    return build


def cut_off(minimum: float, maximum: float):
    return lambda g, x: g.op("Max", g.op("Min", x, maximum), minimum)


def cast_through(element_type: int):
    return lambda g, x: g.op("CastLike", g.op("Cast", x, to=element_type), x)


def stepped(step: float):
    return lambda g, x: g.op("Mul", g.op("Round", g.op("Div", x, step)), step)


def nan_guard(g: GraphEditor, x: str) -> str:
    return g.op("Where", g.op("Greater", g.op("Abs", x), 1.0), 0.0, x)


def last_layer_dropped(g: GraphEditor) -> None:
    before = g.node(r"layer\.4/output/LayerNorm/LayerNormalization").output[0]
    g.replace(g.graph.output[0].name, lambda _: before)


def _list(kind: str, entries: dict[str, Edit], **where) -> list[Fault]:
    return [Fault(name, kind, edit, **where) for name, edit in entries.items()]


def _showing(faults: list[Fault], **shown_by: str) -> list[Fault]:
    names = {name.replace("_", " "): (where,) for name, where in shown_by.items()}
    assert names.keys() <= {f.name for f in faults}
    return [replace(f, shown_by=names.get(f.name, f.shown_by)) for f in faults]


_HALF, _BF16 = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16

TEXT_FAULTS: list[Fault] = [
    *_list(
        "mask",
        {
            "mask ignored": on_mask(lambda g, m: g.op("Max", m, _number(1))),
            "mask inverted": on_mask(lambda g, m: g.op("Sub", _number(1), m)),
            "mask shifted by one": on_mask(lambda g, m: rolled(g, m, 1)),
            "mask reversed": on_mask(lambda g, m: reversed_along(g, m, 1)),
            "mask of the first row for all": on_mask(first_row),
            "masks of the rows rotated": on_mask(lambda g, m: rolled(g, m, 0)),
            "mask over queries": lambda g: g.replace(
                MASK, lambda m: g.op("Transpose", m, perm=[0, 1, 3, 2])
            ),
            "mask ignored in one layer": bypassed(attention("Add")),
            "mask after softmax": mask_after_softmax,
            "causal mask": lambda g: g.replace(
                MASK,
                lambda m: g.op(
                    "Add", m, g.op("Trilu", g.op("Add", g.op("Mul", m, 0.0), -1e4), _number(1))
                ),
            ),
            "mask of 0": lambda g: g.set_array(MASK_FILL, g.array(MASK_FILL) * 0),
            "mask of -1": lambda g: g.change_array(MASK_FILL, lambda a: a * 0 - 1),
            "mask of -5": lambda g: g.change_array(MASK_FILL, lambda a: a * 0 - 5),
            "mask of -10": lambda g: g.change_array(MASK_FILL, lambda a: a * 0 - 10),
            "mask of +10000": lambda g: g.change_array(MASK_FILL, lambda a: a * 0 + 10000),
            "last token masked": on_mask(
                lambda g, m: g.op(
                    "Concat", part(g, m, 1, END, 1), g.op("Mul", part(g, m, 0, 1, 1), 0), axis=1
                )
            ),
        },
    ),
    *[
        Fault(f"mask ignored if {name}", "mask if", no_mask_if(CONDITIONS[name][0]), shown_by=shown)
        for name, shown in {
            "batch > 16": (),
            "length > 64": (),
            "length > 128": (),
            "length > 256": ("ragged 302",),
            "row padded by more than half": (),
            "last row": (),
            "rows after the 16th": (),
            "batch a multiple of 5": (),
        }.items()
    ],
    *[
        Fault(f"scores × 0.7 if {name}", "scores if", weak_scores_if(condition), shown_by=inputs)
        for name, (condition, inputs) in CONDITIONS.items()
        if name not in ("length 1", "row of one token")  # a softmax over one score is 1
    ],
    *[
        Fault(f"attention × 0.7 if {name}", "scores if", weak_attention_if(condition), shown_by=by)
        for name, (condition, by) in CONDITIONS.items()
        if name in ("length 1", "row of one token", "length > 300", "batch > 16")
    ],
    *_list(
        "positions",
        {
            "positions from 1": positions(lambda g, i: clamped(511)(g, g.op("Add", i, _number(1)))),
            "positions from 2": positions(lambda g, i: clamped(511)(g, g.op("Add", i, _number(2)))),
            "positions clamped at 15": positions(clamped(15)),
            "positions clamped at 63": positions(clamped(63)),
            "positions clamped at 255": positions(clamped(255)),
            "positions clamped at 510": positions(clamped(510)),
            "positions reversed": positions(lambda g, i: reversed_along(g, i, 1)),
            "positions of 0 if batched": positions(constant_positions_if_batched),
            "positions modulo 128": positions(lambda g, i: g.op("Mod", i, _number(128))),
            "positions dropped": lambda g: g.replace_output(
                POSITIONS, lambda x: g.op("Mul", x, 0.0)
            ),
            "position row 300 of zeros": embedding(POSITIONS, 300, 0),
            "position row 511 of zeros": embedding(POSITIONS, 511, 0),
            "position row 100 its neighbour's": embedding(POSITIONS, 100, "neighbour"),
        },
    ),
    *_showing(
        _list(
            "embeddings",
            {
                "token types ignored": lambda g: g.replace_input(
                    TYPES, 1, lambda i: g.op("Mul", i, _number(0))
                ),
                "token types inverted": lambda g: g.replace_input(
                    TYPES, 1, lambda i: g.op("Sub", _number(1), i)
                ),
                "token type embedding dropped": multiplied(TYPES, 0),
                "rare row of zeros": embedding(EMBEDDINGS, RARE, 0),
                "rare row its neighbour's": embedding(EMBEDDINGS, RARE, "neighbour"),
                "rare row with noise": embedding(EMBEDDINGS, RARE, "noise"),
                "rare row of NaN": embedding(EMBEDDINGS, RARE, np.nan),
                "last row of zeros": embedding(EMBEDDINGS, 30521, 0),
                "common row of zeros": embedding(EMBEDDINGS, FUNCTION, 0),
                "common row its neighbour's": embedding(EMBEDDINGS, FUNCTION, "neighbour"),
                "padding row of noise": embedding(EMBEDDINGS, 0, "noise"),
                "start row times 0.9": embedding(EMBEDDINGS, 101, 0.9),
                "embeddings times 1.01": multiplied(EMBEDDINGS, 1.01),
                "ids moved by one": lambda g: g.replace_input(
                    EMBEDDINGS, 1, lambda i: g.op("Min", g.op("Add", i, _number(1)), _number(30521))
                ),
                "embedding norm dropped": bypassed("/embeddings/LayerNorm/LayerNormalization"),
            },
        ),
        token_types_ignored="pairs",
        **{
            "rare_row_of_zeros": "rare token",
            "rare_row_its_neighbour's": "rare token",
            "rare_row_with_noise": "rare token",
            "rare_row_of_NaN": "rare token",
            "last_row_of_zeros": "last token",
            "common_row_of_zeros": "common token",
            "common_row_its_neighbour's": "common token",
        },
    ),
    *_list(
        "output",
        {
            "last layer dropped": last_layer_dropped,
            "rows rotated": on_last(lambda g, x: rolled(g, x, 0)),
            "sequence reversed": on_last(lambda g, x: reversed_along(g, x, 1)),
            "sequence moved by one": on_last(lambda g, x: rolled(g, x, 1)),
            "first row for all": on_last(first_row),
            "first token for all": on_last(
                lambda g, x: g.op("Expand", part(g, x, 0, 1, 1), g.op("Shape", x))
            ),
            "batch of 1 baked in": on_last(baked(batch_size=1)),
            "batch of 2 baked in": on_last(baked(batch_size=2)),
            "sequence of 8 baked in": on_last(baked(sequence=8)),
            "clipped at 1": on_last(cut_off(-1.0, 1.0)),
            "clipped at 0.5": on_last(cut_off(-0.5, 0.5)),
            "output through bf16": on_last(cast_through(_BF16)),
            "output in steps of 1/64": on_last(stepped(1 / 64)),
            "output times 1.001": on_last(lambda g, x: g.op("Mul", x, 1.001)),
            "output times 1.01": on_last(lambda g, x: g.op("Mul", x, 1.01)),
            "output plus 0.001": on_last(lambda g, x: g.op("Add", x, 1e-3)),
            "large values set to 0": on_last(nan_guard),
            "one feature of zeros": on_last(
                lambda g, x: g.op("Mul", x, np.float32([*[1] * 7, 0, *[1] * 376]))
            ),
            "two features swapped": on_last(
                lambda g, x: g.op("Gather", x, np.int64([1, 0, *range(2, 384)]), axis=2)
            ),
            "output negated": on_last(lambda g, x: g.op("Neg", x)),
        },
    ),
    *_list("output", {"output through fp16": on_last(cast_through(_HALF))}, precisions=("fp32",)),
]


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
    *_list(
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
    *_list(
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
    *_list(
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
    *_list(
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
    *_list(
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
    *_list(
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
    *_list(
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
    *_list(
        "weights",
        {
            "one weight in fp16": on_weight(UP, through(np.float16)),
            "all weights in fp16": every_layer(
                lambda g, node: g.change_array(g.weight(node), through(np.float16)),
                ".*/dense/MatMul",
            ),
            "hidden state through fp16": on_output(_bias(UP), cast_through(_HALF)),
            "hidden state through bf16": on_output(_bias(UP), cast_through(_BF16)),
        },
        models=TRANSFORMERS,
        precisions=("fp32",),
    ),
]


def _overflow(factor: float):
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
    *_list(
        "half precision",
        {
            "activation overflows": on_output(_bias(UP), _overflow(30000.0)),
            "scores overflow": on_output(attention("MatMul"), _overflow(3000.0)),
            "norm in fp16": norm(),
            "all norms in fp16 with epsilon 0": every_layer(
                lambda g, node: layer_norm(g, node, epsilon=0), ".*LayerNormalization"
            ),
            "sums of 8 parts in fp16": every_layer(_in_parts(8), ".*/output/dense/MatMul"),
            "sums of 64 parts in fp16": every_layer(_in_parts(64), ".*/output/dense/MatMul"),
            "subnormals flushed": on_weight(UP, flush_subnormals),
            "small weights flushed": on_weight(UP, lambda a: np.where(np.abs(a) < 1e-3, 0, a)),
            "activation in bf16": on_output(_bias(UP), cast_through(_BF16)),
            "all activations in bf16": every_layer(
                lambda g, node: g.replace_output(node, lambda x: cast_through(_BF16)(g, x)),
                ".*/dense/Add",
            ),
            "activation in 8 bit": on_output(_bias(UP), stepped(1 / 16)),
        },
        models=TRANSFORMERS,
        precisions=("fp16",),
    ),
    *_list(
        "half precision",
        {
            "mask of -5000": lambda g: g.change_array(MASK_FILL, lambda a: a * 0 - 5000),
            "mask of -20": lambda g: g.change_array(MASK_FILL, lambda a: a * 0 - 20),
            "mask of -infinity": lambda g: g.change_array(MASK_FILL, lambda a: a * 0 - np.inf),
        },
        precisions=("fp16",),
    ),
]
