"""Residual additions after convolutions read a quantized activation in INT8."""

import onnx_ir as ir
import pytest

from enginery.passes.qdq.insert import insert_qdq, quantize_residuals
from enginery.passes.qdq.layers import find_layers
from enginery.passes.qdq.scales import ActivationQuantParams

GRAPH = """<ir_version: 10, opset_import: ["" : 20]>
g (float[1, 16, 4, 4] x, float[1, 16, 4, 4] other) => (float[1, 16, 4, 4] y)
  <float[16, 16, 1, 1] w = {WEIGHTS}> {
    NODES
}""".replace("WEIGHTS", ", ".join(["0.1"] * 256))
BLOCK = "[first] a = Conv(x, w)\n [relu] b = Relu(a)\n [second] c = Conv(b, w)\n"


def quantized(nodes, *names):
    """Return the graph with these layers in INT8, and the additions that read INT8."""
    model = ir.from_onnx_text(GRAPH.replace("NODES", nodes))
    layers = [layer for layer in find_layers(model) if layer.name in names]
    ranges = {layer.activation: ActivationQuantParams(scale=0.05) for layer in layers}
    insert_qdq(model, layers, ranges)
    return model, quantize_residuals(model)


def test_addition_reads_what_the_first_convolution_reads():
    model, found = quantized(BLOCK + "[add] y = Add(c, x)", "first", "second")
    assert found == ["add"]
    made = {node.name: node for node in model.graph}
    assert made["add"].inputs[1].producer() is made["first"].inputs[0].producer()
    assert made["add"].inputs[1].producer().op_type == "DequantizeLinear"
    assert made["add"].inputs[0].producer() is made["second"]


def test_activation_function_may_be_between():
    silu = "[s] s = Sigmoid(c)\n [silu] m = Mul(c, s)\n [add] y = Add(x, m)"
    assert quantized(BLOCK + silu, "first", "second")[1] == ["add"]


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        (BLOCK + "[add] y = Add(c, other)", ("first", "second")),
        (BLOCK + "[add] y = Add(c, x)", ("second",)),
        (BLOCK + "[mul] m = Mul(c, other)\n [add] y = Add(m, x)", ("first", "second")),
        (
            "[before] d = Conv(other, w)\n [add] e = Add(d, x)\n [layer] f = Conv(x, w)\n"
            "y = Mul(e, f)",
            ("layer",),
        ),
    ],
    ids=["not quantized", "first layer in FP32", "gated", "before the layer"],
)
def test_other_additions_stay(nodes, names):
    assert quantized(nodes, *names)[1] == []
