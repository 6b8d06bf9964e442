"""Deliberately broken models: each fault fails, and the verdict says where."""

import pytest
from onnx import TensorProto

from enginery import validate_model
from enginery.core.errors import ArtifactError
from tests.validate.faults import edits as faults

TEXT = ("bert", "text-classification")
FEATURES = ("bert", "feature-extraction")


@pytest.fixture
def verdict(exported, copied):
    """Validate an artifact with one fault and return the report."""

    def make(model, edit, *, graph="model.onnx", options=None, **manifest):
        artifact = faults.break_graph(copied(exported(*model)), edit, graph=graph, **manifest)
        report = validate_model(artifact, **(options or {}))
        assert report.passed == (artifact.open(artifact.path).failed_verdict() is None)
        return report

    return make


def problems(report):
    return [output.problem for case in report.cases for output in case.outputs if output.problem]


def cases_that_fail(report):
    return {case.name for case in report.cases if not case.passed}


@pytest.mark.more
def test_swapped_outputs(verdict):
    edit = faults.swap_outputs("start_logits", "end_logits")
    report = verdict(("bert", "question-answering"), edit)
    assert {o.output for case in report.cases for o in case.outputs if o.problem} == {
        "start_logits",
        "end_logits",
    }


@pytest.mark.more
def test_batch_folded_to_a_constant_that_small_inputs_happen_to_have(verdict):
    report = verdict(TEXT, faults.reshape("logits", [2, 3]))
    assert "small" not in cases_that_fail(report)
    assert {"one", "odd", "ragged"} <= cases_that_fail(report)
    assert "the graph fails but PyTorch does not" in report.summary


@pytest.mark.more
def test_batch_folded_to_one(verdict):
    report = verdict(TEXT, faults.first_row("logits"))
    assert "one" not in cases_that_fail(report)
    assert "shape (1, 3), expected (2, 3) as in PyTorch" in problems(report)
    assert "shape (1, 3), expected" in report.summary


@pytest.mark.more
def test_ignored_attention_mask_fails_only_on_padded_inputs(verdict):
    report = verdict(TEXT, faults.ignore_mask)
    failed = {
        case.name
        for case in report.cases
        if case.kind in ("sweep", "real") and not case.passed and "padded" not in case.name
    }
    decisions = {name for name in failed if name.startswith("decision at")}
    assert failed - decisions == {"ragged", "sentences 1–16"}
    assert not any("batch 1," in name for name in decisions), "a single row has no padding"
    # Of the texts that are answered, those beside longer ones.
    assert any(case.kind == "answer" and not case.passed for case in report.cases)


@pytest.mark.slow
def test_ignored_attention_mask_of_a_decoder(verdict):
    report = verdict(("gpt2", "text-generation-with-past"), faults.ignore_mask)
    failed = [case for case in report.cases if not case.passed and "padded" not in case.name]
    sweep = [case.name for case in failed if case.kind == "sweep"]
    assert [name for name in sweep if not name.startswith("decision at")] == ["ragged"]
    prompts = {case.name.split(", ")[0] for case in failed if case.kind == "decoding"}
    assert "4 prompts of 1–24 tokens" in prompts
    assert all("prompts of 1–" in name for name in prompts), "only prompts with padding"


@pytest.mark.more
def test_nan_weight(verdict):
    report = verdict(TEXT, faults.put_nan)
    assert "elements are NaN or infinite on one side only" in report.summary
    assert report.worst()[1].nonfinite > 0


@pytest.mark.more
@pytest.mark.parametrize(
    ("element_type", "name"),
    [
        (TensorProto.DOUBLE, "float64"),
        (TensorProto.FLOAT16, "float16"),
        (TensorProto.INT64, "int64"),
    ],
)
def test_wrong_dtype(verdict, element_type, name):
    """A graph that differs from its manifest makes the artifact invalid."""
    with pytest.raises(ArtifactError, match=rf"the output logits: {name} .* differs from manifest"):
        verdict(TEXT, faults.cast("logits", element_type))


def test_wrong_dtype_in_graph_and_manifest(verdict, exported):
    graph = exported(*TEXT).manifest.graphs[0]
    spec = graph.outputs[0]
    wide = graph.model_copy(update={"outputs": (type(spec)(spec.name, "float64", spec.dims),)})
    report = verdict(TEXT, faults.cast("logits", TensorProto.DOUBLE), graphs=(wide,))
    assert set(problems(report)) == {"dtype float64, expected float32"}


@pytest.mark.more
def test_half_precision_in_the_middle_fails_at_fp32(verdict):
    report = verdict(FEATURES, faults.through_fp16)
    assert not report.passed
    worst = report.worst()[1]
    assert 10 * worst.limit < worst.max_abs < 0.1


@pytest.mark.more
def test_half_precision_in_the_middle_passes_with_loose_limits(verdict):
    loose = {"max_abs_error": 0.1, "min_cosine": 0.999}
    report = verdict(FEATURES, faults.through_fp16, options=loose)
    assert report.passed, report.summary
    assert {(o.limit, o.cosine_limit) for case in report.cases for o in case.outputs} == {
        (0.1, 0.999)
    }


def test_output_that_pytorch_lacks_fails(verdict, exported):
    """An output that PyTorch never computes is not skipped."""
    graph = exported(*TEXT).manifest.graphs[0]
    spec = graph.outputs[0]
    renamed = (type(spec)("scores", spec.dtype, spec.dims),)

    def edit(model):
        for node in model.graph.node:
            for index, name in enumerate(node.output):
                if name == "logits":
                    node.output[index] = "scores"
        model.graph.output[0].name = "scores"

    report = verdict(TEXT, edit, graphs=(graph.model_copy(update={"outputs": renamed}),))
    assert "scores" in report.summary
    assert "PyTorch has no such output" in report.summary
