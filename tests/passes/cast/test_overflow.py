"""Nodes that stay FP32: found from ranges, no more than needed, and needed."""

import math

import numpy as np
import pytest

from enginery.passes.cast.cast import cast_graph
from enginery.passes.cast.overflow import find_fp32_nodes, mask_floor
from enginery.passes.cast.simulation import simulate_cast
from enginery.passes.ir.nodes import infer_types
from enginery.passes.ranges.measure import float_tensors, measure_ranges
from enginery.passes.ranges.tensor_range import array_range
from tests.passes.graphs import graph, run, saved

# A residual stream as in T5: blocks add to it until it exceeds FP16, and RMSNorm squares it.
T5 = """
g (float[batch, 8] x) => (float[batch, 8] y) {
  u = MatMul (x, up)
  residual = Add (x, u)
  square = Pow (residual, two)
  mean = ReduceMean <keepdims: int = 1> (square, axes)
  safe = Add (mean, eps)
  root = Sqrt (safe)
  normed = Div (residual, root)
  z = MatMul (normed, down)
  y = Tanh (z)
}
"""
RNG = np.random.default_rng(0)
T5_WEIGHTS = {
    "up": RNG.normal(size=(8, 8)) * 3e4,
    "two": np.float32(2),
    "axes": np.array([-1]),
    "eps": np.float32(1e-6),
    "down": RNG.normal(size=(8, 8)),
}
X = RNG.normal(size=(4, 8)).astype(np.float32)


def fp32_nodes_of(model, path, batches):
    infer_types(model)
    ranges = measure_ranges(path, float_tensors(model.graph), batches, mask_floor=mask_floor(model))
    return find_fp32_nodes(model.graph, ranges), ranges


def test_growing_residual_is_finite_only_with_fp32_nodes(tmp_path):
    reference = saved(graph(T5, **T5_WEIGHTS), tmp_path / "fp32.onnx")
    expected = run(reference, x=X)[0]
    plain = graph(T5, **T5_WEIGHTS)
    simulate_cast(plain, "fp16")
    assert not np.isfinite(run(saved(plain, tmp_path / "plain.onnx"), x=X)[0]).all()

    model = graph(T5, **T5_WEIGHTS)
    fp32_nodes, ranges = fp32_nodes_of(model, reference, [{"x": X}])
    assert ranges["residual"].largest > 65504
    result = cast_graph(model, "fp16", keep_fp32=fp32_nodes)
    found = run(saved(model, tmp_path / "kept.onnx"), x=X)[0]
    np.testing.assert_allclose(found, expected, atol=5e-3)
    rounded = graph(T5, **T5_WEIGHTS)
    simulate_cast(rounded, "fp16", keep_fp32=fp32_nodes)
    found = run(saved(rounded, tmp_path / "rounded.onnx"), x=X)[0]
    np.testing.assert_allclose(found, expected, atol=5e-3)
    # The second MatMul, after the norm, is in range again.
    assert "matmul_7" not in fp32_nodes
    assert result.casts <= 3, "x needs no cast, the norm's output and y need one each"
    assert "the largest FP16 number is 65504" in fp32_nodes["pow_2"].reason


def test_large_input_of_layer_normalization_stays_fp32(tmp_path):
    text = """g (float[n, 8] x) => (float[n, 8] y) {
      a = Mul (x, big)  b = LayerNormalization (a, scale)  y = Tanh (b) }"""
    weights = {"big": np.float32(6e4), "scale": np.ones(8)}
    reference = saved(graph(text, **weights), tmp_path / "fp32.onnx")
    expected = run(reference, x=X)[0]
    plain = graph(text, **weights)
    simulate_cast(plain, "fp16")
    assert not np.isfinite(run(saved(plain, tmp_path / "plain.onnx"), x=X)[0]).all()
    model = graph(text, **weights)
    fp32_nodes, _ = fp32_nodes_of(model, reference, [{"x": X}])
    cast_graph(model, "fp16", keep_fp32=fp32_nodes)
    assert set(fp32_nodes) == {"mul_0", "layernormalization_1"}
    found = run(saved(model, tmp_path / "kept.onnx"), x=X)[0]
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_variance_beyond_fp16_keeps_the_norm_in_fp32(tmp_path):
    text = """g (float[n, 8] x) => (float[n, 8] y) {
      a = Mul (x, big)  y = LayerNormalization (a, scale) }"""
    model = graph(text, big=np.float32(2e3), scale=np.ones(8))
    fp32_nodes, ranges = fp32_nodes_of(model, saved(model, tmp_path / "m.onnx"), [{"x": X}])
    assert ranges["a"].largest < 32752
    assert list(fp32_nodes) == ["layernormalization_1"]
    assert "variance" in fp32_nodes["layernormalization_1"].reason


def test_sum_of_a_mean_beyond_fp16_keeps_it_in_fp32(tmp_path):
    text = """g (float[1, n] x) => (float[1, 1] y) {
      y = ReduceMean <keepdims: int = 1> (x, axes) }"""
    model = graph(text, axes=np.array([-1]))
    long, short = np.full((1, 4000), 100, np.float32), np.full((1, 400), 100, np.float32)
    path = saved(model, tmp_path / "m.onnx")
    assert (
        "sum of its mean reaches 4e+05"
        in fp32_nodes_of(model, path, [{"x": long}])[0]["reducemean_0"].reason
    )
    assert fp32_nodes_of(model, path, [{"x": short}])[0] == {}


def one_node(op_type, tmp_path, values, **attributes):
    """Return the nodes that stay FP32 in a graph of one reduction over the last axis."""
    options = ", ".join(f"{name}: int = {value}" for name, value in attributes.items())
    text = f"""g (float[n, 8] x) => (float[n, 1] y) {{
      y = {op_type} <{options or "keepdims: int = 1"}> (x, axes) }}"""
    model = graph(text, axes=np.array([-1]))
    path = saved(model, tmp_path / f"{op_type}.onnx")
    return fp32_nodes_of(model, path, [{"x": np.float32(values)}])[0]


@pytest.mark.parametrize(
    ("op_type", "value"),
    [
        ("ReduceSum", 5e3),  # 4e4
        ("ReduceL1", -5e3),
        ("ReduceSumSquare", 70),
        ("ReduceL2", 70),  # 198, the root of 39200
        ("ReduceLogSum", 5e3),
        ("ReduceLogSumExp", 9),  # 8 exp(9) is 64824
    ],
)
def test_sum_of_a_reduction_beyond_fp16_keeps_it_in_fp32(tmp_path, op_type, value):
    assert list(one_node(op_type, tmp_path, np.full((2, 8), value))) == [f"{op_type.lower()}_0"]
    assert one_node(op_type, tmp_path, np.full((2, 8), value / 10)) == {}


def test_softmax_subtracts_the_maximum_first(tmp_path):
    text = "g (float[n, 8] x) => (float[n, 8] y) { s = Mul (x, scale)  y = Softmax (s) }"
    model = graph(text, scale=np.float32(1e4))
    path = saved(model, tmp_path / "m.onnx")
    x = np.float32([[1, -1, 2, 3, 0, 0.5, -3, 1]])
    assert fp32_nodes_of(model, path, [{"x": x}])[0] == {}
    expected = run(path, x=x)[0]
    simulate_cast(model, "fp16")
    np.testing.assert_allclose(run(saved(model, tmp_path / "s.onnx"), x=x)[0], expected, atol=1e-3)
    beyond = graph(text, scale=np.float32(2e4))
    path = saved(beyond, tmp_path / "beyond.onnx")
    assert set(fp32_nodes_of(beyond, path, [{"x": x}])[0]) == {"mul_0", "softmax_1"}


def test_mean_of_squares_beyond_fp16_keeps_rms_norm_in_fp32(tmp_path):
    text = """g (float[n, 8] x) => (float[n, 8] y) { y = RMSNormalization (x, scale) }"""
    model = graph(text, opset=23, scale=np.ones(8))
    infer_types(model)
    found = {
        "x": array_range(np.full((1, 8), 300, np.float32)),
        "y": array_range(np.ones((1, 8), np.float32)),
    }
    assert found["x"].row_variance < 1
    assert "inner squares reach 9e+04" in (
        find_fp32_nodes(model.graph, found)["rmsnormalization_0"].reason
    )
    plain = graph(text.replace("RMSNormalization", "LayerNormalization"), scale=np.ones(8))
    infer_types(plain)
    assert find_fp32_nodes(plain.graph, found) == {}


def test_simulation_rounds_outputs_of_fp32_nodes_that_fp16_nodes_read(tmp_path):
    """The cast between an FP32 node and an FP16 node can overflow too."""
    text = "g (float[n, 8] x) => (float[n, 8] y) { a = Mul (x, big)  y = Sin (a) }"
    for keep, finite in (({"mul_0"}, False), ({"mul_0", "sin_1"}, True)):
        model = graph(text, big=np.float32(1e6))
        simulate_cast(model, "fp16", keep_fp32=keep)
        found = run(saved(model, tmp_path / f"{len(keep)}.onnx"), x=X)[0]
        assert np.isfinite(found).all() == finite


def test_simulation_rounds_fp16_graph_outputs_of_fp32_nodes(tmp_path):
    text = "g (float[n, 8] x) => (float[n, 8] y) { y = Mul (x, big) }"
    for io_dtype, finite in (("fp32", True), ("same", False)):
        model = graph(text, big=np.float32(1e6))
        simulate_cast(model, "fp16", keep_fp32={"mul_0"}, io_dtype=io_dtype)
        found = run(saved(model, tmp_path / f"{io_dtype}.onnx"), x=X)[0]
        assert np.isfinite(found).all() == finite


def test_masked_scores_do_not_count_as_overflow(tmp_path):
    text = """g (float[2, 4] x, bool[2, 4] m) => (float[2, 4] y) {
      s = Where (m, x, low)  y = Softmax (s) }"""
    model = graph(text, low=np.array([np.finfo(np.float32).min]))
    feeds = {"x": np.ones((2, 4), np.float32), "m": np.array([[True] * 4, [True, False] * 2])}
    fp32_nodes, ranges = fp32_nodes_of(model, saved(model, tmp_path / "m.onnx"), [feeds])
    assert fp32_nodes == {}
    assert ranges["s"].largest == 1.0
    # Without a mask constant in the graph, the same values are ordinary values.
    assert array_range(np.float32([-3e38, 1])).largest == pytest.approx(3e38)


def test_divisor_of_subnormal_numbers_stays_fp32(tmp_path):
    text = "g (float[n, 8] x) => (float[n, 8] y) { a = Mul (x, tiny)  b = Abs (a)  y = Div (a, b) }"
    model = graph(text, tiny=np.float32(1e-7))
    fp32_nodes, _ = fp32_nodes_of(model, saved(model, tmp_path / "m.onnx"), [{"x": X}])
    assert set(fp32_nodes) == {"div_2"}
    assert "loses bits below" in fp32_nodes["div_2"].reason


def test_ranges_do_not_depend_on_the_group_size(tmp_path):
    model = graph(T5, **T5_WEIGHTS)
    path = saved(model, tmp_path / "m.onnx")
    infer_types(model)
    tensors = float_tensors(model.graph)
    batches = [{"x": X}, {"x": 2 * X[:1]}]
    one = measure_ranges(path, tensors, batches, group_bytes=1)
    assert one == measure_ranges(path, tensors, batches)
    assert one["x"].largest == pytest.approx(max(np.abs(X).max(), 2 * np.abs(X[0]).max()))


def test_range_of_an_array():
    found = array_range(np.float32([[0, 1e-3, -5], [np.inf, 2, 3]]))
    assert found.nonfinite
    assert found.largest > 1e38
    assert array_range(np.zeros((2, 0), np.float32)).elements == 0
    assert array_range(np.float32([-np.inf, 2]), mask_floor=-math.inf).nonfinite is False
    assert array_range(np.float32([[1, 3]])).row_variance == 1.0
