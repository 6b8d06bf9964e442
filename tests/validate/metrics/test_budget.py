"""A quantized artifact is checked against its own budget."""

import json
import math
import shutil
from statistics import NormalDist

import numpy as np
import pytest

from enginery import Artifact, quantize_model, validate_model
from enginery.core.accuracy import AccuracyMetrics
from enginery.core.artifact.artifact import commit_artifact
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.model.source import resolve_source
from enginery.reports.quantization import QuantizationReport
from enginery.reports.validation import ValidationReport
from enginery.validate.config import ValidateConfig
from enginery.validate.metrics.budget import accuracy_expectation
from enginery.validate.stage import find_finished
from tests.tiny import TEXT, save_tiny
from tests.validate.faults import edits as faults

GPT2 = ("gpt2", "text-generation")
DISTILBERT = ("distilbert", "feature-extraction")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Quantize a tiny model with the default budget: `made(kind, task)`."""
    from enginery import export_model

    root = tmp_path_factory.mktemp("quantized")
    wide = {"gpt2": {"n_embd": 128, "n_head": 2}}
    artifacts = {}

    def make(kind, task, *, pooled=False):
        key = f"{kind}-{pooled}"
        if key not in artifacts:
            model = save_tiny(kind, task, root / f"{key}-model", **wide.get(kind, {}))
            if pooled:
                as_sentence_transformer(model)
            source = export_model(str(model), task=task)
            artifacts[key] = quantize_model(
                source, TEXT, min_cosine=0.998, capability=(), out=root / key
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


def measured(cosine, **members):
    """Return a report of the stage with this mean cosine on held-out rows."""
    accuracy = AccuracyMetrics(64, cosine, cosine, None, None, None)
    members = {"accuracy": accuracy, **members}
    return QuantizationReport("measured", "int8", notes=[], fields={}, **members).to_json().decode()


def least(artifact, *, own_data=False, rows=16):
    return accuracy_expectation(artifact, own_data=own_data).limits(rows).cosine


@pytest.mark.more
@pytest.mark.parametrize("model", [DISTILBERT, pytest.param(GPT2, marks=pytest.mark.slow)])
def test_correct_artifact_has_the_accuracy_that_quantize_measured(made, copied, model):
    artifact = made(*model)
    builtin = QuantizationReport.of(artifact).builtin
    report = validate_model(artifact.copy_to(artifact.path.parent / f"copy-{model[0]}"))
    assert report.passed, report.summary
    found = report.accuracy
    assert found.expected == builtin
    assert found.found.cosine == pytest.approx(builtin.cosine, abs=1e-4)
    assert found.found.worst_cosine == pytest.approx(builtin.worst_cosine, abs=1e-3)
    shortfall = 1 - builtin.cosine
    assert 1 - found.cosine_limit == pytest.approx(1.25 * shortfall, abs=1e-4)
    assert f"mean cosine {found.found.cosine:.4f} over 16 real inputs" in report.summary


@pytest.mark.more
def test_report_describes_the_rule_and_survives_json(made, tmp_path):
    artifact = made(*DISTILBERT).copy_to(tmp_path / "copy")
    report = validate_model(artifact)
    lines = report.lines()
    assert any("on these inputs quantize measured a mean cosine of" in line for line in lines)
    assert any(
        "1.25 and 1.5 times as large; a cosine of at least 0.5 on any one" in line for line in lines
    )
    again = ValidationReport.from_json((artifact.path / "reports/validation.json").read_bytes())
    assert again.accuracy == report.accuracy
    assert again.worst()[0].name == report.worst()[0].name
    assert again.to_json() == report.to_json()


WRONG = {
    "scale doubled": faults.change_quantized_weight(lambda scale: 2 * scale, operand=1),
    "sign flipped": faults.change_quantized_weight(np.negative),
    "zeros": faults.change_quantized_weight(np.zeros_like),
    "two weights swapped": faults.swap_quantized_weights,
    "ranges a quarter": faults.clip_activations(0.25),
}


def test_value_that_is_not_finite_fails(made, copied):
    def edit(model):
        scale = faults.weights_of(model)[-1].input[1]
        faults.change_initializer(model, scale, lambda a: np.where(np.arange(a.size), a, np.nan))

    report = validate_model(faults.break_graph(copied(made(*DISTILBERT)), edit))
    assert not report.passed
    assert "NaN or infinite on one side only" in report.summary


@pytest.mark.more
def test_generated_inputs_alone_need_a_cosine_of_one_half(made, copied, tmp_path):
    """Without a tokenizer, in the source neither, only the sweep runs, and the report says so."""
    artifact = copied(made(*DISTILBERT))
    source = shutil.copytree(artifact.manifest.source.id, tmp_path / "source")
    files = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
    for directory in (artifact.path, source):
        for name in files:
            (directory / name).unlink(missing_ok=True)
    record = resolve_source(str(source)).record
    report = validate_model(faults.break_graph(artifact, lambda model: None, source=record))
    assert report.passed, report.summary
    assert report.accuracy is None
    assert any(
        "no real inputs were compared, so this was not checked" in note for note in report.notes
    )
    assert {o.cosine_limit for case in report.cases for o in case.outputs} == {0.5}
    wrong = validate_model(faults.break_graph(artifact, WRONG["sign flipped"]))
    assert not wrong.passed
    assert "expected at least 0.5" in wrong.summary


@pytest.mark.more
def test_user_data_have_the_accuracy_of_held_out_rows(made, tmp_path):
    (tmp_path / "data.txt").write_text("\n".join(TEXT))
    artifact = made(*DISTILBERT)
    held_out = QuantizationReport.of(artifact).accuracy
    copy = artifact.copy_to(tmp_path / "copy")
    report = validate_model(copy, data=str(tmp_path / "data.txt"))
    assert report.passed, report.summary
    error = held_out.deviation * math.sqrt(1 / held_out.rows + 1 / len(TEXT))
    bound = held_out.cosine - NormalDist().inv_cdf(0.999) * error
    assert report.accuracy.cosine_limit == pytest.approx(min(bound, 0.998))
    assert any(f"on {held_out.rows} held-out rows" in note for note in report.notes)


@pytest.mark.more
def test_mean_and_smallest_cosine_of_pooled_embeddings(made, tmp_path):
    artifact = made(*DISTILBERT, pooled=True).copy_to(tmp_path / "copy")
    report = validate_model(artifact)
    assert report.passed, report.summary
    assert report.embeddings.mean_cosine == pytest.approx(report.accuracy.found.cosine, abs=1e-6)
    assert report.accuracy.found.neighbour_agreement >= report.accuracy.neighbours_limit
    # The same small error in every token, across what LayerNorm leaves.
    faults.break_graph(artifact, faults.added("last_hidden_state", 0.3))
    wrong = validate_model(artifact.path)
    assert not wrong.passed
    assert "mean cosine 0.9" in wrong.accuracy.problem


def test_worst_row_and_neighbours_count_like_the_mean(with_options):
    seen = AccuracyMetrics(16, 0.99, 0.98, 0.875, None, None)
    limits = accuracy_expectation(
        with_options(report=measured(0.995, builtin=seen)), own_data=False
    ).limits(16)
    floor = (16 * 2.0**-11) ** 2
    assert limits.cosine == pytest.approx(1 - 1.25 * 0.01 - floor)
    assert limits.worst_cosine == pytest.approx(1 - 1.5 * 0.02 - floor)
    assert limits.neighbours == pytest.approx(0.75)


@pytest.mark.slow
def test_user_limits_take_precedence_over_the_budget(made, copied):
    artifact = copied(made(*DISTILBERT))
    strict = validate_model(artifact, min_cosine=0.9999)
    assert not strict.passed
    assert strict.accuracy is None
    assert "expected at least 0.9999" in strict.summary
    assert validate_model(artifact.path, min_cosine=0.9).passed
    far = validate_model(artifact.path, max_abs_error=1e-3)
    assert not far.passed
    assert "largest error" in far.summary
    assert far.accuracy, "the budget still holds for the cosine"
    broken = validate_model(faults.break_graph(artifact, WRONG["scale doubled"]), min_cosine=-1)
    assert all(case.passed for case in broken.cases)
    assert "a weight differs from PyTorch's" in broken.summary, "its weights are still compared"


def test_measured_cosine_replaces_a_budget_that_is_no_cosine(with_options):
    report = measured(0.998)
    for options in ({"min_cosine": -1.0}, {"accuracy_budget": "1%"}, {"label_column": "label"}):
        artifact = with_options(report=report, **options)
        assert least(artifact) == pytest.approx(0.98)
        assert least(artifact, own_data=True) == pytest.approx(0.992)
        described = accuracy_expectation(artifact, own_data=False).describe()
        assert "10 times that of the promised or measured cosine of 0.9980" in described


def test_budget_that_was_not_met_is_ignored(with_options):
    """The measured cosine of a dynamic scheme may be below the budget."""
    artifact = with_options(report=measured(0.99), scheme="dynamic")
    expected = accuracy_expectation(artifact, own_data=True)
    assert expected.cosine == 0.99
    assert expected.describe().startswith("dynamic: over all real inputs")


@pytest.mark.parametrize("report", ["", "[]", "{}", '{"accuracy": null}', '{"accuracy": 1}'])
def test_missing_or_damaged_report_leaves_the_budget(with_options, report):
    assert accuracy_expectation(with_options(report=report), own_data=False).cosine == 0.998


def test_without_budget_or_measurement_the_error_names_the_option(with_options):
    artifact = with_options(min_cosine=-1.0)
    with pytest.raises(OptionError, match=r"its accuracy is not recorded.*--min-cosine 0\.95"):
        validate_model(artifact)
    assert Artifact.open(artifact.path).manifest.verdicts == ()


def test_budget_of_one_permits_rounding(with_options):
    assert least(with_options(min_cosine=1.0)) == pytest.approx(1 - 10 * (16 * 2.0**-11) ** 2)


@pytest.mark.parametrize("own_data", [True, False])
def test_no_measurement_permits_less_than_the_minimum(with_options, own_data):
    assert least(with_options(min_cosine=0.6), own_data=own_data) == 0.95
    seen = AccuracyMetrics(16, 0.5, 0.1, None, None, None, deviation=0.3)
    report = measured(0.5, builtin=seen, accuracy=seen)
    assert least(with_options(report=report), own_data=own_data) == 0.95


def test_changed_budget_invalidates_the_verdict(with_options):
    from enginery.validate import stage
    from enginery.validate.config import ValidateConfig

    keys = [
        stage.fingerprint(with_options(min_cosine=cosine), ValidateConfig()).key
        for cosine in (0.998, 0.99)
    ]
    assert keys[0] != keys[1]


def test_artifact_that_is_not_quantized_has_no_budget(exported):
    with pytest.raises(ArtifactError, match="not quantized"):
        accuracy_expectation(exported("bert", "text-classification"), own_data=False)


@pytest.mark.slow
def test_changed_argmax_of_a_quantized_graph_does_not_fail(made, copied):
    report = validate_model(copied(made(*GPT2)))
    agreements = [o.argmax_agreement for case in report.cases for o in case.outputs]
    assert min(agreements) < 1.0
    assert report.passed
    assert all(math.isinf(o.limit) for case in report.cases for o in case.outputs)


@pytest.mark.parametrize("report", ["[" * 200_000, "[1]", '{"accuracy": 1}', '"\\ud800"'])
def test_damaged_quantization_report_is_ignored(with_options, report):
    artifact = with_options(report=report)
    assert accuracy_expectation(artifact, own_data=False).cosine == pytest.approx(0.998)


@pytest.mark.more
def test_deeply_nested_validation_report_is_replaced(with_options):
    artifact = with_options()
    assert validate_model(artifact).passed
    for report in (b"[" * 200_000, b"[" * 700 + b"]" * 700):
        artifact = Artifact.open(artifact.path)
        artifact = artifact.annotate(reports={"reports/validation.json": report})
        assert find_finished(artifact, ValidateConfig()) is None
