"""The simulation of a stored FP16 or BF16 graph: values, types, subgraphs."""

import numpy as np
import pytest

from enginery.passes.cast.cast import cast_graph
from enginery.passes.cast.simulation import simulate_cast, simulate_low_precision
from tests.passes.graphs import graph, run, saved

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8)).astype(np.float32)
LAYER = """
g (float[n, 8] x) => (float[n, 8] y) {
  u = MatMul (x, weight)
  v = Erf (u)
  w = Mul (u, v)
  t = Transpose <perm = [0, 1]> (w)
  y = Softmax (t)
}
"""


def layer():
    return graph(LAYER, weight=np.random.default_rng(1).normal(size=(8, 8)))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kept", [(), ("erf_1",), ("matmul_0", "softmax_4")])
def test_stored_graph_rounds_as_its_cast_was_simulated(tmp_path, precision, kept):
    before = layer()
    simulate_cast(before, precision, keep_fp32=kept)
    expected = run(saved(before, tmp_path / "before.onnx"), x=X)[0]
    after = layer()
    cast_graph(after, precision, keep_fp32=kept)
    simulate_low_precision(after)
    found = run(saved(after, tmp_path / "after.onnx"), x=X)[0]
    np.testing.assert_array_equal(found, expected)
    exact = run(saved(layer(), tmp_path / "exact.onnx"), x=X)[0]
    assert not np.array_equal(found, exact)


@pytest.mark.parametrize(
    ("op", "gates", "outputs"),
    [
        ("LSTM", 4, ", h"),
        ("LSTM", 4, ", , c"),
        ("LSTM", 4, "a"),
        ("GRU", 3, ", h"),
        ("GRU", 3, "a"),
        ("RNN", 1, ", h"),
    ],
)
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_node_with_unused_outputs(tmp_path, op, gates, outputs, directions):
    read = outputs.strip(", ")
    direction = "bidirectional" if directions == 2 else "forward"
    # `, h` cannot be written as text: an output without a name.
    text = f"""g (float[t, b, 4] x) => (float[b, 8] y) {{
      a, h{", c" if op == "LSTM" else ""} =
        {op} <hidden_size = 8, direction = "{direction}"> (x, w, r)
      s = ReduceSum <keepdims = 0> ({read}, {"sequence" if read == "a" else "first"})
      y = Relu (s) }}"""
    generator = np.random.default_rng(2)
    weights = {
        "w": generator.normal(size=(directions, gates * 8, 4)),
        "r": generator.normal(size=(directions, gates * 8, 8)),
        "first": np.int64([0]),
        "sequence": np.int64([0, 1]),
    }

    def model():
        recurrent = graph(text, **weights)
        for value in recurrent.graph[0].outputs:
            if value.name != read:
                value.name = ""
        return recurrent

    x = generator.normal(size=(3, 2, 4)).astype(np.float32)
    simulated = model()
    simulate_cast(simulated, "fp16")
    expected = run(saved(simulated, tmp_path / "simulated.onnx"), x=x)[0]
    cast = model()
    cast_graph(cast, "fp16")
    found = run(saved(cast, tmp_path / "cast.onnx"), x=x)[0]
    np.testing.assert_allclose(found, expected, atol=5e-3)
    simulate_low_precision(cast)
    again = run(saved(cast, tmp_path / "again.onnx"), x=x)[0]
    np.testing.assert_allclose(again, expected, atol=5e-3)


def test_overflow_that_the_cpu_hides(tmp_path):
    text = """g (float16[n, 8] x) => (float16[n, 8] y) {
      wide = Constant <value = float[1] {30000.0}> ()
      big = Cast <to = 10> (wide)
      a = Mul (x, big)
      y = Div (a, big) }"""
    x = np.full((1, 8), 4, np.float16)
    np.testing.assert_array_equal(run(saved(graph(text), tmp_path / "stored.onnx"), x=x)[0], x)
    model = graph(text)
    simulate_low_precision(model)
    found = run(saved(model, tmp_path / "simulated.onnx"), x=x)[0]
    assert found.dtype == np.float32
    assert np.all(np.isinf(found))


def test_values_inside_a_branch_and_a_loop(tmp_path):
    text = """g (float16[8] x, bool go, int64 times) => (float16[8] y) {
      big = Constant <value = float[1] {30000.0}> ()
      factor = Cast <to = 10> (big)
      kept = If (go) <
        then_branch = yes () => (float16[8] a) { b = Mul (x, factor)  a = Div (b, factor) },
        else_branch = no () => (float16[8] c) { c = Identity (x) } >
      y = Loop (times, go, kept) <
        body = body (int64 i, bool on, float16[8] state)
            => (bool more, float16[8] next) {
          more = Identity (on)
          next = Add (state, x) } >
    }"""
    model = graph(text)
    simulate_low_precision(model)
    path = saved(model, tmp_path / "simulated.onnx")
    x = np.arange(1, 9).astype(np.float16)
    went, stayed = (run(path, x=x, go=np.array(go), times=np.array(3))[0] for go in (True, False))
    np.testing.assert_array_equal(stayed, x)
    np.testing.assert_array_equal(went[:2], 4 * x[:2].astype(np.float32))
    assert np.all(np.isinf(went[2:]))


def test_graph_in_fp32_stays_as_it_is(tmp_path):
    model = layer()
    simulate_low_precision(model)
    assert [node.op_type for node in model.graph] == [node.op_type for node in layer().graph]


def test_types_that_the_file_does_not_state_are_inferred(tmp_path):
    """Exporters may leave out the types of values between nodes."""
    text = """g (float[n, 8] x) => (float[n, 8] y) {
      wide = Constant <value = float[1] {30000.0}> ()
      big = Cast <to = 10> (wide)
      low = Cast <to = 10> (x)
      a = Mul (low, big)
      b = Div (a, big)
      y = Cast <to = 1> (b) }"""
    model = graph(text)
    assert all(value.dtype is None for node in list(model.graph)[:-1] for value in node.outputs)
    simulate_low_precision(model)
    found = run(saved(model, tmp_path / "simulated.onnx"), x=np.full((1, 8), 4, np.float32))[0]
    assert np.all(np.isinf(found))


def test_output_that_nothing_reads(tmp_path):
    text = """g (float16[n, 8] x) => (float16[n, 8] y) {
      y, mean, spread = LayerNormalization (x, weight) }"""
    model = graph(text, weight=np.ones(8, np.float16))
    simulate_low_precision(model)
    found = run(saved(model, tmp_path / "simulated.onnx"), x=X.astype(np.float16))[0]
    assert np.all(np.isfinite(found))
