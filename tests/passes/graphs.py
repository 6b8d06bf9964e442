"""Graphs in ONNX's text format for the tests of the passes, and functions to run them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import numpy_helper


def graph(text, opset=20, **weights):
    """Parse an `onnx_ir.Model` from the text of a graph; `weights` are FP32 or integer arrays."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]>\n{text}')
    for name, values in weights.items():
        array = np.asarray(values)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type.lower()}_{index}"
    return ir.from_proto(model)


def saved(model, path):
    """Write the model, and check that it is valid and strictly typed."""
    from enginery.passes.ir.graph_file import check_graph, write_graph

    write_graph(model, path)
    check_graph(path)
    onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, check_type=True)
    return path


def run(path, **feeds):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def ops(model, op_type):
    return [node for node in model.graph.all_nodes() if node.op_type == op_type]


def types(path):
    """Return the types of all values by name, as ONNX infers them."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True)
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    found = {value.name: value.type.tensor_type.elem_type for value in values}
    found |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {name: onnx.TensorProto.DataType.Name(number) for name, number in found.items()}
