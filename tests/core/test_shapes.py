import itertools

import pytest

from enginery.core.errors import ShapeError
from enginery.core.shapes import (
    DimRange,
    Profile,
    TensorSpec,
    canonical_dim,
    choose_profile,
    dim_terms,
    dynamic_dims,
    fixed_dims,
    preference_order,
    resolve_dim,
)

TEXT = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "sequence")),
)
DECODER = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "past_sequence + sequence")),
    TensorSpec("past.0.key", "float32", ("batch", 4, "past_sequence", 16)),
)


def test_profile_reads_ranges_and_fixed_sizes():
    profile = Profile.parse(" batch = 1:8:32 , sequence=128")
    assert profile.dims == {"batch": DimRange(1, 8, 32), "sequence": DimRange(128, 128, 128)}


def test_profile_accepts_names_of_optimum():
    assert Profile.parse("batch_size=2,sequence_length=8") == Profile.parse("batch=2,sequence=8")


def test_profile_prints_as_it_is_read():
    text = "batch=1:8:32,sequence=128"
    assert str(Profile.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch=8:4:16", "batch: min 8 is above opt 4, expected 1 <= min <= opt <= max."),
        ("batch=1:9:8", "batch: opt 9 is above max 8, expected 1 <= min <= opt <= max."),
        ("batch=0", "batch: found size 0, expected a whole number from 1 to 2147483647."),
        ("batch=0:1:2", "batch: found size 0, expected a whole number from 1 to 2147483647."),
        (
            "batch=1:1:4294967296",
            "batch: found size 4294967296, expected a whole number from 1 to 2147483647.",
        ),
        ("batch=-1", "batch: found size '-1', expected a whole number from 1 to 2147483647."),
        ("batch=1.5", "batch: found size '1.5', expected a whole number from 1 to 2147483647."),
        ("batch=1:2", "batch: '1:2' has 2 numbers, expected min:opt:max or one size."),
        ("batch=1:2:3:4", "batch: '1:2:3:4' has 4 numbers, expected min:opt:max or one size."),
        (
            "batch",
            "found 'batch', expected name=min:opt:max or name=size. Write it as "
            "batch=1:8:32,sequence=8:128:512.",
        ),
        (
            "batch=1,batch_size=2",
            "dim 'batch' is given twice. A profile has one range for each "
            "dim; give --profile again for another.",
        ),
    ],
)
def test_invalid_profile_is_an_error_with_the_reason(text, message):
    with pytest.raises(ShapeError) as error:
        Profile.parse(text)
    assert str(error.value) == f"profile '{text}': {message}"


@pytest.mark.parametrize(
    "text",
    [
        "batch=",
        "=1",
        "batch=1,",
        "batch=a:b:c",
        "batch=1_0",
        "batch=1:2:",
        "batch=²",
        "batch=" + "9" * 5000,
    ],
)
def test_profile_rejects_other_notations(text):
    with pytest.raises(ShapeError, match=r"expected (name=min:opt:max|a whole number)"):
        Profile.parse(text)


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_profile_is_rejected(text):
    with pytest.raises(ShapeError) as error:
        Profile.parse(text)
    assert str(error.value) == (
        "a profile is empty, expected name=min:opt:max. Write it as "
        "batch=1:8:32,sequence=8:128:512."
    )


def test_sizes_may_have_leading_zeros_and_spaces():
    assert DimRange.parse(" 0001 : 00000000000008 :32") == DimRange(1, 8, 32)


def test_only_the_past_of_a_decoder_may_be_empty():
    text = "batch=1:2:4,sequence=1:8:32,past_sequence=0:16:64"
    profile = Profile.parse(text)
    assert str(profile) == text
    assert {"batch": 1, "sequence": 1, "past_sequence": 0} in list(profile.corners())
    assert str(Profile.parse("past_decoder_sequence=0")) == "past_decoder_sequence=0"
    with pytest.raises(ShapeError, match="sequence: found size 0, expected a whole number from 1"):
        Profile.parse("batch=1,sequence=0:1:2")


def test_corners_are_every_end_once_and_then_the_optimum():
    corners = list(Profile.parse("batch=1:4:8,sequence=16").corners())
    assert corners == [
        {"batch": 1, "sequence": 16},
        {"batch": 8, "sequence": 16},
        {"batch": 4, "sequence": 16},
    ]


def test_corners_of_two_ranges_are_four_and_an_optimum_at_a_corner_is_not_repeated():
    assert len(list(Profile.parse("batch=1:4:8,sequence=8:64:128").corners())) == 5
    assert len(list(Profile.parse("batch=1:1:8,sequence=8:8:128").corners())) == 4


def test_a_model_without_dynamic_dims_has_one_corner():
    assert list(Profile({}).corners()) == [{}]


def test_check_names_the_nearest_dim_for_an_unknown_one():
    with pytest.raises(ShapeError, match="no dynamic dim 'sequnce'; did you mean 'sequence'"):
        Profile.parse("batch=1,sequnce=8").check(TEXT, {})


def test_check_rejects_a_maximum_beyond_the_models_positions():
    profile = Profile.parse("batch=1,sequence=8:64:513")
    with pytest.raises(ShapeError, match="up to 513, but the model's positions end at 512"):
        profile.check(TEXT, {"sequence": 512})
    profile.check(TEXT, {"sequence": 513})


def test_check_wants_each_name_of_a_sum():
    Profile.parse("batch=1,sequence=1,past_sequence=0001:4:8").check(DECODER, {})
    with pytest.raises(ShapeError, match="lacks the dim 'past_sequence'"):
        Profile.parse("batch=1,sequence=1").check(DECODER, {})


def test_check_names_all_dims_that_the_profile_lacks():
    with pytest.raises(ShapeError) as error:
        Profile.parse("batch=1").check(DECODER, {})
    assert str(error.value) == (
        "profile 'batch=1' lacks the dims 'sequence', 'past_sequence'. "
        "Add sequence=min:opt:max,past_sequence=min:opt:max."
    )


def test_a_profile_may_name_a_fixed_dim_with_its_own_size_alone():
    image = (TensorSpec("pixel_values", "float32", ("batch", 3, 32, 32)),)
    Profile.parse("batch=1:2:4,channels=3,height=32").check(image, {})
    for text in ("channels=4", "channels=1:2:3", "channels=3:3:4"):
        with pytest.raises(ShapeError) as error:
            Profile.parse(f"batch=1,{text}").check(image, {})
        assert str(error.value) == (
            f"profile 'batch=1,{text}': channels is fixed at 3 in the graph, found {text}. "
            "Leave channels out, or export the model with a dynamic channels."
        )


def test_a_profile_for_a_graph_of_fixed_shapes_is_rejected():
    with pytest.raises(ShapeError) as error:
        Profile.parse("rows=8").check((TensorSpec("input_ids", "int64", (1, 16)),), {})
    assert str(error.value) == (
        "profile 'rows=8': the model has no dynamic dim 'rows'. "
        "All its shapes are fixed; leave the profile out."
    )


def test_check_reads_its_inputs_once():
    Profile.parse("batch=1,sequence=8").check(iter(TEXT), {"sequence": 8})


def test_fixed_dims_are_named_as_the_exporter_names_them_where_nothing_is_dynamic():
    assert fixed_dims((TensorSpec("input_ids", "int64", (8, "sequence")),)) == {"batch": 8}
    assert fixed_dims((TensorSpec("input_values", "float32", (8, 16)),)) == {}
    mixed = (
        TensorSpec("input_ids", "int64", (1, 4)),
        TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),
    )
    assert fixed_dims(mixed) == {"sequence": 4, "channels": 3, "height": 8, "width": 8}


def test_resolve_dim_adds_names_and_sizes():
    assert resolve_dim("past_sequence + sequence", {"past_sequence": 4, "sequence": 1}) == 5
    assert resolve_dim("sequence+1", {"sequence": 8}) == 9
    assert resolve_dim(7, {}) == 7
    with pytest.raises(ShapeError, match="dim 'sequence' has no size"):
        resolve_dim("sequence", {"batch": 1})


def test_canonical_dim_shortens_every_term():
    assert canonical_dim("past_sequence_length + sequence_length") == "past_sequence + sequence"
    assert canonical_dim("num_channels") == "channels"
    assert canonical_dim("encoder_sequence_length") == "encoder_sequence"
    assert canonical_dim("height") == "height"


def test_dynamic_dims_come_once_in_order_of_appearance():
    assert dynamic_dims(DECODER) == ["batch", "sequence", "past_sequence"]
    assert dim_terms("sequence + 1") == ["sequence"]
    assert dim_terms(4) == []


def test_tensor_spec_resolves_and_prints_its_shape():
    spec = DECODER[2]
    assert spec.shape({"batch": 2, "past_sequence": 8}) == (2, 4, 8, 16)
    assert str(spec) == "past.0.key: float32 (batch, 4, past_sequence, 16)"


def test_a_digit_that_is_no_number_is_a_name():
    assert dim_terms("² + 1") == ["²"]
    with pytest.raises(ShapeError, match="dim '²' has no size"):
        resolve_dim("²", {})


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


def test_the_smallest_shape_counts_before_the_number_of_shapes():
    small, few = profiles("batch=1:1:8,sequence=1:16:16", "batch=4:4:8,sequence=16:16:17")
    assert choose_profile([few, small], {"batch": 4, "sequence": 16}) == 1


def test_of_equal_profiles_the_first_is_chosen():
    alike = profiles("batch=1:2:8,sequence=1:2:4", "batch=1:2:4,sequence=1:2:8")
    assert preference_order(alike) == [0, 1]


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
def test_uncovered_sizes_name_the_nearest_profile_and_the_dims(given, sizes, message):
    with pytest.raises(ShapeError) as error:
        choose_profile(profiles(*given), sizes)
    assert str(error.value) == message


def test_a_size_of_zero_is_outside():
    with pytest.raises(ShapeError, match="batch 0 is below its minimum 1 by 1"):
        choose_profile(profiles("batch=1:2:4"), {"batch": 0})
