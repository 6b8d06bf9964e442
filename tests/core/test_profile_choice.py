import itertools

import pytest

from enginery.core.errors import ShapeError
from enginery.core.profile_choice import choose_profile, preference
from enginery.core.shapes import Profile


def profiles(*texts):
    return [Profile.parse(text) for text in texts]


FULL = "batch=1:8:32,sequence=8:128:512"
SHORT = "batch=1:8:64,sequence=1:16:32"


@pytest.mark.parametrize(
    ("sizes", "chosen"), [((64, 32), 1), ((32, 512), 0), ((1, 8), 1), ((1, 33), 0), ((1, 1), 1)]
)
def test_the_profile_with_the_smallest_largest_shape_is_taken(sizes, chosen):
    batch, sequence = sizes
    assert choose_profile(profiles(FULL, SHORT), {"sequence": sequence, "batch": batch}) == chosen


def test_of_equal_largest_shapes_the_narrower_profile_is_taken():
    wide, narrow = profiles("batch=1:8:32", "batch=8:16:32")
    assert choose_profile([wide, narrow], {"batch": 8}) == 1
    assert choose_profile([narrow, wide], {"batch": 8}) == 0
    assert choose_profile([wide, narrow], {"batch": 7}) == 0


def test_of_profiles_that_are_alike_the_first_is_taken():
    assert preference(profiles("batch=1:2:8,sequence=1:2:4", "batch=1:2:4,sequence=1:2:8")) == [
        0,
        1,
    ]


def test_the_choice_does_not_depend_on_the_order_given():
    """Where no two profiles are of one size."""
    texts = (FULL, SHORT, "batch=1,sequence=1:64:128")
    for sizes in ({"batch": 1, "sequence": 20}, {"batch": 32, "sequence": 64}):
        chosen = {
            order[choose_profile(profiles(*order), sizes)]
            for order in itertools.permutations(texts)
        }
        assert len(chosen) == 1


def test_a_graph_of_fixed_shapes_has_one_profile_for_its_one_shape():
    assert choose_profile([Profile({})], {}) == 0


@pytest.mark.parametrize(
    ("given", "sizes", "message"),
    [
        (
            (FULL, SHORT),
            {"batch": 64, "sequence": 600},
            "batch 64, sequence 600 is outside the nearest profile "
            "'batch=1:8:32,sequence=8:128:512': batch 64 is above its maximum 32 by 32; sequence "
            "600 is above its maximum 512 by 88. Split or pad the input to fit, or rebuild with "
            "--profile batch=1:8:64,sequence=8:128:600",
        ),
        (
            (FULL, SHORT),
            {"batch": 65, "sequence": 2},
            "batch 65, sequence 2 is outside the nearest profile 'batch=1:8:64,sequence=1:16:32': "
            "batch 65 is above its maximum 64 by 1. Split or pad the input to fit, or rebuild with "
            "--profile batch=1:8:65,sequence=1:16:32",
        ),
        (
            (FULL,),
            {"batch": 2, "sequence": 5},
            "batch 2, sequence 5 is outside the profile 'batch=1:8:32,sequence=8:128:512': "
            "sequence 5 is below its minimum 8 by 3. Split or pad the input to fit, or rebuild "
            "with --profile batch=1:8:32,sequence=5:128:512",
        ),
        ((SHORT,), {"batch": 2}, "dim 'sequence' has no size; sizes given: batch 2."),
        ((SHORT,), {}, "dim 'batch' has no size; sizes given: none."),
        (
            (SHORT,),
            {"batch": 2, "sequence": 2, "sequense": 3},
            "the profiles have no dim 'sequense'; did you mean 'sequence'? "
            "Their dims: batch, sequence.",
        ),
        ((), {"batch": 2}, "there are no profiles to choose from."),
    ],
)
def test_sizes_in_no_profile_say_which_is_nearest_and_what_does_not_fit(given, sizes, message):
    with pytest.raises(ShapeError) as error:
        choose_profile(profiles(*given), sizes)
    assert str(error.value) == message


def test_a_size_of_zero_is_outside():
    with pytest.raises(ShapeError, match="batch 0 is below its minimum 1 by 1"):
        choose_profile(profiles("batch=1:2:4"), {"batch": 0})
