"""Dynamic INT8 quantization for ONNX Runtime on the CPU.

Weights are stored as INT8; the scales of activations are computed at run time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginery.core.artifact.external_data import external_data_files, load_graph

_FLOAT32 = 1
"""onnx.TensorProto.FLOAT"""
_INTEGER_OPS = (
    "MatMulInteger",
    "ConvInteger",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
    "QAttention",
    "DynamicQuantizeLSTM",
)


def quantize_dynamically(source: Path, out: Path, exclude: Sequence[str] = ()) -> tuple[str, ...]:
    """Write the graph with INT8 weights, one scale per column; return its external data files.

    Args:
        source: the FP32 graph.
        out: where to write the ONNX file.
        exclude: names of nodes that stay in FP32.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    out.parent.mkdir(parents=True, exist_ok=True)
    data_files = external_data_files(source)
    # The quantizer replaces a Gemm by a MatMul of this name first.
    excluded = [name + suffix for name in exclude for suffix in ("", "_MatMul")]
    logging.disable(logging.WARNING)  # it recommends its pre-processing on every call
    try:
        quantize_dynamic(
            source if data_files else _without_types_of_weights(source),
            out,
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=bool(data_files),
            nodes_to_exclude=[*_refused_nodes(source), *excluded],
            # ONNX cannot infer the output types of fused ops; they are float32.
            extra_options={"MatMulConstBOnly": True, "DefaultTensorType": _FLOAT32},
        )
    finally:
        logging.disable(logging.NOTSET)
    return tuple(external_data_files(out))


def _refused_nodes(source: Path) -> list[str]:
    """Return the names of nodes that the quantizer would fail on.

    It rejects convolutions with a bias whose weights are computed: VITS normalizes its weights in
    the graph. It takes ONNX's Attention, which has no weights, for that of com.microsoft.
    """
    graph = load_graph(source).graph
    weights = {tensor.name for tensor in graph.initializer}
    convolutions = [
        node.name
        for node in graph.node
        if node.op_type == "Conv" and len(node.input) == 3 and node.input[1] not in weights
    ]
    attentions = [
        node.name for node in graph.node if node.op_type == "Attention" and not node.domain
    ]
    return [*convolutions, *attentions]


def _without_types_of_weights(source: Path) -> Any:
    """Return the graph without `value_info` for initializers; its path if it has none.

    The quantizer replaces Gemm by MatMul and transposes the weight, whose earlier shape then fails
    ONNX's inference. It holds several copies of a graph that is not a path.
    """
    model = load_graph(source)
    weights = {tensor.name for tensor in model.graph.initializer}
    value_infos = [value for value in model.graph.value_info if value.name not in weights]
    if len(value_infos) == len(model.graph.value_info):
        return source
    del model.graph.value_info[:]
    model.graph.value_info.extend(value_infos)
    return model


def count_integer_nodes(path: Path) -> dict[str, int]:
    """Count the nodes of a graph that multiply integers, by op."""
    counts = Counter(node.op_type for node in load_graph(path).graph.node)
    return {op: counts[op] for op in _INTEGER_OPS if counts[op]}
