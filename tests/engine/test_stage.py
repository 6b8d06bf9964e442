import json
import re
import shutil

import numpy as np
import onnx
import pytest

from enginery import build_engine, stages, validate_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.errors import (
    OptionError,
    ProviderError,
    RejectedArtifactError,
    ShapeError,
)
from enginery.core.progress import SILENT
from enginery.core.store.store import Store
from enginery.engine import stage
from enginery.engine.requests import resolve_requests
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.validate import stage as validate
from enginery.validate.config import ValidateConfig
from tests.core.artifacts import verdict
from tests.engine.conftest import build_config
from tests.engine.products import PROFILE, artifact_of, product
from tests.passes.onnx_graphs import WIDTH, node, quantized_constants, quantized_product
from tests.progress import Said
from tests.tiny import TEXT

pytestmark = pytest.mark.skipif(not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'")


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """Give the test an empty store."""
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def engines_of(artifact):
    return [Engine.open(path, verify=True) for path in engine_directories(artifact.path)]


def report_of(artifact):
    return json.loads((artifact.path / stage.REPORT).read_bytes())


def files_of(artifact):
    return {name: record.sha256 for name, record in artifact.manifest.files.items()}


# What is made


def test_artifact_keeps_its_files_and_gets_the_engine(tmp_path, built):
    source = product(tmp_path / "a", external=True)
    source = source.annotate(reports={"reports/validation.json": b"{}"})
    made = built(source)
    (engine,) = engines_of(made)
    assert Artifact.open(made.path, verify=True) == made
    assert (made.path / "reports/validation.json").read_text() == "{}"
    added = {name for name in files_of(made) if name not in files_of(source)}
    assert added == {
        f"engines/{engine.name}/{file}"
        for file in ("model.plan", "model_ctx.onnx", "engine.json", "layers.json")
    }
    assert files_of(source).items() <= files_of(made).items()
    assert [record.stage for record in made.manifest.stages] == ["export", "build"]
    assert made.manifest.graphs == source.manifest.graphs


def test_record_describes_the_engine(tmp_path, built):
    made = built(
        product(tmp_path / "a"),
        capability="8.9,8.0",
        profile=["batch=2", "batch=1:4:8"],
        engine_per_profile=False,
    )
    (engine,) = engines_of(made)
    record = engine.record
    assert (record.flavor, record.capabilities) == ("tensorrt-rtx", ("8.0", "8.9"))
    assert record.profiles == ("batch=2", "batch=1:4:8")
    assert record.directory_name == engine.name
    assert engine.name.startswith("tensorrt-rtx-sm80-sm89-")
    assert record.layers["gemm fp32"] >= 1
    assert sum(record.layers.values()) == len(engine.layers())
    assert record.plan_size_bytes == engine.plan.stat().st_size > 1000
    assert record.weights_bytes >= WIDTH * WIDTH * 4
    assert record.seconds > 0
    assert record.peak_rss_bytes > 1e7
    assert record.options["workspace_bytes"] == 8 << 30
    wrapper = onnx.load(engine.path / record.wrapper)
    (node,) = wrapper.graph.node
    assert node.op_type == "EPContext"
    assert [value.name for value in wrapper.graph.input] == ["x"]


def test_the_report_has_engines_notes_and_the_stage(tmp_path, own_home, built):
    made = built(
        product(tmp_path / "a"), profile=["batch=1:2:4", "batch=8:16:32"], engine_per_profile=False
    )
    report = report_of(made)
    (engine,) = report["engines"]
    assert engine["directory"] == engines_of(made)[0].name
    assert engine["from_store"] is False
    assert report["left_out"] == []
    assert any("5 to 7" in note for note in report["notes"]), "the gap between the profiles"
    assert any("only the first profile of an engine" in note for note in report["notes"])
    (said,) = (note for note in report["notes"] if "Triton" in note)
    assert "on the server's GPU, build with --flavor tensorrt --capability current" in said
    record = made.manifest.stages[-1]
    assert list(record.notes) == [report["summary"], *report["notes"]]
    assert record.fields == report["fields"]
    assert record.peak_rss_bytes >= engine["peak_rss_bytes"]


def test_engine_per_profile_has_one_profile(tmp_path, built):
    made = built(product(tmp_path / "a"), profile=["batch=1:2:4", "batch=5:16:32"])
    found = [engine.record.profiles for engine in engines_of(made)]
    assert sorted(found) == [("batch=1:2:4",), ("batch=5:16:32",)]
    assert not any("first profile" in note for note in report_of(made)["notes"])


def test_graph_with_fixed_shapes_needs_no_profile(tmp_path, built):
    made = built(product(tmp_path / "a", batch=4), profile=[])
    assert engines_of(made)[0].record.profiles == ()


def test_portable_engine_has_portable_in_its_name(tmp_path, built):
    (engine,) = engines_of(built(product(tmp_path / "a"), capability="portable"))
    assert engine.name.startswith("tensorrt-rtx-portable-")
    assert engine.record.capabilities == ()


def test_shapes_in_tensorrts_notation_are_the_same_engine(tmp_path, own_home):
    source = product(tmp_path / "a")
    ours = resolve_requests(source, build_config(profile=["batch=1:4:8"]))
    theirs = resolve_requests(
        source,
        build_config(min_shapes="x:1x64", opt_shapes="x:4x64", max_shapes="x:8x64"),
    )
    assert ours.requests == theirs.requests


# Engines beside one another


def test_out_may_be_the_source(tmp_path, own_home):
    source = product(tmp_path / "a")
    first = build_engine(source, out=source.path, profile=[PROFILE], capability="8.9")
    second = build_engine(source.path, out=source.path, profile=[PROFILE], capability="8.0")
    assert first.path == second.path == source.path
    assert [engine.record.capabilities for engine in engines_of(second)] == [("8.0",), ("8.9",)]
    assert [record.stage for record in second.manifest.stages] == ["export", "build", "build"]
    assert report_of(second)["earlier_engines"] == [engines_of(first)[-1].name]
    before = state(source.path)
    for capability in ("8.9", "8.0"):  # either is there already
        build_engine(source.path, out=source.path, profile=[PROFILE], capability=capability)
    assert state(source.path) == before


def state(directory):
    return {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def test_an_artifact_that_has_the_engines_needs_no_store(tmp_path, own_home):
    source = product(tmp_path / "a")
    made = build_engine(source, out=tmp_path / "b", profile=[PROFILE], capability="8.9")
    shutil.rmtree(own_home)
    assert build_engine(made, profile=[PROFILE], capability="8.9") == made
    assert not (own_home / "engines").exists()
    copied = build_engine(made, out=tmp_path / "c", profile=[PROFILE], capability="8.9")
    assert files_of(copied) == files_of(made)


def test_force_rebuilds_and_replaces_the_engine(tmp_path, own_home):
    source = product(tmp_path / "a")
    options = {"profile": [PROFILE], "capability": "8.9"}
    made = build_engine(source, out=tmp_path / "b", **options)
    again = build_engine(made, out=tmp_path / "b", force=True, **options)
    (engine,) = engines_of(again)
    assert report_of(again)["engines"][0]["from_store"] is False
    assert [record.stage for record in again.manifest.stages] == ["export", "build"]
    (stored,) = [entry.engine for entry in Store().entries() if entry.engine]
    assert stored.record == engine.record


def test_the_store_keeps_one_copy_of_a_plan(tmp_path, own_home):
    weight = np.random.default_rng(0).standard_normal((WIDTH, 1 << 14)).astype(np.float32)
    nodes = [node("MatMul", "x w", "p"), node("MatMul", "p v", "y")]
    source = artifact_of(tmp_path / "a", {"model.onnx": nodes}, {"w": weight, "v": weight.T.copy()})
    build_engine(source, profile=[PROFILE], capability="8.9")
    entries = Store().entries()
    (engine,) = [entry for entry in entries if entry.kind == "engines"]
    (made,) = [entry for entry in entries if entry.kind == "artifacts"]
    assert engine.engine.plan.stat().st_size > 1 << 20
    shared = set(engine.files) & set(made.files)
    assert len(shared) == 1
    alone = sum(entry.size_bytes for entry in entries)
    assert Store().size_bytes() == alone - engine.engine.plan.stat().st_size


# Verdicts


def test_validation_stays_valid_after_a_build(exported, copied, built):
    source = copied(exported("bert", "text-classification"))
    config = ValidateConfig()
    report = validate_model(source)
    opened = Artifact.open(source.path)
    made = built(opened, profile=["batch=1:2:4,sequence=1:16:32"])
    assert validate.find_finished(made, config) == report
    assert not stages.run_validate(made, config, force=False, progress=SILENT).worked
    # What the verdict is about is still looked at.
    other = made.manifest.model_copy(update={"precision": "fp16"})
    assert validate.find_finished(Artifact(made.path, other), config) is None


def test_a_verdict_of_other_content_is_not_carried_over(tmp_path, built):
    source = product(tmp_path / "a")
    stale = verdict(passed=True).model_copy(update={"fields": {"artifact": "0" * 64}})
    source = source.annotate(stale, b"{}")
    made = built(source)
    assert made.manifest.verdicts == (stale,), "what it was about is not this"


def test_a_stored_result_never_brings_an_older_verdict(tmp_path, own_home):
    options = {"profile": [PROFILE], "capability": "8.9"}
    source = product(tmp_path / "a").annotate(verdict(passed=True), b"{}")
    assert not build_engine(source, **options).failed_verdict()
    source = source.annotate(verdict(passed=False), b"{}")
    assert build_engine(source, allow_failed=True, **options).failed_verdict()


def test_reports_written_since_stay_where_engines_come_from_the_store(tmp_path, own_home):
    options = {"profile": [PROFILE], "capability": "8.9"}
    source = product(tmp_path / "a")
    build_engine(source, **options)
    reports = source.path / "reports"
    source = source.annotate(reports={"reports/benchmark.json": b"{}"})
    build_engine(source, out=source.path, **options)
    assert {"benchmark.json", "engines.json"} <= {path.name for path in reports.iterdir()}


def test_replaced_engines_are_named(tmp_path, own_home):
    source, out = product(tmp_path / "a"), tmp_path / "out"
    build_engine(source, out=out, profile=[PROFILE], capability="8.9")
    said = Said()
    build_engine(source, out=out, profile=[PROFILE], capability="8.0", progress=said)
    (news,) = [message for message in said.messages if "are replaced" in message]
    assert "tensorrt-rtx-sm89-" in news
    assert f"build from {out}" in news
    build_engine(out, out=out, profile=[PROFILE], capability="8.9", progress=said)
    assert len(engines_of(Artifact.open(out))) == 2
    assert len([message for message in said.messages if "are replaced" in message]) == 1


def test_large_report_of_the_source_is_not_overwritten(tmp_path, built):
    source = product(tmp_path / "a")
    (source.path / "reports").mkdir()
    large = json.dumps({"padding": "x" * (2 << 20)})
    (source.path / stage.REPORT).write_text(large)
    assert report_of(built(source))["engines"]
    assert (source.path / stage.REPORT).read_text() == large


def test_failed_artifact_is_rejected_unless_allowed(tmp_path, built):
    source = product(tmp_path / "a").annotate(verdict(passed=False), b"{}")
    with pytest.raises(RejectedArtifactError, match="failed its validation"):
        built(source)
    assert built(source, allow_failed=True).failed_verdict()


# Errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"profile": []}, ShapeError, "dynamic dims batch, but no profile was given"),
        ({"profile": ["rows=1:2:3"]}, ShapeError, "no dynamic dim 'rows'"),
        ({"capability": "9.0"}, OptionError, "does not build for compute capability '9.0'"),
        ({"capability": " "}, OptionError, "option 'capability' is empty"),
        ({"capability": "current"}, ProviderError, "no GPU can be used"),
        # What is missing comes before what it could not do either.
        (
            {"flavor": "tensorrt", "capability": "current"},
            ProviderError,
            "pip install 'tensorrt-cu13>=10,<11'",
        ),
        ({"flavor": "tensorrt", "capability": "8.9"}, ProviderError, "which is not installed"),
        ({"flavor": "trt"}, OptionError, "option 'flavor' for build"),
        ({"optimization_level": 5}, OptionError, "no effect in TensorRT for RTX"),
        ({"count": 0}, OptionError, "option 'count' is 0, expected 1 or more"),
        (
            {"profile": [PROFILE], "min_shapes": "x:1x64"},
            OptionError,
            "several options set profiles: 'profile', 'min_shapes'",
        ),
        (
            {"profile": [PROFILE], "data": "a.csv"},
            OptionError,
            "several options set profiles: 'profile', 'data'",
        ),
        ({"data": "missing.csv"}, ShapeError, "model.onnx takes no texts"),
    ],
)
def test_invalid_option_is_an_error_and_builds_nothing(
    tmp_path, own_home, built, options, error, message
):
    if options.get("capability") == "current" and shutil.which("nvidia-smi"):
        pytest.skip("there may be a GPU")
    with pytest.raises(error, match=re.escape(message)):
        built(product(tmp_path / "a"), **options)
    assert Store().entries() == []


def test_maximum_beyond_the_positions_is_rejected(exported, built):
    source = exported("bert", "text-classification")
    with pytest.raises(ShapeError, match="positions end at 128"):
        built(source, profile=["batch=1,sequence=8:64:256"])


def test_unsupported_nodes_are_named_with_operator_reason_and_remedy(tmp_path, own_home, built):
    nodes = [
        node("Foo", "x", "a", name="first", domain="my.ops"),
        node("Foo", "a", "b", name="second", domain="my.ops"),
        node("Relu", "b", "y", name="rest"),
    ]
    source = artifact_of(tmp_path / "a", {"model.onnx": nodes})
    with pytest.raises(ProviderError) as caught:
        built(source)
    assert "model.onnx" in caught.value.message
    assert "first" in caught.value.message
    assert "1 more like it" in caught.value.message
    assert caught.value.do
    assert Store().entries() == []


def test_nodes_that_tensorrt_rejects_have_its_message(tmp_path, own_home, built):
    # A rule of this package's own would stop it earlier: none knows this operator.
    nodes = [node("Det", "m", "d", name="det"), node("Add", "x d", "y", name="sum")]
    constants = {"m": np.eye(4, dtype=np.float32)}
    source = artifact_of(tmp_path / "a", {"model.onnx": nodes}, constants)
    with pytest.raises(ProviderError, match=r"supports 1 of 2 nodes.*det \(Det\)"):
        built(source)


def test_lint_rules_run_before_tensorrt(tmp_path, built, monkeypatch):
    monkeypatch.setattr("enginery.engine.build.coverage", pytest.fail)
    monkeypatch.setattr("enginery.engine.build.build_plan", pytest.fail)
    constants = quantized_constants(z=np.array(3, np.int8))
    source = artifact_of(tmp_path / "a", {"model.onnx": quantized_product()}, constants)
    with pytest.raises(ProviderError, match=r"zero") as caught:
        built(source)
    assert caught.value.do


def test_partitions_are_allowed_if_another_graph_is_supported(tmp_path, built):
    good = [node("MatMul", "x w", "y", name="product")]
    bad = [node("Det", "m", "d", name="det"), node("Add", "x d", "y", name="sum")]
    constants = {"w": np.eye(WIDTH, dtype=np.float32), "m": np.eye(4, dtype=np.float32)}
    source = artifact_of(tmp_path / "a", {"encoder.onnx": good, "decoder.onnx": bad}, constants)
    with pytest.raises(ProviderError, match=r"decoder\.onnx: .*--allow-partitions"):
        built(source)
    made = built(source, allow_partitions=True)
    assert [engine.record.graph for engine in engines_of(made)] == ["encoder.onnx"]
    (left,) = report_of(made)["left_out"]
    assert (left["graph"], left["taken"], left["total"]) == ("decoder.onnx", 1, 2)
    assert any("decoder.onnx stays ONNX" in note for note in report_of(made)["notes"])


def test_partitions_do_not_help_if_no_graph_is_supported(tmp_path, own_home, built):
    bad = [node("Det", "m", "d", name="det"), node("Add", "x d", "y", name="sum")]
    source = artifact_of(tmp_path / "a", {"model.onnx": bad}, {"m": np.eye(4, dtype=np.float32)})
    with pytest.raises(ProviderError) as caught:
        built(source, allow_partitions=True)
    assert "--allow-partitions" not in str(caught.value)
    assert Store().entries() == []


# Profiles from data


@pytest.mark.more
def test_profiles_from_data_are_reported_with_their_padding(exported, built, tmp_path):
    source = exported("bert", "text-classification")
    data = tmp_path / "texts.csv"
    texts = [*(["short"] * 20), *TEXT]
    data.write_text("text\n" + "\n".join(json.dumps(text) for text in texts) + "\n")
    made = built(source, data=str(data), count=2, batch="1:2:4")
    report = report_of(made)
    assert len(report["lengths"]["buckets"]) == 2
    assert sum(bucket["rows"] for bucket in report["lengths"]["buckets"]) >= 20
    profiles = [profile for engine in engines_of(made) for profile in engine.record.profiles]
    assert len(profiles) == len(engines_of(made)) == 2, "ONNX Runtime reaches the first alone"
    assert any(profile.endswith(":128") for profile in profiles), "the model's limit"
    assert all("batch=1:2:4" in profile for profile in profiles)
    pytest.importorskip("matplotlib")
    assert (made.path / stage.FIGURE).read_text().lstrip().startswith("<?xml")


def test_another_file_of_texts_is_another_artifact_and_an_old_engine(exported, tmp_path, own_home):
    source = exported("bert", "text-classification")
    keys = set()
    for name, count in (("a", 5), ("b", 6)):
        data = tmp_path / f"{name}.csv"
        data.write_text("text\n" + "short words\n" * count)
        config = build_config(data=str(data))
        requested = resolve_requests(source, config)
        keys.add(
            (stage.fingerprint(source, config, requested).key, requested.requests[0].directory)
        )
    assert len({key for key, _ in keys}) == 2
    assert len({directory for _, directory in keys}) == 1
