"""Remove what computes shapes, and views that cancel out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.passes.generation.sizes import (
    LONE_STEP,
    RUNS,
    DecoderSizes,
    Size,
    Sizes,
    UnsuitableGraphError,
    solve_sizes,
)
from enginery.passes.ir.builder import Builder
from enginery.passes.ir.nodes import constant_numbers

_ALL_RUNS = (*RUNS, LONE_STEP)
_PREFIX = "fixed_cache/size"
# Operators for which a dim of size 1 does for any size.
_BROADCASTING = frozenset({"Add", "And", "Div", "Equal", "MatMul", "Mul", "Or", "Sub", "Where"})
_ELEMENTWISE = frozenset({"Cast", "Cos", "Identity", "Neg", "Sin"})
# They compute on the CPU, or choose what is run.
_UNFIT = frozenset({"ConstantOfShape", "If", "Loop", "NonZero", "Range", "Scan", "Shape", "Size"})
_Position = Callable[[Sequence[NDArray[Any]], Sequence[Sizes]], ir.Value | None]


class SizeFolder:
    """Replaces what a decoder computes from sizes and masks by constants, or positions."""

    def __init__(
        self, model: ir.Model, sizes: DecoderSizes, position: _Position, positions: ir.Value
    ) -> None:
        """Take a decoder whose attentions no longer read masks.

        Args:
            model: the decoder, changed in place.
            sizes: its sizes.
            position: returns the value that stands for arrays, if these are positions.
            positions: the input with the tokens' positions, (batch, sequence).
        """
        self._model, self._sizes, self._position = model, sizes, position
        self._positions = positions
        self._build = Builder(model, _PREFIX)

    def run(self) -> None:
        """Replace all such values.

        Raises:
            UnsuitableGraphError: a value cannot be folded so, or an operator that runs on the CPU
                remains.
        """
        self._read_positions()
        _, reads = self._kinds()
        names = list(dict.fromkeys(node.inputs[index].name or "" for node, index in reads))
        if names:
            traces = [self._sizes.evaluate(names, sizes) for sizes in _ALL_RUNS]
            for node, index in reads:
                name = node.inputs[index].name or ""
                self._replace(node, index, [trace[name] for trace in traces])
        self._model.graph.sort()
        RemoveUnusedNodesPass()(self._model)
        for node in self._model.graph:
            # A recorded step does not repeat what runs on the CPU.
            if node.op_type in _UNFIT and node not in self._build.added:
                raise UnsuitableGraphError(f"{node.name} ({node.op_type})")

    def _read_positions(self) -> None:
        """Replace positions that are counted from sizes or masks by the input."""
        kinds, _ = self._kinds()
        counted = [
            value
            for value, kind in kinds.items()
            if kind == "sizes"
            and value.dtype == ir.DataType.INT64
            and (node := value.producer()) is not None
            and node.op_type != "Shape"
        ]
        names = [value.name or "" for value in counted]
        if not names:
            return
        traces = [self._sizes.evaluate(names, sizes) for sizes in _ALL_RUNS]
        for value in counted:
            arrays = [trace[value.name or ""] for trace in traces]
            # The input that replaces them is (batch, sequence).
            if any(array.ndim != 2 for array in arrays):
                continue
            position = self._position(arrays, _ALL_RUNS)
            if position is not None:
                value.replace_all_uses_with(position)
        self._model.graph.sort()
        RemoveUnusedNodesPass()(self._model)

    def _kinds(self) -> tuple[dict[ir.Value, str], list[tuple[ir.Node, int]]]:
        """Return what follows from sizes and masks, and where nodes with data read it."""
        kinds: dict[ir.Value, str] = {}
        for value in self._model.graph.inputs:
            kinds[value] = "sizes" if value.name == "attention_mask" else "data"
        reads = []
        for node in self._model.graph:
            inputs = [kinds.get(value, "") if value is not None else "" for value in node.inputs]
            # What is computed from both is data; what is computed from neither is constant.
            kind = "data" if "data" in inputs else "sizes" if "sizes" in inputs else ""
            # The shape of data follows from sizes.
            if node.op_type == "Shape":
                kind = "sizes"
            elif kind == "data":
                reads += [(node, i) for i, source in enumerate(inputs) if source == "sizes"]
            for value in node.outputs:
                kinds[value] = kind
        return kinds, reads

    def _replace(self, node: ir.Node, index: int, arrays: Sequence[NDArray[Any]]) -> None:
        value = node.inputs[index]
        if value is None:
            return
        first = arrays[0]
        if all(array.shape == first.shape and (array == first).all() for array in arrays):
            node.replace_input_with(index, self._build.constant(first))
        elif node.op_type == "Reshape" and index == 1:
            self._reshape(node, arrays)
        # Its readers broadcast by themselves.
        elif node.op_type == "Expand" and index == 1 and _may_broadcast(node.outputs[0]):
            node.outputs[0].replace_all_uses_with(_input(node))
        elif (position := self._position(arrays, _ALL_RUNS)) is not None:
            node.replace_input_with(index, position)
        # An array that only repeats itself along the axes that change broadcasts from size 1 there.
        elif node.op_type in _BROADCASTING and (common := _repeated(arrays)) is not None:
            node.replace_input_with(index, self._build.constant(common))
        else:
            raise UnsuitableGraphError(
                f"{node.name} ({node.op_type}), which reads {value.name}: it changes with sizes"
            )

    def _reshape(self, node: ir.Node, arrays: Sequence[NDArray[Any]]) -> None:
        """Write a Reshape's target with 0 for dims that stay, and one -1."""
        target = solve_sizes([array.tolist() for array in arrays], _ALL_RUNS)
        source = self._sizes.dims.get(_input(node).name or "")
        if source is None:
            raise UnsuitableGraphError(f"{node.name} (Reshape), which reads a changed value")
        looked_up = _input(node).producer()
        by_token = source[0] == Size(1, "new tokens") and _leading(target) == ["batch", "sequence"]
        if by_token and looked_up is not None and looked_up.op_type == "Gather":
            # The rows of the tokens, of which the index has two dims by now.
            node.outputs[0].replace_all_uses_with(_input(node))
            return
        numbers = []
        for axis, size in enumerate(target):
            if size is not None and not size.of:
                numbers.append(size.factor)
            # 0 keeps the size of the input's dim.
            elif size is not None and axis < len(source) and source[axis] == size:
                numbers.append(0)
            # A Reshape can leave one size open.
            elif size is not None and -1 not in numbers:
                numbers.append(-1)
            else:
                node.replace_input_with(1, self._tokens_shape(node, target))
                return
        stays = len(source) == len(numbers) and all(
            number == 0 or source[axis] == Size(number) or (number == -1 and numbers.count(-1) == 1)
            for axis, number in enumerate(numbers)
        )
        # The input has that shape already.
        if stays:
            node.outputs[0].replace_all_uses_with(_input(node))
        else:
            # torch's exporter lets 0 be a size.
            node.attributes.pop("allowzero", None)
            node.replace_input_with(1, self._build.ints(*numbers))

    def _tokens_shape(self, node: ir.Node, target: Sequence[Size | None]) -> ir.Value:
        """Return the shape (batch, sequence, …), for what rows of tokens are reshaped to.

        ONNX Runtime reads the sizes of an input on the host, before anything is computed.
        """
        others = [size.factor if size is not None and not size.of else None for size in target[2:]]
        numbers = [number for number in others if number is not None]
        if _leading(target) != ["batch", "sequence"] or len(numbers) < len(others):
            raise UnsuitableGraphError(f"{node.name} (Reshape), whose dims are unknown")
        tokens = self._build("Shape", self._positions)
        return self._build("Concat", tokens, self._build.ints(*numbers), axis=0)


def _leading(dims: Sequence[Size | None]) -> list[str]:
    """Return what the first two dims are sizes of."""
    return [size.of if size is not None and size.factor == 1 else "" for size in dims[:2]]


def _input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    if value is None:
        raise UnsuitableGraphError(f"{node.name}, which has no first input")
    return value


def _repeated(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Return the array that all arrays repeat along some axes, where its size is 1."""
    ranks = {array.ndim for array in arrays}
    if len(ranks) > 1:
        return None
    parts = []
    for array in arrays:
        bounds = tuple(
            slice(None) if len({other.shape[axis] for other in arrays}) == 1 else slice(0, 1)
            for axis in range(array.ndim)
        )
        parts.append(array[bounds])
    common = parts[0]
    same = all(part.shape == common.shape and (part == common).all() for part in parts)
    return common if same and all((array == common).all() for array in arrays) else None


def _may_broadcast(value: ir.Value) -> bool:
    """Return True if all that reads a value takes dims of size 1 for any size."""
    return all(
        use.node.op_type in _BROADCASTING
        or use.node.op_type == "Shape"
        or (use.node.op_type in _ELEMENTWISE and _may_broadcast(use.node.outputs[0]))
        for use in value.uses()
    )


def cancel_views(model: ir.Model) -> None:
    """Remove two Transposes that cancel out, and heads that are split and merged again."""
    changed = True
    while changed:
        changed = False
        for node in list(model.graph):
            source = _before_views(node)
            if source is not None and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(source)
                changed = True
                model.graph.remove(node, safe=True)
        RemoveUnusedNodesPass()(model)


def _before_views(node: ir.Node) -> ir.Value | None:
    """Return the value that two views in a row give back."""
    first = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if first is None or first.op_type != node.op_type:
        return None
    source = first.inputs[0]
    if node.op_type == "Transpose":
        first_perm, second_perm = (n.attributes.get_ints("perm") or () for n in (first, node))
        both = [first_perm[axis] for axis in second_perm]
        return source if both == list(range(len(first_perm))) else None
    if node.op_type != "Reshape" or source is None or source.shape is None:
        return None
    # From (batch, sequence, hidden) to heads and back; 0 and -1 keep the first two dims.
    split, merged = (constant_numbers(n.inputs[1]) or [] for n in (first, node))
    ranks = [len(source.shape), len(split), len(merged)]
    same = ranks == [3, 4, 3] and all(t[0] == 0 and t[1] in (0, -1) for t in (split, merged))
    return source if same else None
