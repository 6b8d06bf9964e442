"""Rules for ONNX Runtime's CUDA provider.

Takes a `LintGraph`; each rule yields its findings.

    >>> [str(found) for found in operators_on_the_cpu(graph)]
    ['warning: x_QuantizeLinear: DynamicQuantizeLinear has no CUDA kernel … [placement]']

Source: docs/OperatorKernels.md of ONNX Runtime, the table of the CUDA provider.
"""

from __future__ import annotations

from collections.abc import Iterator

from enginery.passes.lint_findings import LintFinding
from enginery.passes.lint_graph import (
    DEQUANTIZE,
    MICROSOFT,
    PRODUCTS,
    STANDARD_DOMAINS,
    LintGraph,
    label,
)

_CPU_ONLY = (
    "DynamicQuantizeLinear", "ConvInteger", "QGemm", "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QEmbedLayerNormalization",
)  # fmt: skip


def operators_on_the_cpu(graph: LintGraph) -> Iterator[LintFinding]:
    """Integer operators that only the CPU provider has: tensors go to the host and back."""
    for node in graph.nodes:
        if node.op_type in _CPU_ONLY or str(node.op_type).startswith("QLinear"):
            yield LintFinding(
                "placement", "warning", label(node),
                f"{node.op_type} has no CUDA kernel; it runs on the CPU, and its tensors are "
                "copied there and back.",
                "Use FP16 on CUDA: `enginery optimize --target cuda --precision fp16`.",
            )  # fmt: skip


def quantized_products(graph: LintGraph) -> Iterator[LintFinding]:
    """Q/DQ in front of a product, which the CUDA provider computes in floating point."""
    for node in graph.nodes_of(*PRODUCTS):
        producers = (value.producer() for value in node.inputs[:2] if value is not None)
        if any(producer is not None and producer.op_type == DEQUANTIZE for producer in producers):
            yield LintFinding(
                "quantization", "warning", label(node),
                f"{node.op_type} behind DequantizeLinear; CUDA dequantizes and multiplies in "
                "floating point, which is slower than without.",
                "Run Q/DQ graphs with TensorRT, and FP16 on CUDA.",
            )  # fmt: skip


def foreign_operators(graph: LintGraph) -> Iterator[LintFinding]:
    """Operators that ONNX Runtime has not got."""
    local = {(key[0], key[1]) for key in graph.model.functions}
    # com.ms.internal.nhwc and com.microsoft.nchwc appear in graphs that ONNX Runtime saved.
    known = (*STANDARD_DOMAINS, MICROSOFT, "ai.onnx.ml", "com.ms.internal.nhwc")
    for node in graph.nodes:
        if node.domain not in known and (node.domain, node.op_type) not in local:
            yield LintFinding(
                "domain", "error", label(node),
                f"{node.domain}::{node.op_type} is neither ONNX's nor ONNX Runtime's own.",
                "Replace it, or register the library that has it.",
            )  # fmt: skip


def control_flow(graph: LintGraph) -> Iterator[LintFinding]:
    """Branches and loops, which rule out CUDA graphs."""
    for node in graph.nodes_of("If", "Loop", "Scan"):
        yield LintFinding(
            "control-flow", "warning", label(node),
            f"{node.op_type}: its condition is read on the host, and CUDA graphs are ruled out.",
            "Make its condition a constant of the export; for a merged decoder, export with "
            "--no-post-process.",
        )  # fmt: skip
