"""Made-up inputs: shapes, dtypes, padding, and the limits that a config.json sets."""

import numpy as np
import pytest

from enginery.core.errors import ShapeError
from enginery.core.model.feeds import MAX_ELEMENTS, FeedLimits, make_feeds
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import TensorSpec

IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("attention_mask", "int64", ("batch", "sequence"))
TYPES = TensorSpec("token_type_ids", "int64", ("batch", "sequence"))
POSITIONS = TensorSpec("position_ids", "int64", ("batch", "sequence"))
PAST = TensorSpec("past_key_values.0.key", "float32", ("batch", 2, "past_sequence", 4))
PAST_MASK = TensorSpec("attention_mask", "int64", ("batch", "past_sequence + sequence"))
LIMITS = FeedLimits(vocab_size=50, pad_token_id=7, special_ids=(9,), type_vocab_size=2)
SIZES = {"batch": 3, "sequence": 9}


def limits_of(config):
    return FeedLimits.from_config(ModelConfig.model_validate(config))


def made(*specs, sizes=SIZES, ragged=False, seed=0, limits=LIMITS):
    return make_feeds(specs, sizes, limits, seed=seed, ragged=ragged)


def test_arrays_have_the_shape_and_dtype_of_each_input():
    feeds = made(IDS, PAST, PAST_MASK, sizes={**SIZES, "past_sequence": 5})
    assert feeds["input_ids"].shape == (3, 9)
    assert feeds["past_key_values.0.key"].shape == (3, 2, 5, 4)
    assert feeds["attention_mask"].shape == (3, 14)
    assert feeds["past_key_values.0.key"].dtype == np.float32
    assert made(TensorSpec("x", "float16", (2,)))["x"].dtype == np.float16


def test_ids_are_from_the_vocabulary_without_padding_and_special_ones():
    ids = made(IDS, sizes={"batch": 40, "sequence": 100})["input_ids"]
    assert set(np.unique(ids)) == set(range(50)) - {7, 9}


def test_same_seed_makes_the_same_and_another_makes_others():
    first, same, other = (made(IDS, seed=seed)["input_ids"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


def test_rows_of_a_classifier_with_a_decoder_end_with_its_end_id():
    config = {
        "is_encoder_decoder": True,
        "architectures": ["BartForSequenceClassification"],
        "eos_token_id": 2,
        "vocab_size": 50,
        "pad_token_id": 1,
    }
    limits = limits_of(config)
    feeds = made(IDS, MASK, ragged=True, limits=limits)
    ids, mask = feeds["input_ids"], feeds["attention_mask"]
    last = mask.sum(axis=1) - 1
    assert last.tolist() == [8, 5, 2]
    assert np.argwhere(ids == 2).tolist() == [[0, 8], [1, 5], [2, 2]]
    assert ((ids == 1) == (mask == 0)).all()
    alone = made(IDS, sizes={"batch": 2, "sequence": 1}, limits=limits)
    assert alone["input_ids"].tolist() == [[2], [2]]
    for change in ({"is_encoder_decoder": False}, {"architectures": ["BartModel"]}):
        assert limits_of({**config, **change}).end_id is None


def test_types_name_two_segments_only_where_the_model_has_two():
    assert made(TYPES)["token_type_ids"][0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    one = FeedLimits(type_vocab_size=1)
    assert not made(TYPES, limits=one)["token_type_ids"].any()


def test_ragged_rows_are_padded_on_the_right_for_encoders():
    feeds = made(IDS, MASK, ragged=True)
    mask = feeds["attention_mask"]
    assert mask.tolist() == [[1] * 9, [1] * 6 + [0] * 3, [1] * 3 + [0] * 6]
    assert ((feeds["input_ids"] == 7) == (mask == 0)).all()


def test_ragged_rows_are_padded_on_the_left_where_the_graph_decodes():
    feeds = made(IDS, MASK, POSITIONS, ragged=True)
    mask = feeds["attention_mask"]
    assert mask.tolist() == [[1] * 9, [0] * 3 + [1] * 6, [0] * 6 + [1] * 3]
    assert ((feeds["input_ids"] == 7) == (mask == 0)).all()
    assert feeds["position_ids"].tolist() == [
        list(range(9)),
        [0, 0, 0, *range(6)],
        [0] * 6 + [0, 1, 2],
    ]


def test_past_is_padded_on_the_left_and_positions_continue():
    sizes = {"batch": 2, "sequence": 3, "past_sequence": 5}
    feeds = made(IDS, PAST, PAST_MASK, POSITIONS, sizes=sizes, ragged=True)
    assert feeds["attention_mask"].tolist() == [[1] * 8, [0] * 4 + [1] * 4]
    assert feeds["position_ids"].tolist() == [[5, 6, 7], [1, 2, 3]]
    assert not (feeds["input_ids"] == 7).any()


def test_positions_without_padding_begin_after_the_past():
    sizes = {"batch": 2, "sequence": 3, "past_sequence": 5}
    assert made(POSITIONS, PAST, sizes=sizes)["position_ids"].tolist() == [[5, 6, 7]] * 2


def test_encoders_mask_in_a_decoder_is_padded_on_the_right():
    mask = TensorSpec("encoder_attention_mask", "int64", ("batch", "encoder_sequence"))
    sizes = {"batch": 2, "sequence": 2, "past_sequence": 2, "encoder_sequence": 4}
    feeds = made(IDS, PAST, mask, sizes=sizes, ragged=True)
    assert feeds["encoder_attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert not (feeds["input_ids"] == 7).any()


def test_padding_of_one_token_leaves_one():
    feeds = made(IDS, MASK, sizes={"batch": 4, "sequence": 1}, ragged=True)
    assert feeds["attention_mask"].all()


def test_boxes_have_their_corners_in_order():
    boxes = made(TensorSpec("bbox", "int64", ("batch", "sequence", 4)))["bbox"]
    assert (boxes[..., 0] <= boxes[..., 2]).all()
    assert (boxes[..., 1] <= boxes[..., 3]).all()


def test_dim_without_a_size_and_type_that_cannot_be_made_are_errors():
    with pytest.raises(ShapeError, match="'sequence' has no size"):
        made(IDS, sizes={"batch": 1})
    with pytest.raises(ShapeError, match="cannot generate inputs of type string"):
        made(TensorSpec("text", "string", ("batch",)))


def test_limits_are_read_from_the_config():
    limits = limits_of(
        {
            "vocab_size": 30,
            "pad_token_id": 1,
            "eos_token_id": [2, 3],
            "type_vocab_size": 2,
            "max_position_embeddings": 40,
        }
    )
    assert (limits.vocab_size, limits.pad_token_id, limits.special_ids) == (30, 1, (2, 3))
    assert limits.max_positions == limits.position_limit == 40


def test_positions_behind_the_padding_id_are_not_counted():
    config = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    assert limits_of(config).position_limit == 512


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "n_positions": 512},
        {
            "model_type": "deberta-v2",
            "max_position_embeddings": 512,
            "position_biased_input": False,
        },
        {
            "model_type": "wav2vec2",
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "max_position_embeddings": 512,
        },
        {},
    ],
)
def test_models_without_absolute_positions_have_no_hard_limit(config):
    assert limits_of(config).position_limit is None


def test_audio_is_long_enough_for_eight_frames():
    limits = limits_of({"conv_kernel": [10, 3], "conv_stride": [5, 2]})
    assert limits.min_sequence == ((8 - 1) * 2 + 3 - 1) * 5 + 10


def test_image_sizes_are_read_from_the_vision_part_too():
    sizes = limits_of({"vision_config": {"image_size": [32, 48]}}).sizes
    assert (sizes["height"], sizes["width"]) == (32, 48)


@pytest.mark.parametrize("dim", [10**12, 2**31 - 1])
def test_too_many_elements_are_rejected_before_allocation(dim):
    with pytest.raises(
        ShapeError, match=r"mask: int64 \(batch, \d+\): the inputs have .* expected"
    ):
        made(TensorSpec("mask", "int64", ("batch", dim)))
    many = [TensorSpec(f"x{n}", "bool", (MAX_ELEMENTS // 2,)) for n in range(3)]
    with pytest.raises(ShapeError, match="elements"):
        made(*many)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("bbox", "int64", ("batch", 5)),
        TensorSpec("position_ids", "int64", ()),
        TensorSpec("x", "float7", ("batch",)),
        TensorSpec("x", "float32", ("batch", -5)),
        TensorSpec("x", "float32", (1,) * 70),
    ],
    ids=str,
)
def test_an_input_that_its_name_or_dtype_does_not_fit_is_an_error_in_words(spec):
    with pytest.raises(ShapeError, match="cannot generate inputs for"):
        made(spec)


def test_rows_start_with_the_tokens_of_an_image():
    vision = {"image_size": 20, "patch_size": 5}
    config = {"text_config": {"vocab_size": 9}, "vlm_config": {"image_token_index": 4}}
    config["vlm_config"]["vision_config"] = vision
    limits = FeedLimits.from_config(ModelConfig.model_validate(config))
    assert limits.min_sequence == 17
    ids = TensorSpec("input_ids", "int64", ("batch", "sequence"))
    mask = TensorSpec("attention_mask", "int64", ("batch", "sequence"))
    pixels = TensorSpec("pixel_values", "float32", ("batch", 3, 20, 20))
    sizes = {"batch": 5, "sequence": 40}
    feeds = make_feeds([ids, mask, pixels], sizes, limits, seed=0, ragged=True)
    assert (feeds["input_ids"][:, :16] == 4).all()
    assert (feeds["input_ids"][:, 16:] != 4).all()
    assert feeds["attention_mask"].sum(axis=1).min() == 17
    alone = make_feeds([ids], sizes, limits, seed=0)
    assert (alone["input_ids"] != 4).all(), "without pixels there is no image"


@pytest.mark.parametrize("ragged", [False, True])
def test_images_of_patches_fill_their_rows_and_columns(ragged):
    feeds = made(
        TensorSpec("pixel_values", "float32", ("batch", "num_patches", 12)),
        TensorSpec("pixel_attention_mask", "int64", ("batch", "num_patches")),
        TensorSpec("spatial_shapes", "int64", ("batch", 2)),
        sizes={"batch": 3, "num_patches": 13},
        ragged=ragged,
    )
    shapes, mask = feeds["spatial_shapes"], feeds["pixel_attention_mask"]
    assert (shapes.prod(axis=1) == mask.sum(axis=1)).all()
    assert shapes.tolist()[:2] == ([[3, 4], [1, 8]] if ragged else [[3, 4], [1, 13]])
    assert len({row[0] for row in shapes.tolist()}) > 1
