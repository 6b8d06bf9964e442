"""Each lint rule finds its problem in a graph that has it, and TensorRT's parser agrees."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginery.core.errors import CheckFailedError, OptionError, ProviderError, SourceError
from enginery.core.shapes import Profile
from enginery.passes.lint import lint
from enginery.passes.lint.lint import lint_onnx
from enginery.runtime.tensorrt.build import BuildRequest
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.runtime.tensorrt.process import build_plan
from tests.passes.onnx_graphs import WIDTH, node, quantized_constants, quantized_product, save_graph

needs_tensorrt = pytest.mark.skipif(
    not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'"
)
F16, F32 = TensorProto.FLOAT16, TensorProto.FLOAT


@pytest.fixture
def found(tmp_path):
    """Return a function that lints a graph and returns a list of (rule, severity, node)."""

    def look(nodes, constants=None, *, target="tensorrt", **graph):
        path = save_graph(tmp_path / "graph.onnx", nodes, constants or {}, **graph)
        report = lint_onnx(path, target=target, parser=False)
        return [(f.rule, f.severity, f.node) for f in report.findings]

    return look


@pytest.fixture
def refusals(tmp_path):
    """Return a function that runs TensorRT's parser on the graph of the last call of `found`."""

    def ask():
        report = lint_onnx(tmp_path / "graph.onnx")
        return [f for f in report.findings if f.rule == "parser"]

    return ask


def test_clean_int8_graph_has_no_findings(found):
    assert found(quantized_product(), quantized_constants()) == []


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("bert", "text-classification"),
        ("resnet", "image-classification"),
        pytest.param("gpt2", "text-generation", marks=pytest.mark.more),
        pytest.param("vit", "image-classification", marks=pytest.mark.more),
        pytest.param("wav2vec2", "audio-classification", marks=pytest.mark.more),
    ],
)
def test_exported_graph_has_no_findings(exported, kind, task):
    for target in ("tensorrt", "cuda"):
        report = lint_onnx(exported(kind, task).model, target=target)
        assert report.findings == ()
        assert report.passed


def test_fp16_graph_has_no_findings(exported, tmp_path):
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(str(exported("bert", "text-classification").model))
    path = tmp_path / "fp16.onnx"
    onnx.save(convert_float_to_float16(model, keep_io_types=True), str(path))
    assert lint_onnx(path).findings == ()


@needs_tensorrt
def test_asymmetric_zero_point(found, refusals):
    constants = quantized_constants(z=np.array(5, np.int8))
    assert found(quantized_product(), constants) == [
        ("zero-point", "error", "x_quantize"),
        ("zero-point", "error", "x_dequantize"),
    ]
    [refusal] = refusals()
    assert "Non-zero zero point" in refusal.problem
    assert "WeightSymmetric" in refusal.remedy


def test_one_asymmetric_channel_of_many_is_found(found):
    zero_points = np.zeros(WIDTH, np.int8)
    zero_points[17] = -3
    constants = quantized_constants(zv=zero_points)
    assert found(quantized_product(), constants) == [("zero-point", "error", "w_dequantize")]


@needs_tensorrt
def test_quantized_bias(found, refusals):
    bias = {
        "b": np.ones(WIDTH, np.int32),
        "sb": np.array(0.001, np.float32),
        "zb": np.array(0, np.int32),
    }
    nodes = [
        *quantized_product()[:3],
        node("DequantizeLinear", "b sb zb", "bd", name="b_dequantize"),
        node("Gemm", "d wd bd", "y", name="product"),
    ]
    assert found(nodes, quantized_constants(**bias)) == [
        ("quantized-bias", "error", "b_dequantize")
    ]
    [refusal] = refusals()
    assert "Int32" in refusal.problem
    assert "QuantizeBias" in refusal.remedy


@needs_tensorrt
def test_dynamic_quantization(found, refusals):
    nodes = [
        node("DynamicQuantizeLinear", "x", "q qs qz", name="dynamic"),
        node("MatMulInteger", "q w qz", "i", name="integer"),
        node("Cast", "i", "y", to=F32),
    ]
    constants = {"w": quantized_constants()["w"]}
    assert found(nodes, constants) == [
        ("dynamic-quantization", "error", "dynamic"),
        ("dynamic-quantization", "error", "integer"),
    ]
    assert {refusal.node for refusal in refusals()} == {"dynamic", "integer"}


@needs_tensorrt
def test_qoperator(found, refusals):
    nodes = [
        node("QuantizeLinear", "x s z", "q", name="x_quantize"),
        node("QLinearMatMul", "q s z w s z s z", "p", name="product"),
        node("DequantizeLinear", "p s z", "y", name="y_dequantize"),
    ]
    rules = found(nodes, quantized_constants())
    assert ("qoperator", "error", "product") in rules
    assert ("unpaired", "warning", "x_quantize") in rules
    assert ("unpaired", "warning", "y_dequantize") in rules
    assert [refusal.node for refusal in refusals()] == ["product"]


@pytest.mark.parametrize(
    ("op_type", "rule"),
    [
        ("MatMulIntegerToFloat", "dynamic-quantization"),
        ("DynamicQuantizeMatMul", "dynamic-quantization"),
        ("QGemm", "qoperator"),
        ("QAttention", "qoperator"),
    ],
)
def test_integer_operators_of_onnx_runtime_have_one_finding_each(found, op_type, rule):
    nodes = [node(op_type, "x x x x", "y", name="integer", domain="com.microsoft")]
    assert found(nodes) == [(rule, "error", "integer")]


@pytest.mark.parametrize(
    ("dtype", "refused"),
    [("UINT8", False), ("INT16", True), ("UINT16", True), ("FLOAT8E5M2", True), ("UINT4", True)],
)
@needs_tensorrt
def test_quantized_types(found, refusals, dtype, refused):
    constants = {
        "s": np.array(0.1, np.float32),
        "z": helper.make_tensor("z", TensorProto.DataType.Value(dtype), [], [0]),
    }
    pair = [
        node("QuantizeLinear", "x s z", "q", name="x_quantize"),
        node("DequantizeLinear", "q s z", "y", name="x_dequantize"),
    ]
    assert found(pair, constants, opset=21) == [
        ("quantized-type", "error", "x_quantize"),
        ("quantized-type", "error", "x_dequantize"),
    ]
    assert bool(refusals()) == refused  # it reads UINT8 as INT8


def test_quantizing_without_a_zero_point_is_uint8(found):
    """ONNX's default, which TensorRT takes for INT8."""
    nodes = [node("QuantizeLinear", "x s", "q", name="q"), node("DequantizeLinear", "q s", "y")]
    rules = found(nodes, {"s": np.array(0.1, np.float32)})
    assert ("quantized-type", "error", "q") in rules


def test_pair_with_different_scales(found):
    nodes = quantized_product()
    nodes[1] = node("DequantizeLinear", "q s2 z", "d", name="x_dequantize")
    constants = quantized_constants(s2=np.array(0.2, np.float32))
    assert found(nodes, constants) == [("scale", "warning", "x_dequantize")]


def test_pair_with_scales_of_different_types(found):
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s2 z", "d", name="x_dequantize"),
        node("Cast", "d", "y", to=F32),
    ]
    constants = quantized_constants(s2=np.array(0.1, np.float16))
    assert found(nodes, constants) == [("scale-type", "warning", "x_dequantize")]


def test_scale_of_another_type_than_the_tensor(found):
    nodes = [
        node("QuantizeLinear", "x s z", "q", name="x_quantize"),
        node("DequantizeLinear", "q s z", "d"),
        node("Cast", "d", "y", to=F32),
    ]
    constants = quantized_constants(s=np.array(0.1, np.float16))
    assert found(nodes, constants) == [("scale-type", "error", "x_quantize")]


def test_computed_scale(found):
    nodes = [
        node("ReduceMax", "x", "top", keepdims=0),
        node("QuantizeLinear", "x top z", "q", name="x_quantize"),
        node("DequantizeLinear", "q top z", "y", name="x_dequantize"),
    ]
    assert found(nodes, {"z": np.array(0, np.int8)}) == [
        ("scale", "warning", "x_quantize"),
        ("scale", "warning", "x_dequantize"),
    ]


@pytest.mark.parametrize(("opset", "rules"), [(17, ["opset", "opset"]), (19, [])])
def test_fp16_scales_need_opset_19(found, opset, rules):
    half = (F16, ["batch", WIDTH])
    pair = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")]
    constants = {"s": np.array(0.1, np.float16), "z": np.array(0, np.int8)}
    got = found(pair, constants, inputs={"x": half}, outputs={"y": half}, opset=opset)
    assert [rule for rule, _, _ in got] == rules


@needs_tensorrt
def test_scales_along_the_summed_axis(found, tmp_path):
    assert found(quantized_product(axis=0), quantized_constants()) == [
        ("channel-axis", "warning", "w_dequantize")
    ]
    built = build_plan(tmp_path / "graph.onnx", BuildRequest([Profile.parse("batch=1:4:8")]))
    assert built.int8_gemms == 0  # what the warning says


@pytest.mark.parametrize(("transposed", "axis"), [(0, 1), (1, 0)])
def test_axis_of_a_gemm_follows_transb(found, transposed, axis):
    def nodes(along):
        gemm = node("Gemm", "d wd", "y", transB=transposed)
        return [*quantized_product(axis=along)[:3], gemm]

    assert found(nodes(axis), quantized_constants()) == []
    assert found(nodes(1 - axis), quantized_constants()) == [
        ("channel-axis", "warning", "w_dequantize")
    ]


@needs_tensorrt
def test_wrong_number_of_scales(found, refusals):
    constants = quantized_constants(sv=np.ones(3, np.float32), zv=np.zeros(3, np.int8))
    assert found(quantized_product(), constants) == [("channel-axis", "error", "w_dequantize")]
    assert [refusal.node for refusal in refusals()] == ["w_dequantize"]


def test_activation_with_a_scale_per_channel(found):
    nodes = quantized_product()
    nodes[:2] = [
        node("QuantizeLinear", "x sv zv", "q", name="x_quantize", axis=1),
        node("DequantizeLinear", "q sv zv", "d", name="x_dequantize", axis=1),
    ]
    assert found(nodes, quantized_constants()) == [("channel-axis", "warning", "x_dequantize")]


def test_weight_may_keep_its_quantize_node(found):
    nodes = quantized_product()
    nodes[2:3] = [
        node("QuantizeLinear", "w sv zv", "wq", axis=1),
        node("DequantizeLinear", "wq sv zv", "wd", axis=1),
    ]
    weight = np.ones((WIDTH, WIDTH), np.float32)
    assert found(nodes, quantized_constants(w=weight)) == []


@pytest.mark.parametrize("missing", ["quantize", "dequantize"])
def test_incomplete_qdq_pair(found, missing):
    integers = (TensorProto.INT8, ["batch", WIDTH])
    op_type = "DequantizeLinear" if missing == "quantize" else "QuantizeLinear"
    ends = {"inputs": {"x": integers}} if missing == "quantize" else {"outputs": {"y": integers}}
    nodes = [node(op_type, "x s z", "y", name="alone")]
    assert found(nodes, quantized_constants(), **ends) == [("unpaired", "warning", "alone")]


def test_weight_without_dequantize_node(found):
    nodes = [
        node("QuantizeLinear", "x s z", "q", name="x_quantize"),
        node("QuantizeLinear", "wf s z", "wq", name="w_quantize"),
        node("MatMulInteger", "q wq", "i", name="integer"),
        node("Cast", "i", "y", to=F32),
    ]
    constants = quantized_constants(wf=np.ones((WIDTH, WIDTH), np.float32))
    assert ("unpaired", "warning", "w_quantize") in found(nodes, constants)


def test_output_of_a_product_is_quantized_for_another_operator(found):
    nodes = [
        *quantized_product()[:3],
        node("MatMul", "d wd", "p", name="product"),
        node("QuantizeLinear", "p s z", "pq", name="p_quantize"),
        node("DequantizeLinear", "pq s z", "pd"),
    ]
    assert found([*nodes, node("Relu", "pd", "y")], quantized_constants()) == [
        ("output-qdq", "warning", "p_quantize")
    ]
    # As the input of another product it is correct.
    assert found([*nodes, node("MatMul", "pd wd", "y")], quantized_constants()) == []


@pytest.mark.parametrize("operator", ["Softmax", "Tanh", "LayerNormalization"])
def test_qdq_around_operators_that_gain_nothing(found, operator):
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "d", name="x_dequantize"),
        node(operator, "d b" if operator == "LayerNormalization" else "d", "y"),
    ]
    constants = quantized_constants(b=np.ones(WIDTH, np.float32))
    assert found(nodes, constants) == [("misplaced-qdq", "warning", "x_dequantize")]


@needs_tensorrt
def test_foreign_operators(found, refusals):
    nodes = [
        node("BiasGelu", "x b", "a", name="fused", domain="com.microsoft"),
        node("Gelu", "a", "c", name="same_name", domain="com.microsoft"),
        node("Whirl", "c", "y", name="own", domain="example.org"),
    ]
    constants = {"b": np.ones(WIDTH, np.float32)}
    assert found(nodes, constants) == [
        ("domain", "error", "fused"),
        ("domain", "error", "own"),
        ("domain", "warning", "same_name"),
    ]
    assert [refusal.node for refusal in refusals()] == ["fused", "own"]


def branch(op_type):
    output = helper.make_tensor_value_info(f"of_{op_type}", F32, ["batch", WIDTH])
    return helper.make_graph([node(op_type, "x", f"of_{op_type}")], op_type, [], [output])


@pytest.mark.parametrize(
    ("condition", "severity"), [("use_cache_branch", "error"), ("flag", "warning")]
)
def test_merged_decoder_is_an_error_and_another_branch_a_warning(found, condition, severity):
    choice = node(
        "If", condition, "y", name="choice", then_branch=branch("Relu"), else_branch=branch("Tanh")
    )
    inputs = {"x": (F32, ["batch", WIDTH]), condition: (TensorProto.BOOL, [])}
    assert found([choice], inputs=inputs) == [("control-flow", severity, "choice")]
    assert found([choice], inputs=inputs, target="cuda") == [("control-flow", "warning", "choice")]


def test_nodes_in_branches_are_checked(found):
    inner = branch("Tanh")
    inner.node[0].CopyFrom(node("Spin", "x", "of_Tanh", name="inner", domain="example.org"))
    choice = node("If", "flag", "y", name="choice", then_branch=branch("Relu"), else_branch=inner)
    inputs = {"x": (F32, ["batch", WIDTH]), "flag": (TensorProto.BOOL, [])}
    path_rules = found([choice, node("Identity", "x", "z", domain="example.org")], inputs=inputs)
    assert ("domain", "error", "inner") in path_rules


@pytest.mark.parametrize(
    ("dtype", "severity"), [("DOUBLE", "warning"), ("INT16", "error"), ("UINT32", "error")]
)
def test_types(found, dtype, severity):
    number = TensorProto.DataType.Value(dtype)
    casts = [node("Cast", "x", "c", name="there", to=number), node("Cast", "c", "y", to=F32)]
    assert found(casts) == [("type", severity, "there")]
    held = {"c": helper.make_tensor("c", number, [1], [1])}
    assert found([node("Cast", "c", "y", to=F32)], held) == [("type", severity, "c")]
    dims = (number, ["batch"])
    relu = [node("Identity", "x", "y", name="same")]
    assert found(relu, inputs={"x": dims}, outputs={"y": dims}) == [
        ("type", severity, "x"),
        ("type", severity, "y"),
    ]


def test_attention_operator_in_fp32(found):
    dims = (F32, ["batch", 4, 8, 16])
    graph = {"inputs": {"x": dims}, "outputs": {"y": dims}, "opset": 23}
    nodes = [node("Attention", "x x x", "y", name="attention")]
    assert found(nodes, **graph) == [("attention", "warning", "attention")]


def test_cuda_rules(found):
    constants = quantized_constants()
    assert found(quantized_product(), constants, target="cuda") == [
        ("quantization", "warning", "product")
    ]
    nodes = [
        node("DynamicQuantizeLinear", "x", "q qs qz", name="dynamic"),
        node("MatMulInteger", "q w qz", "i"),
        node("Cast", "i", "c", to=F32),
        node("BiasGelu", "c b", "y", domain="com.microsoft"),
    ]
    constants |= {"b": np.ones(WIDTH, np.float32)}
    assert found(nodes, constants, target="cuda") == [("placement", "warning", "dynamic")]


def optimum_quantizer(artifact):
    from optimum.onnxruntime import ORTQuantizer

    return ORTQuantizer.from_pretrained(artifact.path, file_name="model.onnx")


@needs_tensorrt
@pytest.mark.filterwarnings("ignore")
def test_optimums_configuration_for_tensorrt_is_diagnosed(exported, tmp_path):
    from onnxruntime.quantization import CalibrationMethod
    from optimum.onnxruntime.configuration import AutoQuantizationConfig, CalibrationConfig

    numbers = np.random.default_rng(0)
    rows = [
        {
            "input_ids": numbers.integers(5, 200, 8),
            "attention_mask": np.ones(8, np.int64),
            "token_type_ids": np.zeros(8, np.int64),
        }
        for _ in range(4)
    ]
    quantizer = optimum_quantizer(exported("bert", "text-classification"))
    config = AutoQuantizationConfig.tensorrt(per_channel=False)
    ranges = quantizer.fit(
        rows,
        CalibrationConfig("rows", "", "", len(rows), CalibrationMethod.MinMax),
        operators_to_quantize=config.operators_to_quantize,
        onnx_augmented_model_name=str(tmp_path / "augmented.onnx"),
    )
    quantizer.quantize(config, tmp_path / "out", calibration_tensors_range=ranges)
    report = lint_onnx(tmp_path / "out" / "model_quantized.onnx")
    biases = {f.node for f in report.findings if f.rule == "quantized-bias"}
    [refusal] = [f for f in report.findings if f.rule == "parser"]
    assert refusal.node in biases
    assert "has type Int32" in refusal.problem
    assert {f.rule for f in report.warnings} == {"output-qdq", "misplaced-qdq"}
    assert not report.passed
    assert "rejects the graph" in report.summary


@needs_tensorrt
@pytest.mark.filterwarnings("ignore")
def test_optimums_dynamic_quantization_is_diagnosed(exported, tmp_path):
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    quantizer = optimum_quantizer(exported("bert", "text-classification"))
    config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    quantizer.quantize(config, tmp_path / "out")
    report = lint_onnx(tmp_path / "out" / "model_quantized.onnx")
    rules = {found.rule for found in report.errors}
    assert rules == {"dynamic-quantization", "zero-point", "quantized-type", "parser"}


def test_table_groups_nodes_with_the_same_finding(tmp_path):
    path = save_graph(
        tmp_path / "g.onnx", quantized_product(), quantized_constants(z=np.array(5, np.int8))
    )
    report = lint_onnx(path, parser=False)
    table, _ = report.rows()
    [row] = table.rows
    assert list(row) == ["severity", "rule", "where", "problem", "remedy"]
    assert row["where"] == "x_quantize and 1 more"
    assert report.summary == "2 errors"
    assert report.as_json()["findings"][0]["node"] == "x_quantize"
    assert report.as_json()["passed"] is False
    with pytest.raises(CheckFailedError, match="does not suit tensorrt: 2 errors"):
        report.require_passed()


def test_errors_come_first(tmp_path):
    nodes = [
        node("Gelu", "x", "a", domain="com.microsoft"),
        node("Spin", "a", "y", domain="example.org"),
    ]
    report = lint_onnx(save_graph(tmp_path / "g.onnx", nodes), parser=False)
    assert [found.severity for found in report.findings] == ["error", "warning"]


def test_external_weights_are_not_needed(tmp_path):
    weight = quantized_constants()["w"]
    held = numpy_helper.from_array(weight, "w")
    path = save_graph(tmp_path / "g.onnx", quantized_product(), quantized_constants(w=held))
    onnx.save(
        onnx.load(str(path)),
        str(path),
        save_as_external_data=True,
        location="w.bin",
        size_threshold=1024,
    )
    (tmp_path / "w.bin").unlink()
    assert lint_onnx(path, parser=False).findings == ()


def test_rules_run_without_tensorrt(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    report = lint_onnx(save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")]))
    assert report.passed
    assert report.parser.startswith("TensorRT's parser did not run")


def test_crash_of_the_parser_is_a_finding(tmp_path, monkeypatch):
    def crash(path):
        raise ProviderError(f"{path}: the process with TensorRT crashed with signal 11.")

    monkeypatch.setattr(lint, "has_tensorrt", lambda: True)
    monkeypatch.setattr(lint, "parse_onnx", crash)
    report = lint_onnx(save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")]))
    assert [found.rule for found in report.errors] == ["parser"]


def test_file_that_is_not_a_model_is_an_error(tmp_path):
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"hello junk")
    with pytest.raises(SourceError, match="not an ONNX model"):
        lint_onnx(junk)
    with pytest.raises(SourceError, match="does not exist"):
        lint_onnx(tmp_path / "none.onnx")


def test_unknown_target_is_an_error(tmp_path):
    with pytest.raises(OptionError, match="did you mean 'tensorrt'"):
        lint_onnx(tmp_path / "any.onnx", target="tensort")
