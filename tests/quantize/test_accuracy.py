import numpy as np

from enginery.quantize.accuracy import AccuracyEvaluator
from enginery.quantize.calibration.data import Batch


def judged(expected, found, labels=()):
    """Measure logits (rows, labels) against expected ones."""
    count = len(expected)
    batch = Batch(tuple(range(count)), lambda: {"x": np.zeros((count, 1), np.float32)})
    evaluator = AccuracyEvaluator([batch], labels, None)
    evaluator._expected = evaluator._collect_rows(
        lambda _: {"logits": np.float32(expected)}, evaluator.batches
    )
    return evaluator.measure(lambda _: {"logits": np.float32(found)})


def test_nan_and_infinite_outputs_never_agree():
    expected = [[3, 1], [2, 1], [0, 1]]
    broken = [[np.nan, np.nan], [np.inf, 0], [0, 1]]
    found = judged(expected, broken, labels=(0, 0, 1))
    assert found.argmax_agreement == found.label_accuracy == 1 / 3
    assert found.worst_cosine == -1


def test_equal_outputs_agree_in_every_metric():
    found = judged([[3, 1], [2, 1]], [[3, 1], [2, 1]], labels=(0, 1))
    assert (found.argmax_agreement, found.label_accuracy) == (1, 0.5)
    assert found.cosine > 1 - 1e-12
