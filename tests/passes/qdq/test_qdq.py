from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, checker, load

from enginery.passes.qdq.insert import insert_qdq
from enginery.passes.qdq.layers import find_layers
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.passes.qdq.scheme import INT8
from enginery.runtime.onnxruntime.session import use_exact_int8
from tests.passes.onnx_graphs import make_graph, node

K, N = 32, 48
GENERATOR = np.random.default_rng(0)
WEIGHT = GENERATOR.normal(size=(K, N)).astype(np.float32)
BIAS = GENERATOR.normal(size=N).astype(np.float32)
ROWS = GENERATOR.normal(size=(5, K)).astype(np.float32)


def model(nodes, initializers, outputs=("y",), shape=("batch", K)):
    floats = dict.fromkeys(outputs, (TensorProto.FLOAT, [None] * len(shape)))
    inputs = {"x": (TensorProto.FLOAT, shape)}
    return ir.from_proto(make_graph(nodes, initializers, inputs=inputs, outputs=floats))


def linear(op="MatMul", *, weight=WEIGHT):
    if op == "Gemm":
        nodes = [node("Gemm", "x w b", "y", name="layer")]
    else:
        nodes = [node("MatMul", "x w", "p", name="layer"), node("Add", "p b", "y", name="bias")]
    return model(nodes, {"w": weight, "b": BIAS})


def run(graph, rows=ROWS):
    proto = ir.to_proto(graph)
    checker.check_model(proto, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    use_exact_int8(options)
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": rows})


def relative_error(mine, theirs):
    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


def quantize(graph, ready=None, **options):
    layers = [layer for layer in find_layers(graph) if not layer.skip_reason]
    ready = ready or ActivationQuantParams(float(np.abs(ROWS).max() / 127))
    return insert_qdq(graph, layers, {layer.activation: ready for layer in layers}, **options)


def ops(graph):
    return [node.op_type for node in graph.graph]


def by_name(graph):
    return {node.name: node for node in graph.graph}


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_int8_layer_is_close_to_fp32(op):
    graph = linear(op)
    quantize(graph)
    assert relative_error(run(graph)[0], ROWS @ WEIGHT + BIAS) < 0.02
    assert ops(graph).count("QuantizeLinear") == 1
    assert ops(graph).count("DequantizeLinear") == 2


def test_zero_points_are_zero_and_weights_are_int8_for_each_channel():
    graph = linear()
    quantize(graph)
    stored = graph.graph.initializers
    weight = stored["layer/weight"].const_value
    assert weight.dtype == ir.DataType.INT8
    assert weight.numpy().min() >= -127
    assert stored["layer/weight_scale"].const_value.shape == (N,)
    for name, value in stored.items():
        if name.endswith("zero_point"):
            assert not value.const_value.numpy().any()


def test_neither_bias_nor_output_is_quantized():
    graph = linear()
    quantize(graph)
    nodes = by_name(graph)
    assert nodes["bias"].inputs[0] is nodes["layer"].outputs[0]
    assert nodes["bias"].inputs[1].const_value.dtype == ir.DataType.FLOAT


def test_scales_survive_a_cast_to_fp16():
    graph = linear(weight=np.where(np.arange(N) == 3, 0, WEIGHT).astype(np.float32))
    quantize(graph, ActivationQuantParams(0.0123456789))
    for name, value in graph.graph.initializers.items():
        if name.endswith("scale"):
            scale = value.const_value.numpy()
            assert (scale > 0).all()
            np.testing.assert_array_equal(scale, scale.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_scaling_and_shifting_channels_only_changes_rounding(op):
    # One channel a hundred times as large, and all of them far from zero.
    rows = ROWS * np.where(np.arange(K) == 7, 100, 1).astype(np.float32) + 5
    exact = rows @ WEIGHT + BIAS
    multiplier = np.where(np.arange(K) == 7, 0.01, 1).astype(np.float32)
    offset = (-5 * multiplier).astype(np.float32)
    inner = np.abs(rows * multiplier + offset).max()
    plain, smoothed = linear(op), linear(op)
    quantize(plain, ActivationQuantParams(float(np.abs(rows).max() / 127)))
    done = quantize(smoothed, ActivationQuantParams(float(inner / 127), multiplier, offset))
    assert done.smoothed == 1
    error = relative_error(run(smoothed, rows)[0], exact)
    assert error < 0.02
    assert error < relative_error(run(plain, rows)[0], exact)


def test_an_offset_without_a_bias_adds_one_and_keeps_the_outputs_name():
    graph = model([node("MatMul", "x w", "y", name="layer")], {"w": WEIGHT})
    offset = np.full(K, -1, np.float32)
    quantize(graph, ActivationQuantParams(4 / 127, None, offset))
    assert [value.name for value in graph.graph.outputs] == ["y"]
    assert relative_error(run(graph)[0], ROWS @ WEIGHT) < 0.03


def test_bias_deltas_are_added():
    graph = linear()
    quantize(graph, bias_deltas={"layer": np.full(N, 10, np.float32)})
    assert relative_error(run(graph)[0], ROWS @ WEIGHT + BIAS + 10) < 0.02


@pytest.mark.parametrize("kernel", [(3,), (3, 3)])
@pytest.mark.parametrize("bias", ["none", "constant", "computed"])
def test_bias_deltas_of_a_convolution_become_its_bias(kernel, bias):
    weight = GENERATOR.normal(size=(N, K, *kernel)).astype(np.float32)
    nodes = [node("Conv", "x w", "y", name="layer")]
    if bias == "constant":
        nodes[0].input.append("b")
    elif bias == "computed":
        nodes.insert(0, node("Abs", "b", "computed", name="abs"))
        nodes[1].input.append("computed")
    images = GENERATOR.normal(size=(2, K, *(5 for _ in kernel))).astype(np.float32)
    delta = GENERATOR.normal(size=N).astype(np.float32)
    shape = ("batch", K, *(5 for _ in kernel))
    plain, corrected = (model(nodes, {"w": weight, "b": BIAS}, shape=shape) for _ in range(2))
    quantize(plain)
    quantize(corrected, bias_deltas={"layer": delta})
    assert "Add" not in [node.op_type for node in corrected.graph if node.name != "layer/add_bias"]
    assert all(len(node.inputs) == 3 for node in corrected.graph if node.op_type == "Conv")
    difference = run(corrected, images)[0] - run(plain, images)[0]
    expected = np.broadcast_to(delta.reshape(-1, *(1 for _ in kernel)), difference.shape)
    np.testing.assert_allclose(difference, expected, atol=1e-4)


def test_layers_that_share_an_activation_share_its_quantization():
    nodes = [node("MatMul", "x w", "y", name="query"), node("MatMul", "x v", "z", name="key")]
    graph = model(nodes, {"w": WEIGHT, "v": WEIGHT[:, ::-1].copy()}, outputs=("y", "z"))
    done = quantize(graph)
    assert (done.layers, done.activations) == (2, 1)
    assert ops(graph).count("QuantizeLinear") == 1


def test_shared_bias_is_changed_for_one_layer_only():
    nodes = [node("Gemm", "x w b", "y", name="one"), node("Gemm", "x w b", "z", name="two")]
    graph = model(nodes, {"w": WEIGHT, "b": BIAS}, outputs=("y", "z"))
    quantize(graph, bias_deltas={"one": np.full(N, 10, np.float32)})
    first, second = run(graph)
    np.testing.assert_allclose(first - second, 10, rtol=1e-4)


def test_split_product_has_one_weight_scale_and_channel_factors_on_its_output():
    uneven = (WEIGHT * np.geomspace(0.1, 10, N)).astype(np.float32)
    nodes = [
        node("Gemm", "x w b", "p", name="layer"),
        node("Split", "p", "q k v", name="split", axis=1, num_outputs=3),
    ]
    graph = model(nodes, {"w": uneven, "b": BIAS}, outputs=("q", "k", "v"))
    quantize(graph)
    assert graph.graph.initializers["layer/weight_scale"].const_value.shape == ()
    found = np.concatenate(run(graph), axis=1)
    exact = ROWS @ uneven + BIAS
    # The smallest channel is a hundredth of the largest: of one scale for all, little would remain.
    errors = np.linalg.norm(found - exact, axis=0) / np.linalg.norm(exact - BIAS, axis=0)
    assert errors.max() < 0.1


def test_a_convolution_has_a_scale_for_each_output_channel():
    kernel = GENERATOR.normal(size=(N, 16, 3, 3)).astype(np.float32)
    images = GENERATOR.normal(size=(2, 16, 8, 8)).astype(np.float32)
    make = [node("Conv", "x w b", "y", name="layer", pads=[1, 1, 1, 1])]
    graph = model(make, {"w": kernel, "b": BIAS}, shape=("batch", 16, 8, 8))
    expected = run(graph, images)[0]
    quantize(graph, ActivationQuantParams(float(np.abs(images).max() / 127)))
    assert relative_error(run(graph, images)[0], expected) < 0.02
    assert by_name(graph)["layer/dequantize_weight"].attributes["axis"].value == 0


@pytest.mark.parametrize(
    ("nodes", "weights", "reason"),
    [
        ([node("MatMul", "x w", "y")], {"w": WEIGHT[:, :8]}, "N = 8"),
        ([node("Gemm", "x w", "y", alpha=2.0)], {"w": WEIGHT}, "alpha or beta other than 1"),
    ],
)
def test_layer_that_cannot_gain_from_int8_has_a_skip_reason(nodes, weights, reason):
    (layer,) = find_layers(model(nodes, weights))
    assert reason in layer.skip_reason


def test_depthwise_convolution_is_skipped():
    kernel = np.ones((32, 1, 7, 7), np.float32)
    made = [node("Conv", "x w", "y", name="layer", group=32)]
    (layer,) = find_layers(model(made, {"w": kernel}, shape=("batch", 32, 16, 16)))
    assert "N = 1" in layer.skip_reason


def test_transposed_convolution_counts_but_is_not_quantized():
    kernel = np.ones((32, 16, 2, 2), np.float32)
    transposed = node("ConvTranspose", "x w b", "y", name="layer", strides=[2, 2])
    weights = {"w": kernel, "b": np.ones(16, np.float32)}
    (layer,) = find_layers(model([transposed], weights, shape=("batch", 32, 16, 16)))
    assert "transposed convolution in FP16" in layer.skip_reason
    # Each input element takes part in 4 products of each output channel, and so makes 4 elements.
    assert (layer.reduction_size, layer.out_channels, layer.bias) == (32, 16, "b")


def test_products_of_two_activations_are_not_layers():
    assert find_layers(model([node("MatMul", "x x", "y", name="m")], {})) == ()


def test_a_weight_behind_an_identity_is_found():
    nodes = [node("Identity", "w", "shared"), node("MatMul", "x shared", "y", name="layer")]
    graph = model(nodes, {"w": WEIGHT})
    assert [layer.name for layer in find_layers(graph)] == ["layer"]
    quantize(graph)
    assert relative_error(run(graph)[0], ROWS @ WEIGHT) < 0.02


@pytest.mark.parametrize("split", [False, True], ids=["alone", "split"])
@pytest.mark.parametrize("shape", [(N,), (1, N), (1,), (5, N)], ids=str)
def test_onnx_runtime_multiplies_a_gemm_in_int8_on_the_cpu(split, shape, tmp_path):
    nodes = [node("Gemm", "x w b", "z" if split else "y", name="layer")]
    if split:
        nodes.append(node("Split", "z", "y rest", axis=1, num_outputs=2))
    bias = np.resize(BIAS, shape)
    graph = model(nodes, {"w": WEIGHT, "b": bias})
    (plain,) = run(graph)
    delta = np.full(N, 1e-4, np.float32)
    quantize(graph, scheme=replace(INT8, unsigned=True), bias_deltas={"layer": delta})
    (found,) = run(graph)
    assert relative_error(found, plain) < 0.02
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "executed.onnx")
    ort.InferenceSession(ir.to_proto(graph).SerializeToString(), options)
    executed = [node.op_type for node in load(tmp_path / "executed.onnx").graph.node]
    assert "QGemm" in executed
    assert "Gemm" not in executed
