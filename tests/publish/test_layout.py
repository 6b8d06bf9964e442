"""The layout of the Hub: artifacts of one model in one folder, and each of them back again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import yaml

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.inputs import InputFiles
from enginery.core.artifact.manifest import Verdict
from enginery.core.errors import ArtifactError, OptionError, RegistryError, RejectedArtifactError
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.publish.config import PublishConfig
from enginery.publish.layout import arrange, read_variants, variant_name
from enginery.publish.stage import pull, run
from enginery.publish.targets.folder import path_from_url
from tests.core.artifacts import publishable, start, validated, verdict
from tests.publish.products import Heard, with_an_engine
from tests.terminal import in_pipe

HUB = PublishConfig(layout="hub", license="mit", name="minilm")
AGREES = "agrees"

VALIDATE = """
import sys
import time
from enginery.core.artifact.artifact import Artifact
from tests.core.artifacts import verdict
artifacts = [Artifact.open(path) for path in sys.argv[1:]]
print("validates", flush=True)
for number in range(100_000):
    for artifact in artifacts:
        summary = f"{number} of {artifact.name}"
        artifact.annotate(verdict(artifact, summary=summary), summary.encode())
    time.sleep(0.05)  # a reader waits 20 ms until a file is old enough that an edit would show
"""


def of_precision(out, precision="fp32", *, target="onnx", residual="", graph=b"", **changes):
    """Return a validated artifact of the precision, whose graph is some bytes."""
    made = publishable(out, graph=graph or f"{precision} {residual} {target}".encode())
    stages = made.manifest.stages
    if residual:
        quantize = stages[0].model_copy(update={"stage": "quantize"})
        stages = (*stages, quantize)
    update = {"precision": precision, "target": target, "residual": residual, "stages": stages}
    commit_artifact(out, made.manifest.model_copy(update={**update, **changes}))
    opened = Artifact.open(out)
    key = Fingerprint("validate", {"artifact": opened.content_sha256()})
    return opened.annotate(
        Verdict.of(
            key, passed=True, summary=f"{precision} {AGREES}", report="reports/validate.json"
        ),
        b"{}",
    )


def optimized(manifest, **options):
    stage = manifest.stages[0].model_copy(update={"stage": "optimize", "options": options})
    return manifest.model_copy(update={"stages": (*manifest.stages, stage)})


@pytest.fixture
def three(tmp_path):
    """Return artifacts of one model in FP32, FP16 and dynamic INT8."""
    return [
        of_precision(tmp_path / "fp32"),
        of_precision(tmp_path / "fp16", "fp16", target="tensorrt"),
        of_precision(tmp_path / "int8", "int8", target="cpu", residual="fp32"),
    ]


def names(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# The folder


def test_graphs_are_in_onnx_and_the_rest_in_the_root(three, tmp_path):
    published = run(three[0], str(tmp_path / "registry"), HUB, variants=three[1:])
    folder = tmp_path / "registry/minilm/1"
    assert published.url == folder.as_uri()
    assert names(folder) == [
        "README.md",
        "config.json",
        "manifest.json",
        "onnx/model.onnx",
        "onnx/model_fp16.onnx",
        "onnx/model_quantized.onnx",
        "reports/fp16/manifest.json",
        "reports/fp16/validate.json",
        "reports/publication.json",
        "reports/quantized/manifest.json",
        "reports/quantized/validate.json",
        "reports/validate.json",
    ]
    for artifact, file in zip(three, ("model", "model_fp16", "model_quantized"), strict=True):
        graph = (folder / f"onnx/{file}.onnx").read_bytes()
        assert graph == (artifact.path / "model.onnx").read_bytes()
    opened = Artifact.open(folder, verify=True)
    assert opened.manifest.precision == "fp32"
    assert [graph.file for graph in opened.manifest.graphs] == ["onnx/model.onnx"]
    assert opened.manifest.verdict("validate").fields["artifact"] == opened.content_sha256()


def test_card_has_every_graph_with_its_verdict(three, tmp_path):
    run(three[0], str(tmp_path / "registry"), HUB, variants=three[1:])
    card = (tmp_path / "registry/minilm/1/README.md").read_text()
    for file, said in (
        ("model", "fp32 agrees"),
        ("model_fp16", "fp16 agrees"),
        ("model_quantized", "int8 agrees"),
    ):
        row = next(li for li in card.splitlines() if f"`onnx/{file}.onnx`" in li and "agrees" in li)
        assert f"validate: passed. {said}." in row
        assert card.count(f"`onnx/{file}.onnx`") >= 2, "inputs and outputs"
    assert "Not validated" not in card
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["library_name"] == "transformers.js", "the Hub's code for the model"
    assert "transformers.js" in metadata["tags"]


def test_order_of_the_artifacts_does_not_matter(three, tmp_path):
    first = run(three[0], str(tmp_path / "registry"), HUB, variants=three[1:])
    again = run(three[2], str(tmp_path / "registry"), HUB, variants=three[:2])
    assert (first.version, again.version, again.is_new) == ("1", "1", False)


def test_verdict_of_a_variant_is_content(three, tmp_path):
    run(three[0], str(tmp_path / "registry"), HUB, variants=three[1:])
    other = validated(three[1], summary="other words")
    again = run(three[0], str(tmp_path / "registry"), HUB, variants=[other, three[2]])
    assert (again.version, again.is_new) == ("2", True)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "fp32"),
        ({"target": "tensorrt"}, "fp32"),
        ({"precision": "fp16", "target": "cuda"}, "fp16"),
        ({"precision": "bf16", "target": "tensorrt"}, "bf16"),
        ({"precision": "int8", "target": "cpu", "residual": "fp32"}, "quantized"),
        ({"precision": "int8", "target": "tensorrt", "residual": "fp32"}, "int8"),
        ({"precision": "int8", "target": "tensorrt", "residual": "fp16"}, "q8f16"),
        ({"precision": "fp8", "target": "tensorrt", "residual": "fp16"}, "fp8"),
    ],
)
def test_names_are_those_of_transformers_js(values, name):
    from tests.core.artifacts import manifest

    assert variant_name(manifest().model_copy(update=values)) == name


def test_fused_fp32_is_named_by_its_level():
    from tests.core.artifacts import manifest

    cpu = manifest().model_copy(update={"target": "cpu"})
    assert variant_name(optimized(cpu, level="O2")) == "O2"


def test_without_fp32_the_first_artifact_is_the_folders(three, tmp_path):
    heard = Heard()
    run(three[1], str(tmp_path / "registry"), HUB, variants=three[2:], progress=heard)
    assert any("there is no onnx/model.onnx" in said for said in heard.news)
    opened = Artifact.open(tmp_path / "registry/minilm/1")
    assert opened.model.name == "model_fp16.onnx"
    assert set(read_variants(opened)) == {"quantized"}


def test_engines_are_left_out(three, tmp_path):
    built = with_an_engine(three[0], tmp_path / "built")
    heard = Heard()
    run(built, str(tmp_path / "registry"), HUB, progress=heard)
    assert any(said.startswith("publish: left out the engines of") for said in heard.news)
    folder = tmp_path / "registry/minilm/1"
    assert not [name for name in names(folder) if "engine" in name]
    assert Artifact.open(folder).manifest.verdict("validate")


# Back again


@pytest.mark.parametrize(("place", "name"), [(0, "fp32"), (1, "fp16"), (2, "quantized")])
def test_variant_is_the_artifact_that_it_was(three, tmp_path, place, name):
    url = run(three[0], str(tmp_path / "registry"), HUB, variants=three[1:]).url
    back = pull(url, tmp_path / "back", HUB, variant=name)
    assert back.manifest == three[place].manifest
    assert names(back.path) == names(three[place].path)
    assert Artifact.open(back.path, verify=True)


def test_whole_version_is_an_artifact_that_is_the_same_version_again(three, tmp_path):
    first = run(three[0], str(tmp_path / "registry"), HUB, variants=three[1:])
    whole = pull(first.url, tmp_path / "whole", HUB)
    assert set(read_variants(whole)) == {"fp16", "quantized"}
    plain = PublishConfig(license="mit", name="minilm")
    assert run(whole, str(tmp_path / "registry"), plain).version == "1"
    with pytest.raises(ArtifactError, match="has several precisions already"):
        run(whole, str(tmp_path / "registry"), HUB)


def test_unknown_variant_is_an_error_with_the_names(three, tmp_path):
    url = run(three[0], str(tmp_path / "registry"), HUB, variants=three[1:]).url
    with pytest.raises(OptionError, match="no variant 'fp61'; did you mean 'fp16'"):
        pull(url, tmp_path / "back", HUB, variant="fp61")
    assert not (tmp_path / "back").exists()
    plain = run(three[0], str(tmp_path / "plain"), PublishConfig(license="mit")).url
    with pytest.raises(OptionError, match="It has fp32"):
        pull(plain, tmp_path / "back", HUB, variant="fp16")


def test_later_stages_do_not_take_other_precisions_along(three, tmp_path):
    made = arrange(three, tmp_path / "made")
    made.copy_side_files(tmp_path / "copied")
    assert names(tmp_path / "copied") == ["config.json"]


@pytest.mark.parametrize(
    "what", ["a file of another model", "another report", "a graph without a hash", "no manifest"]
)
def test_manifest_of_a_variant_that_lists_other_files_is_an_error(three, tmp_path, what):
    made = arrange(three, tmp_path / "made")
    inner = made.path / "reports/fp16/manifest.json"
    manifest = read_variants(made)["fp16"].manifest
    if what == "a file of another model":
        record = manifest.files["config.json"]
        changed = manifest.model_copy(update={"files": {**manifest.files, "x.json": record}})
    elif what == "a graph without a hash":
        graph = manifest.graphs[0].model_copy(update={"file": "onnx/model.onnx"})
        changed = manifest.model_copy(update={"graphs": (graph,)})
    else:
        record = manifest.reports["reports/validate.json"]
        changed = manifest.model_copy(update={"reports": {"reports/other.json": record}})
    content = b"{}" if what == "no manifest" else changed.to_bytes()
    altered = made.annotate(reports={"reports/fp16/manifest.json": content})
    assert inner.read_bytes() == content
    with pytest.raises(ArtifactError, match=r"reports/fp16/manifest\.json (lists|is damaged)"):
        read_variants(altered)
    with pytest.raises(ArtifactError):
        run(altered, str(tmp_path / "registry"), PublishConfig(license="mit"))
    assert not (tmp_path / "registry").exists()


# Refusals


def refuse(three, tmp_path, other, error, said):
    with pytest.raises(error, match=said):
        run(three[0], str(tmp_path / "registry"), HUB, variants=[other])
    assert not (tmp_path / "registry").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("id", "org/other"), ("revision", "def"), ("sha256", "1" * 64)]
)
def test_artifacts_of_different_sources_are_an_error(three, tmp_path, field, value):
    source = three[1].manifest.source.model_copy(update={field: value})
    other = of_precision(tmp_path / "other", "fp16", target="tensorrt", source=source)
    said = rf"fp32 and .*other are not of one model: they differ in the source's {field}\."
    refuse(three, tmp_path, other, ArtifactError, said)


def test_artifacts_for_different_tasks_are_an_error(three, tmp_path):
    other = of_precision(tmp_path / "other", "fp16", target="tensorrt", task="fill-mask")
    refuse(three, tmp_path, other, ArtifactError, "differ in the task")


def test_two_artifacts_of_one_precision_are_an_error(three, tmp_path):
    other = of_precision(tmp_path / "other", target="tensorrt")
    refuse(three, tmp_path, other, ArtifactError, r"would both be onnx/model\.onnx")


def test_different_side_files_are_an_error(three, tmp_path):
    (three[1].path / "config.json").write_text('{"other": 1}')
    commit_artifact(three[1].path, three[1].manifest)
    other = validated(Artifact.open(three[1].path))
    refuse(three, tmp_path, other, ArtifactError, r"differ in config\.json")


def test_precision_that_is_a_path_is_an_error(tmp_path):
    with pytest.raises(ArtifactError, match=r"precision: String should match pattern '\^\(fp32\|"):
        of_precision(tmp_path / "other", "../../fp16", target="tensorrt")


def test_altered_variant_is_an_error_with_its_name(three, tmp_path):
    graph = three[1].path / "model.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"fp16", b"FP16"))
    refuse(three, tmp_path, three[1], ArtifactError, r"fp16/model\.onnx was altered")


def test_failed_variant_needs_the_option_and_the_card_says_so(three, tmp_path):
    failed = three[1].annotate(verdict(three[1], passed=False, summary="NaN"), b"{}")
    refuse(three, tmp_path, failed, RejectedArtifactError, r"fp16 was not published.*NaN")
    allowed = PublishConfig(layout="hub", license="mit", name="minilm", allow_failed=True)
    url = run(three[0], str(tmp_path / "registry"), allowed, variants=[failed]).url
    card = (tmp_path / "registry/minilm/1/README.md").read_text()
    assert "fp16: its validation failed: NaN" in card
    assert "validate: **failed**. NaN." in card
    listing = (tmp_path / "registry/minilm/1/reports/publication.json").read_text()
    assert json.loads(listing)["validated"] is False
    assert pull(url, tmp_path / "back", HUB, variant="fp16").failed_verdict()


def test_verdict_on_other_content_is_not_carried_over(three, tmp_path):
    stale = three[1].annotate(verdict().model_copy(update={"fields": {"artifact": "0"}}), b"{}")
    refuse(three, tmp_path, stale, RejectedArtifactError, "was of other content")
    made = read_variants(arrange([three[0], stale], tmp_path / "made"))["fp16"]
    assert made.manifest.verdict("validate").fields == {"artifact": "0"}


@pytest.mark.parametrize("layout", ["enginery", "hub"])
def test_publishing_is_no_change_to_who_reads_the_artifact(tmp_path, layout):
    artifact = of_precision(tmp_path / "large", graph=b"g" * (1 << 20))
    inputs = InputFiles()
    inputs.add(artifact.model)
    run(artifact, str(tmp_path / "registry"), replace(HUB, layout=layout))
    inputs.check()


@pytest.mark.parametrize("layout", ["enginery", "hub"])
def test_checks_meanwhile_do_not_disturb_publishing(three, tmp_path, layout):
    """A version has the report that belongs to its verdict, whenever another process validates."""
    config, child = replace(HUB, layout=layout), start(VALIDATE, *(a.path for a in three))
    variants = three[1:] if layout == "hub" else []
    try:
        assert child.stdout.readline() == "validates\n"
        urls = {run(three[0], str(tmp_path / "r"), config, variants=variants).url for _ in range(9)}
        assert child.poll() is None, child.stderr.read()
    finally:
        child.kill()
        child.communicate()
    assert len(urls) > 1, "nothing was validated meanwhile"
    for url in urls:
        version = Artifact.open(path_from_url(url), verify=True)
        for folder, opened in {"": version, **read_variants(version)}.items():
            summary = opened.manifest.verdict("validate").summary
            # Between two writes of the manifest there is a verdict without a report.
            if "reports/validate.json" in opened.manifest.reports and not summary.endswith(AGREES):
                assert (version.path / "reports" / folder / "validate.json").read_text() == summary


def test_several_artifacts_need_the_layout(three, tmp_path):
    with pytest.raises(OptionError, match="3 artifacts were given, but the layout 'enginery'"):
        run(three[0], str(tmp_path / "registry"), PublishConfig(), variants=three[1:])
    with pytest.raises(OptionError, match="option 'layout' is 'flat'"):
        PublishConfig(layout="flat")


# The commands


@pytest.mark.more
def test_commands_publish_several_and_pull_one(three, tmp_path):
    paths = [artifact.path for artifact in three]
    words = ("--layout", "hub", "--license", "mit", "--name", "minilm")
    done = in_pipe("publish", *paths, tmp_path / "registry", *words)
    assert (done.status, done.out) == (0, f"{(tmp_path / 'registry/minilm/1').as_uri()}\n")
    done = in_pipe("pull", done.out.strip(), tmp_path / "back", "--variant", "fp16")
    assert done.status == 0
    assert "fp16, every file checked" in done.out
    done = in_pipe("publish", *paths, tmp_path / "other")
    assert done.status == 2
    assert "--layout hub" in done.err
    assert not (tmp_path / "other").exists()


# Graphs that are rewritten


@pytest.fixture
def embedder(exported, tmp_path):
    """Return a function: `embedder("a", mean=True)` is a tiny sentence-transformers artifact."""

    def make_one(name, *, external=False, modules=True, **modes):
        source, out = exported("bert", "feature-extraction"), tmp_path / name
        shutil.copytree(source.path, out, ignore=shutil.ignore_patterns("reports"))
        graph = source.manifest.graphs[0]
        if external:
            (out / "model.onnx").unlink()
            model = read_graph(source.path / "model.onnx")
            data = write_graph(model, out / "model.onnx", max_inline_bytes=0)
            graph = graph.model_copy(update={"data_files": data})
        if modules:
            kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
            listed = [{"path": path, "type": f"st.{kind}"} for path, kind in kinds.items()]
            (out / "modules.json").write_text(json.dumps(listed))
            (out / "1_Pooling").mkdir()
            config = {f"pooling_mode_{mode}": True for mode in modes or {"mean_tokens": True}}
            (out / "1_Pooling/config.json").write_text(json.dumps(config))
        update = {"graphs": (graph,), "verdicts": (), "reports": {}}
        commit_artifact(out, source.manifest.model_copy(update=update))
        return validated(Artifact.open(out))

    return make_one


def feeds(rows=2, length=5):
    ids = np.arange(rows * length, dtype=np.int64).reshape(rows, length) + 5
    mask = np.ones_like(ids)
    mask[1, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def outputs(file: Path):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds()), strict=True))


def test_external_data_follow_the_graph_under_the_names_of_transformers_js(embedder, tmp_path):
    artifact = embedder("large", external=True)
    assert artifact.external_data() == {"model.onnx.data"}
    url = run(artifact, str(tmp_path / "registry"), HUB).url
    folder = tmp_path / "registry/minilm/1"
    assert "onnx/model.onnx_data" in names(folder)
    config = json.loads((folder / "config.json").read_text())
    chunks = config["transformers.js_config"]["use_external_data_format"]
    assert chunks == {"model.onnx": 1}
    (expected,), (found,) = (
        outputs(path / file).values()
        for path, file in ((artifact.path, "model.onnx"), (folder, "onnx/model.onnx"))
    )
    np.testing.assert_array_equal(found, expected)
    back = pull(url, tmp_path / "back", HUB, variant="fp32")
    assert back.external_data() == {"model.onnx_data"}
    np.testing.assert_array_equal(outputs(back.path / "model.onnx").popitem()[1], expected)
    assert back.manifest.verdict("validate").fields["artifact"] == back.content_sha256()


def test_external_data_that_the_manifest_does_not_list_are_an_error(embedder, tmp_path):
    artifact = embedder("large", external=True)
    graph = artifact.manifest.graphs[0].model_copy(update={"data_files": ("config.json",)})
    commit_artifact(artifact.path, artifact.manifest.model_copy(update={"graphs": (graph,)}))
    with pytest.raises(ArtifactError, match=r"data model\.onnx\.data, but .* lists config\.json"):
        run(validated(Artifact.open(artifact.path)), str(tmp_path / "registry"), HUB)
    assert not (tmp_path / "registry").exists()


def test_damaged_version_gives_no_variant(three, tmp_path):
    url = run(three[0], str(tmp_path / "registry"), HUB, variants=three[1:]).url
    (tmp_path / "registry/minilm/1/onnx/model_fp16.onnx").write_bytes(b"x")
    with pytest.raises((ArtifactError, RegistryError), match=r"onnx/model_fp16\.onnx has 1 bytes"):
        pull(url, tmp_path / "back", HUB, variant="quantized")
    assert not (tmp_path / "back").exists()
