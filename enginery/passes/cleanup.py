"""Folds constants and removes what does nothing, without a change to the interface.

    >>> cleaned = clean_graph(model)
    >>> cleaned.before, cleaned.after
    (389, 271)

Takes an `onnx_ir.Model`; leaves it with standard ops alone and with the inputs, outputs and named
dims that it had. Weights are not folded into new ones: a graph does not grow.
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

# What is folded: a constant made of constants of this size at most. Weights are larger.
_INPUT_ELEMENTS = 8192
_OUTPUT_ELEMENTS = 262_144


@dataclass(frozen=True)
class CleanupSummary:
    """How many nodes there were and are."""

    before: int
    after: int
    removed: dict[str, int]
    """By op, the most first."""

    def describe(self) -> str:
        """One line for the manifest."""
        most = ", ".join(f"{count} {op}" for op, count in list(self.removed.items())[:4])
        return f"clean-up: {self.before} → {self.after} nodes" + (f" ({most})" if most else "")


def clean_graph(model: ir.Model) -> CleanupSummary:
    """Cleans the graph in place.

    Raises:
        ExportError: an input or output would have changed; that is a bug of a pass.
    """
    interface = _interface(model)
    counts = _count_ops(model)
    with _quiet_loggers():
        if model.functions:
            InlinePass()(model)
        _fold(model)
        _remove_redundant_nodes(model)
        CommonSubexpressionEliminationPass()(model)
        RemoveUnusedNodesPass()(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        RemoveUnusedOpsetsPass()(model)
    if (changed := _interface(model)) != interface:
        raise ExportError(
            f"clean-up changed the graph's interface from {interface} to {changed}.",
            do="Please report this model; nothing was saved.",
        )
    left = _count_ops(model)
    removed = {op: count for op, count in (counts - left).most_common() if op != "Constant"}
    return CleanupSummary(counts.total(), left.total(), removed)


def non_standard_nodes(model: ir.Model) -> list[str]:
    """The nodes, as `name (domain::op)`, whose ops are not ONNX's own."""
    return [
        f"{node.name} ({node.domain}::{node.op_type})"
        for node in model.graph.all_nodes()
        if node.domain not in ("", "ai.onnx")
    ]


def _fold(model: ir.Model) -> None:
    """Constant folding by onnxscript's evaluator; shape computations become constants as well."""
    from onnxscript.optimizer import fold_constants_ir

    fold_constants_ir(
        model,
        onnx_shape_inference=True,
        input_size_limit=_INPUT_ELEMENTS,
        output_size_limit=_OUTPUT_ELEMENTS,
    )


def _remove_redundant_nodes(model: ir.Model) -> None:
    """Removes Identity, and casts to the type that a value has: Softmax is often followed by one.

    What makes an output of a graph stays: the output would take another name.
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


def _interface(model: ir.Model) -> list[tuple[str, str, str]]:
    return [
        (str(value.name), str(value.dtype), str(value.shape))
        for value in (*model.graph.inputs, *model.graph.outputs)
    ]


def _count_ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    """The passes warn of every node that they leave alone."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
