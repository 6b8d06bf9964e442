"""The graph that lint rules check: every node, those in subgraphs and functions included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.errors import SourceError
from enginery.core.json_file import require_regular_file
from enginery.core.paths import require_utf8
from enginery.core.trust.onnx_structure import read_structure

STANDARD_DOMAINS = ("", "ai.onnx")
MICROSOFT = "com.microsoft"
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
DYNAMIC_OPERATORS = (
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "ConvInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
)
_QOPERATORS = ("QGemm", "QAttention", "QMoE", "QEmbedLayerNormalization")


@dataclass(frozen=True)
class LintGraph:
    """A model whose external weights are not read."""

    model: ir.Model

    @classmethod
    def read(cls, path: Path) -> LintGraph:
        """Read an ONNX file.

        Raises:
            SourceError: the file is missing, or is not an ONNX model.
        """
        try:
            require_utf8(path, error=SourceError)
            require_regular_file(path)
            read_structure(path, error=SourceError)
            model = ir.load(path)
        except SourceError:
            raise
        except Exception as error:  # the types of protobuf and onnx_ir depend on their versions
            reason: BaseException = error
            while reason.__cause__ is not None:  # onnx_ir wraps an error at each level
                reason = reason.__cause__
            problem = "does not exist" if not path.exists() else f"is not an ONNX model: {reason}"
            raise SourceError(f"{path} {problem}.") from error
        if not model.graph.outputs:
            raise SourceError(f"{path} is not an ONNX model: it has no outputs.")
        return cls(model)

    @cached_property
    def opset(self) -> int:
        """The version of the standard operator set; 0 if the graph does not import it."""
        imports = self.model.opset_imports
        return next((imports[name] for name in STANDARD_DOMAINS if name in imports), 0)

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All nodes of the graph, its subgraphs and its functions."""
        functions = self.model.functions.values()
        inside = (node for function in functions for node in function.all_nodes())
        return (*self.model.graph.all_nodes(), *inside)

    def nodes_of(self, *op_types: str) -> Iterator[ir.Node]:
        """Yield the nodes of these operators, standard ones and ONNX Runtime's of the same name."""
        domains = (*STANDARD_DOMAINS, MICROSOFT)
        return (n for n in self.nodes if n.op_type in op_types and n.domain in domains)

    def initializers(self) -> Iterator[ir.Value]:
        """Yield each initializer of the graph and its subgraphs."""
        graphs = {id(graph): graph for node in self.nodes if (graph := node.graph) is not None}
        for graph in [self.model.graph, *graphs.values()]:
            if isinstance(graph, ir.Graph):
                yield from graph.initializers.values()


def label(node: ir.Node) -> str:
    """Return the name of the node, or of its first output if it has none."""
    return node.name or next((out.name for out in node.outputs if out.name), "") or node.op_type


def is_qoperator(node: ir.Node) -> bool:
    """Return True for a node of ONNX Runtime's QOperator format, which computes on integers."""
    return str(node.op_type).startswith("QLinear") or node.op_type in _QOPERATORS


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of the node; None if it is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def constant_value(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the array of an initializer or a Constant node; None for a computed value."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else np.asarray(tensor.numpy())


def is_constant(value: ir.Value | None) -> bool:
    """Return True for an initializer or the output of a Constant node; its data is not read."""
    if value is None:
        return False
    producer = value.producer()
    return value.const_value is not None or (
        producer is not None and producer.op_type == "Constant"
    )


def producer_type(value: ir.Value | None) -> str:
    """Return the operator that computes a value; '' for inputs and initializers."""
    producer = value.producer() if value is not None else None
    return producer.op_type if producer is not None else ""


def dtype_of(value: ir.Value | None) -> str:
    """Return the type of a value, such as INT8, declared or implied by Q/DQ; '' if unknown."""
    if value is None:
        return ""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return str(tensor.dtype.name)
    if value.dtype is not None:
        return str(value.dtype.name)
    producer = value.producer()
    if producer is None:
        return ""
    # Nothing infers types here, but Q and DQ nodes say what they return.
    if producer.op_type == QUANTIZE:
        return quantized_dtype(producer)
    return dtype_of(input_at(producer, 1)) if producer.op_type == DEQUANTIZE else ""


def quantized_dtype(node: ir.Node) -> str:
    """Return the quantized type of a Q or DQ node. ONNX's default for QuantizeLinear is UINT8."""
    if node.op_type == DEQUANTIZE and (dtype := dtype_of(input_at(node, 0))):
        return dtype
    output = node.attributes.get("output_dtype")
    if output is not None and output.as_int():
        return str(ir.DataType(output.as_int()).name)
    zero_point = input_at(node, 2)
    return dtype_of(zero_point) if zero_point is not None else "UINT8"
