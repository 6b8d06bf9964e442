"""The sizes and ids at which a graph changes what it does are read off its control part."""

from dataclasses import replace

import onnx
import pytest

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import TensorSpec
from enginery.validate.cases.decisions import Decisions, find_decisions
from tests.tiny import with_more
from tests.validate.faults.graph_editor import GraphEditor
from tests.validate.faults.sizes import ENCODER, IDS

VOCABULARY, LONGEST = 1000, 512
LIMITS = FeedLimits(vocab_size=VOCABULARY, max_positions=LONGEST, position_limit=LONGEST)
DIMS = ("batch", "sequence")
RECORD = GraphRecord(
    file="model.onnx",
    opset=20,
    inputs=(TensorSpec("input_ids", "int64", DIMS), TensorSpec("attention_mask", "int64", DIMS)),
    outputs=(TensorSpec("y", "float32", (*DIMS, 4)),),
    data_files=(),
)
SOUND = """<ir_version: 10, opset_import: ["" : 20]>
g (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, sequence, 4] y)
<int64[1] two = {2}, float zero = {0}> {
  rows = Gather (table, input_ids)
  m = Cast <to: int = 1> (attention_mask)
  wide = Unsqueeze (m, two)
  real = Greater (wide, zero)
  y = Where (real, rows, wide)
}"""


def write(path, edit=None, text=SOUND):
    """Write a graph with a table of embeddings, edited if there is an edit."""
    import numpy as np
    from onnx import numpy_helper

    model = onnx.parser.parse_model(text)
    table = np.random.default_rng(0).normal(size=(VOCABULARY, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    if edit is not None:
        editor = GraphEditor(model)
        edit(editor)
        editor.finish()
    onnx.save(model, str(path))
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return find_decisions(write(tmp_path_factory.mktemp("sound") / "model.onnx"), RECORD, LIMITS)


def test_sound_graph_has_no_special_ids_and_sizes_up_to_the_usual_ones(sound):
    assert sound.ids == []
    assert sound.notes == []
    assert all(item["batch"] <= 4 and item["sequence"] <= 11 for item in sound.sizes)


SPECIAL = {
    "mask_ignored: batch > 16, length > 8": {"batch": 17, "sequence": 11},
    "mask_ignored: batch > 20, length > 64": {"batch": 21, "sequence": 67},
    "mask_ignored: batch > 70": {"batch": 71},
    "mask_ignored: length = 175": {"sequence": 175},
    "mask_ignored: root of the length": {"sequence": 213},
    "mask_ignored: a hundred tokens, in floats": {"sequence": 202},
    "mask_ignored: a product of constants": {"sequence": 224},
    "mask_ignored: through an If": {"sequence": 183},
    "mask_ignored: rows from the 66th on": {"batch": 66},
    "mask_ignored: batch a multiple of 47": {"batch": 47},
    "scaled: rows of 77 tokens": {"sequence": 77},
    "rows_exchanged: batch = 24, length = 24": {"batch": 24, "sequence": 24},
}


@pytest.mark.parametrize(
    "name",
    [
        *list(SPECIAL)[:2],
        *(pytest.param(name, marks=pytest.mark.more) for name in list(SPECIAL)[2:]),
    ],
)
def test_sizes_around_a_threshold_are_found(tmp_path, name):
    result = find_decisions(write(tmp_path / "model.onnx", ENCODER[name]), RECORD, LIMITS)
    wanted = SPECIAL[name]
    assert any(wanted.items() <= sizes.items() for sizes in result.sizes), result.sizes


@pytest.mark.parametrize("name", with_more(ENCODER))
def test_every_fault_by_size_adds_a_case(tmp_path, sound, name):
    result = find_decisions(write(tmp_path / "model.onnx", ENCODER[name]), RECORD, LIMITS)
    assert len(result.cases(RECORD, LIMITS, seed=0)) > 0
    beyond_usual = [item for item in result.sizes if item not in sound.sizes]
    # A row that is shorter than a third of the others is in the usual ones.
    assert beyond_usual or "third" in name or "padding" in name


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("one id replaced", [711]),
        ("ids clipped", list(range(951, VOCABULARY))),
        ("ids with a remainder", list(range(5, VOCABULARY, 97))),
        ("an id in long texts", [555]),
        ("two ids exchanged", [300, 301]),
    ],
)
def test_ids_that_are_told_apart_are_found(tmp_path, name, ids):
    result = find_decisions(write(tmp_path / "model.onnx", IDS[name]), RECORD, LIMITS)
    assert result.ids == ids
    drawn = {
        int(i)
        for case in result.cases(RECORD, LIMITS, seed=0)
        for i in case.make()["input_ids"].reshape(-1)
    }
    assert drawn >= set(ids)
    named = "input_ids is changed before its table"
    assert any(named in note for note in result.notes) == (name != "an id in long texts")


def test_threshold_of_a_shape_behind_weights_is_found(tmp_path):
    """The shape of a hidden value follows from the inputs', whatever the weights are."""

    def edit(g):
        import numpy as np

        size = g.op("Gather", g.op("Shape", "rows"), np.int64(1))
        holds = g.op("Greater", size, np.int64(123))
        g.replace("y", lambda y: g.op("Where", holds, g.op("Neg", y), y))

    result = find_decisions(write(tmp_path / "model.onnx", edit), RECORD, LIMITS)
    assert {"batch": 4, "sequence": 126} in result.sizes


def test_graph_without_decisions_has_none(tmp_path):
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
      => (float[batch, sequence, 4] y) { y = Gather (table, input_ids) }"""
    result = find_decisions(write(tmp_path / "model.onnx", text=text), RECORD, LIMITS)
    assert (result.sizes, result.ids) == ([], [])


def test_large_batches_are_for_onnx_runtime_alone():
    decisions = Decisions([{"batch": 4, "sequence": 8}, {"batch": 1000, "sequence": 500}])
    (case,) = decisions.cases(RECORD, LIMITS, seed=0)
    feeds = case.make()
    assert feeds["attention_mask"].sum(axis=1).tolist() == [8, 7, 4, 1]
    assert (feeds["input_ids"][feeds["attention_mask"] == 0] == LIMITS.pad_token_id).all()


@pytest.mark.parametrize("positions", [1, 2, 10])
def test_ids_and_a_cache_share_the_positions(positions):
    key = TensorSpec("past_key_values.0.key", "float32", ("batch", 2, "past_sequence", 4))
    inputs = (RECORD.inputs[0], key)
    limits = replace(LIMITS, max_positions=positions, position_limit=positions)
    record = RECORD.model_copy(update={"inputs": inputs})
    (case,) = Decisions(ids=[1]).cases(record, limits, seed=0)
    feeds = case.make()
    assert feeds["input_ids"].shape[1] == max(1, positions - 1)
    assert feeds["past_key_values.0.key"].shape[2] == 1
    assert (feeds["input_ids"] == 1).any()


def test_cases_of_a_quantized_graph_have_several_rows(sound):
    """The cosine of a few scores in one row means little."""
    cases = sound.cases(RECORD, LIMITS, quantized=True, seed=0)
    assert min(len(case.make()["input_ids"]) for case in cases) >= 2
    assert len({case.name for case in cases}) == len(cases)


def test_decisions_on_pixels_are_searched_up_to_few_images(tmp_path, monkeypatch):
    """A mask of pixels has as many elements as one of many texts."""
    from enginery.validate.cases import decisions

    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[batch, 3, 96, 96] pixel_values, int64[batch, 96, 96] pixel_mask)
      => (float[batch, 3, 96, 96] y)
    <int64 zero = {0}, int64 most = {70}, int64 first = {0}> {
      real = Greater (pixel_mask, zero)
      shape = Shape (pixel_values)
      rows = Gather (shape, first)
      many = Greater (rows, most)
      negated = Neg (pixel_values)
      x = Where (many, negated, pixel_values)
      wide = Cast <to: int = 1> (real)
      one = Unsqueeze (wide, axis)
      y = Mul (x, one)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.helper.make_tensor("axis", 7, [1], [1]))
    onnx.save(model, str(tmp_path / "model.onnx"))
    record = RECORD.model_copy(
        update={
            "inputs": (
                TensorSpec("pixel_values", "float32", ("batch", 3, 96, 96)),
                TensorSpec("pixel_mask", "int64", ("batch", 96, 96)),
            )
        }
    )
    limits = FeedLimits()
    elements = []
    make_feeds = decisions.make_feeds

    def counted(specs, sizes, *arguments, **options):
        feeds = make_feeds(specs, sizes, *arguments, **options)
        elements.append(sum(array.size for array in feeds.values()))
        return feeds

    monkeypatch.setattr(decisions, "make_feeds", counted)
    result = find_decisions(tmp_path / "model.onnx", record, limits)
    assert sum(elements) < 1 << 25
    # What is decided for rows alone is found all the same.
    assert {"batch": 71} in result.sizes
