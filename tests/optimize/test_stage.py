"""The artifacts of the optimize stage for each target, and the inputs that it rejects."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginery import export_model, optimize_model
from enginery.core.artifact import artifact as artifact_module
from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.core.errors import ExportError, InputError, OptionError, RejectedArtifactError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.optimize import stage
from enginery.optimize.config import OptimizeConfig
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tensorrt.build import BuildRequest


@pytest.fixture
def optimized(tmp_path):
    """Return a function that runs the stage: `optimized(artifact, target="cuda")`."""

    def make(artifact, **options):
        name = "-".join(["out", *map(str, options.values())]).replace("/", "_")
        return stage.run(artifact, OptimizeConfig(**options), tmp_path / name)

    return make


@pytest.mark.more
@pytest.mark.parametrize(
    ("target", "precision"), [("cpu", "fp32"), ("cuda", "fp16"), ("tensorrt", "fp16")]
)
def test_large_graph_is_the_same_after_the_stage(exported, monkeypatch, target, precision):
    """A hard link of the input that comes and goes would count as a change while it was read."""
    monkeypatch.setattr(artifact_module, "_LINKED_BYTES", 0)
    source = exported("bert", "text-classification")
    artifact = optimize_model(source, target=target, precision=precision, force=True)
    assert artifact.manifest.target == target


def report_of(artifact):
    return json.loads((artifact.path / stage.REPORT).read_text())


def feeds_for(artifact):
    record = artifact.manifest.graphs[0]
    limits = FeedLimits.from_artifact(artifact)
    sizes = {"batch": 3, "sequence": 12}
    return make_feeds(record.inputs, sizes, limits, seed=0, ragged=True)


def answers(artifact):
    with OrtRunner(artifact) as runner:
        return runner(feeds_for(artifact))


def test_tensorrt_fp16_has_standard_ops_fp32_edges_and_a_record(exported, optimized):
    source = exported("bert", "text-classification")
    artifact = optimized(source)
    manifest = artifact.manifest
    assert (manifest.precision, manifest.target) == ("fp16", "tensorrt")
    assert [record.stage for record in manifest.stages] == ["export", "optimize"]
    assert manifest.graphs == source.manifest.graphs, "the interface is what it was"
    model = onnx.load(artifact.model)
    assert {o.domain for o in model.opset_import} == {""}
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds
    assert onnx.TensorProto.FLOAT not in kinds
    for name in ("tokenizer.json", "config.json"):
        assert (artifact.path / name).read_bytes() == (source.path / name).read_bytes()
    report = report_of(artifact)
    assert report["passed"]
    assert report["graphs"][0]["feeds"] == "built-in sentences"
    assert report["graphs"][0]["largest"] > 0
    error = np.abs(answers(artifact)["logits"] - answers(source)["logits"]).max()
    assert error < report["graphs"][0]["agreements"][0]["limit"]
    layers = report["graphs"][0]["layer_errors"]
    products = [node.name for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    assert list(layers) == products, "every product, in graph order"
    assert all(0 < error < 0.01 for error in layers.values()), "FP16's rounding"
    assert (artifact.path / "reports/layer-errors.svg").is_file()


def test_interface_is_fp16_with_io_dtype_same(exported, optimized):
    artifact = optimized(exported("vit", "image-classification"), io_dtype="same")
    record = artifact.manifest.graphs[0]
    assert {spec.dtype for spec in (*record.inputs, *record.outputs)} == {"float16"}


def test_bf16_is_checked_by_simulation(exported, optimized):
    artifact = optimized(exported("bert", "text-classification"), precision="bf16")
    found = report_of(artifact)["graphs"][0]
    assert "no BF16 kernels" in found["not_run"]
    assert found["agreements"][0]["cosine"] > 0.999
    assert artifact.manifest.verdict("optimize").passed


def test_cuda_gets_fused_ops_and_tensorrt_rejects_them(exported, optimized):
    artifact = optimized(exported("bert", "text-classification"), target="cuda", precision="fp32")
    ops = {node.op_type for node in onnx.load(artifact.model).graph.node}
    assert {"Attention", "SkipLayerNormalization"} <= ops
    with pytest.raises(ExportError, match=r"nodes that TensorRT cannot parse.*com\.microsoft::"):
        optimized(artifact, target="tensorrt")


def test_cuda_fp16_is_close_after_fusion(exported, optimized):
    source = exported("bert", "text-classification")
    artifact = optimized(source, target="cuda", level="O4")
    assert artifact.manifest.precision == "fp16"
    assert "FastGelu" in {node.op_type for node in onnx.load(artifact.model).graph.node}
    one, other = answers(artifact)["logits"].ravel(), answers(source)["logits"].ravel()
    assert one @ other / np.sqrt((one @ one) * (other @ other)) > 0.999


def overflowing(source, out):
    """Return the artifact with a hidden state that exceeds FP16 before a norm."""
    model = onnx.load(source.model)
    nodes = model.graph.node
    norms = [i for i, node in enumerate(nodes) if node.op_type == "LayerNormalization"]
    norm = nodes[norms[2]]
    scale = onnx.numpy_helper.from_array(np.float32(3e4), "growth")
    model.graph.initializer.append(scale)
    grown = onnx.helper.make_node("Mul", [norm.input[0], "growth"], ["grown"], name="grow")
    norm.input[0] = "grown"
    nodes.insert(norms[2], grown)
    with staging(out) as directory:
        for path in source.path.iterdir():
            if path.is_file():
                (directory / path.name).write_bytes(path.read_bytes())
        onnx.save(model, directory / "model.onnx")
        commit_artifact(directory, source.manifest.model_copy(update={"verdicts": ()}))
    return Artifact.open(out)


def test_overflowing_node_stays_fp32_with_its_range_in_the_report(exported, optimized, tmp_path):
    source = overflowing(exported("bert", "text-classification"), tmp_path / "grown")
    artifact = optimized(source)
    islands = {island["node"]: island for island in report_of(artifact)["graphs"][0]["islands"]}
    assert "grow" in islands
    assert islands["grow"]["largest"] > 65504
    assert len(islands) == 2, "only the product and the norm"
    assert np.isfinite(answers(artifact)["logits"]).all()


@pytest.mark.more
def test_check_finds_the_node_where_the_graphs_diverge(exported, optimized, tmp_path, monkeypatch):
    """Without the measured ranges, the check alone finds the node."""
    from enginery.optimize import guard

    monkeypatch.setattr(guard, "find_fp32_nodes", lambda graph, ranges: {})
    source = overflowing(exported("bert", "text-classification"), tmp_path / "grown")
    artifact = optimized(source)
    found = report_of(artifact)["graphs"][0]
    assert found["rounds"] >= 1
    assert {island["node"] for island in found["islands"]} >= {"grow"}
    assert artifact.failed_verdict() is None


def test_graph_that_cannot_be_repaired_is_marked_with_its_node(
    exported, optimized, tmp_path, monkeypatch
):
    from enginery.optimize import guard

    monkeypatch.setattr(guard, "find_fp32_nodes", lambda graph, ranges: {})
    source = overflowing(exported("bert", "text-classification"), tmp_path / "grown")
    artifact = optimized(source, max_rounds=0)
    verdict = artifact.failed_verdict()
    assert verdict is not None
    assert "it diverges from FP32 at the node grow" in verdict.summary
    with pytest.raises(RejectedArtifactError):
        optimized(artifact, precision="bf16")


@pytest.mark.slow
def test_all_graphs_of_sequence_to_sequence_models_are_cast(exported, optimized):
    source = exported("t5", "text2text-generation")
    artifact = optimized(source)
    assert len(report_of(artifact)["graphs"]) == len(source.manifest.graphs) > 1
    assert artifact.failed_verdict() is None


def test_ranges_are_measured_on_the_users_data(exported, optimized, tmp_path):
    file = tmp_path / "reviews.csv"
    file.write_text("text\nGreat value.\nBroke after a week.\n")
    artifact = optimized(exported("bert", "text-classification"), data=str(file))
    assert report_of(artifact)["graphs"][0]["feeds"] == "rows of reviews.csv"
    with pytest.raises(InputError, match="no column 'review'"):
        optimized(exported("bert", "text-classification"), data=str(file), column="review")


def test_fp16_artifact_is_rejected(exported, optimized):
    artifact = optimized(exported("bert", "text-classification"))
    with pytest.raises(OptionError, match="is fp16 already"):
        optimized(artifact, precision="bf16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cpu", "precision": "fp16"}, "and only add casts"),
        ({"level": "O4", "target": "cpu", "precision": "fp32"}, "O3 in FP16 on CUDA"),
        ({"level": "O2"}, "does not use ONNX"),
        ({"rows": 0}, "expected 1 or more"),
        ({"max_error": float("nan")}, "expected a number above 0"),
    ],
)
def test_contradicting_options_are_rejected(exported, options, message):
    with pytest.raises(OptionError, match=message):
        stage.fingerprint(exported("bert", "text-classification"), OptimizeConfig(**options))


@pytest.mark.parametrize(
    ("target", "precision"), [("cpu", "fp32"), ("cuda", "fp16"), ("tensorrt", "fp16")]
)
def test_the_target_has_a_default_precision(exported, target, precision):
    artifact = exported("bert", "text-classification")
    default = stage.fingerprint(artifact, OptimizeConfig(target=target))
    named = stage.fingerprint(artifact, OptimizeConfig(target=target, precision=precision))
    assert default.key == named.key
    assert default.fields["precision"] == precision


def test_fingerprint_follows_the_options_and_the_data(exported, tmp_path):
    artifact = exported("bert", "text-classification")
    file = tmp_path / "a.txt"
    file.write_text("one\n")
    first = stage.fingerprint(artifact, OptimizeConfig(data=str(file)))
    file.write_text("two\n")
    second = stage.fingerprint(artifact, OptimizeConfig(data=str(file)))
    assert [change.partition(":")[0] for change in second.changes(first.fields)] == ["data"]
    assert first.key != stage.fingerprint(artifact, OptimizeConfig()).key


@pytest.mark.parametrize(
    ("kind", "task", "precision"),
    [
        # FP16 engines: test_fp16_engines.py
        pytest.param("bert", "text-classification", "bf16", marks=pytest.mark.more),
        pytest.param("distilbert", "fill-mask", "bf16", marks=pytest.mark.slow),
        pytest.param("convnext", "image-classification", "bf16", marks=pytest.mark.slow),
        pytest.param("gpt2", "text-generation", "bf16", marks=pytest.mark.slow),
        pytest.param("distilbert", "fill-mask", "fp16", marks=pytest.mark.slow),
    ],
)
def test_tensorrt_builds_an_engine_of_the_precision(exported, optimized, kind, task, precision):
    pytest.importorskip("tensorrt_rtx_bindings")
    from enginery.core.shapes import Profile, dynamic_dims
    from enginery.runtime.tensorrt.process import build_plan

    artifact = optimized(exported(kind, task), precision=precision)
    names = dynamic_dims(artifact.manifest.graphs[0].inputs)
    sizes = {"batch": "1:2:4", "height": "64", "width": "64"}
    profile = Profile.parse(",".join(f"{name}={sizes.get(name, '1:8:16')}" for name in names))
    built = build_plan(artifact.model, BuildRequest([profile], capabilities=("8.9",)))
    assert built.count("gemm", "fp32") == 0
    assert built.count("gemm", precision) > 0


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.more)])
def test_messages_name_the_inputs_on_which_fp16_ranges_were_measured(
    tmp_path, optimized, precision
):
    """BF16 has the range of FP32, so nothing is measured."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"], name="relu")],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 4))],
    )
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "relu.onnx")
    imported = export_model(str(tmp_path / "relu.onnx"))
    made = optimized(imported, target="tensorrt", precision=precision)
    measured = "(measured on generated numbers, which real inputs may exceed)"
    note = next(note for note in made.manifest.stages[-1].notes if "nodes in" in note)
    summary = report_of(made)["summary"]
    assert (measured in note, measured in summary) == (precision == "fp16",) * 2
