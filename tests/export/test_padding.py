"""The outputs of a text do not depend on the other texts of its batch."""

from __future__ import annotations

import pytest

from enginery import load_model
from enginery.core.errors import ExportError
from enginery.runtime.text.tokenizer import EQUAL_LENGTHS
from tests.tiny_inputs import TOKENS_AND_MASK, export_here, save_with_generic_tokenizer

TEXTS = ["the engine", "the engine starts at the first turn of the key", "a", "is it warm"]
LEFT = {"padding_side": "left", "model_input_names": TOKENS_AND_MASK}
RIGHT = {"padding_side": "right", "model_input_names": TOKENS_AND_MASK}
OTHER_ID = {"pad_token": "<eos>", "model_input_names": TOKENS_AND_MASK}


def pipeline_answers(source, texts):
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(source), device="cpu", top_k=None)
    return [{row["label"]: row["score"] for row in classify([text])[0]} for text in texts]


def assert_answers_are_those_of_the_pipeline(source, artifact, texts=TEXTS):
    expected = pipeline_answers(source, texts)
    with load_model(artifact) as model:
        together = model.classify(texts)
        alone = [model.classify([text])[0] for text in texts]
    for results in (alone, together):
        for result, scores in zip(results, expected, strict=True):
            found = {label.label: label.score for label in result.labels}
            assert found == pytest.approx(scores, abs=1e-4)


PADDED = [
    ("llama", "nowhere", RIGHT, {"pad_token_id": 1}, ("right", 1)),
    ("gpt2", "nowhere", LEFT, {}, ("right", 0)),
    ("roberta", "around", LEFT, {}, ("right", 0)),
    ("llama", "nowhere", RIGHT, {"pad_token_id": -1}, ("left", 0)),
]
MORE = [
    ("llama", "end", OTHER_ID, {}, ("right", 0)),
    ("mistral", "end", LEFT, {}, ("left", 0)),
    ("opt", "nowhere", LEFT | OTHER_ID, {}, ("left", 0)),
    ("qwen2", "nowhere", LEFT, {"pad_token_id": 1}, ("left", 1)),
    ("bloom", "nowhere", LEFT, {}, ("left", 0)),
    ("bert", "around", LEFT, {}, ("right", 0)),
    ("bart", "around", LEFT | OTHER_ID, {}, ("right", 0)),
]


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "special", "tokenizer", "config", "padding"),
    [*PADDED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_texts_are_padded_so_that_they_keep_their_answers(
    kind, special, tokenizer, config, padding, tmp_path, monkeypatch
):
    source = save_with_generic_tokenizer(
        kind, tmp_path / "model", special=special, tokenizer=tokenizer, **config
    )
    artifact = export_here(source, tmp_path / "artifact", monkeypatch)
    (record,) = artifact.manifest.graphs
    assert (record.padding.side, record.padding.token_id) == padding
    assert_answers_are_those_of_the_pipeline(source, artifact.path)


def test_another_padding_than_that_of_the_files_is_noted(tmp_path, monkeypatch):
    source = save_with_generic_tokenizer("gpt2", tmp_path / "model", tokenizer=LEFT)
    artifact = export_here(source, tmp_path / "artifact", monkeypatch)
    notes = artifact.manifest.stages[0].notes
    assert any("padded on the right with the token 0: padded on the left" in note for note in notes)


def test_texts_of_a_model_that_reads_padding_share_no_batch(tmp_path, monkeypatch):
    # Its convolutions read the positions beside a text.
    source = save_with_generic_tokenizer("convbert", tmp_path / "model")
    artifact = export_here(source, tmp_path / "artifact", monkeypatch)
    assert artifact.manifest.graphs[0].padding.side == "none"
    assert EQUAL_LENGTHS in artifact.manifest.stages[0].notes
    with load_model(artifact.path) as model:
        assert EQUAL_LENGTHS in model.notes
    assert_answers_are_those_of_the_pipeline(source, artifact.path)


def test_a_padding_token_that_ends_every_text_is_refused(tmp_path, monkeypatch):
    source = save_with_generic_tokenizer(
        "gpt2", tmp_path / "model", special="end", tokenizer=OTHER_ID, pad_token_id=None
    )
    with pytest.raises(ExportError, match="ends each text with its padding token <eos>"):
        export_here(source, tmp_path / "artifact", monkeypatch)


def test_pairs_and_single_texts_of_barts_classifier_share_no_batch(tmp_path, monkeypatch):
    # It reads the last end of sequence; a pair has two, which would move the rows after it.
    source = save_with_generic_tokenizer("bart", tmp_path / "model")
    artifact = export_here(source, tmp_path / "artifact", monkeypatch)
    inputs = [("the pump", "runs"), "the engine starts", ("a list", "of the key"), "is warm"]
    with load_model(artifact.path) as model:
        together = model.classify(inputs)
        alone = [model.classify([item])[0] for item in inputs]
    for one, other in zip(together, alone, strict=True):
        assert one.label == other.label
        assert one.score == pytest.approx(other.score, abs=1e-5)
