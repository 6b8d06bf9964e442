"""A quantized artifact is checked against its own budget."""

import json
import math

import numpy as np
import pytest

from enginery import Artifact, quantize_model, validate_model
from enginery.cli.render import report_lines
from enginery.core.artifact.artifact import commit_artifact
from enginery.core.artifact.reports import AccuracyMetrics, QuantizationReport, ValidationReport
from enginery.core.errors import ArtifactError, OptionError
from enginery.validate.config import ValidateConfig
from enginery.validate.metrics.budget import quantization_budget
from enginery.validate.overall import OverallComparison
from enginery.validate.stage import read_current_report
from tests.tiny import TEXT, save_tiny
from tests.validate.faults import edits as faults

GPT2 = ("gpt2", "text-generation")
DISTILBERT = ("distilbert", "feature-extraction")


@pytest.fixture(scope="module")
def made(tmp_path_factory, session_home):
    """Quantize a tiny model with the default budget: `made(kind, task)`."""
    from enginery import export_model

    root = tmp_path_factory.mktemp("quantized")
    wide = {"gpt2": {"n_embd": 128, "n_head": 2}}
    artifacts = {}

    def make(kind, task, *, pooled=False):
        key = f"{kind}-{pooled}"
        if key not in artifacts:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ENGINERY_HOME", str(session_home))
                model = save_tiny(kind, task, root / f"{key}-model", **wide.get(kind, {}))
                if pooled:
                    as_sentence_transformer(model)
                source = export_model(str(model), task=task)
                artifacts[key] = quantize_model(
                    source, TEXT, min_cosine=0.998, capabilities=(), out=root / key
                )
        return artifacts[key]

    return make


def as_sentence_transformer(model):
    """Write the modules of a sentence-transformers model with mean pooling."""
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    )
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    (model / "modules.json").write_text(json.dumps(modules))


@pytest.fixture
def with_options(made, tmp_path):
    """Copy the quantized DistilBERT with other options of its quantize stage."""

    def make(*, report=None, **options):
        artifact = made(*DISTILBERT)
        artifact = artifact.copy_to(tmp_path / f"copy-{len(list(tmp_path.iterdir()))}")
        artifact = artifact.annotate(removed=["reports/quantization.json"])
        *before, stage = artifact.manifest.stages
        changed = stage.model_copy(update={"options": {**stage.options, **options}})
        commit_artifact(
            artifact.path, artifact.manifest.model_copy(update={"stages": (*before, changed)})
        )
        opened = Artifact.open(artifact.path)
        if report is None:
            return opened
        return opened.annotate(reports={"reports/quantization.json": report.encode()})

    return make


def measured(cosine):
    """Return a report of the stage with this mean cosine."""
    accuracy = AccuracyMetrics(64, cosine, cosine, None, None, None)
    report = QuantizationReport("measured", "int8", notes=[], fields={}, accuracy=accuracy)
    return report.to_json().decode()


@pytest.mark.parametrize("model", [GPT2, DISTILBERT])
def test_correct_artifact_passes_with_half_the_tolerance(made, copied, model):
    report = validate_model(copied(made(*model)))
    assert report.passed, report.summary
    (overall,) = report.overall
    assert overall.cosine_limit == pytest.approx(0.98)
    assert 1 - overall.cosine < 0.5 * (1 - overall.cosine_limit)
    assert f"cosine {overall.cosine:.4f} over 16 real inputs, at least 0.9800" in report.summary


def test_report_describes_the_rule_and_survives_json(made, copied):
    artifact = copied(made(*DISTILBERT))
    report = validate_model(artifact)
    lines = report_lines(report)
    assert any("int8: over all real inputs a cosine of at least 0.9800" in line for line in lines)
    assert any("10 times that of its budget of 0.9980; 0.5 on any one" in line for line in lines)
    again = ValidationReport.from_json((artifact.path / "reports/validation.json").read_bytes())
    assert again.overall == report.overall
    assert again.worst()[0].name == report.worst()[0].name
    assert again.to_json() == report.to_json()


WRONG = {
    "scale doubled": faults.change_quantized_weight(lambda scale: 2 * scale, operand=1),
    "sign flipped": faults.change_quantized_weight(np.negative),
    "zeros": faults.change_quantized_weight(np.zeros_like),
    "two weights swapped": faults.swap_quantized_weights,
    "ranges a quarter": faults.clip_activations(0.25),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("model", [GPT2, DISTILBERT])
def test_faulty_artifact_fails_with_its_cosine(made, copied, model, fault):
    artifact = faults.break_graph(copied(made(*model)), WRONG[fault])
    report = validate_model(artifact)
    assert not report.passed
    assert Artifact.open(artifact.path).failed_verdict()
    (overall,) = report.overall
    assert 1 - overall.cosine > 1.5 * (1 - overall.cosine_limit)
    output = {"gpt2": "logits", "distilbert": "last_hidden_state"}[model[0]]
    if all(o.passed for case in report.cases for o in case.outputs):
        assert f"{output} differs from PyTorch's: cosine {overall.cosine:.4f}" in report.summary
        assert "expected at least 0.9800" in report.summary
    else:
        assert f"worst: {output} on " in report.summary


def test_value_that_is_not_finite_fails(made, copied):
    def edit(model):
        scale = faults.weights_of(model)[-1].input[1]
        faults.change_initializer(model, scale, lambda a: np.where(np.arange(a.size), a, np.nan))

    report = validate_model(faults.break_graph(copied(made(*DISTILBERT)), edit))
    assert not report.passed
    assert "NaN or infinite on one side only" in report.summary


def test_generated_inputs_alone_need_a_cosine_of_one_half(made, copied):
    """Without a tokenizer only the sweep runs, and the report says so."""
    artifact = copied(made(*DISTILBERT))
    (artifact.path / "tokenizer.json").unlink()
    report = validate_model(faults.break_graph(artifact, lambda model: None))
    assert report.passed
    assert report.overall == []
    assert any(
        "no real inputs were compared, so this was not checked" in note for note in report.notes
    )
    assert {o.cosine_limit for case in report.cases for o in case.outputs} == {0.5}
    wrong = validate_model(faults.break_graph(artifact, WRONG["sign flipped"]))
    assert not wrong.passed
    assert "expected at least 0.5" in wrong.summary


def test_user_data_have_a_smaller_tolerance(made, copied, tmp_path):
    (tmp_path / "data.txt").write_text("\n".join(TEXT))
    report = validate_model(copied(made(*GPT2)), data=str(tmp_path / "data.txt"))
    assert report.passed, report.summary
    assert [overall.cosine_limit for overall in report.overall] == [pytest.approx(0.992)]
    assert any("a shortfall of 4 times that of" in note for note in report.notes)


def test_mean_cosine_of_pooled_embeddings_has_the_same_limit(made, copied, monkeypatch):
    artifact = copied(made(*DISTILBERT, pooled=True))
    report = validate_model(artifact)
    assert report.passed, report.summary
    assert report.embeddings.mean_cosine > 0.98
    # The same small error in every token, across what LayerNorm leaves.
    faults.break_graph(artifact, faults.added("last_hidden_state", 0.3))
    monkeypatch.setattr(OverallComparison, "metrics", lambda self, *, min_cosine: [])
    wrong = validate_model(artifact.path)
    assert not wrong.passed
    assert "pooled embeddings differ from PyTorch's: mean cosine 0.9" in wrong.summary
    assert "expected at least 0.9800" in wrong.summary


def test_user_limits_take_precedence_over_the_budget(made, copied):
    artifact = copied(made(*DISTILBERT))
    strict = validate_model(artifact, min_cosine=0.9999)
    assert not strict.passed
    assert strict.overall == []
    assert "expected at least 0.9999" in strict.summary
    assert validate_model(artifact.path, min_cosine=0.9).passed
    far = validate_model(artifact.path, max_abs_error=1e-3)
    assert not far.passed
    assert "largest error" in far.summary
    assert far.overall, "the budget still holds for the cosine"
    broken = validate_model(faults.break_graph(artifact, WRONG["scale doubled"]), min_cosine=-1)
    assert all(case.passed for case in broken.cases)
    assert "a weight differs from PyTorch's" in broken.summary, "its weights are still compared"


def test_measured_cosine_replaces_a_budget_that_is_no_cosine(with_options):
    report = measured(0.995)
    for options in ({"min_cosine": -1.0}, {"accuracy_budget": "1%"}, {"label_column": "label"}):
        budget = quantization_budget(with_options(report=report, **options))
        assert budget.min_cosine(own_data=False) == pytest.approx(0.95)
        assert "the measured cosine of 0.9950" in budget.describe(own_data=False)


def test_budget_that_was_not_met_is_ignored(with_options):
    """The measured cosine of a dynamic scheme may be below the budget."""
    report = measured(0.99)
    budget = quantization_budget(with_options(report=report, scheme="dynamic"))
    assert budget.cosine == 0.99
    assert budget.describe(own_data=True).startswith("dynamic: over all real inputs")


@pytest.mark.parametrize("report", ["", "[]", "{}", '{"accuracy": null}', '{"accuracy": 1}'])
def test_missing_or_damaged_report_leaves_the_budget(with_options, report):
    assert quantization_budget(with_options(report=report)).cosine == 0.998


def test_without_budget_or_measurement_the_error_names_the_option(with_options):
    artifact = with_options(min_cosine=-1.0)
    with pytest.raises(OptionError, match=r"its accuracy is not recorded.*--min-cosine 0\.95"):
        validate_model(artifact)
    assert Artifact.open(artifact.path).manifest.verdicts == ()
    assert validate_model(artifact, min_cosine=0.9).passed


def test_budget_of_one_permits_rounding(with_options):
    budget = quantization_budget(with_options(min_cosine=1.0))
    assert budget.min_cosine(own_data=False) == pytest.approx(1 - 10 * (16 * 2.0**-11) ** 2)


@pytest.mark.parametrize("own_data", [True, False])
def test_no_budget_permits_less_than_the_minimum(with_options, own_data):
    budget = quantization_budget(with_options(min_cosine=0.6))
    assert budget.min_cosine(own_data=own_data) == 0.95
    assert "would permit less, but only --min-cosine can" in budget.describe(own_data=own_data)


def test_changed_budget_invalidates_the_verdict(with_options):
    from enginery.validate import stage
    from enginery.validate.config import ValidateConfig

    keys = [
        stage.fingerprint(with_options(min_cosine=least), ValidateConfig()).key
        for least in (0.998, 0.99)
    ]
    assert keys[0] != keys[1]


def test_artifact_that_is_not_quantized_has_no_budget(exported):
    with pytest.raises(ArtifactError, match="not quantized"):
        quantization_budget(exported("bert", "text-classification"))


def test_changed_argmax_of_a_quantized_graph_does_not_fail(made, copied):
    report = validate_model(copied(made(*GPT2)))
    agreements = [o.argmax_agreement for case in report.cases for o in case.outputs]
    assert min(agreements) < 1.0
    assert report.passed
    assert all(math.isinf(o.limit) for case in report.cases for o in case.outputs)


@pytest.mark.parametrize("report", ["[" * 200_000, "[1]", '{"accuracy": 1}', '"\\ud800"'])
def test_damaged_quantization_report_is_ignored(with_options, report):
    artifact = with_options(report=report)
    assert quantization_budget(artifact).cosine == pytest.approx(0.998)


@pytest.mark.parametrize("report", [b"[" * 200_000, b"[" * 700 + b"]" * 700])
def test_deeply_nested_validation_report_is_replaced(with_options, report):
    artifact = with_options()
    assert validate_model(artifact).passed
    artifact = Artifact.open(artifact.path).annotate(reports={"reports/validation.json": report})
    assert read_current_report(artifact, ValidateConfig()) is None
