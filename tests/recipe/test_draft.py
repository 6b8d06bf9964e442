"""The recipe that `enginery init` writes."""

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from enginery import Artifact
from enginery.cli import main
from enginery.core.errors import EngineryError, OptionError
from enginery.recipe import Recipe
from enginery.recipe.checks import check_recipe
from enginery.recipe.draft import DraftOptions, draft_recipe
from enginery.runtime.tensorrt.library import has_tensorrt

needs_tensorrt = pytest.mark.skipif(
    not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'"
)


@pytest.fixture
def init(capsys, tmp_path, monkeypatch):
    """`init(model, "--target", "cpu")`: the recipe, the exit status, and what is printed."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main(["init", *map(str, words)])
        out, err = capsys.readouterr()
        return ended.value.code, out + err

    return call


@pytest.fixture
def reviews(tmp_path):
    lines = [f"review {place}: the engine is warm,{place % 2}" for place in range(80)]
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


def stages(text, base=None):
    return [step.stage for step in Recipe.parse(text, base=base).steps]


@needs_tensorrt
@pytest.mark.parametrize("target", ["tensorrt", "cuda", "cpu"])
@pytest.mark.parametrize("task", ["text-classification", "image-classification"])
def test_recipe_for_every_target_has_no_mistake(target, task, tiny_model, tmp_path):
    model = tiny_model("vit" if task.startswith("image") else "bert", task)
    text = draft_recipe(str(model), tmp_path / "recipe.yaml", DraftOptions(target=target))
    recipe = Recipe.parse(text, base=tmp_path)
    check_recipe(recipe)
    assert recipe.steps[0].options.task == task
    assert [step.stage for step in recipe.steps][-2:] == ["publish", "export-triton"]


@needs_tensorrt
def test_recipe_with_labelled_data_quantizes_what_export_made(tiny_model, reviews, tmp_path):
    options = {"data": str(reviews), "label_column": "label", "capability": "8.9"}
    model = tiny_model("bert", "text-classification")
    (tmp_path / "here").mkdir()
    text = draft_recipe(str(model), tmp_path / "here/recipe.yaml", DraftOptions(**options))
    recipe = Recipe.parse(text, base=tmp_path / "here")
    quantize = next(step for step in recipe.steps if step.stage == "quantize")
    assert (quantize.source, quantize.options.accuracy_budget) == ("export", "0.5%")
    assert quantize.options.capability == ("8.9",)
    assert Path(quantize.options.data).resolve() == reviews
    assert [step.stage for step in recipe.steps] == [
        *("export", "validate", "optimize", "validate", "quantize", "validate", "lint", "build"),
        *("bench", "publish", "export-triton"),
    ]
    check_recipe(recipe)


def test_shapes_stay_within_the_positions_of_the_model(tiny_model, tmp_path):
    model = tiny_model("bert", "fill-mask")
    limit = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    text = draft_recipe(str(model), tmp_path / "recipe.yaml", DraftOptions(target="cpu"))
    validate = Recipe.parse(text, base=tmp_path).steps[1].options
    assert validate.profile[0].endswith(f":{min(limit, 512)}")


def test_model_of_a_task_without_requests_gets_no_profile(tmp_path):
    task = "automatic-speech-recognition"
    text = draft_recipe("org/name", tmp_path / "recipe.yaml", DraftOptions(task=task))
    assert "profile" not in text
    assert stages(text) == ["export", "validate", "optimize", "validate", "bench", "publish"]


@pytest.mark.parametrize("name", ["my ${model}", "a: b", "#1", "it's", "-", "größe"])
def test_names_are_quoted_where_yaml_needs_it(tiny_model, tmp_path, name):
    model = tmp_path / "models" / name
    shutil.copytree(tiny_model("bert", "fill-mask"), model)
    text = draft_recipe(str(model), tmp_path / "recipe.yaml", DraftOptions(target="cpu"))
    assert Path(Recipe.parse(text, base=tmp_path).model).resolve() == model


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"column": "text"}, "option 'column' is set, but there are no data"),
        ({"label_column": "label"}, "option 'label_column' is set, but there are no data"),
        ({"held_out": "rest.csv"}, "option 'held_out' is set, but there are no data"),
        ({"task": "sorting"}, "unknown task 'sorting'"),
        (
            {"task": "fill-mask", "data": "a.csv", "label_column": "label"},
            "the task is fill-mask, expected a classifier",
        ),
    ],
)
def test_options_that_do_not_go_together_are_named(options, problem, tmp_path):
    with pytest.raises(OptionError, match=problem):
        draft_recipe("org/name", tmp_path / "recipe.yaml", DraftOptions(**options))


def test_model_that_is_not_there_is_an_error_and_leaves_no_file(init, tmp_path):
    status, said = init("./nowhere")
    assert status == 2
    assert "nowhere" in said
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineryError):
        draft_recipe("a b", tmp_path / "recipe.yaml", DraftOptions())


def flattened(text):
    return text.replace("\n", " ")


def test_command_writes_the_recipe_once_and_says_what_to_mend(init, tiny_model, tmp_path):
    model = tiny_model("bert", "text-classification")
    status, said = init(model, "--target", "cpu", "--data", "nowhere.csv")
    assert status == 0
    assert re.search(r"fix before it runs: found \d+ problems: - recipe\.yaml:", flattened(said))
    before = (tmp_path / "recipe.yaml").read_text()
    status, said = init(model)
    assert status == 2
    assert "exists already" in said
    assert (tmp_path / "recipe.yaml").read_text() == before
    status, said = init(model, "--target", "cpu", "--force", "--json")
    assert status == 0
    assert json.loads(said)["problem"] == ""


def options_of(recipe, stage):
    return [step.options for step in recipe.steps if step.stage == stage]


@needs_tensorrt
@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
def test_labelled_rows_are_split_and_measured_alike(init, tiny_model, reviews, tmp_path, target):
    model = tiny_model("bert", "text-classification")
    words = (model, "--target", target, "--data", reviews, "--label-column", "label")
    status, said = init(*words)
    assert status == 0
    assert "recipe-held-out.parquet: 20 rows" in said.replace("\n", " ")
    recipe = Recipe.load("recipe.yaml")
    check_recipe(recipe)
    for options in options_of(recipe, "validate"):
        assert Path(options.data).name == "recipe-held-out.parquet"
        assert (options.label_column, options.rows) == ("label", 1024)
    for options in options_of(recipe, "quantize") if target == "tensorrt" else ():
        assert Path(options.data).name == "recipe-calibration.parquet"
        assert Path(options.held_out).name == "recipe-held-out.parquet"
    tables = [pq.read_table(f"recipe-{name}.parquet") for name in ("calibration", "held-out")]
    texts = [table["text"].to_pylist() for table in tables]
    assert sorted(texts[0] + texts[1]) == sorted(
        line.rpartition(",")[0] for line in reviews.read_text().splitlines()[1:]
    )
    assert len(texts[1]) == 20
    status, said = init(*words, "-o", "other.yaml")
    assert status == 0
    (tmp_path / "other.yaml").unlink()
    status, said = init(*words, "-o", "other.yaml")
    assert status == 2
    assert "other-calibration.parquet exists already" in said.replace("\n", "")


def test_held_out_rows_are_those_that_are_named(init, tiny_model, reviews, tmp_path):
    shutil.copy(reviews, tmp_path / "mine.csv")
    model = tiny_model("bert", "text-classification")
    words = ("--target", "cpu", "--data", reviews, "--label-column", "label")
    assert init(model, *words, "--held-out", "mine.csv")[0] == 0
    recipe = Recipe.load("recipe.yaml")
    assert {Path(options.data).name for options in options_of(recipe, "validate")} == {"mine.csv"}
    assert not list(tmp_path.glob("*.parquet"))


def test_few_rows_are_not_split(init, tiny_model, tmp_path):
    (tmp_path / "few.csv").write_text("text,label\n" + "warm,1\n" * 7)
    model = tiny_model("bert", "text-classification")
    status, said = init(model, "--target", "cpu", "--data", "few.csv", "--label-column", "label")
    assert (status, "too few rows to hold some out" in said) == (0, True)
    assert not list(tmp_path.glob("*.parquet"))


@needs_tensorrt
@pytest.mark.slow
def test_recipe_runs_from_the_model_to_the_registry(init, tiny_model, reviews, tmp_path, capsys):
    model = tiny_model("bert", "feature-extraction")
    assert init(model, "--data", reviews)[0] == 0
    with pytest.raises(SystemExit) as ended:
        main(["run", "recipe.yaml", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert said["passed"]
    names = {path.name for path in (tmp_path / "build").iterdir()}
    assert names >= {"registry", "triton"}
    precisions = {
        Artifact.open(path).manifest.precision
        for path in (tmp_path / "build").iterdir()
        if (path / "manifest.json").exists()
    }
    assert precisions == {"fp32", "fp16", "int8"}
