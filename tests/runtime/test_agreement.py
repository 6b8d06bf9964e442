"""Agreement of the answers of two graphs, row by row."""

import numpy as np
import pytest

from enginery.runtime.agreement import AnswerAgreement


def compared(found, expected, pooling=None, feeds=None):
    """Compare the outputs of one batch, by name."""
    agreement = AnswerAgreement(pooling)
    found, expected = (
        {name: np.asarray(array, np.float32) for name, array in outputs.items()}
        for outputs in (found, expected)
    )
    agreement.add(found, expected, feeds or {})
    return agreement.metrics()


def embeddings_compared(found, expected):
    """Compare token vectors of one token each, which are pooled."""
    found, expected = (
        {"last_hidden_state": np.expand_dims(np.float32(vectors), 1)}
        for vectors in (found, expected)
    )
    feeds = {"attention_mask": np.ones((len(found["last_hidden_state"]), 1), np.int64)}
    return compared(found, expected, lambda tokens, mask: tokens.mean(axis=1), feeds)


def test_mean_smallest_and_deviation_of_the_cosine():
    seen = embeddings_compared([[1, 0], [1, 1], [0, 2]], [[1, 0], [1, 0], [0, 1]])
    cosines = [1, 0.5**0.5, 1]
    assert seen.rows == 3
    assert seen.cosine == pytest.approx(np.mean(cosines))
    assert seen.worst_cosine == pytest.approx(0.5**0.5)
    assert seen.deviation == pytest.approx(np.std(cosines, ddof=1))
    assert embeddings_compared([[1, 0]], [[1, 0]]).deviation is None


def test_batches_add_up():
    agreement = AnswerAgreement(None)
    for found, expected in (([[1, 0]], [[1, 0]]), ([[1, 1], [0, 1]], [[1, 0], [0, 1]])):
        agreement.add({"a": np.float32(found)}, {"a": np.float32(expected)}, {})
    seen = agreement.metrics()
    assert seen.rows == agreement.rows == 3
    assert seen.cosine == pytest.approx((1 + 0.5**0.5 + 1) / 3)


def test_the_least_similar_output_counts():
    same, other = [[1, 0], [0, 1]], [[1, 1], [0, 1]]
    seen = compared({"a": same, "b": other}, {"a": same, "b": same})
    assert seen.cosine == pytest.approx((0.5**0.5 + 1) / 2)


@pytest.mark.parametrize("classes", [3, 20_000])
def test_every_position_of_a_row_counts(classes):
    """A text recognizer: one position of 40 answers another character."""
    expected = np.zeros((1, 40, classes), np.float32)
    expected[..., 0] = 1
    found = expected.copy()
    found[0, 7] = np.roll(found[0, 7], 1)
    seen = compared({"probabilities": found}, {"probabilities": expected})
    assert seen.cosine == seen.worst_cosine == pytest.approx(39 / 40)


def test_padded_positions_do_not_count():
    expected = np.ones((1, 3, 2), np.float32)
    found = expected.copy()
    found[0, 2] = [5, -5]
    mask = {"attention_mask": np.int64([[1, 1, 0]])}
    assert compared({"a": found}, {"a": expected}, feeds=mask).cosine == pytest.approx(1)
    assert compared({"a": found}, {"a": expected}).cosine < 0.5


def test_another_number_of_boxes_does_not_agree():
    expected = np.ones((1, 3, 4), np.float32)
    seen = compared({"boxes": expected[:, :2]}, {"boxes": expected})
    assert seen.cosine == -1


def test_nearest_neighbours_and_classes():
    vectors = [[1, 0], [0.9, 0.1], [0, 1]]
    swapped = [[1, 0], [0, 1], [0.9, 0.1]]
    assert embeddings_compared(vectors, vectors).neighbour_agreement == 1
    assert embeddings_compared(swapped, vectors).neighbour_agreement < 1
    seen = compared({"logits": swapped}, {"logits": vectors})
    assert seen.argmax_agreement == pytest.approx(1 / 3)
