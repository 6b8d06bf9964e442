import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginery.core.errors import InputError, ProviderError
from enginery.runtime.onnxruntime.tracing import GraphTracer

WEIGHT = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


@pytest.fixture
def graph(tmp_path):
    """x @ w, then Relu; `external` puts the weight beside the file."""

    def make(*, external=False):
        made = helper.make_model(
            helper.make_graph(
                [
                    helper.make_node("MatMul", ["x", "w"], ["product"]),
                    helper.make_node("Relu", ["product"], ["y"]),
                ],
                "graph",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
                [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
                [numpy_helper.from_array(WEIGHT, "w")],
            ),
            opset_imports=[helper.make_opsetid("", 20)],
            ir_version=10,
        )
        path = tmp_path / "model.onnx"
        onnx.save(
            made, str(path), save_as_external_data=external, location="data", size_threshold=0
        )
        return path

    return make


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("optimized", [False, True])
def test_inner_tensors_have_their_values(graph, external, optimized):
    feeds = {"x": -np.ones((3, 8), np.float32)}
    with GraphTracer(graph(external=external), ["product", "y"], optimized=optimized) as trace:
        values = trace(feeds)
    np.testing.assert_allclose(values["product"], feeds["x"] @ WEIGHT, rtol=1e-6)
    assert not values["y"].any()


def test_an_input_of_the_graph_comes_back_as_it_was_fed(graph):
    feeds = {"x": np.ones((1, 8), np.float32)}
    with GraphTracer(graph(), ["x", "product"]) as trace:
        assert trace(feeds)["x"] is feeds["x"]


def test_the_file_and_its_directory_stay_as_they_are(graph):
    path = graph(external=True)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with GraphTracer(path, ["product"]) as trace:
        trace({"x": np.ones((1, 8), np.float32)})
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_an_unknown_tensor_is_an_error_that_names_the_nearest(graph):
    with pytest.raises(InputError, match="did you mean 'product'"):
        GraphTracer(graph(), ["produkt"])


def test_a_feed_that_does_not_fit_is_an_input_error(graph):
    with (
        GraphTracer(graph(), ["product"]) as trace,
        pytest.raises(InputError, match="x \\(1, 7\\)"),
    ):
        trace({"x": np.ones((1, 7), np.float32)})


def test_closed_tracer_is_an_error(graph):
    trace = GraphTracer(graph(), ["product"])
    trace.close()
    with pytest.raises(ProviderError, match="closed"):
        trace({})
