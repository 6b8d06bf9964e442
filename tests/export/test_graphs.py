"""Precision, dims and names of exported graphs."""

import numpy as np
from onnx import TensorProto

from enginery.core.model.feeds import FeedLimits
from enginery.export.graphs import float_precision, probe_dims, record_graph
from tests.passes.onnx_graphs import node, save_graph


def test_precision_is_that_of_most_elements_not_of_most_tensors(tmp_path):
    values = [np.zeros((4, 4), np.float32), *(np.float16([index]) for index in range(3))]
    weights = {f"w{index}": value for index, value in enumerate(values)}
    path = save_graph(tmp_path / "m.onnx", [node("Relu", "x", "y")], weights)
    assert float_precision(path) == "fp32"


def test_an_output_dim_is_no_constant_if_a_run_that_could_change_it_failed(tmp_path):
    """The graph takes 8 tokens alone, so no run shows whether its output depends on them."""
    path = save_graph(
        tmp_path / "m.onnx",
        [node("Cast", "input_ids", "x", to=TensorProto.FLOAT), node("MatMul", "x w", "y")],
        {"w": np.ones((8, 3), np.float32)},
        inputs={"input_ids": (TensorProto.INT64, ["batch", "sequence"])},
        outputs={"y": (TensorProto.FLOAT, ["batch", None])},
    )
    record, _ = probe_dims(path, record_graph(path, tmp_path), FeedLimits())
    assert record.outputs[0].dims == ("batch", "y_sequence")
