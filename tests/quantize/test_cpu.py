"""Static INT8 for ONNX Runtime's CPU provider."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest

from enginery import validate_model
from enginery.core.errors import ArtifactError, CheckFailedError, OptionError
from enginery.passes.ir.graph_file import read_graph
from enginery.passes.qdq.embeddings import quantize_embeddings
from enginery.passes.qdq.joining import joining_tensors
from enginery.passes.qdq.layers import find_layers
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.quantize import calibrate, stage
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.job import scheme_from_config
from enginery.quantize.layer_toggles import LayerToggleModel
from enginery.runtime.onnxruntime.runner import OrtRunner
from tests.validate.faults.edits import break_graph

BERT = ("bert", "text-classification")
RESNET = ("resnet", "image-classification")
IMAGES = [np.random.default_rng(i).integers(0, 256, (32, 32, 3), np.uint8) for i in range(8)]


def report_of(artifact):
    return json.loads((artifact.path / stage.REPORT).read_bytes())


def executed(artifact, tmp_path):
    """Return how many nodes of each kind ONNX Runtime runs after its fusions."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "executed.onnx")
    onnxruntime.InferenceSession(artifact.model, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(tmp_path / "executed.onnx").graph.node)


def test_every_quantized_layer_is_multiplied_in_int8(tiny, quantized, tmp_path):
    made = quantized(tiny(*BERT), target="cpu")
    manifest, report = made.manifest, report_of(made)
    assert (manifest.target, manifest.precision, manifest.residual) == ("cpu", "int8", "fp32")
    # Query, key and value of each layer read one activation.
    assert len(report["quantized_layers"]) == 12
    found = executed(made, tmp_path)
    assert found["MatMulIntegerToFloat"] == 12
    assert not found["DequantizeLinear"]


@pytest.mark.more
def test_a_one_sided_activation_uses_all_of_uint8(tiny, quantized, tmp_path):
    source = tiny(*BERT)
    made = quantized(source, out=tmp_path / "cpu", target="cpu", shift=False)
    other = quantized(source, out=tmp_path / "tensorrt", residual="fp32", shift=False)
    ids = np.random.default_rng(0).integers(0, 90, (3, 11))
    feeds = {spec.name: np.ones_like(ids) for spec in source.manifest.graphs[0].inputs}
    feeds["input_ids"] = ids
    with OrtRunner(source) as fp32, OrtRunner(made) as one, OrtRunner(other) as two:
        exact = fp32(feeds)["logits"]
        errors = [np.square(runner(feeds)["logits"] - exact).mean() for runner in (one, two)]
    assert errors[0] < 0.9 * errors[1]
    ranges = json.loads((made.path / "reports" / "ranges.json").read_bytes())["ranges"]
    after_gelu = [record["zero_point"] for name, record in ranges.items() if "intermediate" in name]
    assert after_gelu
    assert all(0 < zero < 100 for zero in after_gelu)


def test_add_and_layer_normalization_are_not_fused(tiny, quantized, tmp_path):
    """ONNX Runtime's kernel of SkipLayerNormalization for the CPU is slower than both."""
    found = executed(quantized(tiny(*BERT), target="cpu"), tmp_path)
    assert found["LayerNormalization"] == 5
    assert not found["SkipLayerNormalization"]


@pytest.mark.more
def test_the_artifact_is_validated_with_its_weights(tiny, quantized):
    made = quantized(tiny("bert", "feature-extraction"), target="cpu", min_cosine=0.99)
    report = validate_model(made, effort="quick")
    assert report.passed, report.summary
    assert "100 % of" in report.summary


def test_a_changed_zero_point_is_found(tiny, quantized):
    made = quantized(tiny("bert", "feature-extraction"), target="cpu", min_cosine=0.99)

    calibrated = []

    def edit(graph):
        zero = next(t for t in graph.graph.initializer if t.data_type == onnx.TensorProto.UINT8)
        calibrated.append(int(onnx.numpy_helper.to_array(zero)) - 128)
        zero.CopyFrom(onnx.numpy_helper.from_array(np.asarray(127, np.uint8), zero.name))

    report = validate_model(break_graph(made, edit), effort="quick")
    assert f"zero point -1, calibrated {calibrated[0]}" in report.summary


@pytest.fixture
def small_tables(monkeypatch):
    """Quantize embedding tables of any size."""
    every = partial(quantize_embeddings, min_elements=1)
    monkeypatch.setattr(calibrate, "quantize_embeddings", every)


@pytest.mark.more
def test_embedding_tables_are_quantized_and_validated(tiny, quantized, small_tables):
    made = quantized(tiny("bert", "feature-extraction"), target="cpu", min_cosine=0.99)
    (note,) = [note for note in report_of(made)["notes"] if "embedding tables" in note]
    assert "word_embeddings" in note
    report = validate_model(made, effort="quick")
    assert report.passed, report.summary
    assert "100 % of" in report.summary


@pytest.mark.more
@pytest.mark.parametrize("part", ["scale", pytest.param("quantized", marks=pytest.mark.more)])
def test_a_changed_row_of_an_embedding_table_is_found(part, tiny, quantized, small_tables):
    made = quantized(tiny("bert", "feature-extraction"), target="cpu", min_cosine=0.99)

    def edit(graph):
        name = f"word_embeddings.weight_{part}"
        found = next(t for t in graph.graph.initializer if t.name.endswith(name))
        values = onnx.numpy_helper.to_array(found).copy()
        values[5] = values[6]
        found.CopyFrom(onnx.numpy_helper.from_array(values, found.name))

    report = validate_model(break_graph(made, edit), effort="quick")
    assert not report.passed
    assert any("word_embeddings" in found.parameter for found in report.weights.differences)


def test_the_budget_is_checked(tiny, quantized):
    with pytest.raises(CheckFailedError, match="budget"):
        quantized(tiny(*BERT), target="cpu", min_cosine=1.0)


def test_convolutions_are_multiplied_in_int8(tiny, quantized, tmp_path):
    made = quantized(tiny(*RESNET), IMAGES, target="cpu")
    report = report_of(made)
    found = executed(made, tmp_path)
    assert len(report["quantized_layers"]) == found["QLinearConv"] == 15
    assert found["Conv"] + found["FusedConv"] == 1  # of 2 channels
    # The last of four residual additions leads to no convolution.
    assert (found["QLinearAdd"], found["Add"], found["QuantizeLinear"]) == (3, 1, 2)
    assert any("tensors between convolutions" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("kind", "convolutions"), [("vit", 1), pytest.param("convnext", 8, marks=pytest.mark.more)]
)
def test_transformers_of_images_are_quantized_whole(kind, convolutions, tiny, quantized, tmp_path):
    made = quantized(tiny(kind, "image-classification"), IMAGES, target="cpu")
    found = executed(made, tmp_path)
    assert found["QLinearConv"] == convolutions  # depthwise ones, too
    products = len(report_of(made)["quantized_layers"]) - convolutions
    assert found["MatMulIntegerToFloat"] == products > 0


def test_what_lies_between_convolutions_stays_if_the_budget_needs_it(tiny, quantized, monkeypatch):
    real = calibrate.quantize_graph

    def spoil(model, layers, calibration, config, *, beyond_layers=False):
        if beyond_layers:  # as if rounding what lies between cost everything
            narrow = ActivationQuantParams.of_range(0, 1e-3)
            joining = dict.fromkeys(joining_tensors(model, layers), narrow)
            calibration = replace(calibration, ranges=calibration.ranges | joining)
        return real(model, layers, calibration, config, beyond_layers=beyond_layers)

    monkeypatch.setattr(calibrate, "quantize_graph", spoil)
    monkeypatch.setattr(stage, "quantize_graph", spoil)
    made = quantized(tiny(*RESNET), IMAGES, target="cpu", min_cosine=0.99)
    report = report_of(made)
    assert len(report["quantized_layers"]) == 15
    assert report["accuracy"]["cosine"] >= 0.99
    assert not any("between convolutions" in note for note in report["notes"])


@pytest.mark.more
def test_a_convolutional_artifact_is_validated(tiny, quantized):
    made = quantized(tiny(*RESNET), IMAGES, target="cpu", min_cosine=0.99)
    report = validate_model(made, effort="quick")
    assert report.passed, report.summary
    assert "100 % of" in report.summary


@pytest.mark.parametrize("kind", ["zero_point", pytest.param("scale", marks=pytest.mark.more)])
def test_a_change_behind_a_convolution_is_found(kind, tiny, quantized):
    made = quantized(tiny(*RESNET), IMAGES, target="cpu", min_cosine=0.99)
    ranges = json.loads((made.path / "reports" / "ranges.json").read_bytes())["ranges"]
    read = {layer.activation for layer in find_layers(read_graph(tiny(*RESNET).model))}
    tensor = next(name for name in ranges if name not in read)

    def edit(graph):
        found = next(t for t in graph.graph.initializer if t.name == f"{tensor}/{kind}")
        value = onnx.numpy_helper.to_array(found)
        changed = value + 1 if kind == "zero_point" else value * np.float32(1.01)
        found.CopyFrom(onnx.numpy_helper.from_array(changed.astype(value.dtype), found.name))

    report = validate_model(break_graph(made, edit), effort="quick")
    assert not report.passed
    problems = [difference.problem for difference in report.weights.differences]
    # The pair has these initializers in common.
    assert [f"activation {tensor}: {kind.replace('_', ' ')}" in p for p in problems] == [True]


@pytest.mark.more
def test_a_pair_with_the_calibration_of_another_tensor_is_found(tiny, quantized):
    made = quantized(tiny(*RESNET), IMAGES, target="cpu", min_cosine=0.99)
    read = {layer.activation for layer in find_layers(read_graph(tiny(*RESNET).model))}
    names = []

    def edit(graph):
        quantizers = [node for node in graph.graph.node if node.op_type == "QuantizeLinear"]
        names[:] = [q.input[0] for q in quantizers if q.input[0] not in read][:2]
        for node in graph.graph.node:
            if node.name in (f"{names[0]}/quantize", f"{names[0]}/dequantize"):
                node.input[1], node.input[2] = f"{names[1]}/scale", f"{names[1]}/zero_point"

    report = validate_model(break_graph(made, edit), effort="quick")
    problems = "".join(difference.problem for difference in report.weights.differences)
    assert f"quantizes '{names[0]}', calibrated for '{names[1]}'" in problems
    assert not report.passed


def test_a_removed_zero_point_is_found(tiny, quantized):
    made = quantized(tiny("bert", "feature-extraction"), target="cpu", min_cosine=0.99)

    def edit(graph):
        pair = [n for n in graph.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
        first = next(node.name for node in pair if node.op_type == "QuantizeLinear")
        tensor = first.removesuffix("/quantize")
        for node in pair:
            if node.name in (f"{tensor}/quantize", f"{tensor}/dequantize"):
                del node.input[2]

    report = validate_model(break_graph(made, edit), effort="quick")
    assert not report.passed
    assert "zero point -128, calibrated 0" in report.weights.differences[0].problem


def test_excluded_layers_stay_in_fp32_in_dynamic_int8_as_well(tiny, quantized):
    made = quantized(tiny(*BERT), target="cpu", scheme="dynamic", exclude=("*attention*",))
    names = [n.name for n in onnx.load(made.model).graph.node if n.op_type == "MatMulInteger"]
    assert names
    assert not any("attention" in name for name in names)
    with pytest.raises(OptionError, match="no layer is named 'nothing'"):
        quantized(tiny(*BERT), target="cpu", scheme="dynamic", exclude=("nothing",))


def test_the_last_product_of_a_classifier_can_be_excluded(tiny, quantized):
    """The quantizer makes a MatMul of this Gemm, under another name."""
    counts = []
    for exclude in ((), ("/classifier/*",)):
        made = quantized(tiny(*BERT), target="cpu", scheme="dynamic", exclude=exclude)
        counts.append(sum(report_of(made)["products"]["model.onnx"].values()))
    assert counts[0] == counts[1] + 1


@pytest.mark.slow
def test_a_first_convolution_of_few_products_stays_in_fp32(tiny, quantized):
    made = quantized(
        tiny("wav2vec2", "audio-classification"), None, target="cpu", allow_random=True
    )
    (reason,) = [r for r in report_of(made)["left_out"].values() if "on the CPU" in r]
    assert reason == "1 input channel, K = 10: INT8 gains nothing on the CPU"


def test_no_tensorrt_is_needed(tiny, quantized, monkeypatch):
    def missing(*_):
        raise AssertionError("TensorRT was loaded")

    monkeypatch.setattr("enginery.quantize.trial.parse_onnx", missing)
    monkeypatch.setattr("enginery.quantize.trial.require_tensorrt", missing)
    assert not report_of(quantized(tiny(*BERT), target="cpu", capability=["8.9"]))["engines"]


def test_a_budget_without_inputs_is_an_error(tiny):
    for options, name in (({"min_cosine": 0.99}, "min_cosine"), ({"accuracy_budget": "1%"}, "acc")):
        config = QuantizeConfig(target="cpu", scheme="dynamic", **options)
        with pytest.raises(OptionError, match=rf"'{name}\w*' is .*no inputs to measure"):
            stage.read_calibration(tiny(*BERT), config)
    assert stage.read_calibration(tiny(*BERT), replace(config, accuracy_budget="")) is None


def test_no_answer_may_change_with_a_budget_of_0(tiny, quantized):
    made = quantized(tiny(*BERT), target="cpu", scheme="int8", accuracy_budget="0%", rows=8)
    assert report_of(made)["accuracy"]["argmax_agreement"] == 1


def test_excluding_everything_from_dynamic_int8_is_an_error(tiny, quantized):
    with pytest.raises(ArtifactError, match="no MatMul that 'exclude' leaves"):
        quantized(tiny(*BERT), target="cpu", scheme="dynamic", exclude=("*",))


def test_a_cosine_that_validation_refuses_is_noted(tiny, quantized, monkeypatch):
    monkeypatch.setattr(stage, "MIN_MEAN_COSINE", 0.99999)
    made = quantized(tiny("bert", "feature-extraction"), target="cpu")
    expected = f"mean cosine {report_of(made)['builtin']['cosine']:.4f} on built-in inputs, but"
    assert any(note.startswith(expected) for note in made.manifest.stages[-1].notes)
    assert any(note.startswith(expected) for note in report_of(made)["notes"])


def test_the_search_rounds_what_a_convolution_writes(tmp_path):
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
    g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) <float[2, 2, 1, 1] w = {1, 2, 3, 4}> {
        [layer] a = Conv(x, w)   y = Relu(a)
    }""")
    path = tmp_path / "model.onnx"
    onnx.save(graph, path)
    ranges = {
        "x": ActivationQuantParams.of_range(-4, 4),
        "y": ActivationQuantParams.of_range(0, 16),
    }
    scheme = scheme_from_config(QuantizeConfig(target="cpu", scheme="int8"))
    images = {"x": np.random.default_rng(0).normal(size=(1, 2, 4, 4)).astype(np.float32)}
    layers = find_layers(read_graph(path))
    with LayerToggleModel(path, layers, ranges, {}, scheme) as toggled:
        exact, rounded = (toggled(images, names)["y"] for names in ((), ("layer",)))
    steps = rounded / ranges["y"].scale
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
    assert len(np.unique(np.rint(steps))) > 5
    np.testing.assert_allclose(rounded, exact, atol=0.2)
    assert not np.allclose(exact / ranges["y"].scale, np.rint(exact / ranges["y"].scale), atol=1e-2)
