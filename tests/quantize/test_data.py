import numpy as np
import pytest

from enginery.core.errors import InputError, OptionError
from enginery.core.options import options_from
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.data import make_batches, read_data
from enginery.quantize.labels import read_labelled
from tests.tiny import TEXT


@pytest.fixture
def bert(tiny):
    return tiny("bert", "text-classification")


def read(artifact, given=None, **options):
    return read_data(artifact, options_from(QuantizeConfig, "quantize", options), given)


def split(artifact, data):
    return make_batches(artifact, artifact.manifest.graphs[0], data, seed=0)


def test_ragged_texts_are_never_padded(bert):
    texts = [" ".join(["engine"] * (1 + i % 7)) for i in range(40)]
    calibrating, held_out = split(bert, read(bert, texts))
    for batch in [*calibrating, *held_out]:
        assert batch.load()["attention_mask"].all()


def test_rows_that_measure_do_not_calibrate(bert):
    calibrating, held_out = split(bert, read(bert, [f"text {i}" for i in range(40)]))
    first = {row for batch in calibrating for row in batch.rows}
    second = {row for batch in held_out for row in batch.rows}
    assert not first & second
    assert first | second == set(range(40))
    assert len(second) == 10


@pytest.mark.parametrize("name", ["csv", "jsonl", "parquet", "txt"])
def test_files_of_every_kind_give_the_same_texts(bert, tmp_path, name):
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    path = tmp_path / f"data.{name}"
    table = pa.table({"text": TEXT})
    if name == "csv":
        pyarrow.csv.write_csv(table, path)
    elif name == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif name == "jsonl":
        import json

        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXT), encoding="utf-8")
    else:
        path.write_text("\n".join(TEXT), encoding="utf-8")
    assert read(bert, calibration=str(path)).items == tuple(TEXT)


def test_a_generator_is_read_up_to_the_rows_and_no_further(bert):
    source = (f"text {i}" for i in range(1000))
    assert len(read(bert, source, rows=16).items) == 16
    assert next(source) == "text 16"


def test_no_inputs_are_refused_unless_made_up_ones_are_allowed(bert):
    with pytest.raises(OptionError, match="no calibration inputs"):
        read(bert)
    assert read(bert, allow_random=True).kind == "random"


def test_ranges_need_no_inputs(bert):
    assert read(bert, ranges="somewhere") is None


@pytest.mark.parametrize("given", ["one text", {"input_ids": np.zeros((1, 4))}])
def test_one_input_in_place_of_many_is_an_error(bert, given):
    with pytest.raises(InputError, match="expected an iterable"):
        read(bert, given)


def test_inputs_of_several_kinds_are_an_error(bert):
    with pytest.raises(InputError, match="several kinds: images, texts"):
        read(bert, ["text", np.zeros((4, 4, 3), np.uint8)])


def test_the_key_follows_the_content(bert):
    assert read(bert, ["a", "b"]).sha256 == read(bert, ["a", "b"]).sha256
    assert read(bert, ["a", "b"]).sha256 != read(bert, ["ab", ""]).sha256


def test_feeds_with_other_names_are_an_error(bert):
    calibrating, _ = split(bert, read(bert, [{"pixels": np.zeros((1, 4))}]))
    with pytest.raises(InputError, match="has pixels; the graph takes input_ids"):
        calibrating[0].load()


def test_labels_are_names_or_indices(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text,label\nAll is well.,glad\n,calm\nWhat now?,1\n")
    found = read_labelled(
        path, "text", "label", rows=9, label2id={"calm": 0, "angry": 1, "glad": 2}
    )
    assert found == (["All is well.", "What now?"], [2, 1])


def test_a_label_that_the_model_does_not_know_is_an_error(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text,label\nAll is well.,happy\n")
    with pytest.raises(InputError, match=r"'happy' is not one of the model's\. Its labels: calm"):
        read_labelled(path, "text", "label", rows=9, label2id={"calm": 0})
