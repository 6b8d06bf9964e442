"""Measure what an attention sees: its scale and cap, and what is added to the scores.

A model's mask is computed by many nodes, in another way for each model. Here it is computed for a
few runs and read: which past positions a query sees, and a bias that depends on their distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.passes.generation.attention import Attention
from enginery.passes.generation.sizes import (
    RUNS,
    Arrays,
    DecoderSizes,
    Sizes,
    UnsuitableGraphError,
)

# Exporters mask with -10000, the lowest FP32 number or -inf.
_MASKED = -9e3
_SHORT = RUNS[1]
_PADDED = 3
_MAX_DISTANCE = 32768
_EXACT = 1e-5


@dataclass(frozen=True)
class Visibility:
    """How an attention weighs the positions that it reads."""

    scale: float
    cap: float = 0.0
    """Scores are `cap * tanh(score / cap)`; 0 for none."""
    window: int | None = None
    """A query sees this many positions, its own included; None for all."""
    distance_bias: NDArray[np.float32] | None = None
    """float32 (distances, heads): added to the score of a key that many positions before the
    query; the last row stands for all greater distances. None for none."""
    slopes: NDArray[np.float32] | None = None
    """float32 (heads,): subtracted for each position of distance; None for none."""
    masks_encoder: bool = False
    """Whether the encoder's mask applies: cross-attention only."""

    @property
    def is_plain(self) -> bool:
        """True if nothing is added to the scores of the positions that a query sees."""
        return self.distance_bias is None and self.slopes is None


def measure_visibility(
    own: Mapping[str, Attention],
    cross: Mapping[str, Attention],
    sizes: DecoderSizes,
    *,
    position_limit: int | None,
) -> dict[str, Visibility]:
    """Measure each attention, by the names of its keys.

    Args:
        own: attentions to the decoder's own positions.
        cross: attentions to the encoder's.
        sizes: the sizes of the decoder.
        position_limit: the number of positions that the model has; None without a limit.

    Raises:
        UnsuitableGraphError: an attention sees others than the positions up to its own, or adds to
            scores what does not depend on distances alone.
    """
    names = list(dict.fromkeys(_operand_names([*own.values(), *cross.values()])))
    longest = min(position_limit or _MAX_DISTANCE, _MAX_DISTANCE)
    # One query behind all positions shows a window, and a bias at every distance.
    long = Sizes(1, 1, longest - 1, 5)
    mask = np.ones((_SHORT.batch, _SHORT.encoder), np.int64)
    # Padding in one row shows whether an attention to the encoder hides it.
    mask[1, -_PADDED:] = 0
    extra = {"encoder_attention_mask": mask}
    short_arrays = sizes.evaluate(names, _SHORT, extra) if names else {}
    long_arrays = sizes.evaluate(names, long) if names else {}
    visibilities = {}
    for key, attention in own.items():
        scale, cap, bias = _scores(attention, short_arrays, _SHORT.total, _SHORT)
        _, _, long_bias = _scores(attention, long_arrays, long.total, long)
        where = attention.scores.name or key
        visibilities[key] = _own_visibility(where, scale, cap, bias, long_bias, position_limit)
    for key, attention in cross.items():
        scale, cap, bias = _scores(attention, short_arrays, _SHORT.encoder, _SHORT)
        where = attention.scores.name or key
        visibilities[key] = Visibility(scale, cap, masks_encoder=_masks_encoder(where, bias, mask))
    return visibilities


def _operand_names(attentions: list[Attention]) -> list[str]:
    operands = [
        value
        for attention in attentions
        for value in (
            *(value for _, value in attention.scales),
            *(step.operand for step in attention.steps),
        )
    ]
    return [
        value.name or ""
        for value in operands
        if value is not None and ir.convenience.get_const_tensor(value) is None
    ]


def _scores(
    attention: Attention, arrays: Arrays, keys: int, sizes: Sizes
) -> tuple[float, float, NDArray[Any]]:
    """Return the scale, the cap and what is added, (batch, heads, sequence, keys)."""
    scale, cap = 1.0, 0.0
    for operator, value in attention.scales:
        scale = _apply(operator, scale, _number(value, arrays))
    added: NDArray[Any] = np.zeros((1, 1, 1, 1))
    has_bias = False
    for step in attention.steps:
        if step.kind == "cap":
            if cap or has_bias:
                raise UnsuitableGraphError(f"{step.node.name}, a second Tanh or one behind a bias")
            # What follows multiplies the cap; what came before divides by it.
            before, scale, cap = scale, 1.0, 1.0
        elif step.kind == "scale" and step.operand is not None:
            if has_bias:
                raise UnsuitableGraphError(f"{step.node.name}, which scales a bias")
            scale = _apply(step.node.op_type, scale, _number(step.operand, arrays))
        elif step.kind == "bias" and step.operand is not None:
            has_bias = True
            added = added + _array(step.operand, arrays)
        elif step.kind == "mask" and step.operand is not None:
            has_bias = True
            # A mask that selects is the same as one that adds -inf to what it hides.
            condition = _array(step.operand, arrays).astype(bool)
            added = np.where(condition != step.inverted, added, -np.inf)
    if cap:
        # So far cap * tanh (before * x), which is cap * tanh (scale * x / cap) with this scale.
        cap = scale
        scale = before * cap
    try:
        shape = (sizes.batch, added.shape[1], sizes.sequence, keys)
        return scale, cap, np.broadcast_to(added, shape)
    except ValueError:
        raise UnsuitableGraphError(
            f"{attention.scores.name}, to which {added.shape} is added, expected {shape}"
        ) from None


def _apply(operator: str, scale: float, number: float) -> float:
    return scale / number if operator == "Div" else scale * number


def _array(value: ir.Value, arrays: Arrays) -> NDArray[Any]:
    tensor = ir.convenience.get_const_tensor(value)
    array = arrays[value.name or ""] if tensor is None else tensor.numpy()
    return array.reshape((1,) * (4 - array.ndim) + array.shape) if array.ndim < 4 else array


def _number(value: ir.Value, arrays: Arrays) -> float:
    array = _array(value, arrays)
    if array.size != 1:
        raise UnsuitableGraphError(f"{value.name}, {array.shape} where a number was expected")
    return float(array.reshape(-1)[0])


def _own_visibility(
    where: str,
    scale: float,
    cap: float,
    bias: NDArray[Any],
    long_bias: NDArray[Any],
    position_limit: int | None,
) -> Visibility:
    last = long_bias[0, :, 0, ::-1]  # (heads, distances)
    visible = last > _MASKED
    count = int(visible[0].sum())
    length = last.shape[1]
    # What a query sees must be the nearest positions, as many for all heads.
    if not (visible == (np.arange(length) < count)).all() or not count:
        raise UnsuitableGraphError(
            f"{where}, whose last query does not see the positions before it"
        )
    window = None if count == length else count
    table = np.where(visible, last, 0.0).T[:count].astype(np.float64)
    table = table - table[:1]  # Softmax ignores what is added to all scores of a query
    _require_table(where, bias, table)
    if np.abs(table).max() <= _EXACT:
        return Visibility(scale, cap, window)
    changes = np.flatnonzero(np.abs(np.diff(table, axis=0)).max(axis=1) > _EXACT)
    constant_from = int(changes[-1]) + 1
    # The last row of a table stands for all greater distances: it has to be constant from there on,
    # or no position lies beyond.
    if constant_from <= length // 2 or (position_limit is not None and length >= position_limit):
        bounded = table[: constant_from + 1].astype(np.float32)
        return Visibility(scale, cap, window, distance_bias=bounded)
    slopes = table[-1] / (count - 1)
    line = np.arange(count)[:, None] * slopes
    if np.abs(table - line).max() > 1e-4 * max(1.0, math.fabs(float(line.min()))):
        raise UnsuitableGraphError(f"{where}, whose bias is neither bounded nor linear")
    return Visibility(scale, cap, window, slopes=(-slopes).astype(np.float32))


def _require_table(where: str, bias: NDArray[Any], table: NDArray[Any]) -> None:
    """Raise UnsuitableGraphError unless the bias of a short run follows from the distances."""
    queries = np.arange(_SHORT.past, _SHORT.total)[:, None]
    distance = queries - np.arange(_SHORT.total)[None]
    visible = (distance >= 0) & (distance < len(table))
    expected = table[np.clip(distance, 0, len(table) - 1)].transpose(2, 0, 1)
    # Softmax ignores what is added to a whole row of scores: rows are compared relative to the
    # score of the query's own position, where the table is 0.
    diagonal = np.take_along_axis(bias, np.broadcast_to(queries, (*bias.shape[:3], 1)), axis=3)
    right = ((bias > _MASKED) == visible).all()
    difference = np.where(visible, bias - diagonal - expected, 0.0)
    if not right or np.abs(difference).max() > 1e-3:
        raise UnsuitableGraphError(
            f"{where}, to whose scores something is added that does not follow from distances"
        )


def _masks_encoder(where: str, bias: NDArray[Any], mask: NDArray[Any]) -> bool:
    visible = bias > _MASKED
    if np.abs(bias[visible]).max(initial=0.0) > _EXACT:
        raise UnsuitableGraphError(f"{where}, which adds a bias to the scores of an encoder")
    if visible.all():
        return False
    if (visible == mask[:, None, None].astype(bool)).all():
        return True
    raise UnsuitableGraphError(f"{where}, which masks other positions than the encoder's padding")
