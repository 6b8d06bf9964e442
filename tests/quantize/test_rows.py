"""Rows as mappings: Hugging Face Datasets, whole and streamed, and lists of dicts."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from enginery.core.errors import InputError
from enginery.core.options import options_from
from enginery.quantize.calibration.data import make_batches, read_data
from enginery.quantize.config import QuantizeConfig
from enginery.runtime.builtin_inputs import synthetic_images
from tests.tiny import LABELS, TEXT

NAMES = LABELS["text-classification"]


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="pip install 'enginery[dev]'")


@pytest.fixture
def bert(tiny):
    return tiny("bert", "text-classification")


@pytest.fixture
def vit(tiny):
    return tiny("vit", "image-classification")


def read(artifact, given=None, **options):
    return read_data(artifact, options_from(QuantizeConfig, "quantize", options), given)


def rows_of(texts, **more):
    return [
        {"id": i, "text": text, **{n: v[i] for n, v in more.items()}}
        for i, text in enumerate(texts)
    ]


def labelled(datasets, names, labels):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))}
    )
    return datasets.Dataset.from_dict({"text": TEXT, "label": labels}, features=features)


def test_a_dataset_gives_what_a_list_of_its_rows_gives(datasets, bert):
    rows = rows_of(TEXT)
    dataset = datasets.Dataset.from_list(rows)
    records = dataset.to_pandas().to_dict("records")
    same = (dataset, dataset.to_iterable_dataset(), rows, iter(rows), records)
    found = [read(bert, given) for given in same]
    assert {data.items for data in found} == {tuple(TEXT)}
    assert {data.content for data in found} == {read(bert, TEXT).content}
    assert found[0].description == f"Dataset: {len(TEXT)} rows of 'text'"


def test_rows_of_a_dataset_are_spread_and_those_of_a_stream_are_the_first(datasets, bert):
    dataset = datasets.Dataset.from_list(rows_of([f"text {i}" for i in range(100)]))
    assert read(bert, dataset, rows=4).items == ("text 0", "text 25", "text 50", "text 75")
    stream = dataset.to_iterable_dataset()
    assert read(bert, stream, rows=3).items == ("text 0", "text 1", "text 2")


def test_a_dataset_is_taken_in_the_order_that_it_has(datasets, bert):
    dataset = datasets.Dataset.from_list(rows_of(TEXT))
    shuffled = dataset.shuffle(seed=3)
    assert read(bert, shuffled).items == tuple(shuffled["text"]) != tuple(TEXT)
    shard = dataset.shard(num_shards=3, index=1)
    assert read(bert, shard).items == tuple(shard["text"])
    stream = dataset.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=4)
    assert read(bert, stream).items == tuple(row["text"] for row in stream)
    assert sorted(read(bert, stream).items) == sorted(TEXT)


def test_a_stream_is_read_no_further_than_its_rows(datasets, bert):
    given = []

    def endless():
        while True:
            given.append(f"text {len(given)}")
            yield {"text": given[-1]}

    assert len(read(bert, endless(), rows=16).items) == len(given) == 16
    stream = datasets.IterableDataset.from_generator(endless)
    assert len(read(bert, stream, rows=16).items) == 16


def test_rows_without_a_text_are_left_out_and_counted(datasets, bert):
    rows = rows_of(["a", None, "  ", "b", ""])
    for given in (rows, datasets.Dataset.from_list(rows), iter(rows)):
        data = read(bert, given)
        assert data.items == ("a", "b")
        assert data.description.endswith("2 rows of 'text', 3 without a text left out")
    assert read(bert, [*rows_of(["a", 5]), {"id": 9}]).items == ("a",)


def test_a_stream_goes_on_until_it_has_its_rows_of_texts(bert):
    stream = iter(rows_of(["a", None, "b", "", "c", "d"]))
    data = read(bert, stream, rows=3)
    assert data.items == ("a", "b", "c")
    assert "2 without a text" in data.description
    assert next(stream)["text"] == "d"


def test_a_missing_column_names_the_nearest_and_all(datasets, bert):
    rows = rows_of(TEXT)
    for given in (rows, datasets.Dataset.from_list(rows)):
        with pytest.raises(
            InputError, match=r"no column 'txt'; did you mean 'text'\? Their columns: id, text\."
        ):
            read(bert, given, column="txt")
        with pytest.raises(InputError, match="no column 'label'"):
            read(bert, given, label_column="label")


def test_a_column_without_texts_says_what_it_holds(bert):
    with pytest.raises(InputError, match=r"column 'id' has no text \(found int\)"):
        read(bert, rows_of(TEXT), column="id")
    with pytest.raises(InputError, match="found only empty values"):
        read(bert, rows_of(["", None]))


def test_no_rows_at_all_are_an_error(datasets, bert):
    empty = datasets.Dataset.from_dict({"text": []})
    stream = datasets.IterableDataset.from_generator(lambda: iter(()))
    for given in (empty, stream, [], iter(())):
        with pytest.raises(InputError, match="inputs are empty"):
            read(bert, given)


def test_an_error_of_the_users_own_generator_comes_through(datasets, bert):
    def broken():
        yield from rows_of(TEXT[:3])
        raise ConnectionError("the line is down")

    with pytest.raises(ConnectionError, match="the line is down"):
        read(bert, broken())
    with pytest.raises(ConnectionError, match="the line is down"):
        read(bert, (row["text"] for row in broken()))
    with pytest.raises(ConnectionError, match="the line is down"):
        read(bert, datasets.IterableDataset.from_generator(broken))
    assert len(read(bert, broken(), rows=3).items) == 3


def test_rows_and_other_things_do_not_mix(bert):
    with pytest.raises(InputError, match="row 1 is a str, expected a mapping"):
        read(bert, [*rows_of(["a"]), "b"])
    with pytest.raises(InputError, match="several kinds: feeds, texts"):
        read(bert, ["b", *rows_of(["a"])])


def test_what_holds_several_tables_or_columns_is_refused(datasets, bert):
    dataset = datasets.Dataset.from_list(rows_of(TEXT))
    with pytest.raises(InputError, match=r"one DatasetDict.*dataset\['train'\]"):
        read(bert, datasets.DatasetDict(train=dataset))
    with pytest.raises(InputError, match=r"is a DataFrame.*to_dict\('records'\)"):
        read(bert, dataset.to_pandas())
    with pytest.raises(InputError, match="is one int, expected an iterable"):
        read(bert, 5)


def test_a_dataset_of_the_graphs_own_inputs_is_fed_as_it_is(datasets, bert):
    record = bert.manifest.graphs[0]
    dataset = datasets.Dataset.from_list([{spec.name: [[5, 6, 7]] for spec in record.inputs}] * 3)
    data = read(bert, dataset)
    assert data.kind == "feeds"
    calibrating, _ = make_batches(bert, record, data, seed=0)
    assert calibrating[2].load()["input_ids"].tolist() == [[5, 6, 7]]


def test_tokenized_rows_that_keep_their_text_are_rows(bert):
    rows = [{"text": "a", "input_ids": [1], "attention_mask": [1], "token_type_ids": [0]}]
    assert read(bert, rows).items == ("a",)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "dataset", "stream", "dicts"])
def test_labels_of_every_source_are_the_same(datasets, bert, tmp_path, kind):
    labels = [NAMES[i % 3] for i in range(len(TEXT))]
    rows = [{"text": text, "label": label} for text, label in zip(TEXT, labels, strict=True)]
    rows.insert(2, {"text": "", "label": "none of them"})
    table, path = pa.Table.from_pylist(rows), tmp_path / f"data.{kind}"
    given = None
    if kind == "csv":
        pyarrow.csv.write_csv(table, path)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        given = rows if kind == "dicts" else datasets.Dataset.from_list(rows)
        given = given.to_iterable_dataset() if kind == "stream" else given
    calibration = "" if given is not None else str(path)
    data = read(bert, given, data=calibration, label_column="label")
    assert data.items == tuple(TEXT)
    assert data.labels == tuple(i % 3 for i in range(len(TEXT)))
    assert data.description.endswith("1 without a text left out")


def test_class_labels_go_by_their_names_where_the_model_knows_them(datasets, bert):
    labels = [i % 3 for i in range(len(TEXT))]
    other_order = (NAMES[2], NAMES[0], NAMES[1])
    given = labelled(datasets, other_order, labels)
    expected = tuple(NAMES.index(other_order[label]) for label in labels)
    assert read(bert, given, label_column="label").labels == expected
    stream = given.to_iterable_dataset()
    assert read(bert, stream, label_column="label").labels == expected
    unknown = labelled(datasets, ("one", "two", "three"), labels)
    assert read(bert, unknown, label_column="label").labels == tuple(labels)


def test_labels_are_part_of_the_key(bert):
    one, other = (
        read(bert, rows_of(TEXT, label=[label] * len(TEXT)), label_column="label")
        for label in (0, 1)
    )
    assert one.content != other.content


@pytest.fixture
def image_rows(datasets):
    from PIL import Image

    features = datasets.Features(
        {"image": datasets.Image(), "shown": datasets.ClassLabel(names=["boat", "cat"])}
    )
    images = [Image.fromarray(image) for image in synthetic_images()]
    return datasets.Dataset.from_dict(
        {"image": [*images, None], "shown": [0, 1, 0, 1, 0, 1, 1]}, features=features
    )


def test_a_dataset_of_images_is_what_its_images_are(vit, image_rows):
    data = read(vit, image_rows, column="image", label_column="shown")
    assert data.kind == "images"
    assert data.description == "Dataset: 6 rows of 'image', 1 without an image left out"
    assert data.labels == (1, 0, 1, 0, 1, 0)  # the model's own order is cat, boat
    record = vit.manifest.graphs[0]
    found, _ = make_batches(vit, record, data, seed=0)
    expected, _ = make_batches(vit, record, read(vit, synthetic_images()), seed=0)
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array_equal(mine.load()["pixel_values"], theirs.load()["pixel_values"])
    stream = read(vit, image_rows.to_iterable_dataset(), column="image", label_column="shown")
    assert (stream.content, stream.labels) == (data.content, data.labels)


def test_images_of_a_dataset_are_not_held(vit, image_rows):
    data = read(vit, image_rows, column="image")
    assert data.items[0] is not data.items[0], "read anew each time"
    assert [image.size for image in data.items[1:3]] == [(148, 136), (136, 176)]


def test_images_that_nobody_asked_for_are_not_decoded(datasets, bert, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    rows = {"text": TEXT, "image": [str(tmp_path / "a.png")] * len(TEXT)}
    dataset = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    assert read(bert, dataset).items == tuple(TEXT)


@pytest.mark.parametrize("form", ["arrays", "paths"])
def test_images_in_rows_are_arrays_or_paths(vit, tmp_path, form):
    from PIL import Image

    rows = []
    for index, image in enumerate(synthetic_images(3)):
        path = tmp_path / f"{index}.png"
        Image.fromarray(image).save(path)
        rows.append({"image": image if form == "arrays" else str(path)})
    expected = read(vit, synthetic_images(3)).content
    assert read(vit, rows, column="image").content == expected
    assert read(vit, [row["image"] for row in rows]).content == expected


def test_an_image_that_is_none_is_named_by_its_place(vit):
    with pytest.raises(InputError, match="image 1 is a dict, expected a path"):
        read(vit, [{"image": synthetic_images(1)[0]}, {"image": {"bytes": b""}}], column="image")


def test_quantize_model_takes_a_dataset_by_its_column(datasets, bert):
    from enginery import quantize_model

    dataset = datasets.Dataset.from_dict({"review": TEXT})
    made = quantize_model(bert, dataset, column="review", min_cosine=-1, capability=())
    assert made.manifest.stages[-1].notes[1] == f"Dataset: {len(TEXT)} rows of 'review'"
