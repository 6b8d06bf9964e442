"""Write what an attention adds to its scores as one tensor of the shape that kernels take.

ONNX Runtime's attention takes (batch or 1, heads or 1, sequence, positions): sums of masks and
relative biases that all layers share are added once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.passes.attention.find import Bias, FoundAttention, same_dim
from enginery.passes.ir.builder import Builder
from enginery.passes.ir.op_types import FLOAT

_MAX_STEPS = 24
_FAR_BELOW = -1e30
_SAMPLE = 1 << 16
# They choose, repeat or arrange elements.
_ARRANGING = frozenset(
    {"Cast", "Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Tile", "Transpose"}
    | {"Squeeze", "Unsqueeze", "Where"}
)


class BiasWriter:
    """Appends the nodes that compute biases; equal ones are appended once."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._written: dict[tuple[object, ...], ir.Value] = {}

    def write(
        self, attention: FoundAttention, query: ir.Value, keys: ir.Value, *, raised: bool
    ) -> ir.Value | None:
        """Return the sum of all biases, of rank 4 and full size in its last two dims.

        Args:
            attention: the attention.
            query: its query, (batch, sequence, hidden) or (batch, heads, sequence, head_dim).
            keys: its keys in the same layout.
            raised: raise finite numbers that are FP32's lowest; -inf stays.

        Returns:
            None if nothing is added to the scores.
        """
        values = [self._single(bias, query) for bias in attention.biases]
        if not values:
            return None
        total = reduce(self._sum, values)
        if raised:
            total = self._raise_lowest(total)
        shape = attention.scores.shape
        sizes = None if shape is None else (shape[2], shape[3])
        if sizes is not None and _ends_in(total, sizes):
            return total
        # Layers of the same sizes share the tensor.
        known = sizes is not None and all(_is_known(size) for size in sizes)
        key = ("full", total, *(map(str, sizes) if known and sizes else (query, keys)))
        if key not in self._written:
            self._written[key] = self._expand(total, query, keys)
        return self._written[key]

    def _raise_lowest(self, bias: ir.Value) -> ir.Value:
        infinity = infinity_of(bias)
        if infinity is Infinity.ALWAYS:
            return bias
        if ("raised", bias) not in self._written:
            build = self._build
            raised = self._typed(
                build("Max", bias, build.constant(np.array(_FAR_BELOW, np.float32)))
            )
            if infinity is Infinity.UNKNOWN:
                infinite = build("IsInf", bias)
                raised = self._typed(build("Where", infinite, bias, raised))
            raised.shape = bias.shape
            self._written["raised", bias] = raised
        return self._written["raised", bias]

    def _expand(self, bias: ir.Value, query: ir.Value, keys: ir.Value) -> ir.Value:
        sizes = [self._size(query), self._size(keys)]
        target = self._build("Concat", self._build.ints(1, 1), *sizes, axis=0)
        return self._typed(self._build("Expand", bias, target))

    def _single(self, bias: Bias, query: ir.Value) -> ir.Value:
        if (bias,) not in self._written:
            value = bias.value
            if bias.filled is not None:
                kept = self._build.constant(np.array(0, np.float32))
                filled = self._build.constant(np.array(bias.filled, np.float32))
                choices = (filled, kept) if bias.inverted else (kept, filled)
                value = self._typed(self._build("Where", value, *choices))
                value.shape = bias.value.shape
            if bias.windows:
                value = self._by_row(value, query)
            self._written[bias,] = value
        return self._written[bias,]

    def _by_row(self, mask: ir.Value, query: ir.Value) -> ir.Value:
        """Return a mask by window, (1, windows, 1, sequence, positions), for the rows of a batch.

        The rows are the windows of all images: (batch * windows, 1, sequence, positions).
        """
        build = self._build
        _, windows, _, *sizes = [] if mask.shape is None else [int(size) for size in mask.shape]
        rows = build("Gather", build("Shape", query), build.ints(0), axis=0)
        batch = build("Div", rows, build.ints(windows))
        repeated = build("Expand", mask, build("Concat", batch, build.ints(1, 1, 1, 1), axis=0))
        result = self._typed(build("Reshape", repeated, build.ints(-1, 1, *sizes)))
        result.shape = ir.Shape([None, 1, *sizes])
        return result

    def _sum(self, first: ir.Value, second: ir.Value) -> ir.Value:
        if (first, second) not in self._written:
            total = self._typed(self._build("Add", first, second))
            shapes = (first.shape, second.shape)
            if all(shape is not None for shape in shapes):
                total.shape = _broadcast(*(list(shape) for shape in shapes if shape is not None))
            self._written[first, second] = total
        return self._written[first, second]

    def _size(self, value: ir.Value) -> ir.Value:
        """Return the number of positions, the dim before (hidden) or (head_dim)."""
        if ("size", value) not in self._written:
            shape = self._build("Shape", value)
            axis = self._build.ints(-2)
            self._written["size", value] = self._build("Gather", shape, axis, axis=0)
        return self._written["size", value]

    def _typed(self, value: ir.Value) -> ir.Value:
        value.type = ir.TensorType(ir.DataType.FLOAT)
        return value


class Infinity(Enum):
    """Whether a bias masks by -inf."""

    NEVER = "never"
    ALWAYS = "always"
    """All that is far below the scores is -inf."""
    UNKNOWN = "unknown"


def infinity_of(value: ir.Value) -> Infinity:
    """Return whether a bias masks by -inf, from the constants of which it is chosen."""
    constants = _constants(value, _MAX_STEPS)
    if constants is None:
        return Infinity.UNKNOWN
    low = [array[array < _FAR_BELOW] for array in constants]
    infinite = {bool(number) for array in low for number in np.isinf(array).reshape(-1)[:_SAMPLE]}
    if len(infinite) == 2:
        return Infinity.UNKNOWN
    return Infinity.ALWAYS if infinite == {True} else Infinity.NEVER


def _constants(value: ir.Value | None, depth: int) -> list[NDArray[Any]] | None:
    """Return the constants of which a value is chosen; None if it is computed."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return [tensor.numpy()]
    node = None if value is None else value.producer()
    if node is None or depth == 0 or node.op_type not in _ARRANGING:
        return None
    if node.op_type == "Cast" and (node.inputs[0] is None or node.inputs[0].dtype != FLOAT):
        return None
    inputs: Sequence[ir.Value | None] = node.inputs
    if node.op_type == "Where":
        inputs = node.inputs[1:]
    elif node.op_type != "Concat":
        # Their other inputs are shapes, axes or indices.
        inputs = node.inputs[:1]
    constants = [_constants(source, depth - 1) for source in inputs]
    if any(part is None for part in constants):
        return None
    return [array for part in constants if part is not None for array in part]


def _ends_in(bias: ir.Value, sizes: Sequence[int | ir.SymbolicDim]) -> bool:
    """Return True if the last two of four dims have these sizes, and need not be repeated."""
    if bias.shape is None or len(bias.shape) != 4:
        return False
    return all(same_dim(a, b) for a, b in zip(bias.shape[2:], sizes, strict=True))


def _is_known(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, int) or dim.value is not None


def _broadcast(
    first: list[int | ir.SymbolicDim], second: list[int | ir.SymbolicDim]
) -> ir.Shape | None:
    """Return the shape of a sum; a dim of two names is unknown."""
    rank = max(len(first), len(second))
    dims: list[int | ir.SymbolicDim | None] = []
    one: list[int | ir.SymbolicDim] = [1] * rank
    for a, b in zip((one + first)[-rank:], (one + second)[-rank:], strict=True):
        dims.append(b if a == 1 else a if b == 1 or same_dim(a, b) else None)
    return ir.Shape(dims)
