"""A graph is also compared without the rounding of its precision, which would hide other faults."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from enginery import optimize_model, quantize_model, validate_model
from enginery.core.artifact.artifact import REPORTS
from tests.tiny import TEXT
from tests.validate.faults import edits as faults
from tests.validate.faults.graph_editor import GraphEditor
from tests.validate.faults.transformer import FP16_FAULTS, TRANSFORMER_FAULTS

SLOW = pytest.mark.slow
WITHOUT = "model.onnx without quantization"
SIMULATED = "model.onnx with every value in FP16"


@pytest.fixture
def copied(tmp_path):
    """Return a function: a copy of an artifact, with its reports."""
    return lambda artifact: artifact.copy_to(tmp_path / "copy")


@pytest.fixture
def int8(exported):
    """Return a function: tiny BERT in INT8, and the rest in a precision."""

    def make(residual="fp16"):
        bert = exported("bert", "feature-extraction")
        return quantize_model(bert, TEXT, capability=(), curve=False, residual=residual)

    return make


def errors(report, graph):
    """Return the errors by their limits."""
    cases = [case for case in report.cases if case.graph == graph]
    return [output.max_abs / output.limit for case in cases for output in case.outputs]


@pytest.mark.more
@pytest.mark.parametrize("residual", ["fp16", pytest.param("fp32", marks=SLOW)])
def test_sound_graph_without_quantization_equals_pytorch(int8, copied, residual):
    report = validate_model(copied(int8(residual)), effort="quick")
    assert report.passed, report.summary
    found = errors(report, WITHOUT)
    assert len(found) == len([case for case in report.cases if case.graph == "model.onnx"])
    assert 0 < max(found) < 0.5
    (coverage,) = report.coverage
    assert coverage.graph == WITHOUT
    assert coverage.compared
    assert not coverage.deviating


@pytest.mark.more
def test_convolutions_with_folded_normalizations(exported, copied, tmp_path):
    generator = np.random.default_rng(0)
    images = [(generator.random((48, 40, 3)) * 255).astype(np.uint8) for _ in range(12)]
    resnet = exported("resnet", "image-classification")
    made = quantize_model(
        resnet, images, capability=(), curve=False, min_cosine=-1, out=tmp_path / "int8"
    )
    report = validate_model(copied(made), effort="quick", min_cosine=-1)
    assert report.passed, report.summary
    assert errors(report, WITHOUT)


def planted(name):
    (fault,) = [fault for fault in TRANSFORMER_FAULTS if fault.name == name]
    return fault


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["ReLU for GELU in one layer", pytest.param("GELU without the root of 2", marks=SLOW)]
)
def test_fault_that_int8_would_hide(int8, copied, exported, name):
    artifact = copied(int8())
    original = onnx.load(str(exported("bert", "feature-extraction").path / "model.onnx"))
    broken = faults.break_graph(artifact, lambda model: planted(name).plant(model, original))
    report = validate_model(broken, effort="quick", min_cosine=-1)
    assert not report.passed
    assert WITHOUT in report.summary
    assert all(case.passed for case in report.cases if case.graph == "model.onnx")


def activation(g):
    """Return the QuantizeLinear of an activation, and its DequantizeLinear."""
    quantize = g.nodes(op="QuantizeLinear")[2]
    (dequantize,) = g.consumers(quantize.output[0])
    return quantize, dequantize


def with_scale(factor, *, both):
    def edit(g):
        quantize, dequantize = activation(g)
        scale = g.array(quantize.input[1])
        other = g.constant((scale * factor).astype(scale.dtype))
        dequantize.input[1] = other
        if both:
            quantize.input[1] = other

    return edit


def with_zero_point(point, *, both):
    def edit(g):
        quantize, dequantize = activation(g)
        zero = g.constant(np.int8(point))
        dequantize.input[2] = zero
        if both:
            quantize.input[2] = zero

    return edit


@pytest.mark.more
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (with_scale(1.02, both=False), "quantizes, but"),
        pytest.param(
            with_zero_point(1, both=False), "zero point 0 quantizes, but 1 dequantizes", marks=SLOW
        ),
        (with_zero_point(64, both=True), "zero point 64, calibrated 0"),
    ],
)
def test_numbers_that_quantize_and_dequantize(int8, copied, edit, said):
    broken = faults.break_graph(copied(int8()), lambda model: edit(GraphEditor(model)))
    report = validate_model(broken, effort="quick", min_cosine=-1)
    assert not report.passed
    assert any(said in found.problem for found in report.weights.differences)


@pytest.mark.more
def test_pair_that_the_calibration_did_not_record(int8, copied):
    def edit(g):
        quantize, dequantize = activation(g)
        scale = g.array(quantize.input[1])
        coarse = g.constant((scale * 4).astype(scale.dtype))
        zero = quantize.input[2]
        g.replace(
            dequantize.output[0],
            lambda x: g.op(
                "DequantizeLinear", g.op("QuantizeLinear", x, coarse, zero), coarse, zero
            ),
        )

    broken = faults.break_graph(copied(int8()), lambda model: edit(GraphEditor(model)))
    report = validate_model(broken, effort="quick", min_cosine=-1)
    assert not report.passed


@pytest.mark.more
def test_graph_that_onnx_runtime_has_optimized(int8, copied, tmp_path):
    import onnxruntime as ort

    artifact = copied(int8())
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(
        str(artifact.path / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    optimized = onnx.load(str(tmp_path / "optimized.onnx"))
    report = validate_model(faults.break_graph(artifact, lambda model: model.CopyFrom(optimized)))
    assert report.passed, report.summary
    assert errors(report, WITHOUT)


def test_without_a_record_of_the_calibration_only_the_quantized_graph_runs(int8, copied, tmp_path):
    artifact = copied(int8())
    (artifact.path / REPORTS / "ranges.json").unlink()
    report = validate_model(artifact, effort="quick")
    assert {case.graph for case in report.cases} == {"model.onnx", SIMULATED}


IN_FP32 = "model.onnx in FP32"


@pytest.fixture
def low(exported):
    """Return a function: a tiny model in FP16 or BF16."""

    def make(kind, task, precision="fp16"):
        return optimize_model(exported(kind, task), target="tensorrt", precision=precision)

    return make


@pytest.mark.more
@pytest.mark.parametrize(
    "kind", ["bert", *(pytest.param(kind, marks=SLOW) for kind in ("resnet", "vit"))]
)
def test_sound_fp16_graph_has_little_error_beside_rounding(low, copied, kind):
    task = "feature-extraction" if kind == "bert" else "image-classification"
    report = validate_model(copied(low(kind, task)), effort="quick")
    assert report.passed, report.summary
    assert {case.graph for case in report.cases} == {"model.onnx", SIMULATED, IN_FP32}
    (rounding,) = report.rounding
    assert 0 < rounding.other_share < 0.01
    (coverage,) = report.coverage
    assert coverage.graph == SIMULATED, "the scan rounds every value"
    assert coverage.compared


@pytest.mark.more
def test_weight_that_an_fp16_model_stores_in_fp32(low, copied):
    """Exporters fold the Cast before a node that computes in FP32 into its weight."""

    def stored_wide(change):
        def edit(model):
            g = GraphEditor(model)
            name = next(n.input[1] for n in g.nodes(op="MatMul") if g.array(n.input[1]) is not None)
            wide = g.constant(change(g.array(name).astype(np.float32)))
            for node in g.consumers(name):
                node.input[1] = g.op("CastLike", wide, name)
            g.finish()

        return edit

    artifact = low("bert", "feature-extraction")
    sound = faults.break_graph(copied(artifact), stored_wide(lambda a: a))
    report = validate_model(sound, effort="quick")
    assert report.passed, report.summary
    assert report.rounding[0].other_share < 0.01


def through_bf16(g):
    name = g.graph.output[0].name
    g.replace(name, lambda x: g.op("CastLike", g.op("Cast", x, to=onnx.TensorProto.BFLOAT16), x))


def factor(number):
    def edit(g):
        g.replace(g.graph.output[0].name, lambda x: g.op("Mul", x, number))

    return edit


@pytest.mark.more
@pytest.mark.parametrize("edit", [factor(1.002), pytest.param(through_bf16, marks=SLOW)])
def test_fault_that_fp16_would_hide(low, copied, edit):
    def change(model):
        editor = GraphEditor(model)
        edit(editor)
        editor.finish()

    broken = faults.break_graph(copied(low("bert", "feature-extraction")), change)
    report = validate_model(broken, effort="quick")
    assert not report.passed
    assert all(case.passed for case in report.cases if case.graph == "model.onnx")
    assert "of the squared error does not come from rounding" in report.rounding[0].problem


@pytest.mark.more
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=SLOW if number else ())
        for number, fault in enumerate(fault for fault in FP16_FAULTS if fault.harmful_on_gpu)
    ],
)
def test_fault_that_the_cpu_hides(low, copied, exported, fault):
    original = onnx.load(str(exported("bert", "feature-extraction").path / "model.onnx"))
    artifact = low("bert", "feature-extraction")
    sound = onnx.load(str(artifact.path / "model.onnx"))
    broken = faults.break_graph(copied(artifact), lambda model: fault.plant(model, original))
    report = validate_model(broken, effort="quick")
    assert not report.passed
    failed = {case.graph for case in report.cases if not case.passed}
    assert failed == {SIMULATED}
    # onnx's own evaluator computes FP16 in FP16.
    feeds = {
        name: np.array([[2, 9, 30, 3]] if name == "input_ids" else np.ones((1, 4)), np.int64)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    with np.errstate(over="ignore", invalid="ignore"):
        expected, found = (
            ReferenceEvaluator(model).run(None, feeds)[0]
            for model in (sound, onnx.load(str(broken.path / "model.onnx")))
        )
    assert not np.allclose(found, expected, atol=0.05)


def test_fp32_artifact_is_compared_once(exported, copied):
    report = validate_model(copied(exported("bert", "feature-extraction")), effort="quick")
    assert {case.graph for case in report.cases} == {"model.onnx"}
    assert report.rounding == []
