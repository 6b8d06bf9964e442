"""Lint rules for TensorRT on operators and types.

Each rule takes a `LintGraph` and yields findings.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from enginery.passes.lint.findings import LintFinding
from enginery.passes.lint.graph import (
    DEQUANTIZE,
    DYNAMIC_OPERATORS,
    MICROSOFT,
    QUANTIZE,
    STANDARD_DOMAINS,
    LintGraph,
    dtype_of,
    input_at,
    is_qoperator,
    label,
)
from enginery.runtime.tensorrt.parse import MERGED_REMEDY

DOMAIN_REMEDY = (
    "Use the graph before ONNX Runtime's fusions: `enginery export`, "
    "then `enginery optimize --target tensorrt`."
)

_PLUGIN_DOMAINS = ("trt.plugins", "nv.plugins")
# TensorRT's parser looks only at the operator's name and treats these as the standard operators.
_SAME_NAME = (
    QUANTIZE,
    DEQUANTIZE,
    "Gelu",
    "LayerNormalization",
    "RMSNormalization",
    "Attention",
    "RotaryEmbedding",
)
_REFUSED_TYPES = (
    "INT16",
    "UINT16",
    "UINT32",
    "UINT64",
    "STRING",
    "COMPLEX64",
    "COMPLEX128",
    "FLOAT8E5M2",
    "FLOAT8E4M3FNUZ",
    "FLOAT8E5M2FNUZ",
    "UINT4",
)


def foreign_operators(graph: LintGraph) -> Iterator[LintFinding]:
    """Find operators outside ONNX's standard domain."""
    # The nodes of a function are checked in place of its name.
    local = {(key[0], key[1]) for key in graph.model.functions}
    for node in graph.nodes:
        domains = (*STANDARD_DOMAINS, *_PLUGIN_DOMAINS)
        if node.domain in domains or (node.domain, node.op_type) in local:
            continue
        name = f"{node.domain}::{node.op_type}"
        if node.domain == MICROSOFT and node.op_type in _SAME_NAME:
            yield LintFinding(
                "domain",
                "warning",
                label(node),
                f"{name} is ONNX Runtime's operator; TensorRT treats it as ONNX's {node.op_type} "
                "and ignores the attributes that only ONNX Runtime has.",
                f"Use ONNX's {node.op_type}.",
            )
        elif node.op_type not in DYNAMIC_OPERATORS and not is_qoperator(node):
            # ONNX Runtime's integer operators have their own, more specific rules.
            yield LintFinding(
                "domain",
                "error",
                label(node),
                f"{name} is not a standard ONNX operator; TensorRT does not have it.",
                DOMAIN_REMEDY
                if node.domain == MICROSOFT
                else "Replace it with standard ONNX operators, or write a TensorRT plugin.",
            )


def control_flow(graph: LintGraph) -> Iterator[LintFinding]:
    """Find branches and loops, such as Optimum's merged decoder."""
    for node in graph.nodes_of("If"):
        condition = input_at(node, 0)
        if condition is not None and condition.name == "use_cache_branch":
            yield LintFinding(
                "control-flow",
                "error",
                label(node),
                "is a merged decoder: its branches return tensors of different shapes, which "
                "TensorRT does not support.",
                MERGED_REMEDY,
            )
        else:
            yield _branches(node)
    for node in graph.nodes_of("Loop", "Scan"):
        yield _branches(node)


def _branches(node: ir.Node) -> LintFinding:
    return LintFinding(
        "control-flow",
        "warning",
        label(node),
        f"{node.op_type}: TensorRT requires that its branches return tensors of the same shapes, "
        "and fuses nothing across its boundary.",
        "Export with a constant condition.",
    )


def types(graph: LintGraph) -> Iterator[LintFinding]:
    """Find inputs, outputs, initializers and Casts of types that TensorRT lacks."""
    named = [(value.name or "", dtype_of(value)) for value in _declared(graph)]
    casts = (
        (label(n), ir.DataType(n.attributes["to"].as_int()).name) for n in graph.nodes_of("Cast")
    )
    for name, dtype in (*named, *casts):
        if dtype == "DOUBLE":
            yield LintFinding(
                "type",
                "warning",
                name,
                "is FP64; TensorRT computes it in FP32.",
                "Export in FP32, so that validation checks what will run.",
            )
        elif dtype in _REFUSED_TYPES:
            yield LintFinding(
                "type",
                "error",
                name,
                f"is {dtype}, which TensorRT does not support.",
                "Use INT32 or INT64, INT8 with Q/DQ, or a floating-point type.",
            )


def _declared(graph: LintGraph) -> Iterator[ir.Value]:
    quantized = _zero_points(graph)
    yield from graph.model.graph.inputs
    yield from graph.model.graph.outputs
    for value in graph.initializers():
        if id(value) not in quantized:  # they have a rule of their own
            yield value


def _zero_points(graph: LintGraph) -> set[int]:
    nodes = list(graph.nodes_of(QUANTIZE, DEQUANTIZE))
    values = [input_at(node, index) for node in nodes for index in (0, 2)]
    return {id(value) for value in values if value is not None}


def attention_operators(graph: LintGraph) -> Iterator[LintFinding]:
    """Find FP32 Attention operators (opset 23), which TensorRT builds only in FP16 and BF16."""
    for node in graph.nodes_of("Attention"):
        if node.domain in STANDARD_DOMAINS and dtype_of(input_at(node, 0)) == "FLOAT":
            yield LintFinding(
                "attention",
                "warning",
                label(node),
                "is an Attention operator in FP32; TensorRT builds it only in FP16 and BF16.",
                "Cast the graph: `enginery optimize --target tensorrt --precision fp16`.",
            )
