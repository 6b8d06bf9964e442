"""For the CPU, what convolutions write and what lies between them is quantized."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from enginery.passes.qdq.insert import insert_qdq
from enginery.passes.qdq.joining import joining_tensors
from enginery.passes.qdq.layers import find_layers, quantized_tensors
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.passes.qdq.scheme import Scheme

CPU = Scheme("int8", 127.0, unsigned=True)
GENERATOR = np.random.default_rng(0)
WEIGHTS = GENERATOR.normal(0, 0.2, (16, 16, 1, 1)).astype(np.float32)
WIDE = GENERATOR.normal(0, 0.2, (16, 32, 1, 1)).astype(np.float32)
IMAGES = GENERATOR.normal(size=(1, 16, 8, 8)).astype(np.float32)


def read(nodes):
    """Return a graph of these nodes, from x to y, with the weights w and wide."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g (float[1, 16, 8, 8] x) => (y) {{ {nodes} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    arrays = {"w": WEIGHTS, "wide": WIDE, "sizes": np.array([1, 16, 16, 16])}
    for name, array in arrays.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(proto)


def ranges_of(model, names):
    """Return the parameters of tensors, measured on IMAGES."""
    proto = ir.to_proto(model)
    proto.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in names
        if name not in ("x", "y")
    )
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    made = [output.name for output in session.get_outputs()]
    values = dict(zip(made, session.run(made, {"x": IMAGES}), strict=True)) | {"x": IMAGES}
    return {
        name: ActivationQuantParams.of_range(values[name].min(), values[name].max())
        for name in names
    }


def quantize(nodes, *, without=()):
    """Quantize a graph for the CPU; return the FP32 graph, the quantized one and what joins."""
    model, plain = read(nodes), read(nodes)
    layers = [layer for layer in find_layers(model) if layer.name not in without]
    joining = joining_tensors(model, layers)
    tensors = quantized_tensors(layers, outputs=True)
    ranges = ranges_of(model, {*tensors, *joining, *joining.values()})
    ranges |= {name: ranges[source] for name, source in joining.items()}
    insert_qdq(model, layers, ranges, scheme=CPU, joining=joining)
    return plain, model, joining


def run(model, path=None):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if path is not None:
        options.optimized_model_filepath = str(path)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {"x": IMAGES})[0]


FIRST, LAST = "[first] a = Conv(x, w)\n", "\n[last] y = Conv(b, w)"
GRAPHS = {
    "silu": (FIRST + "s = Sigmoid(a)\n b = Mul(a, s)" + LAST, {"s"}),
    "residual": (
        FIRST + "[middle] c = Conv(a, w)\n d = Add(c, a)\n e = Relu(d)\n [third] f = Conv(e, w)\n"
        "b = Add(f, e)" + LAST,
        set(),
    ),
    "concatenated": (
        FIRST + "c = Relu(a)\n b = Concat<axis = 1>(c, c)\n [last] y = Conv(b, wide)",
        set(),
    ),
    "parts": (
        FIRST + "c, d = Split<axis = 1, num_outputs = 2>(a)\n b = Concat<axis = 1>(d, c)" + LAST,
        {"c", "d"},
    ),
    "pooled": (
        FIRST + "c = Relu(a)\n b = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c)" + LAST,
        {"b"},
    ),
    "enlarged": (FIRST + 'b = Resize<mode = "nearest">(a, , , sizes)' + LAST, {"b"}),
}


@pytest.mark.parametrize(("nodes", "joining"), GRAPHS.values(), ids=GRAPHS)
def test_everything_between_convolutions_is_computed_in_int8(nodes, joining, tmp_path):
    plain, model, found = quantize(nodes)
    assert set(found) == joining
    result, expected = run(model, tmp_path / "executed.onnx"), run(plain)
    assert np.linalg.norm(result - expected) < 0.03 * np.linalg.norm(expected)
    executed = [node.op_type for node in onnx.load(tmp_path / "executed.onnx").graph.node]
    assert executed.count("QuantizeLinear") == executed.count("DequantizeLinear") == 1
    assert not {"Conv", "FusedConv", "Add", "Mul", "Sigmoid", "Relu"} & set(executed)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_a_resize_that_computes_new_numbers_is_not_joined(mode):
    nodes = GRAPHS["enlarged"][0].replace("nearest", mode)
    assert set(quantize(nodes)[2]) == set()


def test_a_relu_in_a_branch_is_not_that_of_a_convolution():
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 20]>
    g (float[1, 16, 8, 8] x, bool c) => (float[1, 16, 8, 8] y) <float[16, 16, 1, 1] w = {0}> {
        a = Conv(x, w)
        y = If (c) <
            then_branch = then () => (float[1, 16, 8, 8] r) { r = Relu(a) },
            else_branch = other () => (float[1, 16, 8, 8] s) { s = Neg(x) }
        >
    }""")
    (layer,) = find_layers(model)
    assert layer.activated_output == "a"


@pytest.mark.parametrize("zero_point", [-1, 256, 5.7, float("inf"), "1"])
def test_a_damaged_zero_point_is_an_error(zero_point):
    record = {"scale": 1.0, "multiplier": None, "offset": None, "zero_point": zero_point}
    with pytest.raises(ValueError, match="expected a whole number from 0 to 255"):
        ActivationQuantParams.from_json(record)


def test_what_is_moved_has_the_range_of_where_it_comes_from():
    _, model, joining = quantize(GRAPHS["pooled"][0])
    assert joining == {"b": "c"}
    made = {value.name: value.const_value.numpy() for value in model.graph.initializers.values()}
    assert made["b/scale"] == made["c/scale"]
    assert made["c/zero_point"] == made["b/zero_point"] == 0


def test_what_leads_to_no_convolution_stays():
    nodes = FIRST + "s = Sigmoid(a)\n b = Mul(a, s)" + LAST.replace("y =", "z =")
    _, model, joining = quantize(nodes + "\n t = Sigmoid(z)\n y = Add(t, z)")
    assert set(joining) == {"s"}
    assert {"z/quantize", "s/quantize"} <= {node.name for node in model.graph}


def test_a_relu_behind_a_move_joins_nothing():
    nodes = FIRST + "c = Concat<axis = 1>(a, a)\n d = MaxPool<kernel_shape = [1, 1]>(c)"
    _, _, joining = quantize(nodes + "\n b = Relu(d)\n [last] y = Conv(b, wide)")
    assert set(joining) == set()


def test_nothing_is_joined_to_a_layer_in_floating_point():
    nodes = FIRST + "[middle] c = Conv(x, w)\n d = Mul(c, c)\n b = Add(a, d)" + LAST
    assert set(quantize(nodes)[2]) == {"d"}
    assert set(quantize(nodes, without=["middle"])[2]) == set()


@pytest.mark.parametrize(
    "middle",
    [
        "[middle] c = Conv(a, w)",
        "[middle] c = ConvTranspose(a, w)",
        "[relu] r = Relu(a)\n [middle] d = Conv(r, w)\n c = Relu(d)",
        "p = MaxPool<kernel_shape = [2, 2]>(a)\n [middle] c = Conv(p, w)",
        "p = Transpose<perm = [0, 1, 3, 2]>(a)\n [middle] c = Conv(p, w)",
    ],
    ids=["Conv", "ConvTranspose", "with ReLUs", "behind a pooling", "transposed"],
)
def test_a_layer_that_is_left_out_stays_in_floating_point(middle, tmp_path):
    # ONNX Runtime would quantize its weight by itself.
    nodes = FIRST + middle + LAST.replace("(b,", "(c,")
    _, model, _ = quantize(nodes, without=["middle"])
    run(model, tmp_path / "executed.onnx")
    graph = onnx.load(tmp_path / "executed.onnx").graph
    assert [node.op_type for node in graph.node].count("QLinearConv") == 2
    (left_out,) = [n for n in graph.node if n.op_type in ("Conv", "FusedConv", "ConvTranspose")]
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert kinds[left_out.input[1]] == onnx.TensorProto.FLOAT


def test_an_output_of_the_graph_that_no_convolution_writes_is_not_rounded():
    text = FIRST + "s = Sigmoid(a)\n y = Mul(a, s)\n [last] z = Conv(y, w)"
    _, model, _ = quantize(text)
    assert model.graph.outputs[0].producer().op_type == "Mul"
    _, model, _ = quantize("[only] y = Conv(x, w)")
    assert model.graph.outputs[0].producer().op_type == "DequantizeLinear"
    assert model.graph.outputs[0].name == "y"


@pytest.mark.parametrize(
    ("range_", "zero_point"), [((0, 6), 0), ((1, 6), 0), ((-6, 0), 255), ((-1, 1), 128)]
)
def test_all_of_uint8_covers_a_range(range_, zero_point):
    found = ActivationQuantParams.of_range(*range_)
    assert found.zero_point == zero_point
    low, high = min(*range_, 0), max(*range_, 0)
    values = np.linspace(low, high, 1000, dtype=np.float32)
    # A scale is an FP16 number.
    tolerance = found.scale / 2 + 2.0**-11 * (high - low)
    np.testing.assert_allclose(found.fake_quantize(values, CPU), values, atol=tolerance)
    assert found.fake_quantize(np.zeros(1, np.float32), CPU) == 0
    assert ActivationQuantParams.from_json(found.to_json()) == found
