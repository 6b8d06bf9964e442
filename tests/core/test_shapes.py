import pytest

from enginery.core.errors import ShapeError
from enginery.core.shapes import (
    DimRange,
    Profile,
    TensorSpec,
    canonical_dim,
    dim_terms,
    dynamic_dims,
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


def test_profile_takes_optimums_names_for_ours():
    assert Profile.parse("batch_size=2,sequence_length=8") == Profile.parse("batch=2,sequence=8")


def test_profile_prints_as_it_is_read():
    text = "batch=1:8:32,sequence=128"
    assert str(Profile.parse(text)) == text


@pytest.mark.parametrize("text", ["batch=8:4:16", "batch=1:9:8", "batch=0:1:2", "batch=0"])
def test_profile_rejects_min_above_opt_opt_above_max_and_sizes_below_one(text):
    with pytest.raises(ShapeError, match=r"expected 1 <= min <= opt <= max"):
        Profile.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "batch", "batch=", "=1", "batch=1,", "batch=a:b:c", "batch=-1", "batch=1.5", "batch=1_0",
     "batch=1:2:", "batch=²", "batch=" + "9" * 5000],
)  # fmt: skip
def test_profile_rejects_what_is_not_name_equals_sizes(text):
    with pytest.raises(ShapeError, match="expected name=min:opt:max or name=size"):
        Profile.parse(text)


def test_profile_rejects_two_and_four_numbers():
    for text in ("batch=1:2", "batch=1:2:3:4"):
        with pytest.raises(ShapeError, match="expected 1 or 3"):
            Profile.parse(text)


def test_profile_rejects_a_dim_given_twice_under_either_name():
    with pytest.raises(ShapeError, match="'batch' is given twice"):
        Profile.parse("batch=1,batch_size=2")


def test_profile_rejects_sizes_beyond_32_bits():
    with pytest.raises(ShapeError, match="2147483647"):
        Profile.parse("batch=1:1:4294967296")


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


def test_check_names_the_dim_that_the_profile_lacks():
    with pytest.raises(ShapeError, match=r"lacks the dim 'sequence'\. Add sequence=min:opt:max"):
        Profile.parse("batch=1").check(TEXT, {})


def test_check_rejects_a_maximum_beyond_the_models_positions():
    profile = Profile.parse("batch=1,sequence=8:64:513")
    with pytest.raises(ShapeError, match="up to 513, but the model's positions end at 512"):
        profile.check(TEXT, {"sequence": 512})
    profile.check(TEXT, {"sequence": 513})


def test_check_wants_each_name_of_a_sum():
    Profile.parse("batch=1,sequence=1,past_sequence=0001:4:8").check(DECODER, {})
    with pytest.raises(ShapeError, match="lacks the dim 'past_sequence'"):
        Profile.parse("batch=1,sequence=1").check(DECODER, {})


def test_tensorrt_notation_names_the_models_dims():
    profile = Profile.parse_tensorrt(
        "input_ids:1x8,attention_mask:1x8",
        "input_ids:4x64,attention_mask:4x64",
        "input_ids:8x128,attention_mask:8x128",
        TEXT,
    )
    assert str(profile) == "batch=1:4:8,sequence=8:64:128"


def test_tensorrt_notation_may_leave_out_inputs_that_add_no_dim():
    profile = Profile.parse_tensorrt("input_ids:1x8", "input_ids:1x8", "input_ids:2x8", TEXT)
    assert str(profile) == "batch=1:1:2,sequence=8"


def test_tensorrt_notation_takes_input_names_with_a_colon():
    inputs = (TensorSpec("input:0", "float32", ("batch", 3)),)
    assert str(Profile.parse_tensorrt("input:0:1x3", "input:0:2x3", "input:0:4x3", inputs)) == (
        "batch=1:2:4"
    )


def test_tensorrt_notation_of_a_fixed_model_is_an_empty_profile():
    inputs = (TensorSpec("image", "float32", (1, 3)),)
    assert Profile.parse_tensorrt("image:1x3", "image:1x3", "image:1x3", inputs) == Profile({})


def test_tensorrt_notation_solves_sums():
    one = "input_ids:1x2,attention_mask:1x6,past.0.key:1x4x4x16"
    assert str(Profile.parse_tensorrt(one, one, one, DECODER)) == (
        "batch=1,sequence=2,past_sequence=4"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input_ids:1x2,attention_mask:1x7,past.0.key:1x4x4x16", "makes it 1x6"),
        ("input_idz:1x2", "no input 'input_idz'; did you mean 'input_ids'"),
        ("input_ids:1", "has 2 dims, found 1"),
        ("input_ids:1x2,past.0.key:1x5x4x16", "dim 4 is fixed, found 5"),
        ("input_ids:1x2,past.0.key:2x4x4x16", "batch is 1 for one input and 2 for past.0.key"),
        ("attention_mask:1x7", "dim 'past_sequence' has no size"),
        ("input_ids=1x2", "expected input:AxBxC"),
        ("input_ids:1x²", "expected input:AxBxC"),
        ("", "expected input:AxBxC"),
    ],
)
def test_tensorrt_notation_says_what_does_not_fit(text, message):
    with pytest.raises(ShapeError, match=message):
        Profile.parse_tensorrt(text, text, text, DECODER)


def test_tensorrt_notation_rejects_a_dim_missing_in_one_corner():
    full, part = "input_ids:1x2", "past.0.key:1x4x2x16"
    with pytest.raises(ShapeError, match="not given in all of min, opt and max"):
        Profile.parse_tensorrt(full, full, part, DECODER)


def test_tensorrt_notation_rejects_min_above_max():
    with pytest.raises(ShapeError, match="min <= opt <= max"):
        Profile.parse_tensorrt("input_ids:4x8", "input_ids:2x8", "input_ids:1x8", TEXT)


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
