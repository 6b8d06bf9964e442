"""Static INT8 for ONNX Runtime's CPU provider."""

import json
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest

from enginery import validate_model
from enginery.core.errors import CheckFailedError
from enginery.quantize import stage
from enginery.runtime.onnxruntime.runner import OrtRunner
from tests.validate.faults.edits import break_graph

BERT = ("bert", "text-classification")


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


def test_it_computes_what_the_graph_for_tensorrt_does(tiny, quantized, tmp_path):
    source = tiny(*BERT)
    made = quantized(source, out=tmp_path / "cpu", target="cpu")
    other = quantized(source, out=tmp_path / "tensorrt", residual="fp32")
    ids = np.random.default_rng(0).integers(0, 90, (3, 11))
    feeds = {spec.name: np.ones_like(ids) for spec in source.manifest.graphs[0].inputs}
    feeds["input_ids"] = ids
    with OrtRunner(made) as one, OrtRunner(other) as two:
        np.testing.assert_allclose(one(feeds)["logits"], two(feeds)["logits"], atol=1e-5)


def test_the_artifact_is_validated_with_its_weights(tiny, quantized):
    made = quantized(tiny("bert", "feature-extraction"), target="cpu", min_cosine=0.99)
    report = validate_model(made, effort="quick")
    assert report.passed, report.summary
    assert "100 % of" in report.summary


def test_a_changed_zero_point_is_found(tiny, quantized):
    made = quantized(tiny("bert", "feature-extraction"), target="cpu", min_cosine=0.99)

    def edit(graph):
        zero = next(t for t in graph.graph.initializer if t.data_type == onnx.TensorProto.UINT8)
        zero.CopyFrom(onnx.numpy_helper.from_array(np.asarray(127, np.uint8), zero.name))

    report = validate_model(break_graph(made, edit), effort="quick")
    assert "zero point -1, calibrated 0" in report.summary


def test_the_budget_is_checked(tiny, quantized):
    with pytest.raises(CheckFailedError, match="budget"):
        quantized(tiny(*BERT), target="cpu", min_cosine=1.0)


def test_convolutions_stay_in_fp32_and_say_why(tiny, quantized):
    images = [np.random.default_rng(i).integers(0, 256, (32, 32, 3), np.uint8) for i in range(8)]
    made = quantized(tiny("vit", "image-classification"), images, target="cpu")
    report = report_of(made)
    assert report["quantized_layers"]
    assert any("only between quantized activations" in why for why in report["left_out"].values())


def test_no_tensorrt_is_needed(tiny, quantized, monkeypatch):
    def missing(*_):
        raise AssertionError("TensorRT was loaded")

    monkeypatch.setattr("enginery.quantize.trial.parse_onnx", missing)
    monkeypatch.setattr("enginery.quantize.trial.require_tensorrt", missing)
    assert not report_of(quantized(tiny(*BERT), target="cpu", capability=["8.9"]))["engines"]
