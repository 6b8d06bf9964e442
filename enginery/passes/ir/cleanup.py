"""Fold constants and remove redundant nodes; inputs, outputs and named dims stay the same.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[n] x) => (float[n] y) { a = Identity (x)  y = Relu (a) }''')
>>> clean_graph(model).describe()
'clean-up: 2 → 1 nodes (1 Identity)'

Weights are not folded into new weights, so the graph does not grow.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from enginery.core.errors import ExportError

# A node is folded if its constant inputs and its result are no larger. Weights are larger.
_INPUT_ELEMENTS = 8192
_OUTPUT_ELEMENTS = 262_144

_MOST_ROWS = 1024
"""Rows of a feature map whose size is dynamic: those of an image of 16,384 rows at most, which
networks with such pools halve four times or more."""


@dataclass(frozen=True)
class CleanupSummary:
    """The number of nodes before and after the clean-up."""

    before: int
    after: int
    removed: dict[str, int]
    """The number of removed nodes by op, in descending order."""

    def describe(self) -> str:
        """Return one line for the manifest."""
        removals = ", ".join(f"{count} {op}" for op, count in list(self.removed.items())[:4])
        details = f" ({removals})" if removals else ""
        return f"clean-up: {self.before} → {self.after} nodes{details}"


def clean_graph(model: ir.Model) -> CleanupSummary:
    """Clean the graph in place.

    Raises:
        ExportError: a pass has changed an input or output, which is a bug in that pass.
    """
    interface = _interface(model)
    shapes = [value.shape for value in model.graph.outputs]
    counts = _count_ops(model)
    with _quiet_loggers():
        if model.functions:
            InlinePass()(model)
        _fold(model)
        _remove_redundant_nodes(model)
        make_pools_global(model)
        CommonSubexpressionEliminationPass()(model)
        RemoveUnusedNodesPass()(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        RemoveUnusedOpsetsPass()(model)
    # Shape inference has replaced the names of dims, which are part of the interface.
    for value, shape in zip(model.graph.outputs, shapes, strict=True):
        _restore_dim_names(value, shape)
    if (changed := _interface(model)) != interface:
        raise ExportError(
            f"clean-up changed the graph's interface from {interface} to {changed}.",
            do="This is a bug: please report it with the model. Nothing was saved.",
        )
    after = _count_ops(model)
    # Constant nodes became initializers.
    removed = {op: count for op, count in (counts - after).most_common() if op != "Constant"}
    return CleanupSummary(counts.total(), after.total(), removed)


def non_standard_nodes(model: ir.Model) -> list[str]:
    """Return the nodes whose ops are not standard ONNX, as `name (domain::op)`."""
    return [
        f"{node.name} ({node.domain}::{node.op_type})"
        for node in model.graph.all_nodes()
        if node.domain not in ("", "ai.onnx")
    ]


def _fold(model: ir.Model) -> None:
    """Fold constants, shape computations included, with onnxscript's evaluator."""
    from onnxscript.optimizer import fold_constants_ir

    fold_constants_ir(
        model,
        onnx_shape_inference=True,
        input_size_limit=_INPUT_ELEMENTS,
        output_size_limit=_OUTPUT_ELEMENTS,
    )


def _remove_redundant_nodes(model: ir.Model) -> None:
    """Remove Identity nodes, and Casts to the type that the value already has.

    The producer of a graph output is kept, because the output would change its name.
    """
    for node in list(model.graph.all_nodes()):
        if node.domain not in ("", "ai.onnx") or not node.inputs or node.graph is None:
            continue
        source, result = node.inputs[0], node.outputs[0]
        redundant = node.op_type == "Identity" or (
            node.op_type == "Cast"
            and source is not None
            and source.dtype is not None
            and source.dtype == node.attributes["to"].as_int()
        )
        if redundant and source is not None and not result.is_graph_output():
            result.replace_all_uses_with(source)
            node.graph.remove(node, safe=True)


def make_pools_global(model: ir.Model) -> None:
    """Replace each AveragePool whose window covers its whole input with GlobalAveragePool.

    TensorRT limits the elements of a window. EfficientNet's in transformers has as many rows and
    columns as channels, more than any image. Inputs of unknown size are taken to have at most 1024
    rows and columns.
    """
    for node in model.graph.all_nodes():
        if _pools_everything(node):
            node.op_type = "GlobalAveragePool"
            node.attributes.clear()


def _pools_everything(node: ir.Node) -> bool:
    if node.op_type != "AveragePool" or node.domain not in ("", "ai.onnx"):
        return False
    shape, attributes = node.inputs[0].shape if node.inputs[0] else None, node.attributes
    window = attributes.get_ints("kernel_shape") or ()
    if shape is None or len(shape) != len(window) + 2:
        return False
    padded = any(attributes.get_ints("pads") or ()) or any(
        dilation != 1 for dilation in attributes.get_ints("dilations") or ()
    )
    plain = not padded and attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    sizes = [size if isinstance(size, int) else _MOST_ROWS for size in shape[2:]]
    if not plain or not all(size <= wide for size, wide in zip(sizes, window, strict=True)):
        return False
    # With ceil_mode the last window may reach beyond the input; elements out there do not count.
    return bool(attributes.get_int("ceil_mode", 0)) or list(shape[2:]) == list(window)


def _restore_dim_names(output: ir.Value, shape: ir.Shape | None) -> None:
    """Give an output its shape again if only names of dims differ.

    Shape inference replaces names that the model's author gave with numbered ones, such as
    `unk__154`.
    """
    if output.shape is None or shape is None or len(output.shape) != len(shape):
        return
    pairs = zip(output.shape, shape, strict=True)
    if all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int)):
        output.shape = shape


def _interface(model: ir.Model) -> list[tuple[str, str, str]]:
    return [
        (str(value.name), str(value.dtype), str(value.shape))
        for value in (*model.graph.inputs, *model.graph.outputs)
    ]


def _count_ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Silence the passes, which warn about every node that they leave unchanged."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
