"""Faults of decoders with a cache: of its growth, of positions and masks, and of an encoder's keys.

They are edits of what Optimum exports: `model.onnx` of a decoder alone, `decoder_model.onnx`,
`decoder_with_past_model.onnx` and `decoder_model_merged.onnx`.
"""

from __future__ import annotations

import numpy as np

from tests.validate.faults.fault import END, part, rolled
from tests.validate.faults.graph_editor import GraphEditor

_PAST = "past_key_values.0.key"


def _ones_like(g: GraphEditor, x: str) -> str:
    return g.op("Expand", np.int64(1), g.op("Shape", x))


def _mask_parts(g: GraphEditor, x: str) -> tuple[str, str]:
    """Return the columns of a mask that are the past's, and those of the new tokens."""
    split = g.op("Reshape", g.size(_PAST, 2), np.int64([1]))
    axis = np.int64([1])
    return g.op("Slice", x, np.int64([0]), split, axis), g.op(
        "Slice", x, split, np.int64([END]), axis
    )


def newest_position_missing(g: GraphEditor) -> None:
    g.replace("present.0.key", lambda x: part(g, x, 0, -1, 2))


def oldest_position_missing(g: GraphEditor) -> None:
    g.replace("present.1.value", lambda x: part(g, x, 1, END, 2))


def positions_returned_in_another_order(g: GraphEditor) -> None:
    g.replace("present.1.value", lambda x: rolled(g, x, 2))


def keys_returned_of_another_layer(g: GraphEditor) -> None:
    g.replace("present.1.key", lambda _: "present.0.key")


def cache_grown_at_the_wrong_end(g: GraphEditor) -> None:
    """Put the new keys and values of a layer before its past."""
    for name in ("present.0.key", "present.0.value"):
        concat = g.producer(name)
        assert concat.op_type == "Concat"
        concat.input[0], concat.input[1] = concat.input[1], concat.input[0]


def positions_counted_from_the_padding(g: GraphEditor) -> None:
    """Ignore `position_ids`: count from the first token, padding or not."""

    def count(positions: str) -> str:
        past = g.size(_PAST, 2)
        end = g.op("Add", past, g.size(positions, 1))
        return g.op("Expand", g.op("Range", past, end, np.int64(1)), g.op("Shape", positions))

    g.replace("position_ids", count)


def mask_of_the_past_ignored(g: GraphEditor) -> None:
    def mask(x: str) -> str:
        past, new = _mask_parts(g, x)
        return g.op("Concat", _ones_like(g, past), new, axis=1)

    g.replace("attention_mask", mask)


def mask_of_the_prompt_ignored(g: GraphEditor) -> None:
    def mask(x: str) -> str:
        past, new = _mask_parts(g, x)
        return g.op("Concat", past, _ones_like(g, new), axis=1)

    g.replace("attention_mask", mask)


def prompt_without_past_differs(g: GraphEditor) -> None:
    empty = g.op("Equal", g.size(_PAST, 2), np.int64(0))
    g.replace("logits", lambda x: g.op("Where", empty, g.op("Mul", x, 1.01), x))


def encoder_keys_of_another_layer(g: GraphEditor) -> None:
    g.replace("past_key_values.1.encoder.key", lambda _: "past_key_values.0.encoder.key")


def encoder_keys_returned_of_another_layer(g: GraphEditor) -> None:
    g.replace("present.1.encoder.key", lambda _: "present.0.encoder.key")


def encoder_mask_ignored(g: GraphEditor) -> None:
    g.replace("encoder_attention_mask", lambda x: _ones_like(g, x))


# Faults of a step with a long past alone: one token at a time, as only generation runs them.

_LONG = 29


def _in_long_step(g: GraphEditor, past: str) -> str:
    """Return whether one token is run after more than 29."""
    one = g.op("Equal", g.size("input_ids", 1), np.int64(1))
    return g.op("And", one, g.op("Greater", g.size(past, 2), np.int64(_LONG)))


def positions_clamped(g: GraphEditor) -> None:
    long = _in_long_step(g, _PAST)
    g.replace("position_ids", lambda x: g.op("Where", long, g.op("Min", x, np.int64(_LONG - 2)), x))


def oldest_position_forgotten(g: GraphEditor, past: str = _PAST) -> None:
    """Return zeros for the key of the first position."""
    long = _in_long_step(g, past)

    def forget(x: str) -> str:
        first, rest = part(g, x, 0, 1, 2), part(g, x, 1, END, 2)
        return g.op("Where", long, g.op("Concat", g.op("Sub", first, first), rest, axis=2), x)

    g.replace(past.replace("past_key_values", "present"), forget)


def long_mask_ignored(g: GraphEditor) -> None:
    long = _in_long_step(g, _PAST)
    g.replace("attention_mask", lambda x: g.op("Where", long, _ones_like(g, x), x))
