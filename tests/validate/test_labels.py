"""With labels, the report has the accuracy of PyTorch and of the artifact."""

import csv
from pathlib import Path

import pytest

from enginery import load_model, validate_model
from enginery.bench.report.page import write_report
from enginery.core.datasets.samples import read_text_rows
from enginery.core.errors import InputError, OptionError
from tests.tiny import LABELS
from tests.tiny import TEXT as SENTENCES
from tests.validate.faults import edits as faults

TEXT = ("bert", "text-classification")
NAMES = LABELS["text-classification"]


def write_rows(path, rows):
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        writer.writerows(rows)
    return str(path)


@pytest.fixture
def classifier(exported, copied):
    return copied(exported(*TEXT))


@pytest.fixture
def labelled(classifier, tmp_path):
    """Write 24 texts; the label of every third one is not the model's answer."""
    texts = [sentence for sentence in SENTENCES if sentence.strip()][:24]
    texts += [f"The pump number {index} runs." for index in range(24 - len(texts))]
    answers = [found.label for found in load_model(classifier).classify(texts)]
    wrong = {name: NAMES[(index + 1) % 3] for index, name in enumerate(NAMES)}
    labels = [wrong[name] if i % 3 == 0 else name for i, name in enumerate(answers)]
    return write_rows(tmp_path / "rows.csv", zip(texts, labels, strict=True))


@pytest.mark.more
def test_accuracy_of_both_is_reported(classifier, labelled):
    report = validate_model(classifier, data=labelled, label_column="label")
    assert report.passed, report.summary
    assert report.labels.column == "label"
    assert [(each.name, each.right, each.rows) for each in report.labels.accuracies] == [
        ("PyTorch", 16, 24),
        ("this artifact", 16, 24),
    ]
    (change,) = report.labels.changes
    assert (change.broken, change.repaired, change.difference) == (0, 0, 0)
    lines = report.lines()
    assert "accuracy of PyTorch: 66.7 % (46.7 to 82.0 %)" in lines
    assert any("0 rows right → wrong, 0 wrong → right" in line for line in lines)
    page = write_report(classifier.path).read_text()
    assert "Accuracy on the labels in" in page
    assert "66.7 % (46.7 to 82.0 %)" in page


@pytest.mark.more
def test_rows_keep_their_labels_when_they_are_sampled(classifier, labelled):
    sample = read_text_rows(Path(labelled), "text", rows=7, label_column="label")
    found = load_model(classifier).classify(sample.items)
    right = sum(one.label == label for one, label in zip(found, sample.labels, strict=True))
    report = validate_model(classifier, data=labelled, label_column="label", rows=7)
    assert [(each.right, each.rows) for each in report.labels.accuracies] == [(right, 7)] * 2


@pytest.mark.more
def test_lost_accuracy_is_counted_and_does_not_decide(classifier, labelled):
    """The worst class always wins."""
    faults.break_graph(classifier, faults.scale("logits", -1))
    report = validate_model(
        classifier.path, data=labelled, label_column="label", max_abs_error=1e6, min_cosine=-1
    )
    (change,) = report.labels.changes
    mine, theirs = report.labels.accuracies[1], report.labels.accuracies[0]
    assert theirs.right == 16
    assert mine.right < 16
    assert change.broken - change.repaired == theirs.right - mine.right
    assert "accuracy" not in report.summary, "the verdict is about outputs"


def test_label_that_the_model_does_not_have_is_an_error(classifier, tmp_path):
    data = write_rows(tmp_path / "rows.csv", [("The pump runs.", "hapy")])
    with pytest.raises(InputError, match=r"the label 'hapy' is not one of the model's"):
        validate_model(classifier, data=data, label_column="label")


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (TEXT, "", r"but there are no data.*--data"),
        (TEXT, "rows.npz", "but arrays have no columns"),
        (("bert", "feature-extraction"), "rows.csv", "is feature-extraction, expected text-class"),
        (("vit", "image-classification"), "images", "but a folder of images has no columns"),
    ],
)
def test_labels_that_cannot_be_compared_are_errors_before_the_work(
    exported, monkeypatch, model, data, message
):
    monkeypatch.setattr("enginery.validate.stage.Reference", None)
    with pytest.raises(OptionError, match=message):
        validate_model(exported(*model), data=data, label_column="label")
