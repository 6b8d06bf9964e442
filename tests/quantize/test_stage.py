import json
from dataclasses import replace

import numpy as np
import onnx
import pytest

from enginery import export_model, optimize_model, validate_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import (
    ArtifactError,
    CheckFailedError,
    ExportError,
    OptionError,
    ProviderError,
    RejectedArtifactError,
    ShapeError,
)
from enginery.core.options import options_from
from enginery.passes.cast.overflow import Fp32Node
from enginery.passes.lint.lint import LintReport
from enginery.quantize import calibrate, stage, trial
from enginery.quantize.calibration.data import make_batches
from enginery.quantize.config import QuantizeConfig
from enginery.runtime.onnxruntime.runner import OrtRunner
from tests.core.artifacts import verdict
from tests.engine.products import artifact_of
from tests.passes.onnx_graphs import WIDTH, node, save_graph
from tests.tiny import TEXT

BERT = ("bert", "text-classification")
GENERATOR = np.random.default_rng(0)
WEIGHT = GENERATOR.normal(size=(16, 16)).astype(np.float32)


def report_of(artifact):
    return json.loads((artifact.path / stage.REPORT).read_bytes())


def test_quantized_artifact_is_complete(tiny, quantized):
    source = tiny(*BERT)
    made = quantized(source)
    manifest = Artifact.open(made.path, verify=True).manifest
    assert (manifest.target, manifest.precision, manifest.residual) == ("tensorrt", "int8", "fp16")
    assert [record.stage for record in manifest.stages] == ["export", "quantize"]
    assert manifest.graphs[0].inputs == source.manifest.graphs[0].inputs
    assert manifest.graphs[0].outputs == source.manifest.graphs[0].outputs
    assert (made.path / "tokenizer.json").is_file()


def test_weights_are_int8_and_the_rest_is_fp16(tiny, quantized):
    graph = onnx.load(quantized(tiny(*BERT)).model)
    types = {tensor.data_type for tensor in graph.graph.initializer if len(tensor.dims) == 2}
    assert onnx.TensorProto.INT8 in types
    assert onnx.TensorProto.FLOAT not in types


def test_fp32_residual_has_no_fp16(tiny, quantized):
    made = quantized(tiny(*BERT), residual="fp32")
    types = {tensor.data_type for tensor in onnx.load(made.model).graph.initializer}
    assert onnx.TensorProto.FLOAT16 not in types
    assert made.manifest.describe_precision() == "int8, fp32 elsewhere"


@pytest.mark.more
def test_the_engine_is_built_and_read_back(tiny, quantized):
    made = quantized(tiny(*BERT), capability=("8.9",))
    report = report_of(made)
    (engine,) = report["engines"]
    assert engine["quantized_layers"] == len(report["quantized_layers"]) == 12
    assert engine["layers"]["gemm int8"] == 8  # query, key and value are one
    assert engine["not_quantized"] == []


@pytest.mark.more
def test_smoothing_costs_neither_int8_gemms_nor_fused_attention(tiny, quantized):
    source = tiny(*BERT, hidden_size=128, num_attention_heads=2)
    engines = {
        smoothing: report_of(
            quantized(source, capability=("8.9",), smoothing=smoothing, shift=smoothing != "none")
        )["engines"][0]
        for smoothing in ("none", 0.5)
    }
    assert engines["none"]["fused_attentions"] == 2
    assert engines[0.5]["layers"] == engines["none"]["layers"]
    assert engines[0.5]["fused_attentions"] == 2


def test_report_counts_match_the_graph(tiny, quantized):
    report = report_of(quantized(tiny(*BERT)))
    assert report["layers"] == {"quantized": 12, "all": 14}
    reasons = " ".join(report["left_out"].values())
    assert "one row per input" in reasons  # the pooler
    assert "N = 3" in reasons  # the classifier
    work = report["multiply_adds"]
    assert 0.7 < work["share_with_attention"] < work["share"] < 1
    # Two layers of 4 × 32 × 32 and 2 × 32 × 64 for each position, a pooler, and three labels.
    per_position = 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert work["all"] == work["positions"] * per_position + 32 * 32 + 32 * 3


def test_the_measured_accuracy_is_that_of_the_saved_graph(tiny, quantized):
    source = tiny(*BERT)
    made = quantized(source)
    config = QuantizeConfig()
    data = stage.read_calibration(source, config, TEXT)
    _, held_out = make_batches(source, source.manifest.graphs[0], data, seed=0)
    cosines = []
    with OrtRunner(source) as one, OrtRunner(made) as other:
        for batch in held_out:
            feeds = batch.load()
            for a, b in zip(one(feeds)["logits"], other(feeds)["logits"], strict=True):
                cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert report_of(made)["accuracy"]["cosine"] == pytest.approx(np.mean(cosines), abs=1e-5)


@pytest.mark.parametrize("kind", ["bert", pytest.param("gpt2", marks=pytest.mark.more)])
def test_the_saved_graph_does_what_the_search_simulated(tiny, quantized, kind):
    task = {"bert": "token-classification", "gpt2": "text-generation"}[kind]
    report = report_of(quantized(tiny(kind, task), residual="fp32"))
    shortfall = 1 - report["search"]["simulated"]["cosine"]
    assert 1 - report["accuracy"]["cosine"] == pytest.approx(shortfall, rel=1e-3)


def test_the_same_inputs_give_the_same_bytes(tiny, quantized, tmp_path):
    first = quantized(tiny(*BERT), out=tmp_path / "first")
    source = tiny(*BERT).copy_to(tmp_path / "source")  # so that it is quantized anew
    second = quantized(source, out=tmp_path / "second")
    assert first.model.read_bytes() == second.model.read_bytes()


@pytest.mark.more
def test_the_search_leaves_layers_out_until_the_budget_holds(tiny, quantized):
    source = tiny("bert", "token-classification")
    everything = report_of(quantized(source))["accuracy"]["cosine"]
    budget = 1 - (1 - everything) / 2
    report = report_of(quantized(source, min_cosine=budget))
    assert report["accuracy"]["cosine"] >= budget
    assert any("raises the mean cosine" in reason for reason in report["left_out"].values())
    assert 0 < report["multiply_adds"]["share"] < 1
    assert len(report["search"]["curve"]) >= 2
    assert len(report["search"]["effects"]) == 12


def test_a_budget_that_cannot_be_kept_leaves_nothing(tiny, quantized, tmp_path):
    with pytest.raises(CheckFailedError, match="no combination with a quantized layer"):
        quantized(tiny(*BERT), min_cosine=1.0)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def asymmetric(monkeypatch):
    """Make zero points that TensorRT does not support."""
    real = stage.quantize_graph

    def quantize_graph(model, *arguments, **options):
        additions = real(model, *arguments, **options)
        for name, value in model.graph.initializers.items():
            if name.endswith("weight_zero_point"):
                ones = np.ones(value.shape.numpy(), np.int8)
                value.const_value = type(value.const_value)(ones, name=name)
        return additions

    monkeypatch.setattr(stage, "quantize_graph", quantize_graph)


def test_nothing_is_saved_where_the_graph_breaks_a_rule(tiny, quantized, tmp_path, asymmetric):
    with pytest.raises(ProviderError, match=r"zero point 1 .* TensorRT accepts only 0"):
        quantized(tiny(*BERT))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_saved_where_the_parser_refuses(
    tiny, quantized, tmp_path, asymmetric, monkeypatch
):
    clean = LintReport("", "tensorrt", (), "")
    monkeypatch.setattr(trial, "lint_onnx", lambda *_, **__: clean)
    with pytest.raises(ProviderError, match="rejected the quantized graph, so it was not saved"):
        quantized(tiny(*BERT), capability=("8.9",))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_nodes_that_overflow_in_fp16_stay_fp32(tiny, quantized, monkeypatch):
    name = "/bert/encoder/layer.1/output/LayerNorm/LayerNormalization"
    found = Fp32Node(name, "LayerNormalization", "t", 7e4, 1.0, "its output reaches 7e+04")
    monkeypatch.setattr(calibrate, "find_fp32_nodes", lambda *_: {name: found})
    made = quantized(tiny(*BERT))
    assert report_of(made)["fp32_nodes"] == {name: "its output reaches 7e+04"}
    nodes = onnx.load(made.model).graph.node
    (norm,) = [node for node in nodes if node.name == name]
    (cast,) = [node for node in nodes if norm.input[0] in node.output]
    assert (cast.op_type, cast.attribute[0].i) == ("Cast", onnx.TensorProto.FLOAT)


def test_excluded_layers_are_not_quantized(tiny, quantized):
    made = quantized(tiny(*BERT), exclude=("*/layer.0/*",))
    report = report_of(made)
    assert not any("layer.0" in name for name in report["quantized_layers"])
    assert any(reason == "excluded by '*/layer.0/*'" for reason in report["left_out"].values())


def test_a_pattern_that_names_no_layer_is_an_error(tiny, quantized):
    with pytest.raises(OptionError, match="no layer is named"):
        quantized(tiny(*BERT), exclude=("*/layer.7/*",))


def test_random_calibration_is_noted_in_the_manifest(tiny, quantized):
    made = quantized(tiny(*BERT), None, allow_random=True)
    assert any("random inputs" in note for note in made.manifest.stages[-1].notes)


def test_missing_trial_engine_is_noted(tiny, quantized):
    notes = quantized(tiny(*BERT)).manifest.stages[-1].notes
    assert any("no trial engine was built" in note for note in notes)


def test_labels_make_the_budget_one_of_accuracy(tiny, quantized, tmp_path):
    rows = "".join(f'"{text.replace(chr(34), "")}",glad\n' for text in TEXT)
    (tmp_path / "data.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    made = quantized(
        tiny(*BERT),
        None,
        out=tmp_path / "int8",
        data=str(tmp_path / "data.csv"),
        label_column="label",
        accuracy_budget="100%",
    )
    report = report_of(made)
    assert report["search"]["budget"].startswith("accuracy of at least")
    assert report["accuracy"]["label_accuracy"] is not None


def test_artifact_with_failed_validation_is_rejected(tiny, quantized, tmp_path):
    source = tiny(*BERT).copy_to(tmp_path / "source")
    source = source.annotate(verdict(source, passed=False, summary="far off"), b"{}")
    with pytest.raises(RejectedArtifactError, match="far off"):
        quantized(source)
    assert quantized(source, allow_failed=True).manifest.verdicts == ()


def test_a_quantized_artifact_is_not_quantized_again(tiny, quantized, tmp_path):
    made = quantized(tiny(*BERT))
    with pytest.raises(ArtifactError, match="already quantized"):
        quantized(made, out=tmp_path / "twice")


@pytest.fixture
def early(tmp_path):
    """An import of opset 11: a product, a Softmax of that opset's kind, and a product."""
    nodes = [
        node("MatMul", "x w", "a", name="first"),
        node("Softmax", "a", "b", name="softmax"),
        node("MatMul", "b w", "y", name="second"),
    ]
    weight = GENERATOR.normal(size=(WIDTH, WIDTH)).astype(np.float32)
    spec = (onnx.TensorProto.FLOAT, ["batch", "tokens", WIDTH])
    path = save_graph(
        tmp_path / "early.onnx",
        nodes,
        {"w": weight},
        inputs={"x": spec},
        outputs={"y": spec},
        opset=11,
    )
    return export_model(str(path), out=tmp_path / "early")


ROWS = [{"x": GENERATOR.normal(size=(1, 5, WIDTH)).astype(np.float32)} for _ in range(12)]


def test_a_graph_of_an_early_opset_is_converted(early, quantized, tmp_path):
    made = quantized(early, ROWS)
    assert early.manifest.graphs[0].opset == 11
    assert made.manifest.graphs[0].opset == 19
    assert [o.version for o in onnx.load(made.model).opset_import if not o.domain] == [19]
    assert any(
        note.startswith("converted from opset 11 to 19") for note in made.manifest.stages[-1].notes
    )
    assert report_of(made)["layers"] == {"all": 2, "quantized": 2}
    report = validate_model(made)
    assert report.passed, report.summary


def test_a_graph_that_cannot_be_converted_is_an_error(early, quantized, tmp_path, monkeypatch):
    monkeypatch.setattr("enginery.passes.ir.opset._MAX_BYTES", 1000)
    with pytest.raises(ExportError, match=r"model\.onnx cannot be converted to opset 19"):
        quantized(early, ROWS, out=tmp_path / "int8")
    assert not (tmp_path / "int8").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": "fp16"}, "is fp16"),
        ({"target": "cuda"}, "for cuda"),
        ({"graphs": 2}, "expected one"),
    ],
)
def test_unsuitable_artifacts_are_rejected_with_a_reason(tiny, change, reason):
    source = tiny(*BERT)
    (graph,) = source.manifest.graphs
    if "graphs" in change:
        change = {"graphs": (graph, graph)}
    altered = replace(source, manifest=source.manifest.model_copy(update=change))
    with pytest.raises(ArtifactError, match=reason):
        stage.require_quantizable(altered, QuantizeConfig())


def test_the_fingerprint_follows_inputs_and_options(tiny):
    source = tiny(*BERT)

    def key(texts=("a", "b"), **options):
        config = options_from(QuantizeConfig, "quantize", options)
        return stage.fingerprint(
            source, config, stage.read_calibration(source, config, list(texts))
        ).key

    assert key() == key()
    assert key() != key(("a", "c"))
    assert key() != key(method="minmax")
    assert key() == key(allow_failed=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"capability": ("9.9",)}, OptionError, "capability '9.9'"),
        ({"capability": ("8.9",), "profile": ("rows=1",)}, ShapeError, "no dynamic dim 'rows'"),
    ],
)
def test_trial_engine_options_are_checked_before_the_calibration(
    tiny, quantized, monkeypatch, options, error, message
):
    monkeypatch.setattr(stage, "calibrate", None)
    with pytest.raises(error, match=message):
        quantized(tiny(*BERT), **options)


@pytest.mark.more
def test_few_inputs_are_not_called_held_out(tiny, quantized):
    few = report_of(quantized(tiny(*BERT), TEXT[:3]))
    assert "on 3 rows that calibrated it, too" in few["summary"]
    assert "held-out rows" in report_of(quantized(tiny(*BERT), TEXT * 2))["summary"]


def in_rows(*nodes):
    """Write a graph around nodes from h to p, both (batch, 4, 16), with input x and output y."""
    return {"model.onnx": [node("Reshape", "x rows", "h"), *nodes, node("Reshape", "p flat", "y")]}


SHAPES = {"rows": np.int64([-1, 4, 16]), "flat": np.int64([-1, WIDTH])}


def rows_of(batch):
    return [{"x": GENERATOR.normal(size=(batch, WIDTH)).astype(np.float32)} for _ in range(9)]


def test_layer_whose_input_is_always_zero_is_not_quantized(tmp_path, quantized):
    graph = in_rows(
        node("Mul", "h none", "gone"),
        node("MatMul", "gone w", "a", name="silent"),
        node("MatMul", "h v", "b", name="loud"),
        node("Add", "a b", "p"),
    )
    weights = {"w": WEIGHT, "v": WEIGHT, "none": np.float32([0])}
    source = artifact_of(tmp_path / "a", graph, {**weights, **SHAPES})
    report = report_of(quantized(source, rows_of(2)))
    assert report["quantized_layers"] == ["loud"]
    assert "zero on all calibration inputs" in report["left_out"]["silent"]


def test_a_graph_of_a_fixed_batch_is_quantized(tmp_path, quantized):
    graph = in_rows(node("MatMul", "h w", "p", name="layer"))
    source = artifact_of(tmp_path / "a", graph, {"w": WEIGHT, **SHAPES}, batch=4)
    assert report_of(quantized(source, rows_of(4)))["quantized_layers"] == ["layer"]


def test_the_curve_is_drawn_and_its_numbers_are_beside_it(tiny, quantized):
    made = quantized(tiny(*BERT), curve=True)
    curve = report_of(made)["search"]["curve"]
    assert [point["left_out"] for point in curve] == [0, 1, 2, 4, 8]
    assert curve[0]["share"] > curve[-1]["share"]
    picture = (made.path / stage.CURVE).read_text(encoding="utf-8")
    assert picture.count("<svg") == 1
    assert "multiply-adds in INT8, %" in picture


def test_without_matplotlib_the_report_says_that_nothing_was_drawn(tiny, quantized, monkeypatch):
    monkeypatch.setattr("enginery.core.figures.can_draw", lambda: False)
    made = quantized(tiny(*BERT))
    assert not (made.path / stage.CURVE).exists()
    assert any("no figures were drawn" in note for note in made.manifest.stages[-1].notes)


def test_without_labels_an_accuracy_budget_counts_answers_that_change(tiny, quantized):
    found = report_of(quantized(tiny(*BERT), accuracy_budget="60%"))["search"]
    assert (found["about"], found["reference"], found["allowed"]) == ("agreement", 1.0, 0.6)
    assert found["budget"] == "agreement with FP32's answers of at least 40.00%"


class TestDynamic:
    def test_it_needs_no_inputs_and_runs_on_the_cpu(self, tiny, quantized):
        source = tiny(*BERT)
        made = quantized(source, None, scheme="dynamic", target="cpu")
        assert made.manifest.target == "cpu"
        assert made.manifest.describe_precision() == "dynamic int8, fp32 elsewhere"
        report = report_of(made)
        assert report["products"]["model.onnx"]["MatMulInteger"] >= 12
        assert report["accuracy"] is None
        with OrtRunner(made) as runner, OrtRunner(source) as reference:
            ids = np.array([[5, 6, 7, 8]], np.int64)
            others = {"attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            feeds = {"input_ids": ids, **others}
            a, b = runner(feeds)["logits"][0], reference(feeds)["logits"][0]
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.95

    def test_inputs_measure_it_and_the_budget_must_hold(self, tiny, quantized, tmp_path):
        source = tiny(*BERT)
        report = report_of(quantized(source, scheme="dynamic", target="cpu"))
        assert report["accuracy"]["rows"] == len(TEXT)
        with pytest.raises(CheckFailedError, match="does not meet the budget, a mean cosine"):
            quantized(source, out=tmp_path / "no", scheme="dynamic", target="cpu", min_cosine=1.0)
        assert not (tmp_path / "no").exists()

    def test_it_takes_what_optimize_fused_for_the_cpu(self, exported, quantized):
        source = exported("bert", "text-classification")  # its head is a Gemm
        fused = optimize_model(source, target="cpu", precision="fp32")
        made = quantized(fused, None, scheme="dynamic", target="cpu")
        assert made.manifest.target == "cpu"
        assert made.manifest.precision == "int8"
        with pytest.raises(ArtifactError, match="is fp32 for cpu"):
            quantized(fused)

    @pytest.mark.more
    def test_every_graph_of_several_is_quantized(self, exported, quantized):
        source = exported("t5", "text2text-generation")
        made = quantized(source, None, scheme="dynamic", target="cpu")
        products = report_of(made)["products"]
        assert set(products) == {graph.file for graph in source.manifest.graphs}
        assert all(products.values())
