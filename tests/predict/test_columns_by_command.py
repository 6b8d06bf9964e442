"""Column options of predict, through the command line."""

import csv
import io
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginery.cli import main
from enginery.predict.task_inputs import are_usable_texts, find_input_problem
from enginery.runtime.model import load_model
from tests.tolerances import SCORES


def status_of(*words):
    """Run a command and return its exit status."""
    try:
        main(words)
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture
def command(tmp_path, capsys):
    """Return a function that runs `predict` and returns its exit status and the output's rows."""

    def go(artifact, source, output, *words):
        inputs = ["--input", str(tmp_path / source), "--out", str(tmp_path / output)]
        status = status_of("predict", str(artifact.path), *inputs, *words)
        capsys.readouterr()
        lines = (tmp_path / output).read_text(encoding="utf-8").splitlines()
        return status, [json.loads(line) for line in lines]

    return go


@pytest.fixture
def photos(tmp_path):
    """Return paths of two images, of a file that is not an image, and of a missing file."""
    from PIL import Image

    (tmp_path / "photos").mkdir()
    for name, color in (("a.png", (200, 20, 90)), ("b.png", (10, 220, 90))):
        Image.new("RGB", (40, 30), color).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "c.png").write_bytes(b"no image at all")
    return ["photos/a.png", str(tmp_path / "photos" / "b.png"), "photos/c.png", "photos/d.png"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_image_paths_are_relative_to_the_folder_of_the_table(
    command, tiny, photos, tmp_path, monkeypatch, suffix
):
    if suffix == "csv":
        with (tmp_path / "in.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([["n", "photo"], *enumerate(photos)])
    else:
        table = pa.table({"n": [str(n) for n in range(4)], "photo": photos})
        pq.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = tiny("vit", "image-classification")
    status, found = command(model, f"in.{suffix}", "out.jsonl", "--column", "photo")
    assert status == 3
    assert [row["photo"] for row in found] == photos
    with load_model(model) as loaded:
        expected = loaded.classify_images(
            [tmp_path / "photos" / name for name in ("a.png", "b.png")]
        )
    assert [row["label"] for row in found] == [*(one.label for one in expected), None, None]
    assert found[0]["score"] == pytest.approx(expected[0].score, abs=SCORES)
    assert found[0]["error"] is None
    assert "is not a complete image" in found[2]["error"]
    assert "d.png" in found[3]["error"]


def test_folder_of_images_may_be_a_relative_path(tiny, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tiny("vit", "image-classification")
    words = ["--input", "photos", "--out", "out.jsonl"]
    assert status_of("predict", str(model.path), *words) == 3  # c.png is none
    assert "error: 1 of 3 rows have no result" in capsys.readouterr().err
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["path"], row["error"] is None) for row in found] == [
        ("a.png", True),
        ("b.png", True),
        ("c.png", False),
    ]


def test_hyphen_is_standard_input(tiny, tmp_path, monkeypatch, capsys):
    stdin = io.TextIOWrapper(io.BytesIO(b"text\nwarm\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    model = tiny("bert", "feature-extraction")
    for hyphen in (["--input", "-"], ["-i", "-"]):
        stdin.buffer.seek(0)
        out = tmp_path / f"{hyphen[0].strip('-')}.jsonl"
        words = [*hyphen, "--format", "csv", "--out", str(out)]
        assert status_of("predict", str(model.path), *words) == 0
        assert json.loads(out.read_text())["text"] == "warm"
    capsys.readouterr()


def test_null_in_the_image_column_is_a_bad_row(command, tiny, photos, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"photo": null}\n{"photo": "photos/a.png"}\n')
    model = tiny("vit", "image-classification")
    status, found = command(model, "in.jsonl", "out.jsonl", "--column", "photo")
    assert status == 3
    assert [row["error"] for row in found] == ["photo is null", None]


def test_pair_column_is_classified_together_with_the_text(command, tiny, tmp_path):
    pairs = [
        ("the pump is warm", "the motor is cold"),
        ("the motor is cold", "the pump is warm"),
        ("warm again", "Paris"),
    ]
    with (tmp_path / "in.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["text", "other"], *pairs, ["warm", ""]])
    model = tiny("bert", "text-classification")
    status, found = command(model, "in.csv", "out.jsonl", "--pair-column", "other", "--top-k", "0")
    assert status == 3
    with load_model(model) as loaded:
        expected = loaded.classify(pairs, top_k=0)
        alone = loaded.classify([first for first, _ in pairs], top_k=0)
    for row, pair, single in zip(found, expected, alone, strict=False):
        scores = {one["label"]: one["score"] for one in row["scores"]}
        assert scores == pytest.approx({one.label: one.score for one in pair.labels}, abs=SCORES)
        assert scores != pytest.approx({one.label: one.score for one in single.labels}, abs=1e-3)
    assert found[3]["error"] == "other is empty"


def test_missing_pair_column_is_an_error(tiny, tmp_path, capsys):
    (tmp_path / "in.csv").write_text("text,other\nwarm,cold\n")
    model = tiny("bert", "text-classification")
    words = ["--input", str(tmp_path / "in.csv"), "--out", str(tmp_path / "out.csv")]
    assert status_of("predict", str(model.path), *words, "--pair-column", "othr") == 2
    assert "no column 'othr'; did you mean 'other'?" in " ".join(capsys.readouterr().err.split())


def test_pair_column_for_a_model_without_pairs_is_an_error(tiny, tmp_path, capsys):
    (tmp_path / "in.csv").write_text("text,other\nwarm,cold\n")
    model = tiny("bert", "feature-extraction")
    words = ["--input", str(tmp_path / "in.csv"), "--out", str(tmp_path / "out.csv")]
    assert status_of("predict", str(model.path), *words, "--pair-column", "other") == 2
    assert "the model does feature-extraction" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("texts", "usable"),
    [
        (["warm", "é", "a b"], True),
        ([], True),
        (["warm", ""], False),
        (["warm", " \t"], False),
        (["warm", None], False),
        (["warm", 7], False),
        (["warm \ud83d", "\ude00"], False),  # one half of a character in each
    ],
)
def test_texts_are_usable_together_as_each_of_them_is(texts, usable):
    assert are_usable_texts(texts) == usable
    problems = [find_input_problem((text,), ("text",)) for text in texts]
    assert (not any(problems)) == usable
