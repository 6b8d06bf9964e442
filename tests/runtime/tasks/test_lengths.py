"""Texts that are longer than any that was compared with PyTorch."""

import logging

import pytest

from enginery import load_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import Verdict
from enginery.core.errors import InputError, OptionError
from enginery.runtime.tasks.text import ComparedLengths, TooLongError

LONG = "a b c d e f " * 20


@pytest.fixture
def proved(exported):
    """Return a function: an artifact whose validation has compared at most 24 tokens."""

    def make(kind, task, longest=24):
        artifact = exported(kind, task)
        verdict = Verdict(
            stage="validate",
            key="",
            fields={},
            passed=True,
            summary="",
            report="reports/validation.json",
            finished="",
            longest=longest,
        )
        manifest = artifact.manifest.model_copy(update={"verdicts": (verdict,)})
        return Artifact(artifact.path, manifest)

    return make


def test_a_longer_text_is_answered_with_one_warning(proved, caplog):
    with load_model(proved("bert", "text-classification")) as model:
        assert any("unproved beyond 24 tokens" in note for note in model.notes)
        with caplog.at_level(logging.WARNING, "enginery.runtime"):
            model.classify(["a b"])
            assert not caplog.records
            assert len(model.classify([LONG, LONG])) == 2
            model.classify([LONG])
    assert [record.getMessage() for record in caplog.records] == [
        "an input has 122 tokens, but validate has compared at most 24"
    ]


def test_a_longer_text_is_refused_on_request(proved):
    with load_model(proved("bert", "text-classification"), unproved="refuse") as model:
        assert len(model.classify(["a b"])) == 1
        with pytest.raises(TooLongError, match=r"input 1 has \d+ tokens.*compared at most 24"):
            model.classify(["a b", LONG])


def test_contexts_of_questions_are_refused_too(proved):
    question = {"question": "who?", "context": LONG}
    with load_model(proved("bert", "question-answering"), unproved="refuse") as model:
        assert any("longer ones are refused" in note for note in model.notes)
        assert model.answer([{"question": "who?", "context": "a b"}])
        with pytest.raises(TooLongError, match=r"input 1 has \d+ tokens.*compared at most 24"):
            model.answer([{"question": "who?", "context": "a b"}, question])


def test_without_a_limit_nothing_is_said(proved, caplog):
    with (
        load_model(proved("bert", "text-classification", None), unproved="refuse") as model,
        caplog.at_level(logging.WARNING, "enginery.runtime"),
    ):
        assert not any("unproved" in note for note in model.notes)
        model.classify([LONG])
    assert not caplog.records


def test_generation_stops_where_nothing_was_compared(proved):
    artifact = proved("gpt2", "text-generation-with-past")
    with load_model(artifact, unproved="refuse") as model:
        (short,) = model.generate(["a b"], min_new_tokens=60, max_new_tokens=60, do_sample=False)
        with pytest.raises(InputError, match="24"):
            model.generate([LONG], max_new_tokens=8, do_sample=False)
    with load_model(artifact) as model:
        (long,) = model.generate(["a b"], min_new_tokens=60, max_new_tokens=60, do_sample=False)
    assert len(short.tokens) < 24 < len(long.tokens)


def test_unknown_value_is_an_error(proved):
    with pytest.raises(OptionError, match=r"'unproved' is 'never', expected warn or refuse"):
        load_model(proved("bert", "text-classification"), unproved="never")


def test_lengths_without_a_verdict():
    ComparedLengths().check([10**6])
    assert ComparedLengths().notes(10**6) == []
