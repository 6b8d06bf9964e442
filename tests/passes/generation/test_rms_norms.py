"""RMS normalizations of a decoder become one node each, with the sum before them."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from enginery.passes.generation.rms_norms import fuse_norms, fuse_residuals
from enginery.passes.ir.builder import Builder
from enginery.passes.ir.nodes import infer_types

NORM = """<ir_version: 9, opset_import: ["" : 18]>
g (float[b, s, 4] x, float[b, s, 4] y) => (float[b, s, 4] z, float[b, s, 4] sum)
<float[4] w = {1, 2, 3, 4}, float two = {2}, float epsilon = {0.01}, int64[1] axis = {AXIS}> {
  sum = Add (x, y)  square = Pow (sum, two)  mean = ReduceMean (square, axis)
  shifted = Add (mean, epsilon)  root = Sqrt (shifted)  ratio = Div (sum, root)
  scaled = Mul (w, ratio)  z = Neg (scaled)
}"""


def run(model):
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, 3, 4)).astype(np.float32) for name in "xy"}
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(["z", "sum"], feeds)


def test_a_norm_and_its_sum_are_one_node_with_the_same_results():
    model = ir.from_onnx_text(NORM.replace("AXIS", "-1"))
    infer_types(model)
    names = {node.op_type: node.name for node in model.graph}
    expected = run(model)
    build = Builder(model, "fused")
    assert (fuse_norms(model, build), fuse_residuals(model, build)) == (1, 1)
    assert [node.op_type for node in model.graph] == ["SkipSimplifiedLayerNormalization", "Neg"]
    for found, wanted in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    # What a cast keeps of the old nodes in FP32, it has to keep of the new one.
    (origins,) = (build.origins[node.name] for node in model.graph if node.name in build.origins)
    assert {names["Pow"], names["Div"], names["Sqrt"]} < origins


@pytest.mark.parametrize(
    "text",
    [NORM.replace("AXIS", "1"), NORM.replace("AXIS", "-1").replace("two = {2}", "two = {3}")],
)
def test_other_norms_stay(text):
    model = ir.from_onnx_text(text)
    infer_types(model)
    assert fuse_norms(model, Builder(model, "fused")) == 0
