"""The lengths at which a model may change are compared on both sides."""

from types import SimpleNamespace

import pytest

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import TensorSpec
from enginery.reports.validation import ValidationCaseResult
from enginery.validate.cases.positions import CaseCost, longest_compared, threshold_cases

ENCODER = GraphRecord(
    file="model.onnx",
    opset=20,
    inputs=(
        TensorSpec("input_ids", "int64", ("batch", "sequence")),
        TensorSpec("attention_mask", "int64", ("batch", "sequence")),
    ),
    outputs=(TensorSpec("logits", "float32", ("batch", 3)),),
    data_files=(),
)
DECODER = ENCODER.model_copy(
    update={
        "inputs": (
            TensorSpec("input_ids", "int64", ("batch", "sequence")),
            TensorSpec("attention_mask", "int64", ("batch", "past_sequence + sequence")),
            TensorSpec("past_key_values.0.key", "float32", ("batch", 4, "past_sequence", 8)),
        )
    }
)
IMAGES = ENCODER.model_copy(
    update={"inputs": (TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),)}
)


def lengths(settings, *, record=ENCODER, positions=512, elements=10**5, effort="normal"):
    limits = FeedLimits(max_positions=positions, position_limit=positions)
    cases = threshold_cases(record, limits, settings, CaseCost(elements, effort), seed=0)
    return [case.make()["attention_mask"].shape[1] for case in cases]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_position_embeddings": 512}, []),
        ({"sliding_window": 64}, [64, 65]),
        ({"sliding_window": None, "use_sliding_window": True}, []),
        ({"attention_window": [32, 32, 64]}, [32, 33, 64, 65]),
        ({"text_config": {"sliding_window": 64}}, [64, 65]),
        ({"rope_scaling": {"original_max_position_embeddings": 128}}, [128, 129]),
        ({"local_attention": 100, "block_size": 16}, [16, 17, 100, 101]),
        ({"chunk_size_feed_forward": 0, "hidden_size": 64}, []),
        ({"sliding_window": 4096}, []),
    ],
)
def test_both_sides_of_each_length_of_config_json(settings, expected):
    assert lengths(settings) == expected


def test_past_counts_as_positions():
    assert lengths({"sliding_window": 64}, record=DECODER) == [64, 65]


def test_images_have_no_lengths():
    limits = FeedLimits(max_positions=512)
    assert threshold_cases(IMAGES, limits, {"window_size": 8}, CaseCost(1, "normal"), seed=0) == []


@pytest.mark.parametrize(
    ("elements", "effort", "longest"),
    [
        (10**5, "normal", 4000),
        (10**8, "normal", None),
        (4 * 10**7, "normal", 2048),
        (10**8, "thorough", 4000),
        (10**5, "quick", 4000),
        (10**7, "quick", None),
    ],
)
def test_longest_input_is_as_long_as_time_allows(elements, effort, longest):
    settings = {"num_attention_heads": 4}
    found = lengths(settings, positions=4000, elements=elements, effort=effort)
    assert found == ([] if longest is None else [longest])


def test_memory_bounds_the_longest_input():
    assert lengths({"num_attention_heads": 32}, positions=131072) == [2048]


def result(length, *, passed=True, graph="model.onnx"):
    return ValidationCaseResult(
        graph=graph,
        name="",
        kind="sweep",
        shapes={"input_ids": [1, length], "attention_mask": [1, length]},
        outputs=[SimpleNamespace(passed=passed)],
        problem="",
    )


def test_only_what_agreed_counts():
    assert longest_compared([IMAGES], []) is None
    assert longest_compared([ENCODER], []) == 0
    results = [result(8), result(24), result(100, passed=False), result(200, graph="other.onnx")]
    assert longest_compared([ENCODER], results) == 24


def test_every_graph_counts():
    decoder = DECODER.model_copy(update={"file": "decoder.onnx"})
    results = [result(24), result(20, graph="decoder.onnx")]
    assert longest_compared([ENCODER, decoder, IMAGES], results) == 20
