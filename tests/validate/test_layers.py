"""Each layer of an INT8 graph is compared with the same layer in FP32, and with what quantize saw.

Most faults here fail for other reasons as well. What is tested is that this comparison finds them.
"""

import json
from statistics import NormalDist

import numpy as np
import onnx
import pytest

from enginery import Artifact, export_model, quantize_model, validate_model
from enginery.core.accuracy import LayerError
from enginery.core.artifact.artifact import commit_artifact
from enginery.reports.quantization import QuantizationReport
from enginery.reports.validation import ValidationReport
from enginery.runtime.builtin_inputs import SENTENCES
from enginery.validate.metrics.budget import LayerExpectation
from tests.tiny import TEXT, save_tiny
from tests.validate.faults import edits as faults
from tests.validate.faults.graph_editor import GraphEditor

LAYER = "/encoder/layer.0/output/dense/MatMul"
ACTIVATION = "/encoder/layer.0/intermediate/intermediate_act_fn/Gelu_output_0"


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tiny BERT in FP32."""
    model = save_tiny("bert", "feature-extraction", tmp_path_factory.mktemp("layers") / "bert")
    return export_model(str(model), task="feature-extraction")


@pytest.fixture(scope="module")
def int8(bert):
    """The same in INT8, calibrated on texts like those that are compared."""
    texts = [*TEXT, *SENTENCES]
    return quantize_model(bert, texts, capability=(), curve=False, min_cosine=0.99)


@pytest.fixture
def planted(int8, bert, tmp_path):
    """Return a function: the report of a copy with a fault, `planted(edit)`."""
    original = onnx.load(str(bert.model))

    def make(edit, *, ranges=None, **options):
        artifact = int8.copy_to(tmp_path / f"copy-{len(list(tmp_path.iterdir()))}")
        if ranges is not None:
            file = artifact.path / "reports" / "ranges.json"
            held = json.loads(file.read_text())
            ranges(held)
            artifact.annotate(reports={"reports/ranges.json": json.dumps(held).encode()})
            artifact = Artifact.open(artifact.path)

        def change(model):
            editor = GraphEditor(model, original)
            edit(editor)
            editor.finish()

        return validate_model(faults.break_graph(artifact, change), effort="quick", **options)

    return make


def failed(report):
    return [layer.layer for layer in report.layers.layers if not layer.passed]


def activation_of(g, name):
    """Return the QuantizeLinear in front of a layer."""
    return g.producer(g.producer(g.node(name).input[0]).input[0])


def scaled(factor):
    return lambda g: g.change_array(activation_of(g, LAYER).input[1], lambda a: a * factor)


def weight_scales(change):
    def edit(g):
        g.change_array(g.producer(g.node(LAYER).input[1]).input[1], change)

    return edit


@pytest.mark.more
def test_quantize_measures_every_layer_on_held_out_and_built_in_rows(int8):
    report = QuantizationReport.of(int8)
    assert set(report.layer_errors) == set(report.quantized_layers)
    assert set(report.builtin_layer_errors) == set(report.quantized_layers)
    assert {seen.rows for seen in report.layer_errors.values()} == {report.accuracy.rows}
    assert {seen.rows for seen in report.builtin_layer_errors.values()} == {report.builtin.rows}
    assert all(0.001 < seen.error < 0.1 for seen in report.layer_errors.values())


@pytest.mark.more
def test_sound_artifact_has_the_errors_that_quantize_measured(int8, tmp_path):
    artifact = int8.copy_to(tmp_path / "copy")
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
    layers = QuantizationReport.of(int8).builtin_layer_errors
    assert {found.layer for found in report.layers.layers} == set(layers)
    for found in report.layers.layers:
        assert found.error == pytest.approx(layers[found.layer].error, rel=1e-3)
        assert found.limit == pytest.approx(1.1 * found.expected + 2**-11)
    assert report.layers.missing == []
    (line,) = [line for line in report.lines() if line.startswith("layers: ")]
    count = len(layers)
    assert f"{count} of {count} compared with FP32 over 16 rows; nearest to its limit: /" in line
    again = ValidationReport.from_json((artifact.path / "reports/validation.json").read_bytes())
    assert again.layers == report.layers


def correction_negated(int8):
    """Turn what calibration has added to the bias into its opposite."""
    held = json.loads((int8.path / "reports" / "ranges.json").read_text())
    delta = np.float32(held["bias_deltas"][LAYER])

    def edit(g):
        (add,) = g.consumers(g.node(LAYER).output[0])
        (bias,) = [name for name in add.input if g.array(name) is not None]
        g.change_array(bias, lambda a: a - 2 * delta)

    return edit


@pytest.mark.parametrize(
    ("fault", "factor"),
    [
        (lambda _: scaled(2), 1.2),
        pytest.param(lambda _: weight_scales(lambda s: np.roll(s, 1)), 2, marks=pytest.mark.more),
        pytest.param(
            lambda _: weight_scales(lambda s: s * 0 + s.mean()), 2, marks=pytest.mark.more
        ),
        pytest.param(correction_negated, 1.1, marks=pytest.mark.more),
    ],
    ids=["activation scale × 2", "weight scales rolled", "their mean", "correction negated"],
)
def test_fault_in_one_layer_fails_that_layer(planted, int8, fault, factor):
    report = planted(fault(int8))
    assert not report.passed
    assert not any("/encoder/layer.0/" in name for name in failed(report) if name != LAYER)
    worst = report.layers.worst
    assert not worst.passed
    assert worst.layer == LAYER
    assert worst.error > factor * worst.expected


@pytest.mark.more
def test_scale_that_the_record_of_the_calibration_has_as_well_is_found_here_alone(planted):
    """The graph and ranges.json agree, the weights are right, and the answers are near enough."""

    def ranges(held):
        held["ranges"][ACTIVATION]["scale"] *= 2

    report = planted(scaled(2), ranges=ranges)
    assert not report.passed
    assert not report.weights.differences
    assert not report.accuracy.problem
    assert all(case.passed for case in report.cases)
    assert report.summary == (
        f"a layer is less accurate than quantize has measured: {report.layers.problem}"
    )
    assert report.layers.problem.startswith(f"{LAYER}: ")
    assert " % off FP32, " in report.layers.problem


@pytest.mark.more
def test_own_data_are_held_against_the_held_out_rows(int8, planted, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXT))
    options = {"data": str(file), "min_cosine": "by-precision"}
    report = planted(lambda g: None, **options)
    assert report.passed, report.summary
    held_out = QuantizationReport.of(int8).layer_errors
    assert {found.layer: found.expected for found in report.layers.layers} == {
        name: seen.error for name, seen in held_out.items()
    }
    assert LAYER in failed(planted(scaled(8), **options))


@pytest.mark.more
def test_users_own_limit_replaces_those_of_the_layers(planted):
    assert planted(lambda g: None, min_cosine=0.5).layers is None


@pytest.mark.more
def test_layers_that_cannot_be_traced_are_counted(planted):
    def rename(g):
        weight = g.producer(g.node(LAYER).input[1])
        old = weight.input[0]
        g.node(LAYER).name = "product"
        weight.input[0] = g.constant(g.array(old))

    report = planted(rename)
    assert report.layers.missing == [LAYER]
    assert not failed(report)


@pytest.mark.more
def test_artifact_without_measured_layers_is_noted(int8, tmp_path):
    artifact = int8.copy_to(tmp_path / "copy")
    file = artifact.path / "reports" / "quantization.json"
    held = json.loads(file.read_text())
    held["layer_errors"], held["builtin_layer_errors"] = {}, {}
    artifact.annotate(reports={"reports/quantization.json": json.dumps(held).encode()})
    commit_artifact(artifact.path, Artifact.open(artifact.path).manifest)
    report = validate_model(Artifact.open(artifact.path), effort="quick")
    assert report.passed, report.summary
    assert report.layers is None
    assert "no single layer was compared with FP32: quantize has not measured them" in report.notes


def test_limits_are_a_share_or_the_confidence_bound_over_all_layers():
    steady, uneven = LayerError(128, 0.01, 0.0001), LayerError(128, 0.01, 0.01)
    layers = {"a": steady, "b": uneven, **{f"{n}": steady for n in range(8)}}
    compared = LayerExpectation(False, layers, 0.0).compare(layers)
    assert [layer.limit for layer in compared.layers] == pytest.approx([0.011] * 10)
    own = LayerExpectation(True, layers, 0.001).compare({**layers, "b": LayerError(4, 0.03, None)})
    limits = {layer.layer: layer.limit for layer in own.layers}
    assert limits["a"] == pytest.approx(0.015 + 0.001)
    few = LayerExpectation(True, layers, 0.0).compare({"b": LayerError(4, 0.03, None)})
    z = NormalDist().inv_cdf(1 - 0.001 / 10)
    assert few.layers[0].limit == pytest.approx(0.01 + z * 0.01 * (1 / 128 + 1 / 4) ** 0.5)
    assert len(few.missing) == 9


def test_error_that_is_not_a_number_fails():
    layers = {"a": LayerError(16, 0.01, 0.001)}
    for value in (float("nan"), float("inf")):
        compared = LayerExpectation(False, layers, 0.0).compare({"a": LayerError(16, value, None)})
        assert compared.problem.startswith("a: no finite error off FP32, 1 % measured by quantize")
