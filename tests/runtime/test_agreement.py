"""Agreement of the answers of two graphs, row by row."""

import numpy as np
import pytest

from enginery.runtime.agreement import EMBEDDING, compare_answers


def rows(*vectors):
    return [np.float32([vector]) for vector in vectors]


def test_mean_smallest_and_deviation_of_the_cosine():
    found = {EMBEDDING: rows([1, 0], [1, 1], [0, 2])}
    expected = {EMBEDDING: rows([1, 0], [1, 0], [0, 1])}
    seen = compare_answers(found, expected)
    cosines = [1, 0.5**0.5, 1]
    assert seen.rows == 3
    assert seen.cosine == pytest.approx(np.mean(cosines))
    assert seen.worst_cosine == pytest.approx(0.5**0.5)
    assert seen.deviation == pytest.approx(np.std(cosines, ddof=1))
    one = compare_answers({EMBEDDING: rows([1, 0])}, {EMBEDDING: rows([1, 0])})
    assert one.deviation is None


def test_the_least_similar_output_counts():
    same, other = rows([1, 0], [0, 1]), rows([1, 1], [0, 1])
    seen = compare_answers({"a": same, "b": other}, {"a": same, "b": same})
    assert seen.cosine == pytest.approx((0.5**0.5 + 1) / 2)


def test_nearest_neighbours_and_classes():
    vectors = rows([1, 0], [0.9, 0.1], [0, 1])
    swapped = rows([1, 0], [0, 1], [0.9, 0.1])
    found, expected = {EMBEDDING: swapped}, {EMBEDDING: vectors}
    assert compare_answers(expected, expected).neighbour_agreement == 1
    assert compare_answers(found, expected).neighbour_agreement < 1
    seen = compare_answers({"logits": swapped}, {"logits": vectors})
    assert seen.argmax_agreement == pytest.approx(1 / 3)
