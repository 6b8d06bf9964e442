"""Models through the export and the validation, without Optimum."""

import pytest

from enginery import export_model, validate_model
from enginery.core.json_file import read_json
from tests.environments import needs_transformers5

pytestmark = needs_transformers5

KINDS = [
    ("bert", "text-classification"),
    ("modernbert", "fill-mask"),
    ("deberta-v2", "token-classification"),
    ("distilbert", "feature-extraction"),
    ("roberta", "question-answering"),
    ("vit", "image-classification"),
    ("resnet", "image-classification"),
    ("swin", "feature-extraction"),
    ("wav2vec2", "automatic-speech-recognition"),
    ("hubert", "audio-classification"),
    ("gpt2", "text-generation"),
]


def notes_of(artifact):
    return artifact.manifest.stages[0].notes


@pytest.mark.parametrize(
    ("kind", "task"),
    [pytest.param(*pair, marks=() if pair[0] == "bert" else pytest.mark.more) for pair in KINDS],
)
def test_model_is_exported_and_equals_pytorch(tiny_model, kind, task):
    source = tiny_model(kind, task)
    artifact = export_model(str(source), task=task)
    assert read_json(artifact.path / "config.json") == read_json(source / "config.json")
    assert any("exported by" in note for note in notes_of(artifact))
    note = "exporter transformers: the environment that exports has no Optimum"
    assert note in notes_of(artifact)
    assert artifact.manifest.graphs[0].opset == 20
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary


@pytest.mark.more
def test_language_model_that_reranks(reranker):
    artifact = export_model(str(reranker()))
    assert artifact.manifest.task == "text-classification"
    # Its config.json says what loading made of the language model.
    labels = read_json(artifact.path / "config.json")["id2label"]
    assert labels == {"0": "LABEL_0"}
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
