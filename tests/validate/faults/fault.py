"""A fault, and the edits that many faults share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx

from tests.validate.faults.graph_editor import GraphEditor

Edit = Callable[[GraphEditor], None]
FLOATS = ("fp32", "fp16")
ALL = ("fp32", "fp16", "int8")
TEXT = ("text",)
TRANSFORMERS = ("text", "vit")


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
    harmful_on_gpu: bool = False
    """Harmful where FP16 is computed in FP16. On the CPU, ONNX Runtime computes it in FP32."""

    def plant(self, model: onnx.ModelProto, original: onnx.ModelProto) -> None:
        """Edit a model in place.

        Args:
            model: the graph of an artifact.
            original: the FP32 graph of the same model.
        """
        editor = GraphEditor(model, original)
        self.edit(editor)
        editor.finish()


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


def cut_off(minimum: float, maximum: float):
    return lambda g, x: g.op("Max", g.op("Min", x, maximum), minimum)


def cast_through(element_type: int):
    return lambda g, x: g.op("CastLike", g.op("Cast", x, to=element_type), x)


def stepped(step: float):
    return lambda g, x: g.op("Mul", g.op("Round", g.op("Div", x, step)), step)


def faults(kind: str, entries: dict[str, Edit], **where) -> list[Fault]:
    """Return a fault for each edit."""
    return [Fault(name, kind, edit, **where) for name, edit in entries.items()]
