"""FP16 and BF16 graphs: the types of each op, nodes that stay FP32, and the number of casts."""

import numpy as np
import onnx
import pytest

from enginery.core.errors import OptionError
from enginery.passes.cast.cast import cast_graph
from enginery.passes.cast.positions import find_position_nodes
from enginery.passes.ir.nodes import infer_types
from tests.passes.graphs import graph, ops, run, saved, types

RNG = np.random.default_rng(0)
LINEAR = """
g (float[batch, 4] x) => (float[batch, 3] y) {
  h = MatMul (x, w)
  a = Relu (h)
  b = Sqrt (a)
  c = Exp (b)
  y = MatMul (c, v)
}
"""
WEIGHTS = {"w": RNG.normal(size=(4, 4)), "v": RNG.normal(size=(4, 3))}
X = RNG.normal(size=(2, 4)).astype(np.float32)


def linear():
    return graph(LINEAR, **WEIGHTS)


def test_interface_stays_fp32_and_the_inside_is_fp16(tmp_path):
    model = linear()
    result = cast_graph(model, "fp16")
    path = saved(model, tmp_path / "m.onnx")
    found = types(path)
    assert (found["x"], found["y"]) == ("FLOAT", "FLOAT")
    assert {found[name] for name in "habcwv"} == {"FLOAT16"}
    assert (result.casts, len(ops(model, "Cast"))) == (2, 2)
    before = run(saved(linear(), tmp_path / "fp32.onnx"), x=X)[0]
    np.testing.assert_allclose(run(path, x=X)[0], before, atol=1e-2)


def test_interface_becomes_fp16_with_io_dtype_same(tmp_path):
    model = linear()
    assert cast_graph(model, "fp16", io_dtype="same").casts == 0
    found = types(saved(model, tmp_path / "m.onnx"))
    assert (found["x"], found["y"]) == ("FLOAT16", "FLOAT16")


def test_fp32_region_has_one_cast_at_each_edge_and_none_inside(tmp_path):
    model = linear()
    result = cast_graph(model, "fp16", keep_fp32={"relu_1", "exp_3"}, io_dtype="same")
    found = types(saved(model, tmp_path / "m.onnx"))
    assert {found[name] for name in ("a", "b", "c")} == {"FLOAT"}
    assert found["h"] == "FLOAT16"
    assert result.kept == {
        "relu_1": "listed in keep_fp32",
        "exp_3": "listed in keep_fp32",
        "sqrt_2": "between FP32 nodes",
    }
    assert len(ops(model, "Cast")) == 2


def test_consumers_of_one_value_share_a_cast(tmp_path):
    text = """g (float[4] x) => (float[4] y) {
      h = Mul (x, x)  a = Exp (h)  b = Sin (h)  c = Tanh (h)  d = Add (a, b)  y = Add (d, c) }"""
    model = graph(text)
    result = cast_graph(model, "fp16", keep_fp32={"exp_1", "sin_2", "tanh_3"}, io_dtype="same")
    saved(model, tmp_path / "m.onnx")
    sources = [node.inputs[0].name for node in ops(model, "Cast")]
    assert sources.count("h") == 1, sources
    assert result.casts == len(sources)


def test_weight_read_in_both_types_is_stored_twice(tmp_path):
    text = """g (float[4] x) => (float[4] y) { a = Mul (x, w)  b = Div (a, w)  y = Sin (b) }"""
    model = graph(text, w=[1.0, 2.0, 3.0, 4.0])
    result = cast_graph(model, "fp16", keep_fp32={"div_1"})
    found = types(saved(model, tmp_path / "m.onnx"))
    assert result.shared == ("w",)
    assert (found["w"], found["w_fp16"]) == ("FLOAT", "FLOAT16")


def test_mask_constants_become_the_lowest_number_and_infinities_stay(tmp_path):
    text = """g (float[4] x, bool[4] m) => (float[4] y) {
      a = Where (m, x, low)  b = Where (m, a, inf)  c = Add (b, eps)  y = Softmax (c) }"""
    weights = {"low": [np.finfo(np.float32).min], "inf": [-np.inf], "eps": [1e-12]}
    model = graph(text, **weights)
    result = cast_graph(model, "fp16")
    path = saved(model, tmp_path / "m.onnx")
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    assert result.clamped == ("low",)
    assert stored["low"] == np.finfo(np.float16).min
    assert np.isneginf(stored["inf"])
    assert stored["eps"] > 0, "an epsilon that becomes zero lets a divisor be zero"


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        # Scales of Resize and the numbers of Range are float32 whatever the rest is.
        (
            """g (float[1, 2, 4, 4] x) => (float[1, 2, 8, 8] y) {
           r = Resize <mode: string = "linear"> (x, , scales)  y = Relu (r) }""",
            {"scales": np.float32([1, 1, 2, 2])},
        ),
        (
            """g (float[4] x) => (float[4] y) {
           r = Range (zero, four, one)  y = Add (x, r) }""",
            {"zero": np.float32(0), "four": np.float32(4), "one": np.float32(1)},
        ),
        (
            """g (float[4] x) => (float[4] y) {
           s = Shape (x)  c = ConstantOfShape <value: tensor = float[1] {2.0}> (s)
           d = ConstantOfShape (s)  e = Add (c, d)  y = Mul (x, e) }""",
            {},
        ),
        (
            """g (float[4] x, int64[4] i) => (float[4] y) {
           f = Cast <to: int = 1> (i)  h = Cast <to: int = 1> (x)  y = Mul (h, f) }""",
            {},
        ),
        (
            """g (float[4] x) => (float[4] y) {
           r = RandomNormalLike <scale: float = 0.000001> (x)  y = Add (x, r) }""",
            {},
        ),
        (
            """g (float[4] x) => (float[4] y) {
           c = Constant <value_float: float = 2.0> ()  m = Greater (x, c)  y = Where (m, x, c) }""",
            {},
        ),
    ],
    ids=["resize", "range", "constant of shape", "cast", "random", "constant"],
)
def test_types_follow_the_schema_of_each_op(tmp_path, text, weights):
    feeds = {"x": RNG.normal(size=(1, 2, 4, 4) if "Resize" in text else 4).astype(np.float32)}
    if "int64[4] i" in text:
        feeds["i"] = np.arange(4)
    model = graph(text, **weights)
    before = run(saved(graph(text, **weights), tmp_path / "fp32.onnx"), **feeds)[0]
    assert cast_graph(model, "fp16").low_nodes > 0
    after = run(saved(model, tmp_path / "m.onnx"), **feeds)[0]
    np.testing.assert_allclose(after, before, rtol=2e-3, atol=2e-3)


def test_redundant_casts_are_removed(tmp_path):
    text = (
        "g (float[4] x) => (float[4] y) { a = Relu (x)  b = Cast <to: int = 1> (a)  y = Exp (b) }"
    )
    model = graph(text)
    cast_graph(model, "fp16", io_dtype="same")
    saved(model, tmp_path / "m.onnx")
    assert ops(model, "Cast") == []


def test_positions_beyond_2048_stay_exact(tmp_path):
    # FP16 represents integers exactly only up to 2048: 2049 would become 2048.
    text = """g (int64[3] i, float[3] x) => (float[3] y, int64[3] j) {
      f = Cast <to: int = 1> (i)  h = Mul (f, one)  j = Cast <to: int = 7> (h)  y = Relu (x) }"""
    model = graph(text, one=np.float32(1))
    result = cast_graph(model, "fp16")
    path = saved(model, tmp_path / "m.onnx")
    positions = np.array([2047, 2049, 4099])
    assert run(path, i=positions, x=np.zeros(3, np.float32))[1].tolist() == positions.tolist()
    assert set(result.kept) == {"cast_0", "mul_1"}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "compare",
    [
        "k = Equal (f, pad)",
        "k = Greater (f, pad)",
        "d = Sub (f, pad)  k = Cast <to: int = 9> (d)",
        "d = Sub (f, pad)  a = Abs (d)  k = Less (a, half)",
        "d = Div (f, three)  n = Floor (d)  r = Sub (d, n)  k = Cast <to: int = 9> (r)",
        "m = Mod <fmod: int = 1> (f, three)  k = Cast <to: int = 9> (m)",
        "m = ReduceMax (f)  k = Less (f, m)",
        "w = Where (t, f, half)  k = Equal (w, pad)",
        """k = If (t) <
          then_branch = a () => (bool[n] ka) { d = Sub (f, pad)  ka = Cast <to: int = 9> (d) },
          else_branch = b () => (bool[n] kb) { kb = Equal (f, pad) }>""",
    ],
)
def test_integers_are_compared_exactly(tmp_path, compare, precision):
    """Also if the same integers are data elsewhere."""
    text = f"""g (int64[n] i, float[n] x) => (bool[n] k, float[n] y) {{
      f = Cast <to: int = 1> (i)  {compare}
      s = Mul (f, small)  y = Mul (x, s) }}"""
    constants = {"pad": 5001, "half": 0.5, "three": 3, "small": 1e-4}
    weights = {name: np.float32(value) for name, value in constants.items()}
    weights["t"] = np.bool_(True)
    ids = np.array([4999, 5000, 5001, 5002, 5003])
    before = graph(text, **weights)
    model = graph(text, **weights)
    result = cast_graph(model, precision)
    assert any("compared" in reason for reason in result.kept.values())
    if precision == "bf16":  # which the CPU does not run
        return
    x = np.ones(5, np.float32)
    expected, found = (
        run(saved(m, tmp_path / f"{index}.onnx"), i=ids, x=x)[0]
        for index, m in enumerate((before, model))
    )
    assert found.tolist() == expected.tolist()
    assert len({*found.tolist()}) == 2


@pytest.mark.parametrize(
    "text",
    [
        """(int64[n] mask) => (bool[n] k) {
          f = Cast <to: int = 1> (mask)  k = Equal (f, pad) }""",
        """(int64[n] i) => (bool[n] k) {
          m = Mod (i, seven)  f = Cast <to: int = 1> (m)  k = Equal (f, pad) }""",
        """(bool[n] i) => (bool[n] k) {
          f = Cast <to: int = 1> (i)  d = Sub (pad, f)  k = Cast <to: int = 9> (d) }""",
    ],
)
def test_small_integers_are_exact_in_fp16(text):
    model = graph(f"g {text}", pad=np.float32(1), seven=np.int64(7))
    infer_types(model)
    assert find_position_nodes(model.graph) == {}


def test_data_that_become_integers_are_no_positions():
    text = """g (float[n] x) => (int64[n] y) {
      h = Mul (x, x)  y = Cast <to: int = 7> (h) }"""
    model = graph(text)
    infer_types(model)
    assert find_position_nodes(model.graph) == {}


def test_angles_of_positions_stay_fp32(tmp_path):
    text = """g (int64[n] i, float[n] x) => (float[n] y) {
      f = Cast <to: int = 1> (i)  a = Mul (f, rate)  s = Sin (a)  y = Mul (x, s) }"""
    weights = {"rate": np.float32(0.7)}
    positions, x = np.arange(400, 500), np.ones(100, np.float32)
    model = graph(text, **weights)
    cast_graph(model, "fp16")
    before = run(saved(graph(text, **weights), tmp_path / "a.onnx"), i=positions, x=x)[0]
    after = run(saved(model, tmp_path / "b.onnx"), i=positions, x=x)[0]
    np.testing.assert_allclose(after, before, atol=1e-3)


def test_points_in_an_image_stay_fp32(tmp_path):
    # Beyond 512 pixels FP16 has steps of half a pixel: of 700.3 and 700.4 it makes one number.
    text = """g (float[b, 2] input_points, float[b, 2] x) => (float[b, 2] y) {
      shape = Shape (input_points)  zeros = Expand (zero, shape)  p = Add (input_points, zeros)
      size = Shape (p)  r = Reshape (p, size)  a = Mul (r, rate)  s = Sin (a)  y = Mul (x, s) }"""
    weights = {"rate": np.float32(3), "zero": np.float32(0)}
    points, x = np.float32([[700.3, 12.7], [700.4, 999.9]]), np.ones((2, 2), np.float32)
    model = graph(text, **weights)
    cast_graph(model, "fp16")
    before = run(saved(graph(text, **weights), tmp_path / "a.onnx"), input_points=points, x=x)[0]
    after = run(saved(model, tmp_path / "b.onnx"), input_points=points, x=x)[0]
    np.testing.assert_allclose(after, before, atol=1e-3)


def test_quantized_graph_keeps_int8_and_gets_fp16_scales(tmp_path):
    text = """g (float[2, 4] x) => (float[2, 4] y) {
      q = QuantizeLinear (x, sx, zero)  d = DequantizeLinear (q, sx, zero)
      w = DequantizeLinear <axis: int = 1> (wq, sw)  y = MatMul (d, w) }"""
    weights = {
        "sx": np.float32(0.02),
        "zero": np.int8(0),
        "wq": RNG.integers(-127, 128, (4, 4), np.int8),
        "sw": np.full(4, 0.01, np.float32),
    }
    model = graph(text, **weights)
    cast_graph(model, "fp16")
    path = saved(model, tmp_path / "m.onnx")
    found = types(path)
    assert (found["sx"], found["sw"], found["wq"], found["w"]) == (
        "FLOAT16",
        "FLOAT16",
        "INT8",
        "FLOAT16",
    )
    before = run(saved(graph(text, **weights), tmp_path / "fp32.onnx"), x=X)[0]
    np.testing.assert_allclose(run(path, x=X)[0], before, rtol=2e-2, atol=2e-2)
    old = graph(text, opset=18, **weights)
    result = cast_graph(old, "fp16")
    assert types(saved(old, tmp_path / "old.onnx"))["sx"] == "FLOAT"
    assert any("QuantizeLinear has no float16" in reason for reason in result.kept.values())


def test_branches_of_an_if_are_cast_and_their_outputs_stay_fp32(tmp_path):
    text = """g (float[4] x, bool c) => (float[4] y) {
      h = Exp (x)
      y = If (c) <
        then_branch = t () => (float[4] a) { b = Mul (h, w)  a = Tanh (b) },
        else_branch = e () => (float[4] d) { d = Identity (h) }
      > }"""
    weights = {"w": [1.0, 2.0, 3.0, 4.0]}
    model = graph(text, **weights)
    assert cast_graph(model, "fp16").low_nodes >= 3
    path = saved(model, tmp_path / "m.onnx")
    reference = saved(graph(text, **weights), tmp_path / "fp32.onnx")
    for flag in (True, False):
        feeds = {"x": np.float32([-1, 0, 1, 2]), "c": np.array(flag)}
        np.testing.assert_allclose(run(path, **feeds)[0], run(reference, **feeds)[0], rtol=2e-3)
    assert types(path)["w"] == "FLOAT16"


def test_bf16_raises_the_opset_to_22(tmp_path):
    text = "g (float[1, 2, 4, 4] x) => (float[1, 3, 4, 4] y) { y = Conv (x, w) }"
    model = graph(text, w=RNG.normal(size=(3, 2, 1, 1)))
    cast_graph(model, "bf16")
    assert types(saved(model, tmp_path / "m.onnx"))["w"] == "BFLOAT16"
    assert model.opset_imports[""] == 22


def test_unknown_precision_is_an_option_error():
    with pytest.raises(OptionError, match="expected fp16 or bf16"):
        cast_graph(linear(), "int8")


def test_agrees_with_onnx_runtimes_own_converter_on_bert(exported, tmp_path):
    from onnxruntime.transformers.float16 import convert_float_to_float16

    from enginery.core.model.feeds import FeedLimits, make_feeds
    from enginery.passes.ir.graph_file import read_graph

    artifact = exported("bert", "text-classification")
    model = read_graph(artifact.model)
    cast_graph(model, "fp16")
    mine = saved(model, tmp_path / "mine.onnx")
    theirs = convert_float_to_float16(onnx.load(artifact.model), keep_io_types=True)
    onnx.save(theirs, tmp_path / "theirs.onnx")
    limits = FeedLimits.from_artifact(artifact)
    inputs = artifact.manifest.graphs[0].inputs
    feeds = make_feeds(inputs, {"batch": 3, "sequence": 12}, limits, seed=0, ragged=True)
    reference = run(artifact.model, **feeds)[0]
    error = np.abs(run(mine, **feeds)[0] - reference).max()
    other = np.abs(run(tmp_path / "theirs.onnx", **feeds)[0] - reference).max()
    assert error <= 2 * other + 1e-3
    assert len(ops(model, "Cast")) <= sum(n.op_type == "Cast" for n in theirs.graph.node)
