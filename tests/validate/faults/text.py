"""The faults of text inputs and of an encoder's output, by name: masks, positions, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from tests.validate.faults.fault import (
    END,
    Edit,
    Fault,
    bypassed,
    cast_through,
    cut_off,
    faults,
    first_row,
    multiplied,
    on_last,
    on_operand,
    part,
    reversed_along,
    rolled,
    stepped,
)
from tests.validate.faults.graph_editor import GraphEditor
from tests.validate.faults.transformer import EVERY, attention, score_factor

RARE = 29346
"""A token that neither the built-in sentences nor the held-out texts have."""
FUNCTION = 3853
"""The token "function"."""
EMBEDDINGS = "/embeddings/word_embeddings/Gather"
POSITIONS = "/embeddings/position_embeddings/Gather"
TYPES = "/embeddings/token_type_embeddings/Gather"
MASK = "/Where_1_output_0"
"""The mask as it is added to the scores: (batch, 1, sequence, sequence)."""
MASK_FILL = "/Constant_12_output_0"


# Masks, positions, token types


def mask_of(value: float) -> Edit:
    """Add another value to the scores of masked positions."""
    return lambda g: g.change_array(MASK_FILL, lambda a: np.full_like(a, value))


def on_mask(build: Callable[[GraphEditor, str], str]) -> Edit:
    """Edit the attention mask as it comes in: int64 (batch, sequence)."""
    return lambda g: g.replace("attention_mask", lambda m: build(g, m))


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


def nan_guard(g: GraphEditor, x: str) -> str:
    return g.op("Where", g.op("Greater", g.op("Abs", x), 1.0), 0.0, x)


def last_layer_dropped(g: GraphEditor) -> None:
    before = g.node(r"layer\.4/output/LayerNorm/LayerNormalization").output[0]
    g.replace(g.graph.output[0].name, lambda _: before)


def _showing(faults: list[Fault], **shown_by: str) -> list[Fault]:
    names = {name.replace("_", " "): (where,) for name, where in shown_by.items()}
    assert names.keys() <= {f.name for f in faults}
    return [replace(f, shown_by=names.get(f.name, f.shown_by)) for f in faults]


TEXT_FAULTS: list[Fault] = [
    *faults(
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
            "mask of 0": mask_of(0),
            "mask of -1": mask_of(-1),
            "mask of -5": mask_of(-5),
            "mask of -10": mask_of(-10),
            "mask of +10000": mask_of(10000),
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
    *faults(
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
        faults(
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
    *faults(
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
            "output through bf16": on_last(cast_through(TensorProto.BFLOAT16)),
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
    *faults(
        "output",
        {"output through fp16": on_last(cast_through(TensorProto.FLOAT16))},
        precisions=("fp32",),
    ),
    *faults(
        "mask",
        {
            "mask of -5000": mask_of(-5000),
            "mask of -20": mask_of(-20),
            "mask of -infinity": mask_of(-np.inf),
        },
        precisions=("fp16",),
    ),
]
