import numpy as np

from enginery.quantize.accuracy import Judge
from enginery.quantize.data import Batch


def judged(expected, found, labels=()):
    """The accuracy of logits (rows, labels) against others."""
    count = len(expected)
    batch = Batch(tuple(range(count)), lambda: {"x": np.zeros((count, 1), np.float32)})
    judge = Judge([batch], labels, None)
    judge._expected = judge._answers(lambda _: {"logits": np.float32(expected)}, judge.batches)
    return judge.measure(lambda _: {"logits": np.float32(found)})


def test_answers_that_are_not_numbers_agree_with_nothing():
    expected = [[3, 1], [2, 1], [0, 1]]
    broken = [[np.nan, np.nan], [np.inf, 0], [0, 1]]
    found = judged(expected, broken, labels=(0, 0, 1))
    assert found.argmax_agreement == found.label_accuracy == 1 / 3
    assert found.worst_cosine == -1


def test_equal_answers_agree_in_all():
    found = judged([[3, 1], [2, 1]], [[3, 1], [2, 1]], labels=(0, 1))
    assert (found.argmax_agreement, found.label_accuracy) == (1, 0.5)
    assert found.cosine > 1 - 1e-12
