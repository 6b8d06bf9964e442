"""Check an ONNX file for what TensorRT or ONNX Runtime on CUDA rejects, before anything is built.

For TensorRT, the rules run first: they check every node and say what to do. Then TensorRT's own
parser runs if it is installed. It is the authority, but it may stop at the first error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

from enginery.core.errors import OptionError, ProviderError, nearest
from enginery.passes.lint import cuda as lint_cuda
from enginery.passes.lint import operators as lint_operators
from enginery.passes.lint import placement as lint_placement
from enginery.passes.lint import quantization as lint_quantization
from enginery.passes.lint.findings import LintFinding, LintReport, sort_findings
from enginery.passes.lint.graph import LintGraph
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.runtime.tensorrt.parse import MERGED_REMEDY
from enginery.runtime.tensorrt.process import parse_onnx
from enginery.runtime.tensorrt.reports import ParseReport

__all__ = ["LintFinding", "LintReport", "Target", "lint_onnx"]

Target = Literal["tensorrt", "cuda"]
Rule = Callable[[LintGraph], Iterator[LintFinding]]

RULES: dict[str, tuple[Rule, ...]] = {
    "tensorrt": (
        lint_operators.foreign_operators,
        lint_operators.control_flow,
        lint_operators.types,
        lint_operators.attention_operators,
        lint_quantization.dynamic_quantization,
        lint_quantization.integer_operators,
        lint_quantization.zero_points,
        lint_quantization.quantized_biases,
        lint_quantization.quantized_types,
        lint_quantization.scales,
        lint_placement.channel_axes,
        lint_placement.unpaired_nodes,
        lint_placement.misplaced_nodes,
    ),
    "cuda": (
        lint_cuda.foreign_operators,
        lint_cuda.control_flow,
        lint_cuda.operators_on_the_cpu,
        lint_cuda.quantized_products,
    ),
}

# Parts of TensorRT's messages, and what to do about them.
_REMEDIES = {
    "shiftIsAllZeros": lint_quantization.SYMMETRIC_REMEDY,
    "input has type Int32": lint_quantization.BIAS_REMEDY,
    "Plugin not found": lint_operators.DOMAIN_REMEDY,
    "Unsupported data type": "Use INT32 or INT64, INT8 with Q/DQ, or a floating-point type.",
    "convertOnnxWeights": "Store the tensor as INT32, INT64, INT8 or a floating-point type.",
    "UINT8": "Quantize activations and weights with QuantType.QInt8.",
    "scaleSize": "Quantize the weight again, one scale for each output channel.",
}
_REMEDIES_BY_OPERATOR = {
    "If": MERGED_REMEDY,
    "DynamicQuantizeLinear": lint_quantization.STATIC_REMEDY,
    "MatMulInteger": lint_quantization.STATIC_REMEDY,
    "ConvInteger": lint_quantization.STATIC_REMEDY,
}


def lint_onnx(path: Path, *, target: Target = "tensorrt", parser: bool = True) -> LintReport:
    """Find the parts of a graph that the target rejects, computes wrongly or runs slowly.

    Args:
        path: the ONNX file; it is not changed.
        target: `tensorrt`, or `cuda` for ONNX Runtime's provider.
        parser: for TensorRT, also run its parser if it is installed.

    Raises:
        SourceError: the file is missing, or is not an ONNX model.
        OptionError: the target is unknown.
    """
    if target not in RULES:
        raise OptionError(
            f"unknown target '{target}'{nearest(target, RULES)}",
            do=f"Known: {', '.join(get_args(Target))}.",
        )
    graph = LintGraph.read(path)
    findings = [finding for rule in RULES[target] for finding in rule(graph)]
    summary = ""
    if target == "tensorrt" and parser:
        refused, summary = _run_parser(path)
        findings.extend(refused)
    return LintReport(str(path), target, sort_findings(findings), summary)


def _run_parser(path: Path) -> tuple[list[LintFinding], str]:
    """Run TensorRT's parser; return its findings and a summary."""
    if not has_tensorrt():
        return [], (
            "TensorRT's parser did not run, because it is not installed: "
            "pip install 'enginery[tensorrt-rtx]'"
        )
    try:
        report = parse_onnx(path)
    except ProviderError as error:
        finding = LintFinding("parser", "error", "", f"{error.message}", error.do)
        return [finding], "TensorRT's parser failed"
    verb = "accepts" if report.accepted else "rejects"
    return list(_refusals(report)), f"TensorRT {report.tensorrt} {verb} the graph"


def _refusals(report: ParseReport) -> Iterator[LintFinding]:
    for refusal in report.refusals:
        where = f"{refusal.op_type}: " if refusal.op_type else ""
        remedy = next(
            (remedy for part, remedy in _REMEDIES.items() if part in refusal.reason),
            _REMEDIES_BY_OPERATOR.get(refusal.op_type, ""),
        )
        problem = f"{where}TensorRT's parser reports: {refusal.reason}"
        yield LintFinding("parser", "error", refusal.node, problem, remedy)
