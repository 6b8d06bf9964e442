"""`enginery try`: one or a few inputs of any task, answered on the terminal."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from enginery import load_model
from enginery.cli import main
from enginery.core.artifact.artifact import commit_artifact
from enginery.core.artifact.manifest import Verdict

TEXTS = ("The engine is warm.", "A cat sleeps.", "The rain is cold.")


@pytest.fixture
def cli(capsys):
    """`cli("try", …)`: exit status, standard output, standard error."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(["try", *map(str, words)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return ended.value.code, out, err

    return run


@pytest.fixture
def embedder(exported):
    return exported("bert", "feature-extraction").path


def answers(out):
    return json.loads(out)["answers"]


def test_vectors_are_those_of_load_model_and_name_the_nearest(cli, embedder):
    status, out, _ = cli(embedder, *TEXTS, "--json")
    assert status == 0
    with load_model(embedder) as model:
        expected = model.embed(TEXTS)
    found = answers(out)
    np.testing.assert_allclose([answer["embedding"] for answer in found], expected, atol=1e-6)
    units = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -1)
    assert [answer["nearest"] for answer in found] == [TEXTS[i] for i in cosines.argmax(axis=1)]
    _, table, _ = cli(embedder, TEXTS[0])
    assert f"32 dims: {expected[0, 0]:.4f} {expected[0, 1]:.4f}" in table


def test_an_example_is_answered_if_no_input_is_given(cli, embedder):
    status, out, _ = cli(embedder, "--json")
    assert (status, len(answers(out))) == (0, 1)


def test_a_dash_is_the_text_of_standard_input(cli, embedder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Où est-il ?\n".encode())))
    _, out, _ = cli(embedder, "-", "--json")
    assert answers(out)[0]["input"] == "Où est-il ?"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"warm \xff")))
    status, _, err = cli(embedder, "-")
    assert status == 2
    assert "standard input is not UTF-8 text: byte 5" in err


def test_labels_of_texts_and_of_pairs(cli, exported):
    artifact = exported("bert", "text-classification").path
    _, out, _ = cli(artifact, TEXTS[0], "--pair", TEXTS[1], "--set", "top_k=2", "--json")
    (answer,) = answers(out)
    with load_model(artifact) as model:
        (expected,) = model.classify([TEXTS[:2]], top_k=2)
    assert [label["label"] for label in answer["labels"]] == [
        label.label for label in expected.labels
    ]
    assert expected.labels[0].label in cli(artifact, TEXTS[0], "--pair", TEXTS[1])[1]


def test_questions_and_contexts_come_in_turn(cli, exported):
    artifact = exported("bert", "question-answering").path
    question, context = "Who built the bridge?", "Marie built the bridge in London."
    _, out, _ = cli(artifact, question, context, "--json")
    with load_model(artifact) as model:
        expected = model.answer([(question, context)])[0]
    (answer,) = answers(out)
    assert answer["answers"][0]["text"] == expected[0].text
    assert answer["input"] == f"{question} | {context}"
    status, _, err = cli(artifact, question)
    assert status == 2
    assert "takes a question and a context, and 1 inputs are given" in err


def test_images_are_paths_and_have_no_example(cli, exported, tmp_path):
    artifact = exported("vit", "image-classification").path
    Image.new("RGB", (40, 30), (200, 20, 20)).save(tmp_path / "red.png")
    status, out, _ = cli(artifact, tmp_path / "red.png")
    assert (status, "red.png" in out) == (0, True)
    status, _, err = cli(artifact)
    assert status == 2
    assert "no input is given. Add the path of a file" in err
    assert cli(artifact, tmp_path / "missing.png")[0] == 2


def test_generated_text_is_printed_as_it_comes(cli, exported):
    artifact = exported("gpt2", "text-generation-with-past").path
    with load_model(artifact) as model:
        (expected,) = model.generate(["The engine"], max_new_tokens=9)
    settings = ("--set", "max_new_tokens=9")
    assert answers(cli(artifact, "The engine", *settings, "--json")[1])[0]["text"] == expected.text
    # What a terminal cannot show is escaped.
    assert cli(artifact, "The engine", *settings, "--stream")[1].strip()
    _, out, _ = cli(artifact, "The engine", *settings, "--set", "num_beams=3", "--json")
    assert len(answers(out)) == 1
    several = ("--set", "num_beams=3", "--set", "num_return_sequences=2")
    found = answers(cli(artifact, "The engine", "A cat", *settings, *several, "--json")[1])
    assert [answer["input"] for answer in found] == ["The engine"] * 2 + ["A cat"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("warm", "--stream"), "option 'stream' is for models that generate, but the model embeds"),
        (("warm", "--chat"), "option 'chat' is for models that generate, but the model embeds"),
        (("warm", "--pair", "cold"), "option 'pair' is given, but the model embeds texts"),
        (("warm", "--set", "dims=3"), "unknown option 'dims'"),
        (("warm", "--set", "dims"), "option 'set' is 'dims', expected NAME=VALUE"),
        (("warm", "--set", "dimensions=0"), "dimensions: found the number 0"),
        (("warm", "--stream", "--json"), "'stream' and 'json' exclude each other"),
    ],
)
def test_what_does_not_fit_is_an_error(cli, embedder, words, message):
    status, out, err = cli(embedder, *words)
    assert status == 2
    assert message in out + err


def test_an_artifact_that_failed_is_refused_unless_allowed(cli, exported, copied):
    artifact = copied(exported("bert", "feature-extraction"))
    verdict = Verdict(
        stage="validate",
        key="0" * 64,
        fields={},
        passed=False,
        summary="1 of 3 outputs differ",
        report="reports/validation.json",
        finished="2026-01-01T00:00:00+00:00",
    )
    commit_artifact(artifact.path, artifact.manifest.model_copy(update={"verdicts": (verdict,)}))
    status, _, err = cli(artifact.path, "warm")
    assert (status, "1 of 3 outputs differ" in err) == (2, True)
    assert cli(artifact.path, "warm", "--allow-failed")[0] == 0
