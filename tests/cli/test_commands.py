"""The promises of the command line: exit status, one JSON document, words instead of tracebacks."""

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from enginery import Artifact
from enginery.bench.config import BenchConfig
from enginery.cli import COMMANDS as MODULES
from enginery.cli import commands, main
from enginery.cli import console as console_module
from enginery.cli.console import Console
from enginery.cli.help import COMMAND_GROUPS, EXAMPLES
from enginery.core.artifact.artifact import commit_artifact
from enginery.core.errors import EngineryError
from enginery.core.json_file import verify_checksum
from enginery.core.store.store import Store
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.triton.options import TritonConfig
from enginery.doctor.config import DoctorConfig
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.predict.config import PredictConfig
from enginery.publish.config import PublishConfig
from enginery.quantize.config import QuantizeConfig
from enginery.serve.config import ServeConfig
from enginery.validate.config import ValidateConfig
from tests.core.artifacts import edit_manifest, make
from tests.engine.made import engine_record, write_engine
from tests.export.test_onnx_file import linear
from tests.terminal import in_pipe, on_terminal, start
from tests.tiny import LABELS

COMMANDS = {
    ("export",): ExportConfig,
    ("optimize",): OptimizeConfig,
    ("quantize",): QuantizeConfig,
    ("build",): BuildConfig,
    ("validate",): ValidateConfig,
    ("bench",): BenchConfig,
    ("report",): None,
    ("predict",): PredictConfig,
    ("try",): None,
    ("serve",): ServeConfig,
    ("publish",): PublishConfig,
    ("pull",): None,
    ("export-triton",): TritonConfig,
    ("export-kserve",): KserveConfig,
    ("lint",): None,
    ("doctor",): DoctorConfig,
    ("init",): None,
    ("run",): None,
    ("inspect",): None,
    ("store",): None,
    ("store", "list"): None,
    ("store", "prune"): None,
    ("store", "path"): None,
}


@pytest.fixture
def cli(capsys):
    """`cli("store", "path")`: exit status, standard output, standard error."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return ended.value.code, out, err

    return run


@pytest.fixture
def tiny(tiny_model):
    return tiny_model("bert", "text-classification")


@pytest.fixture
def artifact(exported, copied):
    return copied(exported("bert", "text-classification")).path


def recipe(path, model, *stages, **keys):
    path.write_text(json.dumps({"model": str(model), "stages": list(stages), **keys}))
    return path


# Help


@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if words != ("store",)], ids=" ".join
)
def test_help_lists_every_option_with_its_meaning(cli, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    status, out, _ = cli(*words, "--help")
    assert status == 0
    meanings = {}
    for line in out.splitlines():
        if found := re.match(r"│ [* ]*(.*?--\S.*?)  +(\S.*?) *│$", line):
            for name in re.findall(r"--([a-z0-9-]+)", found[1]):
                meanings[name] = re.sub(r" *\[(default|choices|required).*", "", found[2])
    expected = {"json", "quiet", "verbose"}
    for field in dataclasses.fields(COMMANDS[words]) if COMMANDS[words] else ():
        expected.add(field.name.replace("_", "-"))
    assert expected <= set(meanings)
    assert set(meanings) == set(re.findall(r"(?<=\s)--([a-z0-9-]+)", out.partition("╭")[2]))
    assert [name for name, meaning in meanings.items() if len(meaning) < 10] == []


def test_every_command_is_in_the_table_above():
    app = commands()
    assert {name for name in app if not name.startswith("-")} == set(MODULES)
    names = {(name,) for name in app if not name.startswith("-")}
    names |= {("store", name) for name in app["store"] if not name.startswith("-")}
    assert names == set(COMMANDS)


@pytest.mark.more
def test_examples_in_the_help_can_be_called(cli):
    app = commands()
    assert set(EXAMPLES) == set(MODULES)
    assert sorted(name for names in COMMAND_GROUPS.values() for name in names) == sorted(MODULES)
    for name, examples in EXAMPLES.items():
        assert len(examples) == 2
        for example in examples:
            program, *words = shlex.split(example)
            assert (program, words[0]) == ("enginery", name)
            app.parse_args(words, exit_on_error=False, print_error=False)
        _, out, _ = cli(name, "--help")
        assert "Examples:" in out


def test_options_of_a_long_help_are_grouped_by_subject(cli):
    _, out, _ = cli("validate", "--help")
    panels = re.findall("╭─ (.*?) ─", out)
    assert panels == ["Parameters", "Data", "Where it runs", "Shapes", "Trust", "Output"]
    _, out, _ = cli("--help")
    panels = re.findall("╭─ (.*?) ─", out)
    assert panels == ["Commands", *COMMAND_GROUPS]


def test_completion_is_installed(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    status, _, _ = cli("--install-completion", "--shell", "bash")
    assert status == 0
    (script,) = (path for path in tmp_path.rglob("enginery") if path.is_file())
    assert "export-triton" in script.read_text()


def test_export_takes_its_arguments_as_optimum_cli_does(cli, tiny, tmp_path, monkeypatch):
    out = tmp_path / "made"
    ways = (
        ("--model", tiny, out),
        (f"--model={tiny}", out),
        ("-m", tiny, out),
        (tiny, out),
        (tiny, "--out", out),
    )
    for words in ways:
        status, _, _ = cli("export", *words, "--task", "sequence-classification")
        assert status == 0
        assert Artifact.open(out).manifest.task == "text-classification"
    status, _, said = cli("export", "onnx", "--model", "org/name", "out")
    assert status == 2
    assert "Leave it out: enginery export org/name out" in said
    monkeypatch.chdir(tmp_path)
    status, _, _ = cli("export", tiny, "onnx")
    assert status == 0
    assert Artifact.open(tmp_path / "onnx").manifest.task == "text-classification"


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("export", "--model", "m", "--optimize", "O2", "out"), "enginery optimize OUT NEW"),
        (("export", "m", "out", "--framework=pt"), "models are loaded with PyTorch"),
        (("export", "m", "out", "--atol", "1e-4"), "enginery validate OUT"),
        (("quantize", "--onnx_model", "m", "--avx512"), "enginery quantize ARTIFACT OUT"),
        (("quantize", "m", "--avx512"), "--scheme dynamic --target cpu"),
    ],
)
def test_options_of_optimum_cli_lead_to_what_there_is_instead(cli, words, instead):
    status, _, said = cli(*words)
    assert status == 2
    assert "has no option '--" in said
    assert instead in " ".join(said.split())


def test_directory_of_the_store_is_no_place_for_a_copy(cli, artifact, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    out = tmp_path / "home/artifacts/mine"
    status, _, said = cli("optimize", artifact, "--target", "cuda", "--out", out)
    assert status == 2
    assert "is inside the store" in " ".join(said.split())
    assert not out.exists()


def test_a_stage_does_not_replace_the_artifact_that_it_starts_from(cli, artifact):
    before = (artifact / "manifest.json").read_bytes()
    for out in (artifact, artifact / ".." / artifact.name):
        status, _, said = cli("optimize", artifact, out, "--target", "cuda")
        assert status == 2
        assert "is the artifact that the stage starts from" in " ".join(said.split())
    assert (artifact / "manifest.json").read_bytes() == before


def test_a_new_artifact_is_shown_with_all_notes_of_its_stage(cli, artifact, tmp_path):
    out = tmp_path / "int8"
    status, said, _ = cli("quantize", artifact, out, "--target", "cpu", "--scheme", "dynamic")
    assert status == 0
    notes = Artifact.open(out).manifest.stages[-1].notes
    assert len(notes) > 1
    for note in notes:
        assert note[:40] in " ".join(said.split())


def test_stages_take_where_to_write_after_the_artifact(cli, artifact, tmp_path):
    out = tmp_path / "fp16"
    status, _, _ = cli("optimize", artifact, out, "--target", "tensorrt", "--precision", "fp16")
    assert status == 0
    assert Artifact.open(out).manifest.precision == "fp16"


# Errors


def test_unknown_option_names_the_nearest(cli):
    status, out, err = cli("export", "model", "--opsets", "17")
    assert (status, out) == (2, "")
    assert "--opsets" in err
    assert "Did you mean --opset?" in err


def test_unknown_command_names_the_nearest(cli):
    status, out, err = cli("exprot", "model")
    assert (status, out) == (2, "")
    assert 'Did you mean "export"?' in err


@pytest.mark.parametrize(
    "words",
    [
        ("export",),
        ("export", "no-such-directory/here/model"),
        ("export", "model", "--dtype", "fp8"),
        ("validate", "no-such-directory"),
        ("validate", "no-such-directory", "--rows", "many"),
        ("run", "no-such-recipe.yaml"),
        ("run", "--ask"),
        ("build",),
        ("build", "no-such-directory"),
        ("build", "no-such-directory", "--flavor", "trt"),
        ("build", "no-such-directory", "--count", "many"),
        ("inspect", "no-such-directory"),
        ("publish", "no-such-directory", "registry"),
        ("publish", "no-such-directory", "registry", "--alias", "a/b"),
        ("pull", "mlfow:/name", "out"),
        ("pull", "no-such-registry", "out"),
        ("doctor", "--require", "cud"),
        ("store", "list", "surplus"),
        ("store", "prune"),
        ("store", "prune", "--max-size", "-1GB"),
        ("store", "prune", "--max-size", "inf"),
        ("store", "prune", "--max-size", "1GB", "--all"),
        ("frobnicate",),
    ],
    ids=" ".join,
)
def test_users_error_is_one_message_and_one_json_document(cli, words):
    status, out, err = cli(*words)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    status, out, _ = cli(*words, "--json")
    assert status == 2
    said = json.loads(out)
    assert set(said) == {"error", "do", "kind"}
    assert said["error"] in err


def test_unreadable_file_is_a_users_error(cli, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device", "/store/model.onnx")

    monkeypatch.setattr(Store, "entries", full)
    status, _, err = cli("store", "list")
    assert (status, err) == (2, "error: /store/model.onnx: No space left on device.\n")


def test_bug_is_a_traceback(monkeypatch):
    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Store, "entries", broken)
    with pytest.raises(ZeroDivisionError):
        main(["store", "list"])


# JSON


def test_export_prints_its_manifest_as_json(cli, tiny, exported):
    made = exported("bert", "text-classification")
    status, out, _ = cli("export", tiny, "--task", "text-classification", "--json")
    said = json.loads(out)
    assert status == 0
    assert said.pop("path") == str(made.path)
    assert said == made.manifest.model_dump(mode="json")


@pytest.mark.more
def test_failed_validation_is_status_1_one_document_and_a_marked_artifact(cli, artifact):
    status, out, err = cli("validate", artifact, "--max-abs-error", "1e-12", "--json")
    assert status == 1
    assert json.loads(out)["passed"] is False
    assert f"error: {artifact} failed its validation" in err
    assert Artifact.open(artifact).failed_verdict()
    again, out, err = cli("validate", artifact, "--max-abs-error", "1e-12")
    assert again == 1, "a verdict that is there already counts the same"
    assert "nothing to do" in err
    assert cli("validate", artifact)[0] == 0, "a failed artifact can be validated anew"
    assert Artifact.open(artifact).failed_verdict() is None


def test_run_prints_stages_and_answers_as_json(cli, tiny):
    status, out, _ = cli(
        "run",
        "--model",
        tiny,
        "--task",
        "text-classification",
        "--ask",
        "a",
        "--ask",
        "b",
        "--json",
    )
    said = json.loads(out)
    assert (status, said["passed"], said["refused"]) == (0, True, [])
    assert [stage["stage"] for stage in said["stages"]] == ["export", "validate"]
    assert said["stages"][1]["report"]["passed"] is True
    assert [answer["input"] for answer in said["answers"]] == ["a", "b"]
    labels = said["answers"][0]["labels"]
    assert {label["label"] for label in labels} == {"calm", "angry", "glad"}
    assert sum(label["score"] for label in labels) == pytest.approx(1, abs=1e-5)


@pytest.mark.more
def test_inspect_doctor_and_store_print_json(cli, artifact, exported):
    made = exported("bert", "text-classification")
    assert json.loads(cli("inspect", artifact, "--json")[1])["path"] == str(artifact)
    providers = json.loads(cli("doctor", "--json")[1])["providers"]
    assert "CPUExecutionProvider" in [provider["name"] for provider in providers]
    entries = json.loads(cli("store", "list", "--json")[1])
    entry = next(entry for entry in entries if entry["path"] == str(made.path))
    assert entry["size_bytes"] > made.model.stat().st_size
    assert json.loads(cli("store", "path", "--json")[1]) == {"path": str(made.path.parents[1])}


def test_inspect_places_the_graph_on_the_providers_that_are_asked_for(cli, artifact, monkeypatch):
    status, out, _ = cli("inspect", artifact, "--placement", "--json")
    placed = json.loads(out)["placement"]
    assert (status, placed["head"], placed["reason"]) == (0, "CPUExecutionProvider", "requested")
    status, out, _ = cli(
        "inspect",
        artifact,
        "--placement",
        "--providers",
        "openvino,cpu",
        "--provider-option",
        "openvino.device_type=CPU",
        "--allow-fallback",
        "--json",
    )
    placed = json.loads(out)["placement"]
    assert (status, placed["head"]) == (0, "CPUExecutionProvider")
    assert placed["reason"].startswith("openvino requested, but ")
    monkeypatch.setenv("ENGINERY_PROVIDERS", "openvino")
    assert "openvino requested, but" in cli("inspect", artifact, "--placement")[2]
    status, _, said = cli("inspect", artifact, "--providers", "cpu")
    assert status == 2
    assert "Add --placement." in said


@pytest.mark.parametrize("command", ["bench", "predict", "validate"])
def test_providers_are_named_alike(cli, artifact, tmp_path, command):
    words = [command, artifact, "--providers", "cuda"]
    if command == "predict":
        (tmp_path / "in.txt").write_text("warm")
        words += ["--input", tmp_path / "in.txt", "--out", tmp_path / "out.csv"]
    options = ["--provider-option", "cuda.device_id=0", "--provider-option", "cuda.memory=2GiB"]
    status, _, said = cli(*words, "--allow-fallback", *options)
    assert (status, "unknown option 'memory' for cuda" in said) == (2, True)
    if command != "validate":
        status, _, said = cli(*words[:2], *words[4:], "--cuda-graph", "--no-io-binding")
        assert (status, "cpu has no CUDA graphs" in said) == (2, True)


def test_doctor_says_no_with_status_1_and_one_document(cli, monkeypatch):
    from enginery.core.errors import ProviderError
    from enginery.doctor import stage

    def crash(*words, timeout_seconds):
        raise ProviderError("the process crashed with signal 11")

    monkeypatch.setattr(stage, "run_probe", crash)
    status, out, err = cli("doctor", "--require", "cpu", "--json")
    assert status == 1
    assert json.loads(out)["machine"]
    assert "crashed with signal 11" in err


# Store and inspect


def test_prune_says_what_it_freed_and_removes_nothing_unasked(cli, exported, tmp_path, monkeypatch):
    made = exported("bert", "text-classification")
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path))
    kept = made.copy_to(tmp_path / "artifacts" / made.path.name).path
    size = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file())

    assert cli("store", "prune")[0] == 2
    assert "Nothing to remove." in cli("store", "prune", "--max-size", "1GB")[1]
    assert kept.is_dir()
    status, out, _ = cli("store", "prune", "--all", "--json")
    said = json.loads(out)
    assert (status, said["freed_bytes"]) == (0, size)
    assert [entry["path"] for entry in said["removed"]] == [str(kept)]
    assert not kept.exists()
    assert cli("store", "list")[1] == "The store is empty.\n"


def test_inspect_says_what_is_damaged_and_verify_reads_again(cli, artifact, monkeypatch):
    model = artifact / "model.onnx"
    content = model.read_bytes()
    model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    status, out, err = cli("inspect", artifact)
    assert (status, out) == (2, "")
    assert f"{model} was altered" in err
    model.unlink()
    assert "is missing from the artifact" in cli("inspect", artifact)[2]

    model.write_bytes(content)
    assert cli("inspect", artifact)[0] == 0
    read = []
    from enginery.core.artifact import artifact as core

    remembered = core.sha256_of
    monkeypatch.setattr(
        core,
        "sha256_of",
        lambda path, *, trust_stat: read.append(trust_stat) or remembered(path),
    )
    cli("inspect", artifact)
    cli("inspect", artifact, "--verify")
    half = len(read) // 2
    assert read == [True] * half + [False] * half
    assert half == len(Artifact.open(artifact).manifest.files)


# Engines


@pytest.fixture
def engine_words(tmp_path):
    """An artifact with one small product, and the words that build its engine."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'enginery[tensorrt-rtx]'")
    from tests.engine.products import PROFILE, product

    made = product(tmp_path / "product").path
    return made, ("build", made, "--profile", PROFILE, "--capability", "8.9")


def test_build_adds_an_engine_to_the_artifact_and_shows_it(cli, engine_words):
    made, words = engine_words
    status, out, err = cli(*words, "--out", made)
    assert status == 0, err
    (engine,) = (made / "engines").iterdir()
    assert engine.name in out
    assert "1 FP32 matrix product" in out
    status, out, err = cli(*words, "--out", made, "--json")
    assert "build: nothing to do, product has the engines" in err
    (record,) = json.loads(out)["engines"]
    written = json.loads(verify_checksum((engine / "engine.json").read_bytes()))
    assert record == {"path": str(engine), **written}


def test_inspect_shows_an_engine_by_itself_and_within_its_artifact(cli, engine_words):
    made, words = engine_words
    cli(*words, "--out", made)
    (engine,) = (made / "engines").iterdir()
    status, out, _ = cli("inspect", engine)
    assert status == 0
    for fact in (
        "tensorrt-rtx, TensorRT ",
        "batch=1:4:8",
        "device memory",
        "peak memory",
        "model_ctx.onnx",
        "gemm fp32",
    ):
        assert fact in out
    said = json.loads(cli("inspect", engine, "--json")[1])
    assert said["all_layers"] == json.loads((engine / "layers.json").read_text())
    assert said["layers"]["gemm fp32"] == 1
    assert "product" in [node for layer in said["all_layers"] for node in layer["nodes"]]
    status, out, _ = cli("inspect", made)
    assert (status, engine.name in out) == (0, True)
    (listed,) = json.loads(cli("inspect", made, "--json")[1])["engines"]
    assert listed["path"] == str(engine)


@pytest.mark.more
def test_layers_on_a_terminal_are_those_that_multiply(engine_words, home):
    made, words = engine_words
    assert in_pipe(*words, "--out", made).status == 0
    (engine,) = (made / "engines").iterdir()
    layers = json.loads((engine / "layers.json").read_text())
    shown = on_terminal("inspect", engine, columns=200).out
    every = in_pipe("inspect", engine).out
    products = [layer["name"] for layer in layers if layer["kind"] != "other"]
    assert all(name in shown for name in products)
    assert all(layer["name"] in every for layer in layers)
    assert len(products) < len(layers)


def test_store_lists_engines_and_prunes_them_with_the_artifacts(
    cli, engine_words, tmp_path, monkeypatch
):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    _, words = engine_words
    cli(*words)
    entries = json.loads(cli("store", "list", "--json")[1])
    assert sorted(entry["kind"] for entry in entries) == ["artifact", "engine"]
    engine = next(entry for entry in entries if entry["kind"] == "engine")
    assert engine["source"].startswith("model.onnx (sha256 ")
    assert engine["state"] == "ok"
    assert "model.onnx (sha256 " in cli("store", "list")[1]
    assert "Nothing to remove." in cli("store", "prune", "--max-size", "20GB")[1]
    before = Store().size_bytes()
    said = json.loads(cli("store", "prune", "--all", "--json")[1])
    assert {entry["kind"] for entry in said["removed"]} == {"artifact", "engine"}
    assert said["freed_bytes"] == before
    assert Store().size_bytes() == 0


def test_build_without_a_gpu_says_which_capabilities_there_are(cli, engine_words, monkeypatch):
    from enginery.core.errors import ProviderError

    def none():
        raise ProviderError("no GPU can be used.")

    monkeypatch.setattr("enginery.runtime.tensorrt.capabilities.visible_gpus", none)
    _, words = engine_words
    status, _, err = cli(*words[:-2])
    assert status == 2
    assert "capability 'current' is that of this machine's GPU" in err
    assert "--capability 8.9" in err


# A run


@pytest.mark.more
def test_a_run_whose_check_failed_answers_nothing_unless_allowed(cli, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))  # the verdict is not for others
    strict = {"validate": {"max_abs_error": 1e-12, "seed": 5}}
    export = {"export": {"task": "text-classification"}}
    path = recipe(tmp_path / "r.yaml", tiny, export, strict, ask=["hello"])
    status, out, err = cli("run", path, "--json")
    assert (status, json.loads(out)["answers"]) == (1, [])
    assert "failed its validation" in err
    status, out, _ = cli("run", path, "--allow-failed", "--json")
    assert (status, len(json.loads(out)["answers"])) == (1, 1)


@pytest.mark.more
def test_builtin_sentences_wear_the_models_own_mask(cli, tiny_model):
    model = tiny_model("roberta", "fill-mask")
    status, out, _ = cli("run", "--model", model, "--task", "fill-mask", "--json")
    answers = json.loads(out)["answers"]
    assert status == 0
    assert len(answers) == 3
    assert all(answer["input"].endswith(" <mask>.") for answer in answers)
    assert all(len(answer["masks"]) == 1 for answer in answers)


@pytest.mark.more
def test_questions_are_skipped_with_a_line_and_refused_when_asked(cli, tiny_model):
    words = (
        "run",
        "--model",
        tiny_model("bert", "question-answering"),
        "--task",
        "question-answering",
    )
    status, out, err = cli(*words, "--json")
    assert (status, json.loads(out)["answers"]) == (0, [])
    assert "ask: skipped, question-answering" in err
    status, _, err = cli(*words, "--ask", "Who?")
    assert status == 2
    assert "question-answering takes more than single texts" in err


def test_images_are_asked_by_path_alone(cli, tiny_model, tmp_path):
    from PIL import Image

    words = (
        "run",
        "--model",
        tiny_model("vit", "image-classification"),
        "--task",
        "image-classification",
        "--json",
    )
    status, out, err = cli(*words)
    assert (status, json.loads(out)["answers"]) == (0, [])
    assert "ask" not in err
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    (answer,) = json.loads(cli(*words, "--ask", tmp_path / "red.png")[1])["answers"]
    assert {label["label"] for label in answer["labels"]} == {"cat", "boat", "tree"}


# A terminal


@pytest.mark.more
@pytest.mark.parametrize("columns", [80, 120])
def test_tables_on_a_terminal_fit_and_keep_numbers_whole(tiny, columns):
    words = ("run", "--model", tiny, "--task", "text-classification", "--quiet")
    found = on_terminal(*words, columns=columns)
    assert found.status == 0
    assert max(map(len, found.out.splitlines())) <= columns
    assert "─" in found.out
    lines = found.out.splitlines()
    header = next(line for line in lines if "max abs error" in line)
    row = next(line for line in lines if line.startswith("validate"))
    assert float(row[header.index("max abs error") :].split()[0]) < 1e-3
    assert float(row[header.index("cosine") :].split()[0]) > 0.999


def test_long_names_fold_and_short_columns_do_not(exported):
    made = exported("bert", "text-classification")
    shown = on_terminal("store", "list").out
    assert max(map(len, shown.splitlines())) <= 80
    row = next(line for line in shown.splitlines() if line.startswith(made.path.name[:8]))
    assert re.search(r"\d B|\d [kMG]B", row)
    assert re.search(r"20\d\d-\d\d-\d\d", row)
    folded = "".join(line.split("  ")[0] for line in shown.splitlines())
    assert made.path.name in folded


def test_crowded_table_breaks_its_long_columns_alone(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "74")
    long = dict.fromkeys("abc", "many words " * 4)
    console = Console()
    monkeypatch.setattr(Console, "is_terminal", True)
    console.table("Crowded", [{**long, "result": "passed earlier", "time": "12 345 678 s"}])
    out = capsys.readouterr().out
    assert "passed earlier  12 345 678 s" in out
    assert max(map(len, out.splitlines())) <= 74


def test_a_profile_is_printed_as_it_is_written(monkeypatch, capsys):
    """`:100:` is also the name of a picture."""
    monkeypatch.setattr(Console, "is_terminal", True)
    console, profile = Console(), "batch=1:100:512"
    console.line(profile)
    console.say(profile)
    console.table("Profiles", [{"profile": profile}])
    shown = capsys.readouterr()
    assert shown.out.count(profile) == 2
    assert shown.err.count(profile) == 1


@pytest.mark.more
def test_no_color_and_a_pipe_have_no_colours(exported):
    exported("bert", "text-classification")
    words = ("store", "list")
    coloured = on_terminal(*words).raw
    plain = on_terminal(*words, NO_COLOR="1").raw
    assert b"\x1b[32m" in coloured
    assert b"\x1b[3" not in plain
    assert b"\x1b" not in in_pipe(*words, FORCE_COLOR="1").raw


def test_ascii_terminal_shows_what_it_can(tiny):
    words = ("run", "--model", tiny, "--task", "text-classification", "--ask", "Größe 水 🎉")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = in_pipe(*words, **ascii_only)
    assert found.status == 0, found.err
    assert "Gr\\xf6\\xdfe" in found.out
    found.raw.decode("ascii")
    found = in_pipe(*words, "--json", **ascii_only)
    assert json.loads(found.raw.decode("ascii"))["answers"][0]["input"] == "Größe 水 🎉"


# Ends


def without_reader(*words):
    with start(*words) as child:
        child.stdout.close()
        err = child.stderr.read()
    return child.returncode, err


def test_reader_that_goes_away_is_not_an_error(tiny, home):
    for words in (("store", "path"), ("store", "path", "--json")):
        assert without_reader(*words) == (0, b"")


@pytest.mark.slow
def test_reader_that_goes_away_does_not_change_the_answer(artifact):
    words = ("validate", artifact, "--max-abs-error", "1e-12", "--quiet")
    assert in_pipe(*words).status == 1
    status, err = without_reader(*words)
    assert status == 1
    assert err.startswith(b"error: ")
    assert err.count(b"\n") == 1


def test_full_disk_under_the_output_is_an_error_in_words():
    expected = b"error: standard output cannot be written: No space left on device.\n"
    for words in (("store", "path"), ("store", "path", "--json")):
        with Path("/dev/full").open("wb") as full, start(*words, stdout=full.fileno()) as child:
            err = child.stderr.read()
        assert (child.returncode, err) == (2, expected)


@pytest.mark.parametrize(
    "words",
    [
        ("export", "b\udcff.onnx", "out"),
        ("export", "m.onnx", "--out=d\udcff"),
        ("inspect", "d\udcff"),
        ("predict", "m", "--input", "\udcff.csv", "--out", "x.csv"),
        ("lint", "b\udcff.onnx"),
    ],
)
def test_name_that_is_not_utf8_is_an_error_in_words(cli, words):
    status, _, err = cli(*words)
    assert status == 2
    assert re.fullmatch(r"error: the name '.*\\xff.*' is not valid UTF-8\. Rename .*\n", err)


def test_working_directory_that_is_not_utf8_is_an_error_in_words(cli, tmp_path, monkeypatch):
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff"))
    directory.mkdir()
    linear(directory / "m.onnx")
    monkeypatch.chdir(directory)
    status, _, err = cli("export", "m.onnx", "out")
    assert status == 2
    assert re.search(r"the name '.*d\\xff/m\.onnx' is not valid UTF-8", err)


def test_file_of_a_model_whose_name_is_not_utf8_is_named(cli, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "m")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/m/a\xff.json")).write_text("{}")
    status, _, err = cli("export", tmp_path / "m", tmp_path / "out")
    assert status == 2
    assert re.search(r"the name '.*/m/a\\xff\.json' is not valid UTF-8", err)


@pytest.mark.more
def test_interrupt_is_status_130_without_traceback_and_leaves_no_exporter(tiny, tmp_path):
    with start("export", tiny, ENGINERY_HOME=str(tmp_path)) as child:
        while line := child.stderr.readline():
            if b"loading PyTorch" in line:
                break
        exporters = psutil.Process(child.pid).children(recursive=True)
        for exporter in exporters:
            exporter.suspend()  # so that it cannot end by itself
        os.kill(child.pid, signal.SIGINT)
        out, err = child.stdout.read(), child.stderr.read()
    assert exporters
    assert child.returncode == 130
    assert err == b"error: interrupted.\n"
    assert out == b""
    _, alive = psutil.wait_procs(exporters, timeout=10)
    for exporter in alive:
        exporter.kill()
    assert not alive
    assert not list((tmp_path / "artifacts").glob("*"))


def test_module_and_script_are_the_same_command():
    script = Path(sys.executable).parent / "enginery"
    said = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert in_pipe("--version").out == said.stdout


HOSTILE = "a\x1b]52;c;eA==\x07b\rc\x9b31md\x85e\x7f"
SHOWN = "a\\x1b]52;c;eA==\\x07b\\x0dc\\x9b31md\\x85e\\x7f"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_of_a_file_reach_nobodys_terminal(monkeypatch, capsys, is_terminal):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    console = Console()
    console.line(HOSTILE)
    console.table(HOSTILE, [{HOSTILE: HOSTILE, "n": 1}])
    console.table("Facts", [{"what": HOSTILE, "value": f"one{HOSTILE}\ntwo"}])
    console.say(HOSTILE)
    console.error(EngineryError(HOSTILE, do=HOSTILE))
    shown = capsys.readouterr()
    for text, times in ((shown.out, 6), (shown.err, 3)):
        assert text.count(SHOWN) == times
        assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\ntwo" in shown.out


def test_control_characters_are_their_own_in_json(capsys):
    Console(as_json=True).json({HOSTILE: [HOSTILE]})
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert json.loads(out) == {HOSTILE: [HOSTILE]}


def test_progress_is_no_markup(monkeypatch, capsys):
    """A model's name may look like rich's, which would end the command."""
    monkeypatch.setenv("COLUMNS", "200")
    console = Console()
    monkeypatch.setattr(console._err, "_force_terminal", True)
    monkeypatch.setattr(console._err, "is_interactive", True)
    with console.task(f"exporting [/b]{HOSTILE}") as advance:
        advance()
    shown = capsys.readouterr().err
    assert SHOWN in shown
    assert "\x1b]52" not in shown


def test_a_long_task_in_a_pipe_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(console_module, "_FIRST_LINE_SECONDS", 0.05)
    monkeypatch.setattr(console_module, "_LINE_SECONDS", 0.05)
    with Console().task("comparing", total=4) as advance:
        advance()
        deadline = time.monotonic() + 30
        while (shown := capsys.readouterr().err) == "" and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "comparing: 25%, 0 s" in shown
    with Console(quiet=True).task("comparing", total=4) as advance:
        advance()
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_short_task_in_a_pipe_says_nothing(capsys):
    with Console().task("comparing", total=4) as advance:
        advance()
    assert capsys.readouterr().err == ""


def test_missing_input_is_named_before_a_model_is_exported(cli, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("enginery.first_use.run_cached", None)
    status, _, err = cli("predict", tiny, "--input", "missing.csv", "--out", tmp_path / "out.csv")
    assert (status, "data 'missing.csv': no such file or folder" in err) == (2, True)


def test_predictions_go_to_standard_output(cli, artifact, monkeypatch):
    texts = io.TextIOWrapper(io.BytesIO(b"The engine is warm.\n \nIt is cold.\n"))
    monkeypatch.setattr("sys.stdin", texts)
    status, out, err = cli("predict", artifact, "--data", "-", "--format", "text", "--out", "-")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (status, len(rows)) == (3, 3)
    assert rows[0]["label"] in LABELS["text-classification"]
    assert "1 of 3 rows have no result" in err
    assert "column error in the output" in err
    status, _, err = cli("predict", artifact, "--input", "-", "--out", "-", "--json")
    assert (status, "option 'json'" in err) == (2, True)


@pytest.mark.parametrize(
    ("dims", "said"), [(["batch", 2**31 - 1], "elements"), (["²", "sequence"], "")]
)
def test_placement_with_dims_of_another_graph_is_no_traceback(cli, artifact, dims, said):
    graphs = json.loads((artifact / "manifest.json").read_text())["graphs"]
    graphs[0]["inputs"][0]["dims"] = dims
    edit_manifest(artifact, graphs=graphs)
    status, _, err = cli("inspect", artifact, "--placement")
    assert (status, said in err) == (2 if said else 0, True)


@pytest.mark.parametrize("layers", ["[{}]", "[" * 200_000, '[{"name": 3}]', "{", "3"])
def test_inspect_says_that_a_list_of_layers_is_damaged(cli, tmp_path, layers):
    artifact = make(tmp_path / "made")
    record = engine_record(artifact)
    engine = write_engine(artifact.path / "engines" / record.directory_name, record)
    assert cli("inspect", engine, "-v")[0] == 0
    (engine / "layers.json").write_text(layers)
    commit_artifact(artifact.path, artifact.manifest)
    for words in ((engine,), (engine, "-v"), (engine, "--json"), (artifact.path,)):
        status, _, err = cli("inspect", *words)
        assert (status, "layers.json is not a list of layers" in err) == (2, True)
