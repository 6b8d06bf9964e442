"""Precision, dims and names of exported graphs."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginery.core.model.feeds import FeedLimits
from enginery.export.graphs import float_precision, probe_dims, record_graph


def saved(path, nodes, inputs, outputs, weights):
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def test_precision_is_that_of_most_elements_not_of_most_tensors(tmp_path):
    values = [np.zeros((4, 4), np.float32), *(np.float16([index]) for index in range(3))]
    weights = [numpy_helper.from_array(value, f"w{index}") for index, value in enumerate(values)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch"]) for name in "xy")
    path = saved(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], [x], [y], weights)
    assert float_precision(path) == "fp32"


def test_an_output_dim_is_no_constant_if_a_run_that_could_change_it_failed(tmp_path):
    """The graph takes 8 tokens alone, so no run shows whether its output depends on them."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", None])
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    weight = numpy_helper.from_array(np.ones((8, 3), np.float32), "w")
    path = saved(tmp_path / "m.onnx", nodes, [ids], [y], [weight])
    record, _ = probe_dims(path, record_graph(path, tmp_path), FeedLimits())
    assert record.outputs[0].dims == ("batch", "y_sequence")
