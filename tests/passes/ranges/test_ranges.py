"""Ranges of a graph's tensors: in segments, in branches, and where they are unknown."""

import numpy as np
import pytest

from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import InputError
from enginery.passes.cast.cast import cast_graph
from enginery.passes.cast.overflow import find_fp32_nodes
from enginery.passes.ir.nodes import infer_types
from enginery.passes.ranges import measure as ranges
from enginery.passes.ranges.measure import float_tensors, make_value_names_unique, measure_ranges
from enginery.passes.ranges.segments import peak_live_bytes, split_graph
from enginery.passes.ranges.tensor_range import array_range
from tests.passes.graphs import graph, run, saved

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8)).astype(np.float32)
# The values of one branch exceed FP16 and return to its range. Both branches use the same names.
BRANCHES = """
g (float[batch, 8] x, bool[1] cached) => (float[batch, 8] y) {
  h = Mul (x, small)
  z = If (cached) <
    then_branch = grown () => (float[batch, 8] out) {
      large = Mul (h, big)
      out = LayerNormalization (large, scale)
    },
    else_branch = plain () => (float[batch, 8] out) {
      large = Add (h, small)
      out = Tanh (large)
    }
  >
  y = Tanh (z)
}
"""
WEIGHTS = {"small": np.float32(2), "big": np.float32(6e4), "scale": np.ones(8)}
LOOP = """
g (float[2, 8] x, int64 n) => (float[2, 8] y) {
  go = Constant <value = bool {1}> ()
  y0 = Loop (n, go, x) <
    body = b (int64 i, bool c, float[2, 8] h) => (bool c2, float[2, 8] h2) {
      c2 = Identity (c)
      h2 = Mul (h, big)
    }
  >
  y = Tanh (y0)
}
"""


def measured(model, path, batches, **options):
    infer_types(model)
    return measure_ranges(path, float_tensors(model.graph), batches, **options)


def branches(tmp_path):
    model = graph(BRANCHES, **WEIGHTS)
    assert make_value_names_unique(model)
    return model, saved(model, tmp_path / "fp32.onnx")


def feeds(*, cached):
    return {"x": X, "cached": np.array([cached])}


def test_overflow_in_a_branch_is_measured_and_its_node_stays_fp32(tmp_path):
    model, path = branches(tmp_path)
    found = measured(model, path, [feeds(cached=True), feeds(cached=False)])
    assert found["large"].largest == pytest.approx(np.abs(X).max() * 2 * 6e4)
    fp32_nodes = find_fp32_nodes(model.graph, found)
    assert {node.op_type for node in fp32_nodes.values()} == {"Mul", "LayerNormalization"}
    assert min(node.largest for node in fp32_nodes.values()) > 65504
    expected = run(path, **feeds(cached=True))[0]
    cast_graph(model, "fp16", keep_fp32=fp32_nodes)
    got = run(saved(model, tmp_path / "fp16.onnx"), **feeds(cached=True))[0]
    np.testing.assert_allclose(got, expected, atol=2e-3)


def test_branch_that_never_ran_stays_fp32(tmp_path):
    model, path = branches(tmp_path)
    found = measured(model, path, [feeds(cached=False)])
    assert found["large"].elements == 0
    fp32_nodes = find_fp32_nodes(model.graph, found)
    assert "its range is unknown" in next(
        node.reason for node in fp32_nodes.values() if node.op_type == "Mul"
    )
    assert {node.op_type for node in fp32_nodes.values()} == {"Mul", "LayerNormalization"}


def test_names_used_in_both_branches_are_made_unique_or_unknown(tmp_path):
    model = graph(BRANCHES, **WEIGHTS)
    path = saved(model, tmp_path / "same.onnx")
    both = measured(model, path, [feeds(cached=True), feeds(cached=False)])
    assert both["large"].largest == pytest.approx(np.abs(X).max() * 2 * 6e4)
    # One of the two branches never ran, and their common name does not say which.
    assert measured(model, path, [feeds(cached=True)])["large"].elements == 0


def test_nested_branch_is_measured(tmp_path):
    text = """
    g (float[n, 8] x, bool[1] a, bool[1] b) => (float[n, 8] y) {
      y = If (a) <
        then_branch = outer () => (float[n, 8] p) {
          p = If (b) <
            then_branch = inner () => (float[n, 8] q) { deep = Mul (x, big)  q = Tanh (deep) },
            else_branch = other () => (float[n, 8] r) { r = Tanh (x) }
          >
        },
        else_branch = none () => (float[n, 8] s) { s = Sin (x) }
      >
    }"""
    model = graph(text, big=np.float32(1e5))
    path = saved(model, tmp_path / "m.onnx")
    yes, no = np.array([True]), np.array([False])
    found = measured(model, path, [{"x": X, "a": yes, "b": yes}, {"x": X, "a": no, "b": yes}])
    assert found["deep"].largest == pytest.approx(np.abs(X).max() * 1e5)
    assert found["s"].elements == X.size
    assert found["r"].elements == 0


def test_body_of_a_loop_stays_fp32_with_a_reason(tmp_path):
    model = graph(LOOP, big=np.float32(3))
    path = saved(model, tmp_path / "m.onnx")
    found = measured(model, path, [{"x": X[:2], "n": np.array(3)}])
    fp32_nodes = find_fp32_nodes(model.graph, found)
    assert [node.op_type for node in fp32_nodes.values()] == ["Mul"]
    (node,) = fp32_nodes.values()
    assert "in the body of Loop" in node.reason
    assert node.as_json()["largest"] is None
    result = cast_graph(model, "fp16", keep_fp32=fp32_nodes)
    assert node.node in result.kept
    saved(model, tmp_path / "fp16.onnx")


CHAIN = """
g (float[n, 8] x) => (float[n, 8] y) {
  a = Mul (x, x)
  b = Sin (a)
  size = Shape (b)
  c = Add (a, b)
  d = Reshape (c, size)
  y = Add (d, x)
}
"""


@pytest.mark.parametrize("most", [1, 300, 1 << 20])
def test_ranges_do_not_depend_on_the_segment_size(tmp_path, most):
    model = graph(CHAIN)
    path = saved(model, tmp_path / "m.onnx")
    batches = [{"x": X}, {"x": 3 * X[:2]}]
    whole = measured(model, path, batches)
    assert measured(model, path, batches, group_bytes=most) == whole
    assert set(whole) == set("xabcdy")
    assert whole["a"].largest == pytest.approx((9 * X[:2] ** 2).max())


def test_each_node_runs_once_per_batch(tmp_path, monkeypatch):
    model = graph(CHAIN)
    path = saved(model, tmp_path / "m.onnx")
    ran = []
    original = ranges.segment_model

    def counted(proto, segment, fetch, types, ranks):
        made, sources = original(proto, segment, fetch, types, ranks)
        ran.extend(node.name for node in made.graph.node)
        return made, sources

    monkeypatch.setattr(ranges, "segment_model", counted)
    measured(model, path, [{"x": X}], group_bytes=200)
    assert sorted(ran) == sorted(node.name for node in model.graph)


def test_segments_respect_the_limit_and_read_earlier_outputs(tmp_path):
    proto = load_graph(saved(graph(CHAIN), tmp_path / "m.onnx"))
    sizes = dict.fromkeys("abcdy", 100)
    segments = split_graph(proto.graph, sizes, typed_values={*"abcdy", "size"}, max_bytes=200)
    assert [(s.start, s.stop) for s in segments] == [(0, 3), (3, 5), (5, 6)]
    assert [set(s.inputs) for s in segments] == [{"x"}, {"a", "b", "size"}, {"d", "x"}]
    assert [set(s.outputs) for s in segments] == [{"a", "b", "size"}, {"d"}, set()]
    assert peak_live_bytes(segments, sizes) == 300
    # A value of unknown type, or that is not a tensor, cannot be passed between segments.
    untyped = split_graph(proto.graph, sizes, typed_values=set("abcdy"), max_bytes=200)
    assert [(s.start, s.stop) for s in untyped] == [(0, 5), (5, 6)]


def test_batches_are_split_if_segments_pass_on_much_data(tmp_path, monkeypatch):
    model = graph(CHAIN)
    path = saved(model, tmp_path / "m.onnx")
    parts = []
    original = ranges._run_segments

    def seen(path, proto, segments, types, batches):
        parts.append(len(batches))
        return original(path, proto, segments, types, batches)

    monkeypatch.setattr(ranges, "_run_segments", seen)
    measured(model, path, [{"x": X}] * 3, group_bytes=300)
    assert parts == [1, 1, 1]
    parts.clear()
    measured(model, path, [{"x": X}] * 3)
    assert parts == [3]


def test_error_names_the_shapes_of_the_failing_batch(tmp_path):
    model = graph(
        "g (float[n, 8] x) => (float[n, 8] y) { a = Sin (x)  y = Add (a, w) }", w=np.ones((4, 8))
    )
    path = saved(model, tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"the graph fails on x \(3, 8\)"):
        measured(model, path, [{"x": X}, {"x": X[:3]}], group_bytes=1)


def test_row_moments_agree_with_numpy():
    for shape in ((3, 7), (500, 3), (2, 100_000), (5,)):
        values = (RNG.normal(size=shape) * 50 + 10).astype(np.float32)
        rows = values.reshape(-1, shape[-1]).astype(np.float64)
        found = array_range(values)
        assert found.row_variance == pytest.approx(rows.var(axis=1).max(), rel=1e-9)
        assert found.row_mean_square == pytest.approx((rows**2).mean(axis=1).max(), rel=1e-9)
        assert found.largest == np.abs(values).max()


def test_nan_is_not_counted():
    found = array_range(np.float32([np.nan, 1, -4]))
    assert found.nonfinite
    assert found.largest == 4


@pytest.mark.parametrize("group_bytes", [1, 1 << 20])
def test_image_that_is_resized_to_a_part_of_its_shape(group_bytes, tmp_path):
    """ONNX takes a slice of the shape of a value for empty if its number of dims is not known."""
    model = graph(
        """g (float[b, 3, h, w] x) => (float[b, 3, h, w] y) {
          small = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)  shape = Shape (x)
          leading = Slice (shape, start, middle)  edges = Slice (shape, middle, end)
          sizes = Concat <axis = 0> (leading, edges)
          z = Resize (small, , , sizes)  y = Neg (z) }""",
        start=np.array([0]),
        middle=np.array([2]),
        end=np.array([4]),
    )
    batch = {"x": np.ones((1, 3, 4, 6), np.float32)}
    found = measured(model, saved(model, tmp_path / "m.onnx"), [batch], group_bytes=group_bytes)
    assert found["z"].largest == 1
