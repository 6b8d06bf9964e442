"""Linear layers without reshapes to rows and back."""

import numpy as np
import onnx_ir as ir
import pytest

from enginery import export_model
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.passes.generation.linear import remove_idle_reshapes, remove_row_reshapes
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.nodes import infer_types
from tests.passes.generation.test_last_position import run

GRAPH = """<ir_version: 9, opset_import: ["" : 20]>
g (float[b, s, 2] x, float[s, b, 2] z) => (float[b, s, 3] y) <
  float[2, 3] w = {1, -2, 3, -4, 5, -6}, float[3, 2] t = {1, -2, 3, -4, 5, -6},
  float[3] bias = {1, 2, 3}, float[1, 3] row = {1, 2, 3},
  int64[2] rows = {-1, 2}, int64[1] first = {0}, int64 second = {1}, int64[1] axis = {0},
  int64[1] last = {3}, int64[3] fixed = {2, 4, 3}
> {
  sizes = Shape (x)
  batch = Gather (sizes, first)
  n = Gather (sizes, second)
  length = Unsqueeze (n, axis)
  r = Reshape (x, rows)
  BODY
}"""
GEMM = "p = Gemm (r, w, bias)"
SHAPE = "shape = Concat <axis = 0> (batch, length, last)"
BACK = "y = Reshape (p, shape)"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ((GEMM, SHAPE, BACK), 1),
        (("p = Gemm (r, w, row)", SHAPE, BACK), 0),
        (("p = Gemm (r, w)", SHAPE, BACK), 1),
        (("p = Gemm <alpha = 2.0> (r, w, bias)", SHAPE, BACK), 0),
        (("p = Gemm <beta = 2.0> (r, w, bias)", SHAPE, BACK), 0),
        (("p = Gemm <transB = 1> (r, t, bias)", SHAPE, BACK), 0),
        ((GEMM, "shape = Concat <axis = 0> (length, batch, last)", BACK), 0),
        ((GEMM, "shape = Concat <axis = 0> (batch, batch, last)", BACK), 0),
        ((GEMM, "shape = Identity (fixed)", BACK), 0),
        ((GEMM, SHAPE, "q = Relu (p)  y = Reshape (q, shape)"), 0),
        ((GEMM, SHAPE, "a = Reshape (p, shape)  c = Reshape (p, shape)  y = Add (a, c)"), 0),
        (
            (
                "o = Shape (z)  bz = Gather (o, first)",
                GEMM,
                "shape = Concat <axis = 0> (bz, length, last)",
                BACK,
            ),
            0,
        ),
    ],
)
def test_layers_are_replaced_only_if_the_shape_comes_back(tmp_path, body, count):
    model = ir.from_onnx_text(GRAPH.replace("BODY", "\n".join(body)))
    write_graph(model, tmp_path / "before.onnx")
    infer_types(model)
    assert remove_row_reshapes(model) == count
    assert any(node.op_type == "MatMul" for node in model.graph) == bool(count)
    write_graph(model, tmp_path / "after.onnx")
    numbers = np.random.default_rng(0)
    for rows, positions in ((2, 4), (1, 1)) if count else ():
        feeds = {
            "x": numbers.normal(size=(rows, positions, 2)).astype(np.float32),
            "z": np.zeros((positions, rows, 2), np.float32),
        }
        wanted, found = (run(tmp_path / f"{name}.onnx", feeds)["y"] for name in ("before", "after"))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("dims", "count"), [("b, s", 1), ("s, b", 0), ("b, t", 0)])
def test_dims_of_a_value_inside_say_that_the_shape_comes_back(dims, count):
    # torch's exporter computes the shape from other values than the states.
    text = GRAPH.replace("int64[2] rows", f"float[{dims}, 3] h, int64[2] rows")
    body = [GEMM, "shape = Identity (fixed)", "h = Reshape (p, shape)", "y = Relu (h)"]
    model = ir.from_onnx_text(text.replace("BODY", "\n".join(body)))
    assert remove_row_reshapes(model) == count


@pytest.mark.parametrize(("dims", "count"), [("b, s, 2", 1), ("s, b, 2", 0), ("b, t, 2", 0)])
def test_reshapes_to_the_shape_that_a_value_has_are_removed(dims, count):
    text = GRAPH.replace("int64[2] rows", f"float[{dims}] h, int64[2] rows")
    text = text.replace("float[b, s, 3] y", "float[b, s, 2] y")
    body = ["shape = Identity (fixed)", "h = Reshape (x, shape)", "y = Relu (h)"]
    model = ir.from_onnx_text(text.replace("BODY", "\n".join(body)))
    assert remove_idle_reshapes(model) == count
    assert any(node.op_type == "Reshape" for node in model.graph) != bool(count)


def test_every_linear_layer_of_gpt2_is_one_product(tiny_model, home, tmp_path):
    source = str(tiny_model("gpt2", "text-generation"))
    artifact = export_model(source, task="text-generation-with-past", layout="optimum")
    model = read_graph(artifact.model)
    infer_types(model)
    layers = sum(node.op_type == "Gemm" for node in model.graph)
    assert remove_row_reshapes(model) == layers > 0
    write_graph(model, tmp_path / "model.onnx")
    limits = FeedLimits.from_artifact(artifact)
    sizes = {"batch": 3, "sequence": 5, "past_sequence": 4}
    feeds = make_feeds(artifact.manifest.graphs[0].inputs, sizes, limits, seed=0)
    wanted, found = run(artifact.model, feeds), run(tmp_path / "model.onnx", feeds)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)
