"""Texts and images from files, and what is wrong with some of them."""

import errno
import io
import json
import os
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from enginery.core.datasets import samples
from enginery.core.datasets.folders import list_images, media_kind, take_evenly
from enginery.core.datasets.reader import open_dataset
from enginery.core.datasets.samples import (
    holds_arrays,
    load_arrays,
    read_arrays,
    read_text_rows,
    read_texts,
    require_texts,
)
from enginery.core.errors import InputError

REVIEWS = ["Great value.", "Broke, after\n2 days", '"Meh"']


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


CSV = 'id,text\n1,Great value.\n2,"Broke, after\n2 days"\n3,"""Meh"""\n'
JSONL = (
    '{"id": 1, "text": "Great value."}\n{"id": 2, "text": "Broke, after\\n2 days"}\n'
    '{"text": "\\"Meh\\"", "more": [1]}\n'
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", CSV),
        ("a.CSV", "\ufeff" + CSV.replace("\n", "\r\n").replace("after\r\n", "after\n")),
        (
            "a.tsv",
            CSV.replace("id,text", "id\ttext")
            .replace("1,G", "1\tG")
            .replace('2,"B', '2\t"B')
            .replace('3,"', '3\t"'),
        ),
        ("a.jsonl", JSONL),
        ("a.ndjson", JSONL),
    ],
)
def test_tables_of_each_kind_hold_the_same(tmp_path, name, content):
    assert read_texts(written(tmp_path / name, content), "text", rows=9) == REVIEWS


def test_parquet(tmp_path):
    table = pa.table({"id": [1, 2, 3, 4], "text": [REVIEWS[0], None, *REVIEWS[1:]]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read_texts(tmp_path / "a.parquet", "text", rows=9) == REVIEWS


def test_text_file_is_one_input_a_line_whatever_the_column(tmp_path):
    path = written(tmp_path / "a.txt", "one\r\n\n  \ntwo\u2028half\n")
    assert read_texts(path, "nothing", rows=9) == ["one", "two\u2028half"]


def test_rows_are_spread_evenly_over_the_file(tmp_path):
    path = written(tmp_path / "a.txt", "\n".join(map(str, range(100))))
    assert read_texts(path, "", rows=4) == ["0", "25", "50", "75"]
    assert take_evenly([1, 2], 5) == [1, 2]


def test_nulls_and_blanks_do_not_count(tmp_path):
    path = written(tmp_path / "a.csv", "text,n\nx,1\n,2\n   ,3\ny,4\n")
    assert read_texts(path, "text", rows=9) == ["x", "y"]
    path = written(tmp_path / "a.jsonl", '{"text": null}\n{"text": "x"}\n{"other": 1}\n')
    assert read_texts(path, "text", rows=9) == ["x"]


def test_numbers_in_a_csv_are_texts(tmp_path):
    assert read_texts(written(tmp_path / "a.csv", "text\n5\n4.50\n"), "text", rows=9) == [
        "5",
        "4.50",
    ]


def test_row_longer_than_pyarrows_block(tmp_path):
    long = "word " * 500_000
    assert read_texts(written(tmp_path / "a.csv", f"text\n{long}\nx\n"), "text", rows=9)[1] == "x"


def test_missing_column_names_the_nearest_and_all(tmp_path):
    with pytest.raises(InputError, match=r"no column 'txt'; did you mean 'text'\? .*: id, text\."):
        read_texts(written(tmp_path / "a.csv", CSV), "txt", rows=9)
    with pytest.raises(InputError, match="no column 'review'"):
        read_texts(written(tmp_path / "a.jsonl", JSONL), "review", rows=9)
    pyarrow.parquet.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"no column 'text'.*Its columns: id\."):
        read_texts(tmp_path / "a.parquet", "text", rows=9)


def test_wrong_delimiter_is_guessed_in_words(tmp_path):
    with pytest.raises(InputError, match="separated by semicolons, expected commas"):
        read_texts(written(tmp_path / "a.csv", "id;text\n1;x\n"), "text", rows=9)
    with pytest.raises(InputError, match="separated by commas, expected tabs"):
        read_texts(written(tmp_path / "a.tsv", CSV), "text", rows=9)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "a.txt"])
def test_empty_file_is_named(tmp_path, name):
    with pytest.raises(InputError, match=rf"{name}'.*(cannot be read|is empty)"):
        read_texts(written(tmp_path / name, ""), "text", rows=9)


def test_header_without_rows_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"column 'text' has no text \(found no rows\)"):
        read_texts(written(tmp_path / "a.csv", "id,text\n"), "text", rows=9)


def test_column_of_numbers_is_an_error_with_the_found_type(tmp_path):
    with pytest.raises(InputError, match=r"column 'id' has no text \(found int\)"):
        read_texts(written(tmp_path / "a.jsonl", JSONL), "id", rows=9)
    with pytest.raises(InputError, match="found only empty values"):
        read_texts(written(tmp_path / "b.jsonl", '{"text": null}\n'), "text", rows=9)


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.jsonl"])
def test_text_that_is_not_utf8_is_an_error(tmp_path, name):
    content = "text\nKöln\n" if name != "a.jsonl" else '{"text": "Köln"}\n'
    with pytest.raises(InputError, match=rf"{name}' cannot be read: row [12]: the .* not utf-8"):
        read_texts(written(tmp_path / name, content.encode("latin-1")), "text", rows=9)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", '{"text": "x"\n'), ("a.csv", "a,text\n1,x\n1,2,3\n"), ("a.parquet", "PAR1")],
)
def test_damaged_file_is_an_error_in_one_line(tmp_path, name, content):
    with pytest.raises(InputError, match="cannot be read") as caught:
        read_texts(written(tmp_path / name, content), "text", rows=9)
    assert "\n" not in caught.value.message


def test_unknown_kind_of_file_is_not_taken_for_lines(tmp_path):
    with pytest.raises(InputError, match=r"found a \.json file.*one JSON object per line"):
        read_texts(written(tmp_path / "a.json", "[]"), "text", rows=9)
    with pytest.raises(InputError, match=r"found a \.xlsx file"):
        read_texts(written(tmp_path / "a.xlsx", "PK"), "text", rows=9)


def test_missing_file_or_wrong_type_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        read_texts(tmp_path / "none.csv", "text", rows=9)
    with pytest.raises(InputError, match="is a folder or an image"):
        read_texts(tmp_path, "text", rows=9)
    with pytest.raises(InputError, match="no such file or folder"):
        list_images(tmp_path / "none", rows=9)
    with pytest.raises(InputError, match="it is a file"):
        list_images(written(tmp_path / "a.csv", CSV), rows=9)
    with pytest.raises(InputError, match="has no images"):
        list_images(tmp_path, rows=9)


def test_images_are_found_below_the_folder_and_hidden_files_left(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("b.PNG", "in/a.jpg", "in/._a.jpg", "in/notes.txt"):
        (tmp_path / name).touch()
    found = list_images(tmp_path, rows=9)
    assert [path.name for path in found] == ["b.PNG", "a.jpg"]
    assert list_images(tmp_path / "b.PNG", rows=9) == [tmp_path / "b.PNG"]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_labels_belong_to_their_texts(tmp_path, kind):
    rows = [
        {"label": "good", "text": "x"},
        {"label": "none", "text": " "},
        {"label": "bad", "text": "y"},
        {"label": "good", "text": "z"},
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        written(path, "".join(json.dumps(row) + "\n" for row in rows))
    else:
        mark = "," if kind == "csv" else "\t"
        lines = [f"label{mark}text", *(f"{row['label']}{mark}{row['text']}" for row in rows)]
        written(path, "\n".join(lines))
    found = read_text_rows(path, "text", rows=9, label_column="label")
    assert (found.items, found.labels) == (["x", "y", "z"], ["good", "bad", "good"])
    assert found.left_out == 1
    few = read_text_rows(path, "text", rows=2, label_column="label")
    assert (few.items, few.labels) == (["x", "y"], ["good", "bad"])
    same = read_text_rows(path, "label", rows=9, label_column="label")
    assert same.items == same.labels == ["good", "none", "bad", "good"]
    with pytest.raises(InputError, match="no column 'lable'; did you mean 'label'"):
        read_text_rows(path, "text", rows=9, label_column="lable")


def test_folders_of_audio_are_told_from_those_of_images(tmp_path):
    (tmp_path / "calls").mkdir()
    for name in ("a.FLAC", "b.wav", "notes.md", "._b.wav"):
        (tmp_path / "calls" / name).touch()
    assert media_kind(tmp_path / "calls") == media_kind(tmp_path / "calls/b.wav") == "audio"
    found = [batch.values for batch in open_dataset(tmp_path / "calls").read(skip=0)]
    assert found == [[("a.FLAC",), ("b.wav",)]]
    (tmp_path / "photos").mkdir()
    assert media_kind(tmp_path / "photos") == media_kind(tmp_path / "a.png") == "images"
    assert media_kind(tmp_path / "a.csv") is None
    with pytest.raises(InputError, match="is audio, expected a file with texts"):
        require_texts(tmp_path / "calls", "text")


def test_labels_need_a_table(tmp_path):
    with pytest.raises(InputError, match="labels need a file with columns"):
        read_text_rows(written(tmp_path / "a.txt", "one"), "", rows=9, label_column="label")


@pytest.mark.more
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a.txt"])
def test_a_file_is_never_in_memory_as_a_whole(tmp_path, name):
    texts = [f"{number} " + "word " * 2000 for number in range(4000)]
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pa.table({"text": texts}), path, use_dictionary=False)
    elif name == "a.jsonl":
        written(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        written(path, "\n".join(texts if name == "a.txt" else ["text", *texts]))
    size = sum(map(len, texts))
    wanted = texts[:: len(texts) // 4]
    del texts
    tracemalloc.start()
    found = read_texts(path, "text", rows=4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [text.strip() for text in found] == [text.strip() for text in wanted]
    # Python's own objects; pyarrow holds one block more.
    assert peak < size / 2


def test_a_file_is_read_no_further_than_the_last_text_that_is_taken(tmp_path, monkeypatch):
    path, seen = written(tmp_path / "a.txt", "\n".join(map(str, range(100)))), []
    stream = samples._values

    def counted(*arguments):
        seen.append(0)
        for row in stream(*arguments):
            seen[-1] += 1
            yield row

    monkeypatch.setattr(samples, "_values", counted)
    assert read_texts(path, "", rows=4) == ["0", "25", "50", "75"]
    assert seen == [100, 76]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "line 2 is a list"),
        ("5", "line 2 is a int"),
        ('{"text": ', "line 2: Expecting"),
        ("[" * 100_000, "line 2: maximum recursion"),
    ],
)
def test_the_line_of_a_jsonl_that_is_no_object_is_named(tmp_path, line, said):
    path = written(tmp_path / "a.jsonl", '{"text": "x"}\n' + line + "\n")
    with pytest.raises(InputError, match=f"cannot be read: {said}"):
        read_texts(path, "text", rows=9)


def test_values_of_a_jsonl_column_need_not_be_of_one_kind(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"text": 5}\n{"text": "x"}\n\n{"text": [1]}\n')
    found = read_text_rows(path, "text", rows=9)
    assert (found.items, found.left_out) == (["x"], 2)


def test_one_array_is_the_one_input(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(8).reshape(4, 2))
    found = read_arrays(tmp_path / "x.npy", ["pixels"], rows=2)
    assert [row["pixels"].tolist() for row in found] == [[[0, 1]], [[4, 5]]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones(2)}, "has the arrays a; expected the graph.s inputs a, b"),
        ({"a": np.ones(2), "b": np.ones(3)}, r"shape a \(2,\), b \(3,\); expected the same number"),
        (
            {"a": np.ones(()), "b": np.ones(())},
            "the same number of rows in each, at least one",
        ),
        ({"a": np.array([{}]), "b": np.ones(1)}, "cannot be read: Object arrays cannot be loaded"),
    ],
    ids=["names", "rows", "no rows", "objects"],
)
def test_arrays_that_cannot_be_used_say_why(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(InputError, match=message):
        read_arrays(tmp_path / "x.npz", ["a", "b"], rows=2)


def test_a_folder_of_arrays_may_have_another_size_in_each_file(tmp_path):
    for index, width in enumerate((2, 5)):
        np.savez(tmp_path / f"{index}.npz", a=np.full((3, width), index))
    assert holds_arrays(tmp_path)
    found = read_arrays(tmp_path, ["a"], rows=3)
    assert [row["a"].tolist() for row in found] == [[[0, 0]], [[0, 0]], [[1] * 5]]


def test_a_folder_with_one_file_that_does_not_fit_names_it(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", a=np.ones(30))
    np.savez(tmp_path / "b.npz", b=np.ones(3))
    with pytest.raises(InputError, match=r"b\.npz' has the arrays b; expected"):
        read_arrays(tmp_path, ["a"], rows=3)
    np.savez(tmp_path / "b.npz", a=np.ones(300))
    monkeypatch.setattr(samples, "_ARRAY_BYTES", 2600)
    with pytest.raises(InputError, match="have more than 2,600 bytes"):
        read_arrays(tmp_path, ["a"], rows=3)


def test_folders_without_npz_hold_no_arrays(tmp_path):
    (tmp_path / "photo.png").touch()
    (tmp_path / "._a.npz").touch()
    assert not holds_arrays(tmp_path)
    assert not holds_arrays(tmp_path / "nowhere")
    assert holds_arrays(tmp_path / "nowhere.npz"), "its name says so; reading it says what is wrong"


def test_files_that_are_no_arrays_are_errors(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no such file or folder"):
        read_arrays(tmp_path / "x.npz", ["a"], rows=2)
    for name in ("x.npz", "x.npy"):
        with pytest.raises(InputError, match="cannot be read"):
            read_arrays(written(tmp_path / name, "nothing"), ["a"], rows=2)
    monkeypatch.setattr(samples, "_ARRAY_BYTES", 1000)
    np.savez_compressed(tmp_path / "z.npz", a=np.zeros(10_000))
    with pytest.raises(InputError, match="have 80,128 bytes, expected at most 1,000"):
        read_arrays(tmp_path / "z.npz", ["a"], rows=2)


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    def denied(path="."):
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, denied)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        holds_arrays(tmp_path)


def lying_array(path, shape, *, version=(1, 0)):
    """Write an .npz file whose array has other bytes than its header says."""
    stream = io.BytesIO()
    write = getattr(np.lib.format, f"write_array_header_{version[0]}_0")
    write(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    stream.write(bytes(16))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", stream.getvalue())
    return path


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("shape", [(10**14,), (10**5, 10**5), (5,)])
def test_header_that_says_more_than_the_file_has_is_an_error(tmp_path, shape, version):
    path = lying_array(tmp_path / "a.npz", shape, version=version)
    with pytest.raises(InputError, match=r"x\.npy has the shape .* needs \d+ bytes; found 16"):
        load_arrays(path, ["x"])
