import numpy as np
import pytest

from enginery.core.datasets.labels import index_labels
from enginery.core.errors import InputError, OptionError
from enginery.core.options import options_from
from enginery.quantize.calibration.data import make_batches, read_data
from enginery.quantize.config import QuantizeConfig
from enginery.runtime import sample_inputs as real_inputs
from enginery.runtime.text.tokenizer import TextTokenizer
from tests.tiny import TEXT


@pytest.fixture
def bert(tiny):
    return tiny("bert", "text-classification")


@pytest.fixture
def vit(tiny):
    return tiny("vit", "image-classification")


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


def lines(path, words, label=""):
    rows = [f"{word},{label or index % 2}\n" for index, word in enumerate(words)]
    path.write_text("text,label\n" + "".join(rows))
    return str(path)


def test_rows_of_a_held_out_file_measure_and_all_others_calibrate(bert, tmp_path):
    rest = lines(tmp_path / "rest.csv", [f"text {i}" for i in range(40)])
    held_out = lines(tmp_path / "held-out.csv", ["engine", "pump", "bell"], label="1")
    options = {"label_column": "label", "accuracy_budget": "1%", "label_values": "indices"}
    data = read(bert, data=rest, held_out=held_out, **options)
    calibrating, measured = split(bert, data)

    def texts(batches):
        return sorted(data.items[row] for batch in batches for row in batch.rows)

    assert texts(calibrating) == sorted(f"text {i}" for i in range(40))
    assert texts(measured) == ["bell", "engine", "pump"]
    assert data.labels == (*[0, 1] * 20, 1, 1, 1)
    assert data.has_held_out_rows
    assert "held out: held-out.csv: 3 rows of 'text'" in data.description
    assert read(bert, [f"text {i}" for i in range(9)], held_out=held_out).calibrating == 9


@pytest.mark.parametrize(("budget", "rows"), [({}, 128), ({"accuracy_budget": "1%"}, 1024)])
def test_no_more_rows_are_held_out_than_without_a_file(bert, tmp_path, budget, rows):
    rest = lines(tmp_path / "rest.csv", ["warm", "cold"])
    held_out = lines(tmp_path / "held-out.csv", [f"text {i}" for i in range(2000)])
    data = read(bert, data=rest, held_out=held_out, **budget)
    assert len(data.items) - data.calibrating == rows


def test_held_out_rows_that_measure_nothing_are_refused(bert, vit, tmp_path):
    rest = lines(tmp_path / "rest.csv", ["warm", "cold"])
    same = lines(tmp_path / "same.csv", ["warm", "cold"])
    with pytest.raises(InputError, match="held-out rows are those that calibrate"):
        read(bert, data=rest, held_out=same)
    with pytest.raises(InputError, match="no such file"):
        read(bert, data=rest, held_out=str(tmp_path / "missing.csv"))
    feeds = {"input_ids": np.ones((1, 4), np.int64), "attention_mask": np.ones((1, 4), np.int64)}
    feeds["token_type_ids"] = np.zeros((1, 4), np.int64)
    with pytest.raises(InputError, match="held-out rows are texts, but those that calibrate"):
        read(bert, [feeds], held_out=rest)


def test_a_generator_is_read_up_to_the_rows_and_no_further(bert):
    source = (f"text {i}" for i in range(1000))
    assert len(read(bert, source, rows=16).items) == 16
    assert next(source) == "text 16"


def test_no_inputs_are_refused_unless_made_up_ones_are_allowed(bert):
    with pytest.raises(OptionError, match="no calibration inputs"):
        read(bert)
    assert read(bert, allow_random=True).kind == "random"


@pytest.mark.parametrize("given", ["one text", {"input_ids": np.zeros((1, 4))}])
def test_one_input_in_place_of_many_is_an_error(bert, given):
    with pytest.raises(InputError, match="expected an iterable"):
        read(bert, given)


def test_inputs_of_several_kinds_are_an_error(bert):
    with pytest.raises(InputError, match="several kinds: feeds, texts"):
        read(bert, ["text", feeds(bert)])


def test_an_input_of_another_kind_is_an_error(bert):
    with pytest.raises(InputError, match="input 1 is a ndarray, expected a text or a dict"):
        read(bert, ["text", np.zeros((4, 4, 3), np.uint8)])
    with pytest.raises(InputError, match="input 0 is a NoneType"):
        read(bert, [None])


def feeds(bert, shape=(1, 4), **more):
    names = [spec.name for spec in bert.manifest.graphs[0].inputs]
    return {**{name: np.ones(shape) for name in names}, **more}


def test_mappings_of_the_graphs_own_inputs_are_fed_as_they_are(bert):
    data = read(bert, [feeds(bert), feeds(bert, (2, 3))])
    assert (data.kind, data.description) == ("feeds", "2 feeds")
    calibrating, _ = split(bert, data)
    assert [batch.load()["input_ids"].shape for batch in calibrating] == [(1, 4), (2, 3)]
    assert calibrating[0].load()["input_ids"].dtype == np.int64


def test_feeds_with_other_names_are_an_error(bert):
    calibrating, _ = split(bert, read(bert, [feeds(bert), {"pixels": np.zeros((1, 4))}]))
    with pytest.raises(InputError, match="pixels, expected the graph's inputs input_ids"):
        calibrating[1].load()


def test_feeds_without_their_batch_dim_are_an_error(bert):
    calibrating, _ = split(bert, read(bert, [feeds(bert, (4,))]))
    with pytest.raises(
        InputError, match=r"input_ids of shape \(4,\), expected \(batch, sequence\)"
    ):
        calibrating[0].load()


def test_texts_are_tokenized_when_their_batch_is_loaded(bert, monkeypatch):
    monkeypatch.setattr(real_inputs, "_TOKENIZED", 8)
    kept = []
    encode = TextTokenizer.encode

    def counted(self, texts):
        found = encode(self, texts)
        kept.append(len(found))
        return found

    monkeypatch.setattr(TextTokenizer, "encode", counted)
    calibrating, _ = split(bert, read(bert, TEXT * 8))
    assert max(kept) == 8, "never all at one time"
    kept.clear()
    feeds = calibrating[0].load()
    assert kept == [len(calibrating[0].rows)]
    texts = [(TEXT * 8)[row] for row in calibrating[0].rows]
    assert feeds["attention_mask"].sum(axis=1).tolist() == [
        len(encoding.ids) for encoding in encode(TextTokenizer.open(bert.path), texts)
    ]


def test_more_rows_of_one_length_do_not_make_larger_batches(bert):
    few, many = (
        max(batch.load()["input_ids"].size for batch in split(bert, read(bert, TEXT * count))[0])
        for count in (8, 40)
    )
    assert many <= max(few, 512)


def test_labels_need_rows_that_have_them(bert, vit, tmp_path):
    with pytest.raises(OptionError, match="'label', but the inputs are texts"):
        read(bert, TEXT, label_column="label")
    with pytest.raises(OptionError, match="a folder of files has no columns"):
        read(vit, data=str(tmp_path), label_column="label")


def test_rows_of_a_token_classifier_have_no_label(tiny, tmp_path):
    path = lines(tmp_path / "rows.csv", ["warm", "cold"])
    with pytest.raises(OptionError, match="token-classification, whose rows have no label"):
        read(
            tiny("bert", "token-classification"),
            data=path,
            label_column="tags",
            accuracy_budget="1%",
        )


def test_a_graph_of_sounds_says_what_it_takes(tiny, tmp_path):
    audio = tiny("wav2vec2", "audio-classification")
    with pytest.raises(InputError, match="expected a folder of audio"):
        read(audio, data=str(tmp_path / "a.csv"))
    with pytest.raises(
        InputError, match=r"rows cannot be used.*exactly these arrays: input_values"
    ):
        read(audio, [{"audio": [0.5]}])


LABELS = {"calm": 0, "angry": 1, "glad": 2}


STARS = {"1": 0, "2": 1, "3": 2, "4": 3, "5": 4}


def test_labels_are_names_or_indices():
    assert index_labels(["glad", "calm"], LABELS, where="here") == [2, 0]
    found = index_labels(["1", 0, np.int64(2), 1.0, "2.0", True], LABELS, where="here")
    assert found == [1, 0, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("column", "indices"),
    [
        (["1", "5", "3"], [0, 4, 2]),  # 5 is no index
        ([1, 5], [0, 4]),
        ([1.0, 5.0], [0, 4]),
        (["0", "4", "3"], [0, 4, 3]),  # 0 is no name
        ([0.0, 4.0], [0, 4]),
    ],
)
def test_names_that_are_numbers_are_told_from_indices_by_the_whole_column(column, indices):
    assert index_labels(column, STARS, where="here") == indices
    # A sample alone may have neither the 5 nor the 0.
    assert index_labels(column[-1:], STARS, where="here", column=column) == indices[-1:]


@pytest.mark.parametrize("column", [["1", "4"], [1, 4], [1.0, 4.0], ["2"]])
def test_labels_that_can_be_names_and_indices_are_an_error_unless_said(column):
    with pytest.raises(InputError, match="the labels can be names and indices") as raised:
        index_labels(column, STARS, where="here")
    assert raised.value.do == "Say which they are: --label-values names, or --label-values indices."
    wholes = [int(label) for label in column]
    assert index_labels(column, STARS, where="", reading="indices") == wholes
    assert index_labels(column, STARS, where="", reading="names") == [n - 1 for n in wholes]


def test_names_that_are_their_own_indices_need_no_choice():
    assert index_labels(["0", "1"], {"0": 0, "1": 1}, where="") == [0, 1]
    assert index_labels([1.0, 2.0], {"1.0": 1, "2.0": 2}, where="") == [1, 2]


def test_column_of_both_is_an_error():
    with pytest.raises(InputError, match="the label 1 is not one of the model's") as raised:
        index_labels(["glad", "angry", 1], LABELS, where="here")
    assert raised.value.do.startswith("The column is read as names.")
    with pytest.raises(InputError, match=r"the label 'glad' is not one of the model's\.") as raised:
        index_labels(["glad", 0], LABELS, where="here")
    assert raised.value.do.startswith("The column is read as indices.")


@pytest.mark.parametrize("label", ["happy", 3, -1, None, 1.5, "2²"])
def test_a_label_that_the_model_does_not_know_is_an_error(label):
    with pytest.raises(InputError, match=r"here: the label .* labels: calm, angry, glad\."):
        index_labels([0, label], LABELS, where="here")


def test_the_nearest_label_is_named():
    with pytest.raises(InputError, match="did you mean 'glad'"):
        index_labels(["gladd"], LABELS, where="here")


def test_names_decide_where_the_source_orders_its_labels_otherwise():
    assert index_labels([0, 1, 2], LABELS, where="", names=("glad", "calm", "angry")) == [2, 0, 1]
    assert index_labels([0, 2], LABELS, where="", names=("bad", "fair", "good")) == [0, 2]
    assert index_labels([0, 1], {}, where="", names=("bad", "good")) == [0, 1]
    with pytest.raises(InputError, match="the label 'sad' is not"):
        index_labels([0, 1], LABELS, where="", names=("glad", "sad"))


def test_inputs_that_differ_have_different_digests(bert):
    assert read(bert, ["a\0b"]).content != read(bert, ["a", "b"]).content
    ids = np.zeros((1, 4), np.int64)
    names = [spec.name for spec in bert.manifest.graphs[0].inputs]
    feeds = [dict.fromkeys(names, ids)]
    wide = [dict.fromkeys(names, ids.view(np.float64))]
    assert read(bert, feeds).content != read(bert, wide).content


def save_arrays(path, names, rows=12):
    ids = np.arange(rows * 4).reshape(rows, 4) % 7
    np.savez(path, **dict.fromkeys(names, ids))
    return ids


def test_arrays_of_a_file_are_rows_of_the_graphs_own_inputs(bert, tmp_path):
    names = [spec.name for spec in bert.manifest.graphs[0].inputs]
    path = tmp_path / "feeds.npz"
    ids = save_arrays(path, names)
    data = read(bert, data=str(path), rows=3)
    assert (data.kind, data.description) == ("feeds", "feeds.npz: 3 rows of arrays")
    calibrating, _ = split(bert, data)
    assert [batch.load()["input_ids"].tolist() for batch in calibrating] == [
        ids[row : row + 1].tolist() for row in (0, 4, 8)
    ]
    with pytest.raises(OptionError, match="arrays have no columns"):
        read(bert, data=str(path), label_column="label")


def test_fractional_ids_are_an_error(bert):
    ids = feeds(bert)
    assert split(
        bert, read(bert, [{name: array.astype(np.float64) for name, array in ids.items()}])
    )
    data = read(bert, [{name: array + 0.5 for name, array in ids.items()}])
    calibrating, _ = split(bert, data)
    with pytest.raises(InputError, match="values of float64 that int64 cannot hold"):
        calibrating[0].load()
