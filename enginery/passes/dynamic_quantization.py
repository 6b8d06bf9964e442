"""Dynamic INT8 for ONNX Runtime's CPU: INT8 weights, activations quantized as they come.

Takes an FP32 ONNX file; leaves another one.

    >>> quantize_dynamically(Path("minilm/model.onnx"), Path("int8/model.onnx"))
    ()
    >>> count_integer_nodes(Path("int8/model.onnx"))
    {'MatMulInteger': 36}
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from enginery.core.external_data import external_data_files, load_graph

_FLOAT32 = 1
"""onnx.TensorProto.FLOAT"""
_INTEGER_OPS = ("MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat",
                "QAttention", "DynamicQuantizeLSTM")  # fmt: skip


def quantize_dynamically(source: Path, out: Path) -> tuple[str, ...]:
    """Writes the graph with INT8 weights, a scale a column; returns its external data files."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    out.parent.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)  # it asks each time to be called by another way
    try:
        quantize_dynamic(
            source, out, per_channel=True, weight_type=QuantType.QInt8,
            use_external_data_format=bool(external_data_files(source)),
            # Types behind fused ops cannot be inferred; they are float32.
            extra_options={"MatMulConstBOnly": True, "DefaultTensorType": _FLOAT32},
        )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return tuple(external_data_files(out))


def count_integer_nodes(path: Path) -> dict[str, int]:
    """How many nodes of a graph multiply integers, by op."""
    found = Counter(node.op_type for node in load_graph(path).graph.node)
    return {op: found[op] for op in _INTEGER_OPS if found[op]}
