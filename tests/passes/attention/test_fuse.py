"""Attention as exporters write it becomes one operator, which computes the same at any size."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from enginery.passes.attention.fuse import fuse_attention
from enginery.passes.ir.graph_file import check_graph, write_graph
from tests.passes.graphs import graph, ops

LOWEST = float(np.finfo(np.float32).min)
CONSTANTS = {
    "split": np.array([0, 0, 4, 8]),
    "merge": np.array([0, 0, 32]),
    "scale": 0.35,
    "root": 0.35**0.5,
    "width": 8**0.5,
    "zero": 0.0,
    "lowest": LOWEST,
    "infinite": -np.inf,
}
SCORES = "p0 = MatMul (qh, kt)  p1 = Mul (p0, scale)"
INPUTS = "float[b, s, 32] q, float[b, t, 32] k, float[b, t, 32] v"
MASK = ", bool[b, 1, s, t] seen"
HEADS = """
  q1 = Reshape (q, split)  qh = Transpose <perm = [0, 2, 1, 3]> (q1)
  k1 = Reshape (k, split)  kt = Transpose <perm = [0, 2, 3, 1]> (k1)
  v1 = Reshape (v, split)  vh = Transpose <perm = [0, 2, 1, 3]> (v1)"""
MERGE = "c1 = Transpose <perm = [0, 2, 1, 3]> (c)  c2 = Reshape (c1, merge)  y = Neg (c2)"
SIZES = ((1, 1, 5), (2, 7, 7), (3, 4, 9))


def attention(scores, inputs="", *, heads=HEADS, merge=MERGE, opset=20, **constants):
    """Return the model of one attention, from `qh` and `kt` by `scores` to probabilities `p`."""
    nodes = f"{heads} {scores} c = MatMul (p, vh) {merge}"
    text = f"g ({INPUTS}{inputs}) => (float[b, s, 32] y) {{ {nodes} }}"
    used = {name: value for name, value in {**CONSTANTS, **constants}.items() if name in text}
    return graph(text, opset=opset, **used)


def feeds_of(model, sizes, *, seed):
    random = np.random.default_rng(seed)
    named = dict(zip("bst", sizes, strict=True))
    feeds = {}
    for value in model.graph.inputs:
        shape = [dim if isinstance(dim, int) else named[dim.value] for dim in value.shape]
        if value.dtype == ir.DataType.BOOL:
            seen = random.random(shape) > 0.4
            seen[..., 0] = True
            seen[-1, :, -1] = False  # a row of which all is masked
            feeds[value.name] = seen
        else:
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


def run(model, feeds):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def fused_and_compared(model, target, tmp_path, sizes=SIZES):
    """Fuse, compare the outputs for all sizes, and return the counts of fused operators."""
    before = model.clone()
    counts = fuse_attention(model, target)
    write_graph(model.clone(), tmp_path / "model.onnx")
    check_graph(tmp_path / "model.onnx")
    for seed, size in enumerate(sizes):
        feeds = feeds_of(before, size, seed=seed)
        for expected, actual in zip(run(before, feeds), run(model, feeds), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)
    return counts


ADDED = "m = Where (seen, zero, {}) p2 = Add (p1, m)"
ZEROED = "p3 = Softmax <axis = -1> (p2) n = IsNaN (p3) p = Where (n, zero, p3)"
SCALES = {
    "scaled after": f"{SCORES} p = Softmax <axis = -1> (p1)",
    "divided after": "p0 = MatMul (qh, kt) p1 = Div (p0, width) p = Softmax <axis = -1> (p1)",
    "scaled on both sides": "q2 = Mul (qh, root) k2 = Mul (root, kt) p1 = MatMul (q2, k2)"
    " p = Softmax <axis = 3> (p1)",
    "scaled by the size": """
      shape = Shape (qh) last = Constant <value_ints = [3]> () size = Gather (shape, last)
      number = Cast <to = 1> (size) r = Sqrt (number) p0 = MatMul (qh, kt) p1 = Div (p0, r)
      p = Softmax <axis = -1> (p1)""",
    "not scaled": "p1 = MatMul (qh, kt) p = Softmax <axis = -1> (p1)",
}
MASKS = {
    "lowest number": f"{SCORES} {ADDED.format('lowest')} p = Softmax <axis = -1> (p2)",
    "infinity, zeroed": f"{SCORES} {ADDED.format('infinite')} {ZEROED}",
    "lowest number, zeroed": f"{SCORES} {ADDED.format('lowest')} {ZEROED}",
    "chosen": f"{SCORES} p2 = Where (seen, p1, lowest) p = Softmax <axis = -1> (p2)",
    "chosen, inverted": f"{SCORES} hidden = Not (seen) p2 = Where (hidden, infinite, p1) {ZEROED}",
    "computed": f"""{SCORES} f = Cast <to = 1> (seen) one = Constant <value_float = 1.0> ()
      g = Sub (one, f) m = Mul (g, lowest) p2 = Add (m, p1) p = Softmax <axis = -1> (p2)""",
}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("scores", SCALES.values(), ids=SCALES)
def test_scales(scores, target, tmp_path):
    model = attention(scores)
    # On the CPU, MultiHeadAttention does not hold the scores as a whole if it has no bias.
    assert fused_and_compared(model, target, tmp_path) == {"MultiHeadAttention": 1}
    assert Counter(node.op_type for node in model.graph) == {"MultiHeadAttention": 1, "Neg": 1}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("scores", MASKS.values(), ids=MASKS)
def test_masks_and_rows_that_see_nothing(scores, target, tmp_path):
    model = attention(scores, MASK)
    operator = {"cpu": "Attention", "cuda": "MultiHeadAttention"}[target]
    assert fused_and_compared(model, target, tmp_path) == {operator: 1}
    assert not ops(model, "Softmax")
    assert model.opset_imports[""] == {"cpu": 23, "cuda": 20}[target]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_mask_by_key_is_repeated_for_all_queries(target, tmp_path):
    scores = f"{SCORES} {ADDED.format('lowest')} p = Softmax <axis = -1> (p2)"
    fused_and_compared(attention(scores, ", bool[b, 1, 1, t] seen"), target, tmp_path)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_bias_by_head_and_a_mask_are_added_once_for_two_layers(target, tmp_path):
    layer = """m{0} = Add (p{0}, bias) n{0} = Add (m{0}, mask) o{0} = Softmax <axis = -1> (n{0})"""
    scores = f"""p0 = MatMul (qh, kt) {layer.format(0)} d = MatMul (o0, vh)
      p1 = MatMul (d, kt) {layer.format(1)} p = Identity (o1)"""
    model = attention(scores, ", float[1, 4, s, t] bias, float[b, 1, s, t] mask")
    counts = fused_and_compared(model, target, tmp_path)
    assert counts.total() == 2
    assert len(ops(model, "Add")) == 1


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_mask_by_window_is_repeated_for_all_images(target, tmp_path):
    scores = f"""{SCORES} p2 = Add (p1, bias) p3 = Reshape (p2, windows) p4 = Add (p3, mask)
      p5 = Reshape (p4, rows) p = Softmax <axis = -1> (p5)"""
    random = np.random.default_rng(0)
    model = attention(
        scores,
        windows=np.array([-1, 2, 4, 6, 6]),
        rows=np.array([-1, 4, 6, 6]),
        bias=random.standard_normal((1, 4, 6, 6)),
        mask=np.where(random.random((1, 2, 1, 6, 6)) > 0.5, 0.0, -100.0),
    )
    fused_and_compared(model, target, tmp_path, sizes=((2, 6, 6), (6, 6, 6)))


REPEATED = """
  s{0} = Slice ({0}, from, to, last) a{0} = Reshape (s{0}, pair)
  b{0} = Transpose <perm = [0, 2, 1, 3]> (a{0}) u{0} = Unsqueeze (b{0}, axis)
  z{0} = Shape (b{0}) zb{0} = Gather (z{0}, first) zl{0} = Gather (z{0}, third)
  e{0} = Concat <axis = 0> (zb{0}, two, two, zl{0}, eight) x{0} = Expand (u{0}, e{0})
  r{0} = Concat <axis = 0> (zb{0}, four, zl{0}, eight) {0}h = Reshape (x{0}, r{0})"""
GROUPED = f"""
  q1 = Reshape (q, split)  qh = Transpose <perm = [0, 2, 1, 3]> (q1)
  {REPEATED.format("k")} kt = Transpose <perm = [0, 1, 3, 2]> (kh) {REPEATED.format("v")}"""


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_shared_heads(target, tmp_path):
    single = {"from": 0, "to": 16, "last": 2, "axis": 2, "first": 0, "third": 2}
    single |= {"two": 2, "four": 4, "eight": 8}
    model = attention(
        f"{SCORES} p = Softmax <axis = -1> (p1)",
        heads=GROUPED,
        pair=np.array([0, 0, 2, 8]),
        **{name: np.array([number]) for name, number in single.items()},
    )
    fused_and_compared(model, target, tmp_path)
    # The CPU's operator repeats them by itself.
    assert len(ops(model, "Expand")) == {"cpu": 0, "cuda": 2}[target]


TRANSPOSED = HEADS.replace("kt = Transpose <perm = [0, 2, 3, 1]> (k1)", "{}")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_keys_may_be_transposed_in_three_dims(target, tmp_path):
    """PyTorch's exporter reshapes keys to (batch * heads, positions, head_dim) for it."""
    steps = """k2 = Transpose <perm = [0, 2, 1, 3]> (k1) ks = Shape (k2) kl = Gather (ks, third)
      kb = Gather (ks, first) kj = Concat <axis = 0> (open, kl, eight) k3 = Reshape (k2, kj)
      k4 = Transpose <perm = [0, 2, 1]> (k3) kr = Concat <axis = 0> (kb, four, eight, kl)
      kt = Reshape (k4, kr)"""
    single = {"first": 0, "third": 2, "open": -1, "four": 4, "eight": 8}
    model = attention(
        f"{SCORES} p = Softmax <axis = -1> (p1)",
        heads=TRANSPOSED.format(steps),
        **{name: np.array([number]) for name, number in single.items()},
    )
    assert fused_and_compared(model, target, tmp_path).total() == 1
    assert not ops(model, "Transpose")


ROWS = """q1 = Mul (q, scale)  {keys}  p0 = MatMul (q1, kt)  {masked}
  p = Softmax <axis = 2> (p0m)  c = MatMul (p, v)  y = Neg (c)"""
ROWS_MASKED = "m = Where (seen, zero, lowest) p0m = Add (m, p0)"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("keys", "masked", "inputs"),
    [
        ("kt = Transpose <perm = [0, 2, 1]> (k)", "p0m = Identity (p0)", ""),
        (
            "k1 = Transpose <perm = [1, 0, 2]> (k) kt = Transpose <perm = [1, 2, 0]> (k1)",
            ROWS_MASKED,
            ", bool[b, s, t] seen",
        ),
        ("kt = Transpose <perm = [0, 2, 1]> (k)", ROWS_MASKED, ", bool[1, s, t] seen"),
    ],
)
def test_heads_may_be_rows_of_the_batch(keys, masked, inputs, target, tmp_path):
    """`torch.nn.MultiheadAttention` computes (batch * heads, positions, head_dim)."""
    nodes = ROWS.format(keys=keys, masked=masked)
    constants = {name: CONSTANTS[name] for name in ("scale", "zero", "lowest") if name in nodes}
    model = graph(f"g ({INPUTS}{inputs}) => (float[b, s, 32] y) {{ {nodes} }}", **constants)
    assert fused_and_compared(model, target, tmp_path).total() == 1
    assert not ops(model, "Softmax")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_queries_of_other_origin_keep_their_layout(target, tmp_path):
    """Rotary embeddings and caches leave (batch, heads, positions, head_dim)."""
    heads = HEADS.replace("qh = Transpose", "q2 = Transpose").replace(
        "vh = Transpose <perm = [0, 2, 1, 3]> (v1)",
        "v2 = Transpose <perm = [0, 2, 1, 3]> (v1) vh = Concat <axis = 2> (past, v2)"
        " qh = Add (q2, q2) k2 = Transpose <perm = [0, 1, 3, 2]> (kt)"
        " k3 = Concat <axis = 2> (past, k2) ku = Transpose <perm = [0, 1, 3, 2]> (k3)",
    )
    scores = f"{SCORES} p = Softmax <axis = -1> (p1)".replace("kt", "ku")
    model = attention(scores, ", float[b, 4, s, 8] past", heads=heads)
    operator = {"cpu": "Attention", "cuda": "MultiHeadAttention"}[target]
    assert fused_and_compared(model, target, tmp_path) == {operator: 1}


def test_a_result_that_is_read_by_head_is_transposed_back(tmp_path):
    model = attention(f"{SCORES} p = Softmax <axis = -1> (p1)", merge="y = ReduceSum (c, axis)")
    model.graph.outputs[0].shape = None
    model.graph.initializers.add(initializer("axis", [1]))
    next(node for node in model.graph if node.op_type == "ReduceSum").replace_input_with(
        1, model.graph.initializers["axis"]
    )
    fused_and_compared(model, "cuda", tmp_path)


def initializer(name, numbers):
    return ir.Value(name=name, const_value=ir.tensor(np.array(numbers), name=name))


UNFUSED = {
    "another axis": f"{SCORES} p = Softmax <axis = -2> (p1)",
    "scores read elsewhere": f"{SCORES} p2 = Softmax <axis = -1> (p1) x = ReduceMax (p1)"
    " p = Mul (p2, x)",
    "a cap": f"{SCORES} p2 = Tanh (p1) p = Softmax <axis = -1> (p2)",
    "a bias that is scaled": f"{SCORES} p2 = Add (p1, zero) p3 = Mul (p2, scale)"
    " p = Softmax <axis = -1> (p3)",
    "a mask that is not far below": f"{SCORES} p2 = Where (seen, p1, width)"
    " p = Softmax <axis = -1> (p2)",
}


@pytest.mark.parametrize("scores", UNFUSED.values(), ids=UNFUSED)
def test_what_the_operators_do_not_compute_stays(scores):
    model = attention(scores, MASK)
    before = [node.op_type for node in model.graph]
    assert not fuse_attention(model, "cpu")
    assert [node.op_type for node in model.graph] == before


@pytest.mark.parametrize("opset", [13, 17])
def test_an_early_opset_is_kept(opset, tmp_path):
    scores = f"{SCORES} {ADDED.format('infinite')} {ZEROED}"
    model = attention(scores, MASK, opset=opset)
    assert fused_and_compared(model, "cpu", tmp_path) == {"MultiHeadAttention": 1}
    assert model.opset_imports[""] == opset


def test_the_node_is_named_after_the_product_with_values():
    model = attention(f"{SCORES} p = Softmax <axis = -1> (p1)")
    (product,) = [node.name for node in ops(model, "MatMul")][1:]
    fuse_attention(model, "cuda")
    assert [node.name for node in ops(model, "MultiHeadAttention")] == [product]
