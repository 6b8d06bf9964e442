import numpy as np
import pytest

from enginery.core.errors import EngineryError
from enginery.quantize.accuracy import AccuracyEvaluator
from enginery.quantize.calibration.data import Batch
from enginery.runtime.agreement import AnswerAgreement


@pytest.fixture
def judged(tmp_path):
    """Measure logits (rows, labels) against expected ones."""

    def measure(expected, found, labels=()):
        count = len(expected)
        batch = Batch(tuple(range(count)), lambda: {"x": np.zeros((count, 1), np.float32)})
        evaluator = AccuracyEvaluator(
            [batch],
            lambda _: {"logits": np.float32(expected)},
            ["logits"],
            lambda: AnswerAgreement(None),
            scratch=tmp_path,
            labels=labels,
        )
        return evaluator.measure(lambda _: {"logits": np.float32(found)})

    return measure


def test_nan_and_infinite_outputs_never_agree(judged):
    expected = [[3, 1], [2, 1], [0, 1]]
    broken = [[np.nan, np.nan], [np.inf, 0], [0, 1]]
    found = judged(expected, broken, labels=(0, 0, 1))
    assert found.argmax_agreement == found.label_accuracy == 1 / 3
    assert found.worst_cosine == -1


def test_equal_outputs_agree_in_every_metric(judged):
    found = judged([[3, 1], [2, 1]], [[3, 1], [2, 1]], labels=(0, 1))
    assert (found.argmax_agreement, found.label_accuracy) == (1, 0.5)
    assert found.cosine > 1 - 1e-12


def test_outputs_that_cannot_be_stored_are_a_clear_error(tmp_path):
    batch = Batch((0,), lambda: {"x": np.zeros((1, 1), np.float32)})
    with pytest.raises(EngineryError, match="cannot be written") as raised:
        AccuracyEvaluator(
            [batch],
            lambda _: {"logits": np.ones((1, 2), np.float32)},
            ["logits"],
            lambda: AnswerAgreement(None),
            scratch=tmp_path / "missing",
        )
    assert "TMPDIR" in raised.value.do
