"""The files beside an artifact's graphs are the source's, in content or in effect."""

import dataclasses
import json
import shutil
import warnings

import pytest

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.json_file import json_bytes
from enginery.core.model.files import PreprocessorConfig
from enginery.reports.validation import SideFileDifference, SideFileMetrics
from enginery.validate import side_files as module
from enginery.validate.config import ValidateConfig
from enginery.validate.reference import Reference
from tests.tiny import tiny_artifact
from tests.validate.faults.side_files import FAULTS, SOUND, change_soundly, save_source

MODELS = ("embedder", "classifier", "decoder", "vit")
QUICK = {
    "embedder": ("first token", "removed", "a default prompt", "limit of 6", "cased"),
    "classifier": ("labels rotated", "several labels", "cased", "two words exchanged"),
    "decoder": ("suppressed", "merges reversed", "no decoder", "a space"),
    "vit": ("nearest", "other mean", "not resized"),
}
KEYS = {
    "first token": "pooling_mode_cls_token",
    "a default prompt": "default_prompt_name",
    "labels rotated": "id2label.0",
    "several labels": "problem_type",
    "nearest": "resample",
    "suppressed": "suppress_tokens",
    "a space": "add_prefix_space",
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Ask transformers here; that its child process answers the same is tested in test_stage."""
    from enginery.runtime.pytorch import side_files

    def describe(directory, question, *, process):  # the way back from another process
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = dataclasses.asdict(question)
            described = side_files.describe_side_files(
                directory, **asked, trust_remote_code=process.trust_remote_code
            )
        return json.loads(json.dumps(described))

    monkeypatch.setattr(module, "describe_side_files", describe)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    artifacts = {}

    def make(model):
        if model not in artifacts:
            directory = tmp_path_factory.mktemp(model)
            source, task = save_source(model, directory / "source")
            # Tiny models of one kind and task have one graph, whatever the files beside it are.
            kind = json.loads((source / "config.json").read_text())["model_type"]
            artifacts[model] = tiny_artifact(kind, task, directory / "artifact", source=source)
        return artifacts[model]

    return make


def compare(artifact, tmp_path):
    return module.compare_side_files(Reference.of(artifact, ValidateConfig()), tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("model", MODELS)
def test_own_files_are_all_compared(artifact, tmp_path, model):
    metrics = compare(artifact(model), tmp_path)
    assert (metrics.differences, metrics.not_compared, metrics.problem) == ([], [], "")
    assert "config.json" in metrics.compared
    wanted = PreprocessorConfig.FILE if model == "vit" else "tokenizer.json"
    assert wanted in metrics.compared


@pytest.mark.more
@pytest.mark.parametrize("model", MODELS)
def test_altered_files_are_named_with_their_keys(artifact, tmp_path, model):
    for index, fault in enumerate(f for f in FAULTS if f.model == model):
        if fault.name not in QUICK[model]:
            continue
        changed = fault.plant(artifact(model), tmp_path / str(index))
        (difference, *_) = compare(changed, tmp_path).differences
        assert difference.file == fault.file, str(fault)
        assert KEYS.get(fault.name, difference.key) in [
            d.key for d in compare(changed, tmp_path).differences
        ]


@pytest.mark.more
@pytest.mark.parametrize("model", MODELS)
def test_changes_without_effect_pass(artifact, tmp_path, model):
    for name, (models, _) in SOUND.items():
        if model in models:
            changed = change_soundly(name, artifact(model), tmp_path / name.replace(" ", "-"))
            assert compare(changed, tmp_path).differences == [], name


def test_a_graph_that_was_moved_lies_without_its_files(artifact, tmp_path):
    own = artifact("classifier")
    (tmp_path / "moved").mkdir()
    shutil.copy(own.path / "model.onnx", tmp_path / "moved" / "model.onnx")
    config = ValidateConfig(reference=str(tmp_path / "moved" / "model.onnx"))
    reference = Reference.of(own, config)
    assert module.compare_side_files(reference, tmp_path).differences == []


def edited(artifact, directory, name, content):
    shutil.copytree(artifact.path, directory)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    files = {n: r for n, r in artifact.manifest.files.items() if (directory / n).is_file()}
    commit_artifact(directory, artifact.manifest.model_copy(update={"files": files}))
    return Artifact.open(directory)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer_config.json", None, "tokenizer_config.json: is missing"),
        ("tokenizer.json", b"{}", "tokenizer.json, version: null, but "),
        ("tokenizer.json", None, "tokenizer.json: is missing"),
        ("vocab.txt", b"[PAD]\n", "vocab.txt: its content is not the source's"),
        ("modules.json", b"[]", "modules.json: is there, but the source has none"),
        ("chat_template.jinja", b"hi", "chat_template.jinja: is there, but the source has none"),
        ("config.json", b'{"model_type": "bert"}', "config.json, "),
    ],
)
def test_missing_new_and_damaged_files_fail(artifact, tmp_path, name, content, problem):
    changed = edited(artifact("classifier"), tmp_path / "changed", name, content)
    assert compare(changed, tmp_path).problem.startswith(problem)


def test_a_file_that_nothing_reads_may_be_added(artifact, tmp_path):
    changed = edited(artifact("classifier"), tmp_path / "changed", "remarks.txt", b"mine")
    assert compare(changed, tmp_path).problem == ""


def test_a_tokenizer_that_transformers_cannot_load_is_compared_by_content(artifact, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(artifact("classifier").manifest.source.id, source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "TokenizerOfTheFuture"
    (source / "tokenizer_config.json").write_bytes(json_bytes(config))
    artifacts = tiny_artifact("bert", "text-classification", tmp_path / "artifact", source=source)
    metrics = compare(artifacts, tmp_path)
    assert metrics.differences == []
    assert "tokenizer: only by content: transformers cannot load" in metrics.not_compared[0]
    config["do_lower_case"] = False
    changed = edited(artifacts, tmp_path / "changed", "tokenizer_config.json", json_bytes(config))
    assert compare(changed, tmp_path).problem == (
        "tokenizer_config.json, do_lower_case: false, but true in the source"
    )


def test_metrics_describe_themselves():
    difference = SideFileDifference("config.json", "id2label.0", '"b", but "a" in the source')
    failed = SideFileMetrics(["tokenizer.json"], [difference], [])
    assert failed.problem == 'config.json, id2label.0: "b", but "a" in the source'
    assert failed.describe() == "config.json not the source's; 1 others are"
    passed = SideFileMetrics(["config.json", "vocab.txt"], [], [])
    assert passed.describe() == "2 are the source's, in content or in effect"


def test_defaults_of_another_family_are_no_difference(artifact, tmp_path):
    copy = shutil.copytree(artifact("classifier").path, tmp_path / "copy")
    reference = Reference.of(Artifact.open(copy), ValidateConfig())
    path = reference.artifact.path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "is_decoder": None, "add_cross_attention": None}))
    differences = module.compare_side_files(reference, tmp_path).differences
    assert {item.key for item in differences} == {"is_decoder", "add_cross_attention"}
    reference = dataclasses.replace(reference, other_transformers="5.24.0")
    assert module.compare_side_files(reference, tmp_path).differences == []
    path.write_text(json.dumps({**config, "is_decoder": True}))
    (difference,) = module.compare_side_files(reference, tmp_path).differences
    assert difference.key == "is_decoder"
