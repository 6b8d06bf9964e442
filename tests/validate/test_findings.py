"""Findings of several comparisons are joined in their order; some errors become notes."""

import errno

import pytest

from enginery.core.errors import ArtifactError, InputError, os_errors_as
from enginery.reports.validation import (
    EmbeddingMetrics,
    RoundingMetrics,
    SideFileMetrics,
    ValidationCaseResult,
)
from enginery.reports.weights import LayerComparison, LayerMetrics
from enginery.validate.findings import Findings, join_findings, note_refusal


def case(name):
    return ValidationCaseResult("model.onnx", name, "sweep", {}, [], "")


def pooled(problem=""):
    return EmbeddingMetrics(2, 1.0, 1.0, 1.0, problem)


def test_lists_follow_each_other_and_the_last_figure_of_a_kind_stays():
    first = Findings(cases=(case("one"),), notes=("a",), embeddings=pooled("far"))
    last = Findings(cases=(case("odd"),), not_proven=("b",), embeddings=pooled())
    joined = join_findings([first, Findings(), last, Findings(notes=("c",))])
    assert [result.name for result in joined.cases] == ["one", "odd"]
    assert (joined.notes, joined.not_proven) == (("a", "c"), ("b",))
    assert joined.embeddings == pooled()
    assert joined.layers is None
    assert join_findings([]) == Findings()


@pytest.mark.parametrize(
    ("findings", "problems"),
    [
        (Findings(embeddings=pooled("far")), ["far"]),
        (Findings(embeddings=pooled(), side_files=SideFileMetrics([], [], ["x"])), []),
        (
            Findings(
                rounding=(
                    RoundingMetrics("model.onnx", "logits", 0.0, ""),
                    RoundingMetrics("model.onnx", "scores", 0.9, "90% is not rounding"),
                )
            ),
            ["90% is not rounding"],
        ),
    ],
)
def test_problems_are_those_of_all_figures(findings, problems):
    assert findings.problems == problems


def test_a_layer_that_fails_in_one_of_two_graphs_fails():
    wrong = LayerMetrics(8, [LayerComparison("encoder/MatMul", 0.5, 0.1, 0.2)], [])
    right = LayerMetrics(4, [LayerComparison("decoder/MatMul", 0.1, 0.1, 0.2)], ["decoder/Gemm"])
    for first, second in ((wrong, right), (right, wrong)):
        findings = join_findings([Findings(layers=first), Findings(layers=second)])
        assert findings.layers is not None
        assert (findings.layers.rows, findings.layers.missing) == (8, ["decoder/Gemm"])
        assert "encoder/MatMul" in "".join(findings.problems)


def test_a_refusal_is_a_note():
    error = InputError("the text is longer than 8 tokens.", do="Shorten it.")
    assert note_refusal("not generated", error).notes == (
        "not generated: the text is longer than 8 tokens.",
    )


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_an_error_of_the_system_is_no_note(code):
    with pytest.raises(ArtifactError) as raised, os_errors_as(ArtifactError, "no tokenizer"):
        raise OSError(code, "denied", "vocab.json")
    with pytest.raises(ArtifactError, match=r"vocab\.json"):
        note_refusal("not generated", raised.value)
