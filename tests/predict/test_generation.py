"""Rows of a file get generated texts."""

import json

import pytest

from enginery import export_model, load_model, predict_file
from enginery.core.errors import InputError, OptionError

TEXTS = ["The engine is warm.", "Who?", "", "A small cat sleeps on the boat."]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)))
    return path


@pytest.fixture
def artifact(tiny_model, home):
    """Return a function: `artifact("gpt2")` generates."""
    tasks = {"gpt2": "text-generation", "marian": "text2text-generation"}

    def make(kind):
        task = tasks[kind]
        return export_model(str(tiny_model(kind, task)), task=f"{task}-with-past")

    return make


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("marian", marks=pytest.mark.more)])
def test_texts_are_those_of_the_model_and_bad_rows_have_an_error(artifact, rows, tmp_path, kind):
    out = tmp_path / "out.jsonl"
    made = artifact(kind)
    report = predict_file(
        made, str(rows), str(out), generation=("max_new_tokens=8", "num_beams=2"), batch_rows=2
    )
    assert report.counts.bad_rows == 1
    found = read(out)
    assert found[2]["error"] == "text is empty"
    assert found[2]["generated"] is None
    with load_model(made) as model:
        good = [text for text in TEXTS if text]
        wanted = model.generate(good, max_new_tokens=8, num_beams=2)
    shown = [row for row in found if row["error"] is None]
    assert [row["generated"] for row in shown] == [each.text for each in wanted]
    assert [row["finish"] for row in shown] == [each.finish for each in wanted]
    assert [row["score"] for row in shown] == pytest.approx([each.score for each in wanted], 1e-5)


def test_several_results_are_lists(artifact, rows, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ("max_new_tokens=4", "num_beams=3", "num_return_sequences=3")
    predict_file(artifact("gpt2"), str(rows), str(out), generation=options)
    first = read(out)[0]
    assert len(first["generated"]) == len(first["finish"]) == len(first["score"]) == 3


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        (("max_new_tokens",), "option 'generation' is 'max_new_tokens', expected NAME=VALUE"),
        (("max_tokens=3",), "unknown option 'max_tokens'"),
        (("num_beams=many",), "num_beams: found 'many'"),
        (("target_language=fr",), "unknown option 'target_language'"),
    ],
)
def test_wrong_options_are_errors(artifact, rows, tmp_path, generation, message):
    out = tmp_path / "out.jsonl"
    with pytest.raises(OptionError, match=message):
        predict_file(artifact("gpt2"), str(rows), str(out), generation=generation)
    assert not out.exists()


def test_prompt_that_is_too_long_is_a_bad_row(artifact, tmp_path):
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    texts = ["The engine", "The engine. " * 200]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    predict_file(artifact("gpt2"), str(path), str(out))
    good, bad = read(out)
    assert good["generated"]
    assert "the model's limit is 128" in bad["error"]


@pytest.mark.more
def test_options_of_generation_are_for_models_that_generate(exported, rows, tmp_path):
    with pytest.raises(OptionError, match="is for models that generate texts"):
        predict_file(
            exported("bert", "text-classification"),
            str(rows),
            str(tmp_path / "out.jsonl"),
            generation=("num_beams=2",),
        )
    with pytest.raises(InputError):
        predict_file(exported("bert", "text-classification"), "missing.csv", "out.jsonl")
