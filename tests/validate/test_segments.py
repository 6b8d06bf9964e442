"""Pairing the segments of two models."""

import numpy as np
import pytest

from enginery.validate.segments import Segments, compare_segments

HEIGHT, WIDTH = 50, 40


def segments(*parts):
    """Segments of stripes: label, score, first and last column."""
    masks = np.zeros((len(parts), HEIGHT, WIDTH), bool)
    for mask, (*_, first, last) in zip(masks, parts, strict=True):
        mask[:, first:last] = True
    return Segments([part[:2] for part in parts], masks)


ROAD, SKY, CAR, OTHER = (
    ("road", None, 0, 20),
    ("sky", None, 20, 40),
    ("car", 0.9, 0, 10),
    ("car", 0.8, 10, 40),
)


def compare(first, second, **limits):
    return compare_segments(first, second, **{"score_error": 1e-3, "tied": 0.0, **limits})


def test_equal_segments_in_another_order():
    assert compare(segments(OTHER, CAR), segments(CAR, OTHER)) == (0.0, "")
    assert compare(segments(), segments()) == (0.0, "")
    nearly = segments(("car", 0.9005, 0, 10), OTHER)
    assert compare(nearly, segments(CAR, OTHER)) == (pytest.approx(0.0005), "")


def test_a_few_pixels_may_differ():
    moved = segments(ROAD, SKY)
    moved.masks[:, 3, 19] ^= True
    assert compare(moved, segments(ROAD, SKY))[1] == ""
    moved.masks[:, :, 19] = [[False], [True]]
    assert "differ in 5.00% of the pixels" in compare(moved, segments(ROAD, SKY))[1]
    assert compare(moved, segments(ROAD, SKY), tied=0.05)[1] == ""


@pytest.mark.parametrize(
    "others",
    [
        segments(SKY, ROAD[:2] + SKY[2:]),
        segments(ROAD),
        segments(),
        segments(ROAD, SKY, CAR),
        segments(("road", 0.5, 0, 20), SKY),
        Segments([ROAD[:2]], np.zeros((1, 5, 5), bool)),
    ],
    ids=["labels", "missing", "none", "extra", "score", "size"],
)
def test_segments_that_differ(others):
    assert compare(others, segments(ROAD, SKY))[1]


def test_a_score_that_differs_is_another_segment():
    assert compare(segments(("car", 0.5, 0, 10), OTHER), segments(CAR, OTHER))[1]
    assert compare(segments(("car", float("nan"), 0, 10), OTHER), segments(CAR, OTHER))[1]
