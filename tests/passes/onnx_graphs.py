"""Small ONNX graphs, built node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 64


def node(op_type: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Create a node: `node("MatMul", "x w", "y", name="product")`."""
    return helper.make_node(op_type, inputs.split(), outputs.split(), **attributes)


def make_graph(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Any] = {},
    *,
    inputs: Mapping[str, tuple[int, Sequence[Any]]] | None = None,
    outputs: Mapping[str, tuple[int, Sequence[Any]]] | None = None,
    opset: int = 20,
) -> onnx.ModelProto:
    """Return a model whose input `x` and output `y` are float32 (batch, 64) by default.

    Constants are numpy arrays, or ONNX tensors for types that numpy lacks.
    """
    default = (TensorProto.FLOAT, ["batch", WIDTH])
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [_value(name, *spec) for name, spec in (inputs or {"x": default}).items()],
        [_value(name, *spec) for name, spec in (outputs or {"y": default}).items()],
        [
            held if isinstance(held, onnx.TensorProto) else numpy_helper.from_array(held, name)
            for name, held in constants.items()
        ],
    )
    domains = dict.fromkeys(n.domain for n in nodes if n.domain)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    # A version that ONNX Runtime 1.31 reads.
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def save_graph(path: Path, *arguments: Any, **options: Any) -> Path:
    """Write a model of `make_graph`."""
    onnx.save(make_graph(*arguments, **options), str(path))
    return path


def quantized_constants(**changes: Any) -> dict[str, Any]:
    """Return a scale and zero point for activations, and an INT8 weight with per-channel scales."""
    numbers = np.random.default_rng(0)
    weight = numbers.integers(-127, 128, (WIDTH, WIDTH)).astype(np.int8)
    return {
        "s": np.array(0.1, np.float32),
        "z": np.array(0, np.int8),
        "sv": np.full(WIDTH, 0.01, np.float32),
        "zv": np.zeros(WIDTH, np.int8),
        "w": weight,
        **changes,
    }


def quantized_product(*, axis: int = 1) -> list[onnx.NodeProto]:
    """Return x -> Q -> DQ -> MatMul with a dequantized weight -> y. TensorRT requires axis 1."""
    return [
        node("QuantizeLinear", "x s z", "q", name="x_quantize"),
        node("DequantizeLinear", "q s z", "d", name="x_dequantize"),
        node("DequantizeLinear", "w sv zv", "wd", name="w_dequantize", axis=axis),
        node("MatMul", "d wd", "y", name="product"),
    ]


def _value(name: str, dtype: int, dims: Sequence[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)
