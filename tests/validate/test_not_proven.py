"""Agreement that proves nothing is not a pass."""

import json

import numpy as np
import pytest

from enginery import export_model, validate_model
from enginery.validate.metrics.differences import constant_error
from tests.tiny import save_tiny
from tests.validate.faults import edits as faults

TEXT = ("bert", "text-classification")


def vanishing_model(directory, factor):
    """Save a classifier whose scores are scaled by a factor."""
    import torch
    from transformers import AutoModelForSequenceClassification

    save_tiny(*TEXT, directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        model.classifier.weight *= factor
        model.classifier.bias *= factor
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-40])
def test_vanishing_outputs_are_not_proven(tmp_path, factor):
    artifact = export_model(str(vanishing_model(tmp_path / "model", factor)), task=TEXT[1])
    report = validate_model(artifact)
    assert not report.passed
    assert report.summary.startswith("not proven: model.onnx, logits: the same values for every")
    assert "--data" in report.summary


def test_small_outputs_with_relative_accuracy_pass(tmp_path):
    artifact = export_model(str(vanishing_model(tmp_path / "model", 1e-20)), task=TEXT[1])
    assert validate_model(artifact).passed


def test_loose_limit_that_a_constant_would_meet_proves_nothing(exported, copied):
    report = validate_model(copied(exported(*TEXT)), max_abs_error=1e3, min_cosine=-1)
    assert report.summary.startswith("not proven: model.onnx, logits")


def test_limit_of_zero_is_not_met_by_a_constant(exported, copied):
    report = validate_model(copied(exported(*TEXT)), max_abs_error=0)
    assert not report.passed
    assert report.not_proven == []


def test_model_that_ignores_its_inputs_is_not_proven(tmp_path):
    """In PyTorch itself every text gets the same scores."""
    directory = save_tiny(*TEXT, tmp_path / "model")
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias += 3
    model.save_pretrained(directory)
    report = validate_model(export_model(str(directory), task=TEXT[1]))
    assert not report.passed
    assert report.not_proven


def test_most_inputs_rejected_by_pytorch(exported, tmp_path):
    """The config declares a larger vocabulary than the weights have."""
    artifact = exported(*TEXT).copy_to(tmp_path / "copy")
    path = artifact.path / "config.json"
    config = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps({**config, "vocab_size": 100_000}))
    faults.break_graph(artifact, lambda model: None)
    report = validate_model(artifact.path)
    assert not report.passed
    assert "not proven: model.onnx: PyTorch rejects 5 of 6 inputs" in report.summary


def test_classifier_that_needs_the_end_of_a_text_is_proven(exported, copied):
    """BART rejects rows without an end-of-sequence id, and reads its state there."""
    report = validate_model(copied(exported("bart", "text-classification")))
    assert report.passed, report.summary
    assert [case.name for case in report.cases if case.kind == "sweep"] == [
        "one",
        "small",
        "odd",
        "ragged",
        "longest",
    ]
    assert not [case.name for case in report.cases if case.skipped]


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        (np.float32([[1, 5], [1, 7]]), 1.0),
        (np.float32([[1, 5], [1, 5]]), 0.0),
        (np.float32([[[1, 5], [2, 5]]]), 0.5),  # one row: its positions
        (np.float32([[1, -3.4e38], [2, -3.4e38]]), 0.5),  # fill values are not compared
        (np.float32([[1, 5]]), np.nan),
        (np.int64([[1], [2]]), np.nan),
    ],
)
def test_error_of_the_best_constant(reference, error):
    np.testing.assert_equal(constant_error(reference), error)
