"""Every recipe of `recipes/` runs, on a tiny model: named as a user names another one."""

import csv
import json
from itertools import islice, product
from pathlib import Path

import pytest
from PIL import Image

from enginery import Artifact, load_model
from enginery.cli import main
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.errors import RecipeError
from enginery.recipe import Recipe
from enginery.runtime.builtin_inputs import synthetic_images
from enginery.runtime.tensorrt.library import has_tensorrt

RECIPES = Path(__file__).parents[2] / "recipes"

needs_tensorrt = pytest.mark.skipif(
    not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'"
)


@pytest.fixture
def run(capsys, tmp_path):
    """`run("minilm", model, task)`: the artifact that the recipe leaves, and what it says."""

    def make(recipe, *words):
        out = tmp_path / "out"
        with pytest.raises(SystemExit) as ended:
            main(["run", str(RECIPES / f"{recipe}.yaml"), "--out", str(out), "--json", *words])
        said, problem = capsys.readouterr()
        assert ended.value.code == 0, problem
        return Artifact.open(out), json.loads(said)

    return make


def stages_of(said):
    return [stage["stage"] for stage in said["stages"]]


def test_every_recipe_is_run_here():
    tested = {name.removeprefix("test_").removesuffix("_runs") for name in globals()}
    written = {path.stem.replace("-", "_") for path in RECIPES.glob("*.yaml")}
    assert written <= tested


@pytest.mark.more
def test_minilm_runs(run, tiny_model):
    model = str(tiny_model("bert", "feature-extraction"))
    artifact, said = run("minilm", "--model", model, "--task", "feature-extraction")
    assert stages_of(said) == ["export", "validate"]
    assert artifact.manifest.verdict("validate").passed


def test_own_model_runs(run, tiny_model, monkeypatch):
    monkeypatch.setenv("MODEL", str(tiny_model("bert", "token-classification")))
    monkeypatch.setenv("TASK", "token-classification")
    artifact, said = run("own_model")
    assert stages_of(said) == ["export", "validate"]
    assert artifact.manifest.task == "token-classification"
    assert artifact.manifest.verdict("validate").passed


@pytest.mark.more
def test_sentiment_runs(run, tiny_model, monkeypatch):
    monkeypatch.delenv("REVIEWS", raising=False)
    model = str(tiny_model("distilbert", "text-classification"))
    artifact, said = run("sentiment", "--model", model, "--task", "text-classification")
    assert stages_of(said) == ["export", "validate"]
    assert artifact.manifest.verdict("validate").passed


@pytest.fixture
def reviews(tmp_path, exported):
    """A CSV of texts, each with the label that the tiny classifier gives it in FP32."""
    made = product(
        ("The engine", "A small cat", "Nobody in Paris", "Der Motor", "The pump", "Who"),
        ("is warm", "sleeps on the boat", "knows the bridge", "runs again", "wrote about it"),
        ("at noon", "in London", "under the tree", "and the rain is cold, the bell rings", "now"),
    )
    texts = [" ".join(words) + "." for words in islice(made, 150)]
    with load_model(exported("bert", "text-classification")) as model:
        labels = [answer.label for answer in model.classify(texts)]
    path = tmp_path / "reviews.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *zip(texts, labels, strict=True)])
    return path


@needs_tensorrt
@pytest.mark.slow
def test_bert_classification_int8_runs(run, tiny_model, reviews, monkeypatch):
    monkeypatch.setenv("REVIEWS", str(reviews))
    model = str(tiny_model("bert", "text-classification"))
    words = ("--model", model, "--task", "text-classification")
    artifact, said = run("bert-classification-int8", *words)
    assert stages_of(said) == ["export", "validate", "quantize", "validate", "build"]
    assert artifact.manifest.verdict("validate").passed
    report = json.loads((artifact.path / "reports/quantization.json").read_bytes())
    assert report["layers"]["quantized"] > 0
    assert report["accuracy"]["label_accuracy"] is not None
    assert "accuracy" in report["search"]["about"]
    engines = [Engine.open(path) for path in engine_directories(artifact.path)]
    assert 1 < len(engines) <= 3
    assert all(engine.record.capabilities == ("8.9",) for engine in engines)
    assert any("int8" in kind for engine in engines for kind in engine.record.layers)
    assert len({engine.record.profiles for engine in engines}) == len(engines)


def test_bert_classification_int8_says_that_it_wants_texts(monkeypatch):
    monkeypatch.delenv("REVIEWS", raising=False)
    with pytest.raises(RecipeError, match="the environment variable 'REVIEWS' is not set"):
        Recipe.load(RECIPES / "bert-classification-int8.yaml")


@pytest.mark.slow
def test_release_runs(run, tiny_model, reviews, tmp_path, monkeypatch):
    monkeypatch.setenv("REVIEWS", str(reviews))
    monkeypatch.setenv("SECONDS", "1")
    monkeypatch.setenv("ANSWERS", str(tmp_path / "answers.csv"))
    monkeypatch.setenv("REGISTRY", str(tmp_path / "registry"))
    model = str(tiny_model("distilbert", "text-classification"))
    words = ("--model", model, "--task", "text-classification")
    artifact, said = run("release", *words)
    assert stages_of(said) == ["export", "validate", "bench", "predict", "publish"]
    assert (artifact.path / "reports/benchmark.json").is_file()
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 151
    card = next((tmp_path / "registry").rglob("README.md")).read_text()
    assert "apache-2.0" in card

    _, again = run("release", *words)
    assert [stage["worked"] for stage in again["stages"]] == [False] * 5
    assert again["stages"][-1]["result"]["version"] == said["stages"][-1]["result"]["version"]


@pytest.mark.slow
@needs_tensorrt
def test_vit_fp16_runs(run, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    for index, image in enumerate(synthetic_images(4)):
        Image.fromarray(image).save(tmp_path / "photos" / f"{index}.png")
    monkeypatch.setenv("IMAGES", str(tmp_path / "photos"))
    model = str(tiny_model("vit", "image-classification"))
    artifact, said = run("vit-fp16", "--model", model, "--task", "image-classification")
    assert stages_of(said) == ["export", "validate", "optimize", "validate", "build"]
    manifest = artifact.manifest
    assert (manifest.target, manifest.precision) == ("tensorrt", "fp16")
    assert manifest.verdict("validate").passed
    (engine,) = (Engine.open(path) for path in engine_directories(artifact.path))
    assert engine.record.profiles == ("batch=1:8:32",)
    assert any("fp16" in kind for kind in engine.record.layers)


def test_vit_fp16_takes_images_made_by_code_where_none_are_named(monkeypatch):
    monkeypatch.delenv("IMAGES", raising=False)
    steps = Recipe.load(RECIPES / "vit-fp16.yaml").steps
    assert [getattr(step.options, "data", "") for step in steps] == [""] * 5
