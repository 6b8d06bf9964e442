"""Pairing the objects of two detectors."""

import math
import re

import pytest

from enginery.validate.objects import ObjectLimits, compare_objects

LIMITS = ObjectLimits(score=1e-3, box=1e-3, ties=0)


def item(label, score, *sides):
    return {
        "label": label,
        "score": score,
        "box": dict(zip(("xmin", "ymin", "xmax", "ymax"), sides, strict=True)),
    }


CAT = item("cat", 0.9, 10, 20, 110, 220)
BOAT = item("boat", 0.8, 10, 20, 110, 220)
TREE = item("tree", 0.1, 300, 5, 340, 90)
ALL = [CAT, BOAT, TREE]


def moved(original, **changes):
    return {**original, **changes}


@pytest.mark.parametrize(
    "objects",
    [
        pytest.param([TREE, CAT, BOAT], id="another order"),
        pytest.param([item("cat", 0.9, 9, 20, 110, 221), BOAT, TREE], id="a pixel"),
        pytest.param([moved(CAT, score=0.9005), BOAT, TREE], id="a small error"),
        pytest.param([CAT, BOAT, item("cat", 0.1001, 1, 2, 3, 4)], id="another last one"),
    ],
)
def test_equal_objects(objects):
    largest, problem = compare_objects(objects, ALL, LIMITS)
    assert problem == ""
    assert largest <= LIMITS.score


@pytest.mark.parametrize(
    ("objects", "problem"),
    [
        ([moved(CAT, score=0.85), BOAT, TREE], r"it lacks the cat at \(10, 20, 110, 220\)"),
        ([moved(CAT, label="boat"), BOAT, TREE], "it lacks the cat"),
        ([moved(CAT, box={**CAT["box"], "xmax": 113}), BOAT, TREE], "it lacks the cat"),
        ([CAT, CAT, TREE], "it lacks the boat"),
        ([CAT, BOAT], "2 objects are found, by the reference 3"),
        ([*ALL, BOAT], "4 objects are found, by the reference 3"),
        ([moved(CAT, score=math.nan), BOAT, TREE], "it lacks the cat"),
        ([], "0 objects are found"),
    ],
)
def test_objects_that_differ(objects, problem):

    assert re.search(problem, compare_objects(objects, ALL, LIMITS)[1])


def test_a_query_with_a_near_tie_may_have_either_label():
    objects = [moved(CAT, label="dog"), BOAT, TREE]
    assert compare_objects(objects, ALL, ObjectLimits(1e-3, 1e-3, ties=1))[1] == ""
    assert compare_objects(objects, ALL, LIMITS)[1]


def test_nothing_equals_nothing():
    assert compare_objects([], [], LIMITS) == (0.0, "")
