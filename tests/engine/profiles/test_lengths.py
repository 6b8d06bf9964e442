import json

import numpy as np
import pytest

from enginery import length_buckets
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError, OptionError, ShapeError
from enginery.core.shapes import TensorSpec
from enginery.engine import report
from enginery.engine.profiles import lengths
from enginery.engine.profiles.buckets import bucket_lengths
from enginery.engine.profiles.check import ProfileReport, check_profiles
from enginery.engine.profiles.lengths import profiles_from_data, token_lengths
from enginery.engine.report import save_length_figure
from enginery.runtime.text.tokenizer import TextTokenizer
from tests.tiny import tiny_artifact

TEXTS = [f"The engine {'is warm ' * n}." for n in (0, 0, 0, 1, 1, 8, 9, 200)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_artifact("bert", "feature-extraction", tmp_path_factory.mktemp("lengths") / "bert")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def graph(*inputs):
    return GraphRecord(file="model.onnx", opset=20, inputs=inputs, outputs=(), data_files=())


def dims(name, *sizes):
    return TensorSpec(name, "int64", sizes)


def test_lengths_are_counted_before_truncation(bert):
    tokenizer = TextTokenizer.open(bert.path)
    expected = [len(encoding.ids) for encoding in tokenizer.encode(TEXTS)]
    found = token_lengths(bert, TEXTS)
    assert found.dtype == np.int32
    assert found.tolist()[:-1] == expected[:-1]
    assert expected[-1] == tokenizer.limit == 128 < found[-1]


def test_lengths_of_a_stream_do_not_depend_on_its_chunks(bert, monkeypatch):
    whole = token_lengths(bert, TEXTS)
    monkeypatch.setattr(lengths, "_CHUNK", 3)
    assert token_lengths(bert, iter(TEXTS)).tolist() == whole.tolist()
    assert token_lengths(bert, []).shape == (0,)


def test_lengths_are_counted_after_preprocessing(bert, monkeypatch):
    """sentence-transformers strips and lower-cases before it tokenizes."""
    (plain,) = token_lengths(bert, ["a"])
    monkeypatch.setattr(TextTokenizer, "prepare", lambda _, text: f"{text} {text}")
    assert token_lengths(bert, ["a"]).tolist() == [plain + 1]


def test_item_that_is_not_a_text_is_rejected(bert):
    with pytest.raises(InputError, match="text 1 is a float, expected a string"):
        token_lengths(bert, [*TEXTS[:1], 1.5])  # type: ignore[list-item]


def test_profiles_follow_each_other_up_to_the_models_limit(bert, data):
    record = bert.manifest.graphs[0]
    profiles, buckets = profiles_from_data(bert, record, data, count=2, batch="1:4:16")
    assert [bucket.rows for bucket in buckets.buckets] == [7, 1]
    assert buckets.truncated == 1
    first = buckets.buckets[0]
    assert [str(profile) for profile in profiles] == [
        f"batch=1:4:16,sequence=1:{first.longest}:{first.longest}",
        f"batch=1:4:16,sequence={first.longest + 1}:128:128",
    ]
    assert check_profiles(profiles, record.inputs, {"sequence": 128}) == ProfileReport((), ())


def test_last_profile_ends_at_the_limit(bert, data):
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:-1]))
    record = bert.manifest.graphs[0]
    (*_, last), buckets = profiles_from_data(bert, record, data)
    longest = buckets.buckets[-1].longest
    assert longest < 128
    assert (last.dims["sequence"].opt, last.dims["sequence"].max) == (longest, 128)
    assert length_buckets(bert.path, data) == buckets


def test_rows_are_spread_over_the_file(bert, data, monkeypatch):
    monkeypatch.setattr(lengths, "_MAX_ROWS", 4)
    _, buckets = profiles_from_data(bert, bert.manifest.graphs[0], data)
    assert buckets.rows == 4


def test_fixed_batch_is_omitted_and_dims_keep_their_order(bert, data):
    fixed = graph(dims("input_ids", 4, "T"), dims("attention_mask", 4, "T"))
    profiles, _ = profiles_from_data(bert, fixed, data, count=1)
    assert [str(profile) for profile in profiles] == ["T=1:128:128"]
    named = graph(dims("input_ids", "N", "T"), dims("attention_mask", "N", "T"))
    profiles, _ = profiles_from_data(bert, named, data, count=1, batch="4")
    assert [str(profile) for profile in profiles] == ["N=4,T=1:128:128"]


IDS = dims("input_ids", "batch", "sequence")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            (IDS, dims("attention_mask", "batch", "past_sequence + sequence")),
            "model.onnx: text lengths do not determine the dims past_sequence. Set its "
            "profiles with --profile, such as batch=1:8:32,sequence=8:128:512.",
        ),
        (
            (dims("input_ids", "batch", "past + new"),),
            "model.onnx: text lengths do not determine the dims past + new. Set its profiles "
            "with --profile, such as batch=1:8:32,sequence=8:128:512.",
        ),
        (
            (dims("input_ids", "batch", 128),),
            "model.onnx: the sequence is fixed at 128, so text lengths do not matter. Remove "
            "--data, or export the model with a dynamic sequence.",
        ),
        (
            (dims("pixel_values", "batch", 3, 32, 32),),
            "model.onnx takes no texts, so profiles cannot be derived from their lengths: expected "
            "input_ids (batch, sequence), found pixel_values: int64 (batch, 3, 32, 32). Set its "
            "profiles with --profile, such as batch=1:8:32,sequence=8:128:512.",
        ),
    ],
)
def test_graph_whose_dims_do_not_follow_from_texts_is_rejected(bert, data, inputs, message):
    with pytest.raises(ShapeError) as error:
        profiles_from_data(bert, graph(*inputs), data)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch": "8:4:16"},
            "option 'batch' is '8:4:16': min 8 is above opt 4, expected 1 <= min <= opt <= max.",
        ),
        ({"count": 0}, "option 'count' is 0, expected 1 or more."),
    ],
)
def test_invalid_options_are_rejected(bert, data, options, message):
    with pytest.raises(OptionError) as error:
        profiles_from_data(bert, bert.manifest.graphs[0], data, **options)
    assert str(error.value) == message


def test_file_without_the_column_is_rejected(bert, data):
    with pytest.raises(InputError, match="no column 'review'"):
        profiles_from_data(bert, bert.manifest.graphs[0], data, column="review")


def test_the_figure_names_each_bucket_and_its_padding(tmp_path):
    pytest.importorskip("matplotlib")
    buckets = bucket_lengths(np.array([5, 6, 7, 30, 31, 120]), 3, most=512)
    path = tmp_path / "lengths.svg"
    assert save_length_figure(path, buckets)
    text = path.read_text()
    for words in (
        "to 8: 25% padding",
        "to 32: 5% padding",
        "to 120: 0% padding",
        "4% padding with 3 buckets, 72% with one",
        "length, tokens",
        "rows",
    ):
        assert words in text


def test_every_row_is_in_one_bar_and_no_bucket_end_splits_a_bar():
    class Axes:
        def __getattr__(self, name):
            return lambda *args, **options: None

        def bar(self, edges, heights, width, **options):
            self.bars = edges, heights, width

    for longest in (1, 60, 61, 256, 480):
        axes = Axes()
        rows = np.arange(longest + 1)
        report._draw(axes, bucket_lengths(rows, 2, most=longest))
        edges, heights, width = axes.bars
        assert heights.sum() == longest + 1
        assert len(edges) <= 60
        assert edges[-1] + width >= longest
        assert 8 % width == 0
