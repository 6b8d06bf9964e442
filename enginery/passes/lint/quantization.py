"""Lint rules for TensorRT on quantized types and scales.

Each rule takes a `LintGraph` and yields findings.

Source: TensorRT developer guide, "Working with quantized types" (symmetric, per tensor for
activations, per output channel for weights). Where the parser and the engines of TensorRT for RTX
differ from the guide, the rules follow them; tests/passes/test_lint.py checks that they still do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from enginery.passes.lint.findings import LintFinding
from enginery.passes.lint.graph import (
    DEQUANTIZE,
    DYNAMIC_OPERATORS,
    QUANTIZE,
    STANDARD_DOMAINS,
    LintGraph,
    constant_value,
    dtype_of,
    input_at,
    is_constant,
    is_qoperator,
    label,
    producer_type,
    quantized_dtype,
)

BIAS_REMEDY = (
    "Do not quantize biases: pass extra_options={'QuantizeBias': False} to quantize_static, "
    "or use `enginery quantize`."
)
SYMMETRIC_REMEDY = (
    "Quantize symmetrically: pass ActivationSymmetric and WeightSymmetric to quantize_static, "
    "or use `enginery quantize`."
)
STATIC_REMEDY = "Quantize statically into Q/DQ nodes with calibration data: `enginery quantize`."

_KNOWN_TYPES = ("INT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1", "")  # "": the graph does not say


def zero_points(graph: LintGraph) -> Iterator[LintFinding]:
    """Find asymmetric quantization: a zero point other than 0."""
    for node in graph.nodes_of(QUANTIZE, DEQUANTIZE):
        values = constant_value(input_at(node, 2))
        # FP8 and types of less than a byte are not quantized asymmetrically.
        if values is None or values.dtype.kind not in "iu" or not values.any():
            continue
        first = int(values.reshape(-1)[np.flatnonzero(values)[0]])
        yield LintFinding(
            "zero-point",
            "error",
            label(node),
            f"has the zero point {first} ({values.dtype.name}); TensorRT accepts only 0.",
            SYMMETRIC_REMEDY,
        )


def quantized_biases(graph: LintGraph) -> Iterator[LintFinding]:
    """Find biases stored as INT32 and read by a DequantizeLinear."""
    for node in graph.nodes_of(DEQUANTIZE):
        if dtype_of(input_at(node, 0)) == "INT32":
            yield LintFinding(
                "quantized-bias",
                "error",
                label(node),
                "dequantizes an INT32 bias; TensorRT dequantizes only INT8, INT4, FP8 and FP4.",
                BIAS_REMEDY,
            )


def dynamic_quantization(graph: LintGraph) -> Iterator[LintFinding]:
    """Find scales that are computed at run time, and integer products."""
    for node in graph.nodes_of(*DYNAMIC_OPERATORS):
        yield LintFinding(
            "dynamic-quantization",
            "error",
            label(node),
            f"{node.op_type} belongs to dynamic quantization; TensorRT has no such operator.",
            STATIC_REMEDY,
        )


def integer_operators(graph: LintGraph) -> Iterator[LintFinding]:
    """Find operators of the QOperator format, such as QLinearMatMul."""
    for node in graph.nodes:
        if is_qoperator(node):
            yield LintFinding(
                "qoperator",
                "error",
                label(node),
                f"{node.op_type} belongs to the QOperator format; TensorRT requires Q/DQ nodes.",
                "Quantize with quant_format=QuantFormat.QDQ, or `enginery quantize`.",
            )


def quantized_types(graph: LintGraph) -> Iterator[LintFinding]:
    """Find quantized types that TensorRT lacks or misreads."""
    for node in graph.nodes_of(QUANTIZE, DEQUANTIZE):
        dtype = quantized_dtype(node)
        if dtype in _KNOWN_TYPES or (dtype == "INT32" and node.op_type == DEQUANTIZE):
            continue  # an INT32 bias has its own rule
        consequence = (
            "TensorRT reads it as INT8, so values above 127 are misread."
            if dtype == "UINT8"
            else "TensorRT supports only INT8, INT4, FP8 (E4M3) and FP4."
        )
        yield LintFinding(
            "quantized-type",
            "error",
            label(node),
            f"quantizes to {dtype}; {consequence}",
            "Quantize activations and weights with QuantType.QInt8.",
        )


def scales(graph: LintGraph) -> Iterator[LintFinding]:
    """Find scales of a type that ONNX does not allow, and computed scales."""
    for node in graph.nodes_of(QUANTIZE, DEQUANTIZE):
        value = input_at(node, 1)
        dtype = dtype_of(value)
        standard = node.domain in STANDARD_DOMAINS
        # Opset 0: the graph does not import ONNX's operators.
        if dtype in ("FLOAT16", "BFLOAT16") and standard and 0 < graph.opset < 19:
            yield LintFinding(
                "opset",
                "error",
                label(node),
                f"has a {dtype} scale at opset {graph.opset}; ONNX allows it from opset 19 on.",
                "Export at opset 20: `enginery export --opset 20`.",
            )
        tensor_dtype = dtype_of(input_at(node, 0)) if node.op_type == QUANTIZE else ""
        if dtype and tensor_dtype.startswith(("FLOAT", "BFLOAT")) and tensor_dtype != dtype:
            yield LintFinding(
                "scale-type",
                "error",
                label(node),
                f"quantizes {tensor_dtype} with a {dtype} scale; "
                "ONNX requires the type of the tensor.",
                f"Store the scale as {tensor_dtype}.",
            )
        if (
            value is not None
            and not is_constant(value)
            # Dynamic quantization has a rule of its own.
            and producer_type(value) not in DYNAMIC_OPERATORS
        ):
            yield LintFinding(
                "scale",
                "warning",
                label(node),
                "has a computed scale; TensorRT uses INT8 kernels only with constant scales.",
                STATIC_REMEDY,
            )
