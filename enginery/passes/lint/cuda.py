"""Lint rules for ONNX Runtime's CUDA provider.

Each rule takes a `LintGraph` and yields findings.

Source: docs/OperatorKernels.md of ONNX Runtime, the table of the CUDA provider.
"""

from __future__ import annotations

from collections.abc import Iterator

from enginery.passes.lint.findings import LintFinding
from enginery.passes.lint.graph import (
    DEQUANTIZE,
    MICROSOFT,
    PRODUCTS,
    STANDARD_DOMAINS,
    LintGraph,
    label,
)

_CPU_ONLY = (
    "DynamicQuantizeLinear",
    "ConvInteger",
    "QGemm",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "QEmbedLayerNormalization",
)


def operators_on_the_cpu(graph: LintGraph) -> Iterator[LintFinding]:
    """Find integer operators without a CUDA kernel, whose tensors are copied to the host."""
    for node in graph.nodes:
        if node.op_type in _CPU_ONLY or str(node.op_type).startswith("QLinear"):
            yield LintFinding(
                "placement",
                "warning",
                label(node),
                f"{node.op_type} has no CUDA kernel; it runs on the CPU, and its tensors are "
                "copied to the host and back.",
                "Use FP16 on CUDA: `enginery optimize --target cuda --precision fp16`.",
            )


def quantized_products(graph: LintGraph) -> Iterator[LintFinding]:
    """Find quantized products, which the CUDA provider computes in floating point."""
    for node in graph.nodes_of(*PRODUCTS):
        producers = (value.producer() for value in node.inputs[:2] if value is not None)
        if any(producer is not None and producer.op_type == DEQUANTIZE for producer in producers):
            yield LintFinding(
                "quantization",
                "warning",
                label(node),
                f"{node.op_type} reads a DequantizeLinear; the CUDA provider dequantizes and "
                "multiplies in floating point, which is slower than without Q/DQ.",
                "Run Q/DQ graphs with TensorRT; on CUDA use FP16.",
            )


def foreign_operators(graph: LintGraph) -> Iterator[LintFinding]:
    """Find operators that ONNX Runtime does not have."""
    local = {(key[0], key[1]) for key in graph.model.functions}
    # com.ms.internal.nhwc and com.microsoft.nchwc appear in graphs that ONNX Runtime saved.
    domains = (*STANDARD_DOMAINS, MICROSOFT, "ai.onnx.ml", "com.ms.internal.nhwc")
    for node in graph.nodes:
        if node.domain not in domains and (node.domain, node.op_type) not in local:
            yield LintFinding(
                "domain",
                "error",
                label(node),
                f"{node.domain}::{node.op_type} is neither an ONNX nor an ONNX Runtime operator.",
                "Replace it, or register the custom operator library that implements it.",
            )


def control_flow(graph: LintGraph) -> Iterator[LintFinding]:
    """Find branches and loops, which prevent CUDA graphs."""
    for node in graph.nodes_of("If", "Loop", "Scan"):
        yield LintFinding(
            "control-flow",
            "warning",
            label(node),
            f"{node.op_type} reads its condition on the host, which prevents CUDA graphs.",
            "Export with a constant condition; for a merged decoder, export the model with "
            "enginery, or with --no-post-process of optimum-cli.",
        )
