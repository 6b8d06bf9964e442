"""Zero-shot classification over HTTP, and for the rows of a file."""

import json

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.utils import reset_sessions

from enginery import export_model, load_model, predict_file
from enginery.core.errors import OptionError
from enginery.serve.config import ServeConfig
from tests.natural_language_inference import save_nli
from tests.serve.conftest import Running

TEXTS = ["The engine is warm.", "A cat sleeps on the boat."]
LABELS = ["machines", "animals"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory, session_home):
    folder = tmp_path_factory.mktemp("nli")
    return export_model(str(save_nli("last", "bert", folder / "source")), out=folder / "judge")


@pytest.fixture(scope="module")
def running(judge, tiny_paths):
    with Running(
        {"judge": judge.path, **tiny_paths("mood")}, ServeConfig(access_log="off")
    ) as server:
        yield server


@pytest.fixture(scope="module")
def expected(judge):
    with load_model(judge) as model:
        return [answer.to_dict()["labels"] for answer in model.zero_shot(TEXTS, LABELS)]


def as_labels(answer):
    pairs = zip(answer["labels"], answer["scores"], strict=True)
    return [{"label": label, "score": pytest.approx(score, abs=1e-6)} for label, score in pairs]


def test_answers_have_the_form_of_the_inference_api(running, expected):
    path = "/models/judge/zero-shot-classification"
    body = {"inputs": TEXTS, "parameters": {"candidate_labels": LABELS}}
    answers = running("POST", path, body).json
    assert [as_labels(answer) for answer in answers] == expected
    assert [answer["sequence"] for answer in answers] == TEXTS
    one = running("POST", path, {**body, "inputs": TEXTS[0]}).json
    assert as_labels(one) == expected[0]
    plain = running(
        "POST", "/predict/judge", {"inputs": TEXTS, "parameters": {"candidate_labels": LABELS}}
    ).json
    assert [[label["label"] for label in output["labels"]] for output in plain["outputs"]] == [
        [label["label"] for label in labels] for labels in expected
    ]


def test_a_client_of_hugging_face_gets_its_labels(running, expected, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the server is here
    reset_sessions()
    client = InferenceClient(model=f"{running.url}/models/judge/zero-shot-classification")
    try:
        found = client.zero_shot_classification(TEXTS[1], LABELS, multi_label=False)
    finally:
        reset_sessions()
    wanted = [(label["label"], pytest.approx(label["score"], abs=1e-6)) for label in expected[1]]
    assert [(label.label, label.score) for label in found] == wanted


@pytest.mark.parametrize(
    ("model", "parameters", "status", "message"),
    [
        ("judge", {"candidate_labels": []}, 400, "candidate_labels"),
        ("judge", {"candidate_labels": ["a"] * 101}, 422, "a list of 1 to 100 strings"),
        ("judge", {"candidate_labels": ["a", ""]}, 422, "a label is empty"),
        ("judge", {"candidate_labels": ["a"], "hypothesis_template": "x"}, 422, "one '{}'"),
        ("judge", {}, 422, "candidate_labels"),
        ("mood", {"candidate_labels": ["a"]}, 422, "none begins with 'entail'"),
    ],
)
def test_what_cannot_be_asked_is_an_error(running, model, parameters, status, message):
    body = {"inputs": "warm", "parameters": parameters}
    response = running("POST", f"/models/{model}/zero-shot-classification", body)
    assert (response.status, message in json.dumps(response.json)) == (status, True)


def test_rows_of_a_file_get_the_labels(judge, expected, tmp_path, exported):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    options = {"candidate_labels": LABELS, "top_k": 2}
    predict_file(judge, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", **options)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, labels in zip(rows, expected, strict=True):
        assert row["label"] == labels[0]["label"]
        assert [score["label"] for score in row["scores"]] == [label["label"] for label in labels]
    other = exported("bert", "feature-extraction")
    with pytest.raises(OptionError, match="'candidate_labels' is given, but the model embeds"):
        predict_file(other, tmp_path / "rows.jsonl", tmp_path / "no.jsonl", **options)


def test_texts_with_their_labels_count_as_inputs(running):
    labels = [str(number) for number in range(100)]
    body = {"inputs": ["warm"] * 21, "parameters": {"candidate_labels": labels}}
    response = running("POST", "/models/judge/zero-shot-classification", body)
    assert (response.status, "2100 inputs" in json.dumps(response.json)) == (413, True)
