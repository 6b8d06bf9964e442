"""Whether a graph is fit for TensorRT or CUDA, in words, before anything is built.

Takes any ONNX file, also one that another tool made; leaves it as it is.

    >>> report = lint_onnx(Path("model_quantized.onnx"), target="tensorrt")
    >>> print(report.summary)
    26 errors, 4 warnings; TensorRT 1.7.1.116 refuses the graph

For TensorRT the rules come first, because they see every node and say what to do; then TensorRT's
own parser is asked, where the package is installed: it knows best, and stops at its first refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

from enginery.core.errors import OptionError, ProviderError, nearest
from enginery.passes import lint_cuda, lint_operators, lint_placement, lint_quantization
from enginery.passes.lint_findings import LintFinding, LintReport, sort_findings
from enginery.passes.lint_graph import LintGraph
from enginery.runtime.tensorrt import ParseReport, has_tensorrt, parse_onnx
from enginery.runtime.tensorrt_parse import MERGED_REMEDY

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

# TensorRT's words, and what mends it.
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
    """Looks for what the target refuses, computes wrongly or runs slowly.

    Args:
        path: the ONNX file.
        target: `tensorrt` or `cuda` (ONNX Runtime's provider).
        parser: for TensorRT, ask its own parser as well, where the package is installed.

    Raises:
        SourceError: the file is missing, or is no ONNX model.
        OptionError: the target is unknown.
    """
    if target not in RULES:
        raise OptionError(
            f"unknown target '{target}'{nearest(target, RULES)}",
            do=f"Known: {', '.join(get_args(Target))}.",
        )
    graph = LintGraph.read(path)
    findings = [found for rule in RULES[target] for found in rule(graph)]
    words = ""
    if target == "tensorrt" and parser:
        asked, words = _run_parser(path)
        findings.extend(asked)
    return LintReport(str(path), target, sort_findings(findings), words)


def _run_parser(path: Path) -> tuple[list[LintFinding], str]:
    """The parser's findings, and in a few words what it said."""
    if not has_tensorrt():
        return [], "TensorRT itself was not asked: pip install 'enginery[tensorrt-rtx]'"
    try:
        report = parse_onnx(path)
    except ProviderError as error:
        finding = LintFinding("parser", "error", "", f"{error.message}", error.do)
        return [finding], "TensorRT did not survive the graph"
    word = "takes" if report.accepted else "refuses"
    return list(_refusals(report)), f"TensorRT {report.tensorrt} {word} the graph"


def _refusals(report: ParseReport) -> Iterator[LintFinding]:
    for refusal in report.refusals:
        where = f"{refusal.op_type}: " if refusal.op_type else ""
        remedy = next(
            (remedy for words, remedy in _REMEDIES.items() if words in refusal.reason),
            _REMEDIES_BY_OPERATOR.get(refusal.op_type, ""),
        )
        problem = f"{where}TensorRT says: {refusal.reason}"
        yield LintFinding("parser", "error", refusal.node, problem, remedy)
