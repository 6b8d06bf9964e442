"""Agreement that proves nothing is not a pass."""

import json
import re

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginery import export_model, optimize_model, validate_model
from enginery.validate.cases.padding import PaddingMask
from enginery.validate.metrics.differences import constant_error
from tests.passes.onnx_graphs import node, save_graph
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


@pytest.mark.more
@pytest.mark.parametrize(
    "factor", [1e-38, *(pytest.param(factor, marks=pytest.mark.slow) for factor in (0.0, 1e-40))]
)
def test_vanishing_outputs_are_not_proven(tmp_path, factor):
    artifact = export_model(str(vanishing_model(tmp_path / "model", factor)), task=TEXT[1])
    report = validate_model(artifact)
    assert not report.passed
    assert report.summary.startswith("not proven: model.onnx, logits: the same values for every")
    assert "--data" in report.summary


@pytest.mark.more
def test_small_outputs_with_relative_accuracy_pass(tmp_path):
    artifact = export_model(str(vanishing_model(tmp_path / "model", 1e-20)), task=TEXT[1])
    assert validate_model(artifact).passed


@pytest.mark.more
def test_loose_limit_that_a_constant_would_meet_proves_nothing(exported, copied):
    report = validate_model(copied(exported(*TEXT)), max_abs_error=1e3, min_cosine=-1)
    assert report.summary.startswith("not proven: model.onnx, logits")


@pytest.mark.more
def test_limit_of_zero_is_not_met_by_a_constant(exported, copied):
    report = validate_model(copied(exported(*TEXT)), max_abs_error=0)
    assert not report.passed
    assert report.not_proven == []


@pytest.mark.more
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


@pytest.mark.more
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
    assert re.match(r"model.onnx: PyTorch rejects \d+ of \d+ inputs", report.not_proven[0])
    assert "config.json, vocab_size: 100000, but 600 in the source" in report.summary


@pytest.mark.more
def test_classifier_that_needs_the_end_of_a_text_is_proven(exported, copied):
    """BART rejects rows without an end-of-sequence id, and reads its state there."""
    report = validate_model(copied(exported("bart", "text-classification")))
    assert report.passed, report.summary
    swept = [case.name for case in report.cases if case.kind == "sweep"]
    usual = [name for name in swept if not name.startswith(("decision at ", "id "))]
    assert usual == ["one", "small", "odd", "ragged", "longest"]
    # PyTorch rejects rows of other numbers of ends, which decisions may have.
    assert not [case.name for case in report.cases if case.skipped and case.name in usual]


def recognizer(directory):
    """Import a text recognizer; return it and inputs on some of which two classes nearly tie.

    Rounding to FP16 moves its largest scores by up to 0.5, and so the probabilities of a near tie.
    """
    generator = np.random.default_rng(0)
    classes = generator.normal(0, 100, (16, 40)).astype(np.float32)
    save_graph(
        directory / "r.onnx",
        [
            node("MatMul", "strip classes", "scores", name="/head/MatMul"),
            node("Softmax", "scores", "probabilities", name="/head/Softmax"),
        ],
        {"classes": classes},
        inputs={"strip": (TensorProto.FLOAT, ("batch", "steps", 16))},
        outputs={"probabilities": (TensorProto.FLOAT, ("batch", "steps", 40))},
    )
    strips = generator.normal(0, 1, (16, 512, 16)).astype(np.float32)
    np.savez(directory / "strips.npz", strip=strips)
    return export_model(str(directory / "r.onnx")), directory / "strips.npz"


@pytest.mark.more
def test_near_ties_in_fp16_leave_a_sound_graph_proven_and_a_constant_failed(tmp_path):
    imported, strips = recognizer(tmp_path)
    made = optimize_model(imported, target="tensorrt", precision="fp16", out=tmp_path / "fp16")
    report = validate_model(made, data=str(strips))
    assert report.passed, report.summary
    found = [(case.kind, output) for case in report.cases for output in case.outputs]
    assert all(output.limit > 1 for kind, output in found if kind == "real")

    def answer_a_constant(model):
        zero = numpy_helper.from_array(np.float16([0]), "zero")
        model.graph.initializer.append(zero)
        softmax = next(n for n in model.graph.node if n.op_type == "Softmax")
        scores, softmax.input[0] = softmax.input[0], "nothing"
        place = list(model.graph.node).index(softmax)
        model.graph.node.insert(place, helper.make_node("Mul", [scores, "zero"], ["nothing"]))

    broken = faults.break_graph(made.copy_to(tmp_path / "broken"), answer_a_constant)
    report = validate_model(broken.path, data=str(strips))
    assert not report.passed
    assert "outputs differ from the source file" in report.summary


@pytest.mark.more
def test_real_inputs_do_not_raise_the_limits_of_generated_ones(tmp_path):
    imported, strips = recognizer(tmp_path)
    made = optimize_model(imported, target="tensorrt", precision="fp16", out=tmp_path / "fp16")
    alone, both = (
        {
            (case.graph, case.name): output.limit
            for case in validate_model(made, data=data).cases
            if case.kind == "sweep"
            for output in case.outputs
        }
        for data in ("", str(strips))
    )
    assert alone == both


@pytest.mark.more
def test_user_whose_own_inputs_prove_nothing_is_not_sent_in_a_circle(tmp_path):
    imported, strips = recognizer(tmp_path)
    np.savez(strips, strip=np.zeros((2, 8, 16), np.float32))
    made = optimize_model(imported, target="tensorrt", precision="fp16", out=tmp_path / "fp16")
    report = validate_model(made, data=str(strips), max_abs_error=10.0)
    assert not report.passed
    assert "the inputs of --data do not change that" in report.summary
    assert "a smaller limit with --max-abs-error" in report.summary
    assert "give other inputs with --data" not in report.summary
    reasons = [line for line in report.lines() if line.startswith("not proven: ")]
    assert len(reasons) == len(report.not_proven) == 2, "as it is, and with every value in FP16"


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
    np.testing.assert_equal(constant_error(reference).max_abs, error)


def test_root_mean_square_of_the_best_constant():
    assert constant_error(np.float32([[1, 5], [1, 7]])).rms == pytest.approx(0.5**0.5)
    assert constant_error(np.float32([[1, -3.4e38], [2, -3.4e38]])).rms == pytest.approx(0.125**0.5)
    padding = PaddingMask(np.ones((2, 2), bool), 1)
    assert np.isnan(constant_error(np.float32([[1, 5], [1, 7]]), padding).rms)
