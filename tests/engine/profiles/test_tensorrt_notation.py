import pytest

from enginery.core.errors import ShapeError
from enginery.core.shapes import Profile, TensorSpec
from enginery.engine.profiles.tensorrt_notation import profiles_from_shapes
from tests.core.test_shapes import DECODER, TEXT


def read(low, opt, high, inputs=TEXT):
    return [str(profile) for profile in profiles_from_shapes(low, opt, high, inputs)]


def refusal(low, opt, high, inputs=TEXT):
    with pytest.raises(ShapeError) as error:
        profiles_from_shapes(low, opt, high, inputs)
    return str(error.value)


def test_shapes_give_the_graphs_dims_their_ranges():
    found = read(
        "input_ids:1x8,attention_mask:1x8",
        " input_ids:4x64, attention_mask:4x64",
        "input_ids:8x128,attention_mask:8x128",
    )
    assert found == ["batch=1:4:8,sequence=8:64:128"]


def test_inputs_without_new_dims_may_be_omitted():
    assert read("input_ids:1x8", "input_ids:1x8", "attention_mask:2x8") == [
        "batch=1:1:2,sequence=8"
    ]


def test_repeated_inputs_start_another_profile_as_in_onnx_runtime():
    found = read(
        "input_ids:32x1,attention_mask:32x1,input_ids:32x41,attention_mask:32x41",
        "input_ids:32x8,input_ids:32x64,attention_mask:32x8,attention_mask:32x64",
        "input_ids:32x40,input_ids:32x128",
    )
    assert found == ["batch=32,sequence=1:8:40", "batch=32,sequence=41:64:128"]


@pytest.mark.parametrize("name", ["input:0", "'input:0'"])
def test_names_may_hold_a_colon_and_be_quoted(name):
    inputs = (TensorSpec("input:0", "float32", ("batch", 3)),)
    assert read(f"{name}:1x3", f"{name}:2x3", f"{name}:4x3", inputs) == ["batch=1:2:4"]


def test_a_graph_of_fixed_shapes_gives_an_empty_profile():
    inputs = (TensorSpec("image", "float32", (1, 3)),)
    assert profiles_from_shapes("image:1x3", "image:1x3", "image:1x3", inputs) == [Profile({})]


@pytest.mark.parametrize(
    "one",
    ["input_ids:1x2,attention_mask:1x6,past.0.key:1x4x4x16", "input_ids:1x2,attention_mask:1x6"],
)
def test_sums_are_solved(one):
    assert read(one, one, one, DECODER) == ["batch=1,sequence=2,past_sequence=4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "input_ids:1x2,attention_mask:1x7,past.0.key:1x4x4x16",
            "attention_mask is 1x7, but "
            "attention_mask: int64 (batch, past_sequence + sequence) makes it 1x6.",
        ),
        (
            "input_ids:1x8,attention_mask:1x6",
            "dim 'past_sequence' has no size; sizes given: {'batch': 1, 'sequence': 8}.",
        ),
        (
            "input_idz:1x2",
            "the model has no input 'input_idz'; did you mean 'input_ids'? Its "
            "inputs: input_ids, attention_mask, past.0.key.",
        ),
        ("input_ids:1", "input_ids has 1 dims, expected 2: input_ids: int64 (batch, sequence)."),
        (
            "input_ids:1x2,past.0.key:1x5x4x16",
            "past.0.key has the size 5, but past.0.key: "
            "float32 (batch, 4, past_sequence, 16) is fixed at 4.",
        ),
        (
            "input_ids:1x2,past.0.key:2x4x4x16",
            "batch is 1 for one input, but 2 for past.0.key. "
            "Use the same size for inputs that share a dim.",
        ),
        (
            "input_ids=1x2",
            "found 'input_ids=1x2', expected input:AxBxC. Write it as "
            "input_ids:1x8,attention_mask:1x8.",
        ),
        (
            "input_ids:1x2,",
            "found '', expected input:AxBxC. Write it as input_ids:1x8,attention_mask:1x8.",
        ),
        (
            "input_ids:1x²",
            "found 'input_ids:1x²', expected input:AxBxC. Write it as "
            "input_ids:1x8,attention_mask:1x8.",
        ),
        (
            "input_ids:1x2,attention_mask:1x2,input_ids:1x4",
            "'attention_mask' is named for 1 of 2 "
            "profiles. Name every input in each profile: a repeated input starts another profile.",
        ),
    ],
)
def test_shapes_that_do_not_fit_the_graph_are_errors(text, message):
    found = refusal(text, text, text, DECODER)
    assert found == (message if message.startswith("dim ") else f"min shapes '{text}': {message}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("100", "opt and max shapes are missing; found min shapes."),
        ("110", "max shapes are missing; found min and opt shapes."),
        ("001", "min and opt shapes are missing; found max shapes."),
    ],
)
def test_all_three_are_needed(given, message):
    texts = ["input_ids:1x8" if flag == "1" else "" for flag in given]
    assert refusal(*texts) == (
        f"{message} Set all three: --min-shapes, --opt-shapes and --max-shapes."
    )


def test_all_three_have_the_same_number_of_profiles():
    two = "input_ids:1x8,input_ids:1x9"
    assert refusal("input_ids:1x8", two, two) == (
        "the numbers of profiles differ: 1 in min shapes, 2 in opt shapes, 2 in max shapes. "
        "Name every input once per profile in all three."
    )


def test_a_dim_has_a_size_in_all_three():
    full, part = "input_ids:1x2", "past.0.key:1x4x2x16"
    assert refusal(full, full, part, DECODER) == (
        "dim 'sequence' has no size in max shapes, but has one in the others. "
        "Name the same inputs in all three."
    )


@pytest.mark.parametrize(
    ("low", "opt", "message"),
    [
        (
            "4x8",
            "2x8",
            "min, opt and max shapes give batch 4:2:8: min 4 is above opt 2, expected "
            "1 <= min <= opt <= max.",
        ),
        (
            "0x8",
            "2x8",
            "profile 'batch=0:2:8,sequence=8': batch: found size 0, expected a whole number from 1 "
            "to 2147483647.",
        ),
        (
            "1x8",
            "9x8",
            "min, opt and max shapes give batch 1:9:8: opt 9 is above max 8, expected "
            "1 <= min <= opt <= max.",
        ),
    ],
)
def test_sizes_out_of_order_are_errors(low, opt, message):
    assert refusal(f"input_ids:{low}", f"input_ids:{opt}", "input_ids:8x8") == message
