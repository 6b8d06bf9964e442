"""Rows of an attention that see no position."""

import numpy as np
import onnx_ir as ir
import pytest

from enginery.passes.generation.unattended import keep_unattended_rows
from enginery.passes.ir.graph_file import write_graph
from tests.passes.generation.test_last_position import run

GRAPH = """<ir_version: 9, opset_import: ["" : 20]>
g (bool[b, 1, s, t] visible, float[b, 1, s, t] scores, float[b, 1, t, 3] v,
   float[1, 1, s, t] bias) => (float[b, 1, s, 3] y) <
  float lowest = {LOWEST}, float one = {1}, float zero = {ZERO}, int64[1] axis = {-1}
> {
  MASK
  shown = Cast <to = 1> (SEEN)
  count = ReduceSum (shown, axis)
  none = Less (count, one)
  masked = Add (scores, mask)
  weights = Softmax <axis = -1> (masked)
  context = MatMul (weights, v)
  y = Where (none, zero, context)
}"""
PRODUCT = "hidden = Not (visible)  unseen = Cast <to = 1> (hidden)  mask = Mul (unseen, lowest)"
CHOICE = "mask = Where (visible, bias, lowest)  seen = Greater (mask, lowest)"


def graph(mask, *, lowest="-3.0e38", zero="0"):
    seen = "seen" if mask is CHOICE else "visible"
    text = GRAPH.replace("MASK", mask).replace("SEEN", seen)
    return ir.from_onnx_text(text.replace("LOWEST", lowest).replace("ZERO", zero))


@pytest.mark.parametrize("mask", [PRODUCT, CHOICE])
def test_rows_that_see_a_position_stay_as_they_are(tmp_path, mask):
    model = graph(mask)
    write_graph(model, tmp_path / "before.onnx")
    assert keep_unattended_rows(model) == 1
    assert not any(node.op_type == "ReduceSum" for node in model.graph)
    write_graph(model, tmp_path / "after.onnx")
    numbers = np.random.default_rng(0)
    visible = np.tril(np.ones((4, 6), bool))[None, None].repeat(2, axis=0)
    visible[0, 0, 1] = False
    feeds = {
        "visible": visible,
        "scores": numbers.normal(size=(2, 1, 4, 6)).astype(np.float32),
        "v": numbers.normal(size=(2, 1, 6, 3)).astype(np.float32),
        "bias": numbers.normal(size=(1, 1, 4, 6)).astype(np.float32),
    }
    before, after = (run(tmp_path / f"{name}.onnx", feeds)["y"] for name in ("before", "after"))
    seen = visible.any(axis=-1)
    np.testing.assert_allclose(after[seen], before[seen], atol=1e-6)
    # As in PyTorch's eager attention.
    np.testing.assert_allclose(after[0, 0, 1], feeds["v"][0, 0].mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("options", [{"lowest": "-inf"}, {"zero": "2"}])
def test_others_are_left_alone(options):
    assert keep_unattended_rows(graph(CHOICE, **options)) == 0
