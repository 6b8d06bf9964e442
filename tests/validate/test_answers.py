"""Answers to raw inputs are compared with those that a user of transformers gets."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import InputError
from enginery.core.model.feeds import FeedLimits
from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.reports.validation import AnswerMetrics
from enginery.runtime.onnxruntime.runner import RunnerOptions
from enginery.validate import answers
from enginery.validate.answers import AnswerLimits, RawInput, compare_answers
from enginery.validate.compare import ComparisonLimits
from enginery.validate.config import ValidateConfig
from enginery.validate.context import ValidationContext
from enginery.validate.reference import Reference
from tests.tiny import save_tiny, tiny_artifact

FP32 = AnswerLimits(Tolerance.for_precision("fp32"), {})
TEXTS = {
    "text-classification": 8,
    "token-classification": 6,
    "question-answering": 3,
    "fill-mask": 2,
    "feature-extraction": 6,
}


def raw(answer=None, *, scale=4.0, margins=(), **arrays):
    """Return the fields of the reference's answer."""
    fields = {"answer": answer, "arrays": arrays, "problem": ""}
    return {**fields, "scale": scale, "margins": list(margins)}


def difference(mine, theirs, limits=FP32):
    return answers._difference(mine, theirs, limits)


def compared(artifact, scratch):
    """Compare the answers of an artifact, without the other checks of a validation."""
    config, record = ValidateConfig(), artifact.manifest.graphs[0]
    reference, limits = Reference.of(artifact, config), ComparisonLimits.of(artifact, config)
    context = ValidationContext(reference, config, limits, FeedLimits(), scratch)
    with context.open_runner(record.file, RunnerOptions(spinning=False)) as runner:
        return compare_answers(context, record, runner, [])


def edited(artifact, **files):
    """Change JSON files of an artifact, as a fault of an export would."""
    for name, edit in files.items():
        path = artifact.path / f"{name}.json"
        document = json.loads(path.read_text())
        edit(document)
        path.unlink()  # it may be a hard link
        path.write_text(json.dumps(document))
    commit_artifact(artifact.path, artifact.manifest)
    return Artifact.open(artifact.path)


def with_other_mean(artifact, directory):
    """A copy of an artifact of images that are normalized otherwise."""
    mean = {"image_mean": [0.1, 0.2, 0.3]}
    return edited(artifact.copy_to(directory), preprocessor_config=lambda d: d.update(mean))


# -- one answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "problem"),
    [
        ([["calm", 0.7], ["glad", 0.3]], [["calm", 0.7], ["glad", 0.3]], ""),
        ([["glad", 0.3], ["calm", 0.7000001]], [["calm", 0.7], ["glad", 0.3]], ""),
        ([["calm", 0.3], ["glad", 0.7]], [["calm", 0.7], ["glad", 0.3]], "calm is 0.3, the refer"),
        ([["calm", 1.0]], [["calm", 0.7], ["glad", 0.3]], "calm is 1, the reference's 0.7"),
        ([["calm", 0.7]], [["calm", 0.7], ["glad", 0.3]], "it lacks the glad, whose score is 0.3"),
        ([["calm", math.nan]], [["calm", 0.7]], "calm is nan"),
        # Spans: label, start, end, score.
        ([["PER", 0, 3, 0.9]], [["PER", 0, 3, 0.9]], ""),
        ([["PER", 0, 4, 0.9]], [["PER", 0, 3, 0.9]], "it lacks the PER at 0–3"),
        ([["PER", 0, 3, 0.9]], [], "the reference has no PER at 0–3, whose score is 0.9"),
        # The best few of many, of which the last may be a near tie with one that was left out.
        ({"0–3": 0.6, "5–7": 0.2}, {"0–3": 0.6, "8–9": 0.2}, ""),
        ({"0–3": 0.6, "5–7": 0.2}, {"0–3": 0.6, "8–9": 0.3}, "8–9 is 0.2, the reference's 0.3"),
        ({"0–3": 0.6}, {"0–3": 0.6, "8–9": 0.3}, "it lacks the 8–9"),
        ([{"7": 0.5}, {"9": 0.4}], [{"7": 0.5}, {"9": 0.4}], ""),
        ([{"7": 0.5}, {"8": 0.2}], [{"7": 0.5}, {"9": 0.4}], "token 9 for mask 2 is 0.2"),
        ([{"7": 0.5}], [{"7": 0.5}, {"9": 0.4}], "it lacks the mask 2"),
        ("YES", "YES", ""),
        ("YES", "YET", "the text is 'YES', the reference's 'YET'"),
    ],
)
def test_scores_and_texts_have_to_be_equal(mine, theirs, problem):
    found = difference(mine, raw(theirs)).problem
    assert found.startswith(problem) if problem else not found


def test_near_ties_may_be_decided_either_way():
    assert not difference("YES", raw("YET", margins=[1e-7, 1.0])).problem
    assert difference("YES", raw("YET", margins=[1e-2])).problem
    # A tie changes a letter or two, not the text.
    assert difference("YES", raw("NOTHING", margins=[1e-7, 1.0])).problem
    spans = [["PER", 0, 3, 0.9]], [["LOC", 0, 3, 0.9]]
    assert difference(spans[0], raw(spans[1], margins=[1e-2])).problem
    assert not difference(spans[0], raw(spans[1], margins=[1e-7])).problem
    others = [["LOC", start, start + 3, 0.9] for start in (0, 10, 20)]
    several = [["PER", start, start + 3, 0.9] for start in (0, 10, 20)]
    assert difference(several, raw(others, margins=[1e-7])).problem


@pytest.mark.parametrize(
    ("first", "second", "edits"),
    [
        ("", "", 0),
        ("abc", "abc", 0),
        ("abc", "", 3),
        ("abc", "abd", 1),
        ("kitten", "sitting", 3),
        ("ab", "ba", 2),
    ],
)
def test_edits_of_texts(first, second, edits):
    assert answers._edits(first, second) == answers._edits(second, first) == edits


def test_vectors_differ_by_length_direction_or_size():
    vector = np.array([3.0, 4.0], np.float32)
    assert not difference(vector * np.float32(1 + 1e-6), raw(vector=vector)).problem
    assert "0.1 of its length" in difference(vector * 1.1, raw(vector=vector)).problem
    assert "cosine 0.96" in difference(vector[::-1], raw(vector=vector)).problem
    found = difference(vector, raw(vector=np.ones(8)))
    assert found.problem == "the vector has 2 numbers, the reference's 8"
    loose = AnswerLimits(Tolerance.for_precision("fp32"), {}, min_cosine=0.95)
    assert not difference(vector[::-1], raw(vector=vector), loose).problem


def test_outputs_are_compared_by_name():
    boxes = np.full((1, 2, 4), 0.5, np.float32)
    expected = raw(boxes=boxes, logits=np.array([[-np.inf, 1.0]]))
    same = {"boxes": boxes, "logits": np.array([[-np.inf, 1.0]]), "other": boxes}
    assert not difference(same, expected).problem
    assert "boxes differs by 0.1" in difference({"boxes": boxes + 0.1}, expected).problem
    assert "has the shape (1, 1, 4)" in difference({"boxes": boxes[:, :1]}, expected).problem


@pytest.mark.parametrize("fill", [-np.inf, np.finfo(np.float32).min])
def test_a_fill_of_masked_places_hides_no_error(fill):
    expected = raw(logits=np.array([[fill, 1.0]]))
    assert not difference({"logits": np.array([[fill, 1.0]])}, expected).problem
    assert (
        "logits differs by 4" in difference({"logits": np.array([[fill, 5.0]])}, expected).problem
    )
    assert "on one side only" in difference({"logits": np.array([[5.0, 1.0]])}, expected).problem


def test_limits_are_those_of_the_outputs():
    exact = Tolerance.for_precision("fp32")
    assert FP32.error(4.0) == pytest.approx(8 * 32 * 2**-24 * 4 + 16 * 2**-24 * 4)
    limits = AnswerLimits(exact, {"logits": 1e-3, "boxes": 1e-5})
    assert limits.error(4.0) > 8e-3 > limits.error(4.0, ("boxes",))
    assert AnswerLimits(exact, {}, max_abs_error=0.5).error(4.0) == 0.5
    # What INT8 adds is judged elsewhere.
    quantized = ComparisonLimits(QuantizedTolerance("fp32"), min_cosine=0.9)
    assert AnswerLimits.of(quantized, [], exact=True) == FP32


def test_each_input_runs_alone_and_in_a_batch():
    """An answer that depends on its batch fails, and what is refused is counted."""

    def side(values):
        if values == ["c"]:
            raise InputError("no")
        return [[["x", 0.5 if len(values) == 1 or value == "a" else 0.6]] for value in values]

    inputs = [RawInput(value, value, {}) for value in "abcd"]
    expected = [raw([["x", 0.5]]) for _ in inputs]
    expected[3] = {**raw(), "problem": "longer than the model's positions"}
    comparison = answers._compare(side, inputs, expected, FP32)
    assert comparison.problems["b"].startswith("in a batch, x is 0.6, the reference's 0.5")
    assert set(comparison.problems) == {"b"}
    assert comparison.refused == {"c": "no"}
    assert comparison.compared == {"a", "b"}
    (case,) = comparison.cases("model.onnx")
    assert (case.kind, case.name, case.passed) == ("answer", "b", False)


def test_metrics_say_what_was_compared():
    name = "transformers' fill-mask pipeline"
    found = AnswerMetrics(name, 4, 3, 0, 2e-7, ["text 4: no"], [])
    assert found.describe() == (
        f"3 raw inputs, alone and in a batch: answers equal those of {name} (largest difference "
        "2e-07); 1 refused with an error"
    )
    found = AnswerMetrics(name, 4, 4, 0, 0.0, [], [], is_around_graph=True)
    assert "in a batch, with PyTorch in the graph's place: answers equal" in found.describe()
    found = AnswerMetrics(name, 4, 3, 2, 0.5, [], ["text 4: too long"])
    assert found.describe() == (
        f"2 of 3 raw inputs have other answers than those of {name} (largest difference 0.5); 1 "
        "that the reference rejects"
    )


# -- artifacts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "task", "count"),
    [
        ("bert", "text-classification", 8),
        ("vit", "image-classification", 3),
        *(
            pytest.param(kind, task, count, marks=mark)
            for kind, mark in (
                ("bert", pytest.mark.slow),
                ("roberta", pytest.mark.slow),
                ("deberta-v2", pytest.mark.more),
            )
            for task, count in TEXTS.items()
        ),
        pytest.param("vit", "feature-extraction", 3, marks=pytest.mark.more),
        pytest.param("wav2vec2", "audio-classification", 2, marks=pytest.mark.more),
        pytest.param("wav2vec2", "automatic-speech-recognition", 2, marks=pytest.mark.more),
        # The reference rejects the empty text, which has no token.
        pytest.param("gpt2", "text-classification", 7, marks=pytest.mark.more),
        pytest.param("gpt2", "text-generation", 5, marks=pytest.mark.more),
    ],
)
def test_sound_artifact_answers_as_transformers(tmp_path, kind, task, count):
    found = compared(tiny_artifact(kind, task, tmp_path / "artifact"), tmp_path / "scratch")
    assert not found.cases
    assert not found.notes
    assert found.answers.compared == count
    assert not found.answers.refused
    assert found.answers.largest_difference < 1e-5


def _rotate_labels(config):
    names = list(config["id2label"].values())
    config["id2label"] = dict(enumerate([*names[1:], names[0]]))


MORE = pytest.mark.more
BERT, VIT = ("bert", "text-classification"), ("vit", "image-classification")
TAGGER = ("bert", "token-classification")


@pytest.mark.parametrize(
    ("model", "file", "edit", "problem"),
    [
        (BERT, "tokenizer_config", lambda d: d.update(do_lower_case=False), "the reference's"),
        (BERT, "config", _rotate_labels, "the reference's"),
        pytest.param(TAGGER, "config", _rotate_labels, "whose score is", marks=MORE),
        (VIT, "preprocessor_config", lambda d: d.update(image_mean=[0.4, 0.5, 0.5]), "reference's"),
        pytest.param(
            BERT, "tokenizer", lambda d: d.update(post_processor=None), "reference's", marks=MORE
        ),
    ],
)
def test_fault_in_a_side_file_changes_answers(tmp_path, model, file, edit, problem):
    artifact = edited(tiny_artifact(*model, tmp_path / "artifact"), **{file: edit})
    found = compared(artifact, tmp_path / "scratch")
    assert found.answers.failed
    assert problem in found.cases[0].problem


def test_task_that_cannot_be_opened_fails(tmp_path):
    artifact = tiny_artifact("bert", "text-classification", tmp_path / "artifact")
    (artifact.path / "tokenizer.json").unlink()
    commit_artifact(artifact.path, artifact.manifest)
    found = compared(Artifact.open(artifact.path), tmp_path / "scratch")
    assert found.answers is None
    assert found.cases[0].problem.startswith("load_model cannot answer: ")


def test_without_a_tokenizer_there_is_nothing_to_compare_with(tmp_path):
    source = save_tiny("bert", "text-classification", tmp_path / "source")
    for file in source.glob("*token*"):
        file.unlink()
    (source / "vocab.txt").unlink(missing_ok=True)
    artifact = tiny_artifact(
        "bert", "text-classification", tmp_path / "artifact", source=Path(source)
    )
    found = compared(artifact, tmp_path / "scratch")
    assert not found.cases
    assert found.notes[0].startswith(
        "answers: not compared: transformers' text-classification pipeline: "
    )


@pytest.mark.more
def test_pytorch_takes_the_place_of_a_rounded_graph(tmp_path):
    """So a fault in a side file shows at any precision, and rounding does not."""
    from enginery import quantize_model

    artifact = tiny_artifact("bert", "text-classification", tmp_path / "artifact")
    small = quantize_model(
        artifact, out=tmp_path / "int8", scheme="dynamic", target="cpu", allow_failed=True
    )
    found = compared(small, tmp_path / "sound")
    assert not found.cases
    assert found.answers.largest_difference < 1e-5
    found = compared(edited(small, config=_rotate_labels), tmp_path / "faulty")
    assert found.answers.failed
