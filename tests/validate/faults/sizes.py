"""Faults that depend on sizes and ids: of any graph, whatever its nodes are called.

A condition is computed from the shapes, masks and ids that the graph takes, in many ways: as a
comparison, a quotient, a remainder, in floats, through an If, from the shape of a hidden value. An
effect changes an input or the first output where the condition holds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from tests.validate.faults.fault import END, Edit, part, rolled
from tests.validate.faults.graph_editor import GraphEditor

Condition = Callable[[GraphEditor], str]
"""Adds nodes that compute a bool without dims, or one for each row, and returns its name."""


def _int(value: int) -> np.ndarray:
    return np.int64(value)


class Sizes:
    """The sizes of a graph's inputs, as values of the graph."""

    def __init__(self, g: GraphEditor) -> None:
        self.g = g
        self.names = [value.name for value in g.graph.input]

    def _size(self, axis: int, *endings: str) -> str:
        name = next(name for ending in endings for name in self.names if name.endswith(ending))
        return self.g.size(name, axis)

    @property
    def batch(self) -> str:
        return self._size(0, "input_ids", "pixel_values", "hidden_states")

    @property
    def length(self) -> str:
        return self._size(1, "input_ids", "hidden_states")

    @property
    def past(self) -> str:
        return self._size(2, "0.key", "decoder.key")

    @property
    def encoded(self) -> str:
        return self._size(1, "encoder_attention_mask", "hidden_states")

    @property
    def mask(self) -> str:
        return next(name for name in self.names if name.endswith("attention_mask"))

    @property
    def ids(self) -> str:
        return next(name for name in self.names if name.endswith("input_ids"))

    @property
    def row_lengths(self) -> str:
        """int64 (batch,)"""
        return self.g.op("ReduceSum", self.mask, _int([1]), keepdims=0)


def above(size: str, number: int) -> Condition:
    return lambda g: g.op("Greater", getattr(Sizes(g), size), _int(number))


def below(size: str, number: int) -> Condition:
    return lambda g: g.op("Less", getattr(Sizes(g), size), _int(number))


def equal(size: str, number: int) -> Condition:
    return lambda g: g.op("Equal", getattr(Sizes(g), size), _int(number))


def both(*conditions: Condition) -> Condition:
    def build(g: GraphEditor) -> str:
        holds = conditions[0](g)
        for condition in conditions[1:]:
            holds = g.op("And", holds, condition(g))
        return holds

    return build


def between(size: str, low: int, high: int) -> Condition:
    """From `low` on, below `high`."""
    return both(above(size, low - 1), below(size, high))


def remainder(size: str, divisor: int, value: int) -> Condition:
    return lambda g: g.op("Equal", g.op("Mod", getattr(Sizes(g), size), _int(divisor)), _int(value))


def tokens_above(number: int) -> Condition:
    return lambda g: g.op("Greater", g.op("Mul", Sizes(g).batch, Sizes(g).length), _int(number))


def quotient(size: str, divisor: int, value: int) -> Condition:
    return lambda g: g.op("Equal", g.op("Div", getattr(Sizes(g), size), _int(divisor)), _int(value))


def in_floats(size: str, number: float) -> Condition:
    """Compare the root of a size."""

    def build(g: GraphEditor) -> str:
        wide = g.op("Cast", getattr(Sizes(g), size), to=TensorProto.FLOAT)
        return g.op("Greater", g.op("Sqrt", wide), g.constant(np.float32(np.sqrt(number + 0.5))))

    return build


def rounded(size: str, divisor: float, value: float) -> Condition:
    def build(g: GraphEditor) -> str:
        wide = g.op("Cast", getattr(Sizes(g), size), to=TensorProto.FLOAT)
        share = g.op("Floor", g.op("Div", wide, g.constant(np.float32(divisor))))
        return g.op("Equal", share, g.constant(np.float32(value)))

    return build


def clipped(size: str, number: int) -> Condition:
    """Compare a size with its minimum with a number."""

    def build(g: GraphEditor) -> str:
        value = getattr(Sizes(g), size)
        return g.op("Less", g.op("Min", value, _int(number)), value)

    return build


def computed(size: str, factor: int, other: int) -> Condition:
    """Compare a size with a product of two constants."""
    return lambda g: g.op(
        "Greater", getattr(Sizes(g), size), g.op("Mul", g.constant(_int(factor)), _int(other))
    )


def through_if(condition: Condition) -> Condition:
    """Return the condition from the branches of an If."""

    def build(g: GraphEditor) -> str:
        def branch(value: bool) -> object:
            name = f"branch/{value}"
            constant = helper.make_node(
                "Constant",
                [],
                [name],
                value=helper.make_tensor(name, TensorProto.BOOL, [], [value]),
            )
            output = helper.make_tensor_value_info(name, TensorProto.BOOL, [])
            return helper.make_graph([constant], name, [], [output])

        return g.op("If", condition(g), then_branch=branch(True), else_branch=branch(False))

    return build


def row_longer(number: int) -> Condition:
    """Hold for rows of more real tokens than a number."""
    return lambda g: g.op("Greater", Sizes(g).row_lengths, _int(number))


def row_of(number: int) -> Condition:
    return lambda g: g.op("Equal", Sizes(g).row_lengths, _int(number))


def row_short_of(share: int) -> Condition:
    """Hold for rows of fewer real tokens than a share of the batch's length."""
    return lambda g: g.op(
        "Less", g.op("Mul", Sizes(g).row_lengths, _int(share)), g.size(Sizes(g).mask, 1)
    )


def rows_from(number: int) -> Condition:
    def build(g: GraphEditor) -> str:
        rows = g.op("Range", g.constant(_int(0)), Sizes(g).batch, g.constant(_int(1)))
        return g.op("GreaterOrEqual", rows, _int(number))

    return build


def spread_above(number: int) -> Condition:
    """Hold for a batch whose longest row has so many more tokens than its shortest."""

    def build(g: GraphEditor) -> str:
        lengths = Sizes(g).row_lengths
        longest = g.op("ReduceMax", lengths, keepdims=0)
        shortest = g.op("ReduceMin", lengths, keepdims=0)
        return g.op("Greater", g.op("Sub", longest, shortest), _int(number))

    return build


def without_padding(g: GraphEditor) -> str:
    """Hold for batches of several rows whose mask is all ones."""
    full = g.op("Equal", g.op("ReduceMin", Sizes(g).mask, keepdims=0), _int(1))
    return g.op("And", full, above("batch", 1)(g))


# Effects


def _by_row(g: GraphEditor, holds: str, rank: int) -> str:
    return g.op("Reshape", holds, np.int64([-1, *[1] * (rank - 1)]))


def mask_ignored(condition: Condition) -> Edit:
    def edit(g: GraphEditor) -> None:
        # The condition reads the mask as it comes in.
        def ignore(x: str) -> str:
            holds = _by_row(g, condition(g), 2)
            return g.op("Where", holds, g.op("Max", x, _int(1)), x)

        g.replace(Sizes(g).mask, ignore)

    return edit


def scaled(condition: Condition, factor: float = 1.3, rank: int = 3) -> Edit:
    """Multiply the first output."""

    def edit(g: GraphEditor) -> None:
        holds = _by_row(g, condition(g), rank)
        name = g.graph.output[0].name
        g.replace(name, lambda x: g.op("Where", holds, g.op("Mul", x, factor), x))

    return edit


def rows_exchanged(condition: Condition) -> Edit:
    def edit(g: GraphEditor) -> None:
        holds = condition(g)
        name = g.graph.output[0].name
        g.replace(name, lambda x: g.op("Where", holds, rolled(g, x, 0), x))

    return edit


def ids_replaced(choose: Callable[[GraphEditor, str], str]) -> Edit:
    """Let every reader of the ids take others."""

    def edit(g: GraphEditor) -> None:
        g.replace(Sizes(g).ids, lambda x: choose(g, x))

    return edit


def positions_moved(condition: Condition, *, by: int = 1) -> Edit:
    """Add to `position_ids`, which decoders take."""

    def edit(g: GraphEditor) -> None:
        def move(x: str) -> str:
            return g.op("Where", _by_row(g, condition(g), 2), g.op("Add", x, _int(by)), x)

        g.replace("position_ids", move)

    return edit


def oldest_key_forgotten(condition: Condition, past: str) -> Edit:
    """Read zeros for the first position of a past."""

    def edit(g: GraphEditor) -> None:
        # The condition reads the past as it comes in.
        def forget(x: str) -> str:
            holds = condition(g)
            first, rest = part(g, x, 0, 1, 2), part(g, x, 1, END, 2)
            return g.op("Where", holds, g.op("Concat", g.op("Sub", first, first), rest, axis=2), x)

        g.replace(past, forget)

    return edit


_CONDITIONS: dict[Callable[[Condition], Edit], dict[str, Condition]] = {
    mask_ignored: {
        "batch > 16, length > 8": both(above("batch", 16), above("length", 8)),
        "batch > 20, length > 64": both(above("batch", 20), above("length", 64)),
        "batch > 70": above("batch", 70),
        "length from 150 to 199": between("length", 150, 200),
        "length = 175": equal("length", 175),
        "more than 4096 tokens": tokens_above(4096),
        "more than 1000 tokens": tokens_above(1000),
        "remainder of the length by 50": remainder("length", 50, 43),
        "length / 64 = 3": quotient("length", 64, 3),
        "root of the length": in_floats("length", 210),
        "a hundred tokens, in floats": rounded("length", 100, 2),
        "minimum with 300": clipped("length", 300),
        "a product of constants": computed("length", 13, 17),
        "through an If": through_if(above("length", 180)),
        "rows of more than 100 tokens in batches over 8": both(row_longer(100), above("batch", 8)),
        "rows shorter than a third": row_short_of(3),
        "rows shorter than a hundredth": row_short_of(100),
        "rows from the 66th on": rows_from(65),
        "one row 100 longer": spread_above(100),
        "batch a multiple of 47": remainder("batch", 47, 0),
    },
    scaled: {
        "rows of 77 tokens": row_of(77),
        "rows of more than 230 tokens": row_longer(230),
        "length from 150 to 199": between("length", 150, 200),
        "length > 400": above("length", 400),
        "length = 301": equal("length", 301),
        "batch > 100": above("batch", 100),
        "batch from 41 to 47": between("batch", 41, 48),
        "more than 8192 tokens": tokens_above(8192),
        "no padding": without_padding,
        "batch = 200": equal("batch", 200),
        "root of the batch": in_floats("batch", 90),
    },
    rows_exchanged: {
        "batch > 70": above("batch", 70),
        "batch = 129": equal("batch", 129),
        "batch > 40, length > 20": both(above("batch", 40), above("length", 20)),
        "batch = 24, length = 24": both(equal("batch", 24), equal("length", 24)),
    },
}

ENCODER: dict[str, Edit] = {
    f"{effect.__name__}: {name}": effect(condition)
    for effect, conditions in _CONDITIONS.items()
    for name, condition in conditions.items()
}

IDS: dict[str, Edit] = {
    "one id replaced": ids_replaced(
        lambda g, x: g.op("Where", g.op("Equal", x, _int(711)), g.constant(_int(17)), x)
    ),
    "ids clipped": ids_replaced(lambda g, x: g.op("Min", x, _int(950))),
    "ids with a remainder": ids_replaced(
        lambda g, x: g.op(
            "Where", g.op("Equal", g.op("Mod", x, _int(97)), _int(5)), g.op("Sub", x, _int(1)), x
        )
    ),
    "an id in long texts": ids_replaced(
        lambda g, x: g.op(
            "Where",
            g.op("And", g.op("Equal", x, _int(555)), above("length", 50)(g)),
            g.constant(_int(17)),
            x,
        )
    ),
    "two ids exchanged": ids_replaced(
        lambda g, x: g.op(
            "Where",
            g.op("Equal", x, _int(300)),
            g.constant(_int(301)),
            g.op("Where", g.op("Equal", x, _int(301)), g.constant(_int(300)), x),
        )
    ),
}

DECODER: dict[str, Edit] = {
    **{
        f"positions moved: {name}": positions_moved(condition)
        for name, condition in {
            "prompt of more than 64 tokens": above("length", 64),
            "prompt of 100 to 120 tokens": between("length", 100, 121),
            "prompt of 77 tokens": equal("length", 77),
            "past over 100": above("past", 100),
            "past from 50 to 60": between("past", 50, 61),
            "one token, past over 45": both(equal("length", 1), above("past", 45)),
            "past of 33": equal("past", 33),
            "batch over 8, prompt over 8": both(above("batch", 8), above("length", 8)),
            "remainder of the past by 50": remainder("past", 50, 37),
            "root of the past": in_floats("past", 120),
        }.items()
    },
    **{
        f"mask ignored: {name}": mask_ignored(condition)
        for name, condition in {
            "prompts in batches over 8": both(above("batch", 8), above("length", 1)),
            "past over 60": above("past", 60),
            "batch over 40": above("batch", 40),
            "several tokens after a past": both(above("length", 1), above("past", 3)),
        }.items()
    },
    **{
        f"oldest key forgotten: {name}": oldest_key_forgotten(
            both(condition, above("past", 0)), "past_key_values.0.key"
        )
        for name, condition in {
            "past over 90": above("past", 90),
            "past from 40 to 44": between("past", 40, 45),
            "batch over 12": above("batch", 12),
        }.items()
    },
    **{
        f"logits scaled: {name}": scaled(condition)
        for name, condition in {
            "prompt over 150": above("length", 150),
            "past over 200": above("past", 200),
            "batch over 50": above("batch", 50),
        }.items()
    },
}

CROSS_ATTENTION: dict[str, Edit] = {
    **{
        f"encoder mask ignored: {name}": mask_ignored(condition)
        for name, condition in {
            "batch over 16": above("batch", 16),
            "batch over 40": above("batch", 40),
            "encoder's length over 70": above("encoded", 70),
            "past over 45": above("past", 45),
            "prompt over 20": above("length", 20),
        }.items()
    },
    **{
        f"oldest key forgotten: {name}": oldest_key_forgotten(
            both(condition, above("past", 0)), "past_key_values.0.decoder.key"
        )
        for name, condition in {
            "past over 45": above("past", 45),
            "batch over 20": above("batch", 20),
        }.items()
    },
    **{
        f"rows exchanged: {name}": rows_exchanged(condition)
        for name, condition in {
            "batch over 40": above("batch", 40),
            "encoder's length of 99": both(above("batch", 1), equal("encoded", 99)),
        }.items()
    },
}
"""Of the decoder of an encoder-decoder."""

SOUND: dict[str, Edit] = {
    # Nodes that decide, and do the same either way.
    **{
        f"the same: {effect.__name__}, {name}": scaled(condition, 1.0)
        for effect, conditions in _CONDITIONS.items()
        for name, condition in conditions.items()
    },
    "ids up to the last": ids_replaced(lambda g, x: g.op("Min", x, _int(999))),
    "ids from the first": ids_replaced(lambda g, x: g.op("Max", x, _int(0))),
    "ids with the remainder by their number": ids_replaced(lambda g, x: g.op("Mod", x, _int(1000))),
    "ids in 32 bits": ids_replaced(
        lambda g, x: g.op("Cast", g.op("Cast", x, to=TensorProto.INT32), to=TensorProto.INT64)
    ),
    "ids in floats": ids_replaced(
        lambda g, x: g.op("Cast", g.op("Cast", x, to=TensorProto.FLOAT), to=TensorProto.INT64)
    ),
    "ids reshaped": ids_replaced(
        lambda g, x: g.op("Reshape", g.op("Reshape", x, np.int64([-1])), g.op("Shape", x))
    ),
    "negative ids replaced": ids_replaced(
        lambda g, x: g.op("Where", g.op("Less", x, _int(0)), g.constant(_int(0)), x)
    ),
    "mask up to one": lambda g: g.replace("attention_mask", lambda x: g.op("Min", x, _int(1))),
    "mask above zero": lambda g: g.replace(
        "attention_mask", lambda x: g.op("Cast", g.op("Greater", x, _int(0)), to=TensorProto.INT64)
    ),
    "mask in floats": lambda g: g.replace(
        "attention_mask",
        lambda x: g.op("Cast", g.op("Cast", x, to=TensorProto.FLOAT), to=TensorProto.INT64),
    ),
    "mask of ones where there is no padding": mask_ignored(without_padding),
    "types up to one": lambda g: g.replace("token_type_ids", lambda x: g.op("Min", x, _int(1))),
}
"""Rewritings of an encoder of 1000 ids that change nothing."""

SOUND_DECODER: dict[str, Edit] = {
    **{
        f"the same: {name}": scaled(condition, 1.0)
        for name, condition in {
            "past over 100": above("past", 100),
            "prompt over 64": above("length", 64),
            "past from 50 to 60": between("past", 50, 61),
            "batch over 8, prompt over 8": both(above("batch", 8), above("length", 8)),
            "root of the past": in_floats("past", 120),
            "remainder of the past by 50": remainder("past", 50, 37),
            "through an If": through_if(above("past", 30)),
        }.items()
    },
    "positions from the first": lambda g: g.replace(
        "position_ids", lambda x: g.op("Max", x, _int(0))
    ),
    "positions up to the last": lambda g: g.replace(
        "position_ids", lambda x: g.op("Min", x, _int(255))
    ),
    "mask up to one": lambda g: g.replace("attention_mask", lambda x: g.op("Min", x, _int(1))),
    "ids from the first": ids_replaced(lambda g, x: g.op("Max", x, _int(0))),
}
"""The same of a decoder of 256 positions."""
