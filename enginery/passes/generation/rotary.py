"""Find rotary position embeddings, and read the tables of their cosines and sines.

    rotated = x * cos + rotate_half (x) * sin
    rotate_half (x) = Concat (-second half of x, first half of x)

GroupQueryAttention does this itself, from tables by position. Only the outline of the pattern is
checked here: whoever replaces it compares the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.passes.generation.sizes import DecoderSizes, Sizes, UnsuitableGraphError

# Each value of a table is half a head wide; kernels need a multiple of 8.
_WIDTH_UNIT = 16
_MAX_POSITIONS = 1 << 18


@dataclass(frozen=True)
class Rotation:
    """One value that is rotated."""

    source: ir.Value
    """(batch, heads, sequence, head_dim), before."""
    cosines: ir.Value
    sines: ir.Value


@dataclass(frozen=True)
class RotaryTables:
    """float32 (positions, head_dim / 2) each."""

    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]


def find_rotation(value: ir.Value) -> Rotation | None:
    """Return what a value is the rotation of; None if it is none, or if a part is not rotated."""
    total = value.producer()
    if total is None or total.op_type != "Add":
        return None
    products = [None if part is None else part.producer() for part in total.inputs]
    if any(node is None or node.op_type != "Mul" for node in products):
        return None
    # The two products may be added in either order.
    for straight, turned in (products, products[::-1]):
        if straight is None or turned is None:
            continue
        halves = None if turned.inputs[0] is None else turned.inputs[0].producer()
        source, cosines, sines = straight.inputs[0], straight.inputs[1], turned.inputs[1]
        if halves is None or halves.op_type != "Concat" or source is None:
            continue
        if cosines is not None and sines is not None and _are_halves(halves, source):
            return Rotation(source, cosines, sines)
    return None


def _are_halves(joined: ir.Node, source: ir.Value) -> bool:
    """Return True for a Concat of the negative of one Slice of a value, and another."""
    if len(joined.inputs) != 2:
        return False
    first, second = (None if part is None else part.producer() for part in joined.inputs)
    if first is None or second is None or first.op_type != "Neg":
        return False
    negated = None if first.inputs[0] is None else first.inputs[0].producer()
    parts = (negated, second)
    return all(
        part is not None and part.op_type in ("Slice", "Split") and part.inputs[0] is source
        for part in parts
    )


def read_tables(
    rotation: Rotation, sizes: DecoderSizes, *, width: int, position_limit: int | None
) -> RotaryTables | None:
    """Return the tables for all positions of a model, and some behind them.

    None if they depend on more than a token's position, or kernels do not take them.

    Args:
        rotation: a rotation.
        sizes: the sizes of the decoder.
        width: the size of a head.
        position_limit: the number of positions of the model.
    """
    if width % _WIDTH_UNIT or position_limit is None:
        return None
    # A buffer may be longer than the positions that the model has.
    count = 2 << (position_limit - 1).bit_length()
    if count > _MAX_POSITIONS:
        return None
    names = [rotation.cosines.name or "", rotation.sines.name or ""]
    try:
        # A prompt of so many tokens has each position once, in order.
        values = sizes.evaluate(names, Sizes(1, count, 0, 1))
    except UnsuitableGraphError:
        return None
    tables = []
    for name in names:
        rows = values[name]
        # They depend on more than the position, such as the row.
        if rows.size != count * width:
            return None
        rows = rows.reshape(count, width).astype(np.float32)
        # GroupQueryAttention's tables have one number for both halves of a head.
        if not np.array_equal(rows[:, : width // 2], rows[:, width // 2 :]):
            return None
        tables.append(np.ascontiguousarray(rows[:, : width // 2]))
    return RotaryTables(*tables)
