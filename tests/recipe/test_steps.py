"""The steps of a recipe that take the artifact and leave something else."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from enginery import Artifact, api, load_model, run_recipe
from enginery.cli import main
from enginery.core.errors import RejectedArtifactError

QUICK = (
    "{against: none, batch: 1, sequence: 8, min_rounds: 2, max_rounds: 2, max_seconds: 2, "
    "warm_up_seconds: 0.1}"
)


@pytest.fixture
def own_home(monkeypatch, tmp_path):
    """A store that nobody reads while `force` replaces what is in it."""
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))


@pytest.fixture
def write(tiny_model, tmp_path):
    """`write("- lint")`: a recipe with these stages behind the export, beside its data."""
    model = tiny_model("bert", "text-classification")

    def make(*stages, out="", name="recipe.yaml"):
        lines = [f"model: {model}", *([f"out: {out}"] if out else []), "stages:"]
        lines += ["  - export: {task: text-classification}", *(f"  - {stage}" for stage in stages)]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    (tmp_path / "reviews.csv").write_text("text\nGood value.\nNever again.\n")
    return make


@pytest.fixture
def cli(capsys):
    """`cli("run", path)`: the exit status, and what is printed on both streams."""

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


def worked(result):
    return {stage.stage: stage.worked for stage in result.stages}


def test_an_artifact_is_at_its_place_when_its_stage_has_ended(write, tmp_path, monkeypatch):
    there, validate = [], api.run_validate

    def looking(*arguments, **options):
        there.append(Artifact.open(tmp_path / "fused").manifest.verdict("validate"))
        return validate(*arguments, **options)

    monkeypatch.setattr(api, "run_validate", looking)
    path = write("optimize: {target: cpu, out: fused}", "validate: {effort: quick, rows: 2}")
    assert run_recipe(path).passed
    assert there == [None]
    assert Artifact.open(tmp_path / "fused").manifest.verdict("validate").passed


def test_lint_looks_through_every_graph_and_a_fit_one_passes(write):
    result = run_recipe(write("lint", "lint: {target: cuda}"))
    assert result.passed
    assert [report.target for stage in result.stages[1:] for report in stage.output] == [
        "tensorrt",
        "cuda",
    ]


def test_lint_that_fails_refuses_what_follows_and_ends_with_1(write, cli, tmp_path):
    path = write(
        "optimize: {target: cuda, precision: fp32}",
        "lint",
        "export-triton: {out: triton}",
        out="out",
    )
    status, out, err = cli("run", path, "--json")
    assert status == 1
    assert "does not suit tensorrt" in err
    said = json.loads(out)
    assert (said["passed"], said["refused"]) == (False, ["export-triton"])
    assert said["stages"][2]["result"]["graphs"][0]["passed"] is False
    assert Artifact.open(tmp_path / "out").manifest.target == "cuda"
    assert not (tmp_path / "triton").exists()


def test_stages_take_the_artifact_that_they_name_and_leave_copies(write, tmp_path, monkeypatch):
    # Tests in other processes make the store's artifact anew, without its verdict.
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    stages = (
        "validate",
        "optimize: {target: tensorrt, out: fp16}",
        "validate",
        "quantize: {from: export, scheme: dynamic, target: cpu, out: int8}",
        "validate",
        "lint: {from: optimize}",
        "publish: {from: optimize, url: registry, name: half}",
        "publish: {from: export, variants: [optimize, quantize], layout: hub, url: registry}",
    )
    path = write(*stages, out="last")
    result = run_recipe(path)
    assert result.passed, result.failure
    assert [stage.artifact.manifest.precision for stage in result.stages] == [
        *("fp32", "fp32", "fp16", "fp16", "int8", "int8", "fp16", "fp16", "fp32")
    ]
    for name, precision in (("fp16", "fp16"), ("int8", "int8"), ("last", "fp32")):
        copy = Artifact.open(tmp_path / name, verify=True)
        assert copy.manifest.precision == precision
        assert copy.manifest.verdict("validate").passed
    assert set(result.copies) == {tmp_path / name for name in ("fp16", "int8", "last")}
    assert result.artifact.path == tmp_path / "last"
    assert Artifact.open(tmp_path / "registry/half/1").manifest.precision == "fp16"
    hub = Path(result.stages[-1].output.url.removeprefix("file://"))
    assert {path.name for path in (hub / "onnx").iterdir()} == {
        *("model.onnx", "model_fp16.onnx", "model_quantized.onnx")
    }
    assert not any(worked(run_recipe(path))[name] for name in ("optimize", "quantize", "publish"))


@pytest.mark.more
def test_copy_of_an_artifact_that_failed_is_marked_as_failed(write, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))  # others use the store's artifact
    path = write(
        "validate: {max_abs_error: 1e-30}", "optimize: {target: cuda, out: fused}", out="out"
    )
    result = run_recipe(path)
    assert not result.passed
    assert result.refused == ("optimize",)
    assert not Artifact.open(tmp_path / "out").manifest.verdict("validate").passed
    assert not (tmp_path / "fused").exists()


@pytest.mark.more
def test_bench_leaves_its_report_and_measures_again_for_other_options_alone(
    write, tmp_path, own_home
):
    path = write(f"bench: {QUICK}", out="out")
    first = run_recipe(path)
    assert worked(first)["bench"]
    assert [case.sizes for case in first.stages[1].output.cases] == [{"batch": 1, "sequence": 8}]
    delivered = tmp_path / "out/reports"
    assert json.loads((delivered / "benchmark.json").read_bytes())["options"]["batch"] == "1"
    assert (delivered / "report.html").is_file()
    Artifact.open(tmp_path / "out", verify=True)

    again = run_recipe(path)
    assert not worked(again)["bench"]
    assert again.stages[1].output.finished == first.stages[1].output.finished
    assert worked(run_recipe(path, force=True))["bench"]
    other = run_recipe(write(f"bench: {QUICK.replace('sequence: 8', 'sequence: 4')}", out="out"))
    assert worked(other)["bench"]
    assert json.loads((delivered / "benchmark.json").read_bytes())["options"]["sequence"] == "4"


@pytest.mark.more
def test_bench_measures_accuracy_again_if_the_labels_have_changed(write, tmp_path):
    data = tmp_path / "labelled.csv"
    data.write_text("text,label\nGood value.,calm\nNever again.,glad\n")
    options = QUICK.replace("{", "{data: labelled.csv, label_column: label, ")
    path = write(f"bench: {options}", out="out")
    first = run_recipe(path)
    assert not worked(run_recipe(path))["bench"]
    data.write_text("text,label\nGood value.,angry\nNever again.,angry\n")
    again = run_recipe(path)
    assert worked(again)["bench"]
    found = [result.stages[1].output.labels.accuracies[0] for result in (first, again)]
    assert [each.rows for each in found] == [2, 2]
    assert found[0].right + found[1].right <= 2, "no row has two labels"


@pytest.mark.more
def test_accuracies_of_labelled_rows_stand_beside_those_of_the_reference(write, cli, tmp_path):
    """The random classifier calls everything by one name; the rows have it 2 of 3 times."""
    data = tmp_path / "labelled.csv"
    data.write_text("text,label\nGood value.,calm\n")
    with load_model(run_recipe(write()).artifact) as model:
        (top,) = model.classify(["Good value."])
    other = next(label for label in ("calm", "glad", "angry") if label != top.label)
    labels = [top.label, top.label, other] * 8
    data.write_text("text,label\n" + "".join(f"Good value.,{label}\n" for label in labels))
    labelled = "data: labelled.csv, label_column: label"
    budget = "accuracy_budget: 100%, rows: 24, smoothing: none, scheme: int8"
    path = write(f"validate: {{{labelled}}}", f"quantize: {{{labelled}, {budget}}}")
    status, out, err = cli("run", path)
    assert status == 0, err
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "accuracy" in rows["stage"]
    assert "66.7% (PyTorch 66.7%)" in rows["validate"]
    assert re.search(r"\d+\.\d% \(FP32 \d+\.\d%\)", rows["quantize"])
    assert "accuracy" not in cli("run", write())[1]


def test_validation_of_a_recipe_takes_arrays(write, tmp_path):
    ids = np.arange(24).reshape(3, 8)
    arrays = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    np.savez(tmp_path / "inputs.npz", **arrays)
    result = run_recipe(write("validate: {data: inputs.npz}"))
    assert result.passed
    cases = result.stages[1].report.cases
    assert [case.name for case in cases if case.kind == "real"] == ["rows 1–3"]


def test_bench_can_leave_its_reports_elsewhere(write, tmp_path):
    path = write("bench: {out: measured, " + QUICK.removeprefix("{"))
    assert worked(run_recipe(path))["bench"]
    assert (tmp_path / "measured/reports/benchmark.json").is_file()
    assert not worked(run_recipe(path))["bench"]


def test_predict_answers_a_file_and_a_second_run_does_nothing(write, tmp_path):
    path = write("predict: {input: reviews.csv, out: answers/a.csv}")
    first = run_recipe(path)
    answers = tmp_path / "answers/a.csv"
    lines = answers.read_text().splitlines()
    assert len(lines) == 3
    assert first.stages[1].output.counts.rows == 2
    before = answers.stat().st_mtime_ns
    assert worked(run_recipe(path)) == {"export": False, "predict": False}
    assert answers.stat().st_mtime_ns == before


def test_rows_without_an_answer_end_the_run_with_3_as_the_command_does(write, cli, tmp_path):
    (tmp_path / "reviews.jsonl").write_text('{"text": "Good."}\n{"text": null}\n')
    path = write("predict: {input: reviews.jsonl, out: a.jsonl}")
    status, out, err = cli("run", path, "--json")
    assert status == 3
    assert "1 of 2 rows have no result" in err
    (_, predicted) = json.loads(out)["stages"]
    assert predicted["result"]["counts"]["bad_rows"] == 1


@pytest.mark.more
def test_publish_makes_a_version_once(write, tmp_path, own_home):
    path = write("validate: {rows: 4}", "publish: {url: registry, name: mine, version: 1.2.0}")
    first = run_recipe(path)
    published = first.stages[2].output
    assert (published.version, published.is_new) == ("1.2.0", True)
    assert published.url == (tmp_path / "registry/mine/1.2.0").as_uri()
    again = run_recipe(path)
    assert (again.stages[2].output.is_new, again.stages[2].worked) == (False, False)


@pytest.mark.more
def test_publish_refuses_what_failed_also_where_the_run_goes_on(write, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))  # the verdict is not for others
    path = write("validate: {max_abs_error: 1e-12}", "publish: {url: registry}")
    refused = run_recipe(path)
    assert (refused.passed, refused.refused) == (False, ("publish",))
    with pytest.raises(RejectedArtifactError, match="was not published"):
        run_recipe(path, allow_failed=True)
    assert not (tmp_path / "registry").exists()


def test_triton_and_kserve_get_what_their_commands_write(write, cli, tmp_path):
    path = write(
        "export-triton: {out: triton, provider: cpu, name: mine}",
        "export-kserve: {out: kserve, storage_uri: 's3://models/mine', image: i/s:1, "
        "provider: cpu}",
    )
    status, out, err = cli("run", path, "--json")
    assert status == 0, err
    triton, kserve = (stage["result"] for stage in json.loads(out)["stages"][1:])
    assert triton["name"] == "mine"
    assert all(
        (tmp_path / "triton" / model / "config.pbtxt").is_file() for model in triton["models"]
    )
    assert kserve["path"] == str(tmp_path / "kserve/inferenceservice.yaml")
    assert "s3://models/mine" in (tmp_path / "kserve/inferenceservice.yaml").read_text()


@pytest.mark.more
def test_what_stages_made_is_printed_as_their_commands_print_it(write, cli, tmp_path, monkeypatch):
    # Its validation replaces the verdict, which tests in other processes may need.
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    path = write(
        f"bench: {QUICK}",
        "predict: {input: reviews.csv, out: a.csv}",
        "validate: {rows: 4}",
        "publish: {url: registry, name: mine}",
    )
    status, out, err = cli("run", path)
    assert status == 0, err
    for words in (
        "measured",
        "answered",
        "published",
        "Predicted",
        "2 read, 2 predicted",
        (tmp_path / "registry/mine/1").as_uri(),
    ):
        assert words in out, words
    reviews, answers = tmp_path / "reviews.csv", tmp_path / "a.csv"
    words = ("predict", stored(path), "--input", reviews, "--out", answers, "--json")
    status, alone, _ = cli(*words)
    assert status == 0
    assert json.loads(alone)["worked"] is False, "the command knows the run's output as its own"


def stored(path):
    return run_recipe(path).artifact.path


def test_a_recipes_trust_holds_for_the_stages_behind_the_export(write, monkeypatch, own_home):
    from enginery.bench import stage as bench

    granted = []
    monkeypatch.setattr(bench, "run", lambda _, config, **__: granted.append(config))
    run_recipe(write(f"bench: {QUICK}"), force=True, trust_remote_code=True, allow_failed=True)
    (config,) = granted
    assert (config.trust_remote_code, config.allow_pickle, config.allow_failed) == (
        True,
        False,
        True,
    )
