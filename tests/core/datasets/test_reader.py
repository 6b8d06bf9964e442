import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginery.core.datasets import batches
from enginery.core.datasets.batches import BATCH_BYTES, ReadOptions
from enginery.core.datasets.reader import column_names, open_dataset
from enginery.core.errors import InputError


def open_(path, *columns, keep="columns", **options):
    return open_dataset(path, columns or ("text",), ReadOptions(keep=keep, **options))


def read(path, *columns, skip=0, **options):
    return list(open_(path, *columns, **options).read(skip))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is empty; expected a header line"),
        ("a.txt", b"", "is empty; expected one text per line"),
        ("a.jsonl", b"\n\n", "is empty; expected one JSON object per line"),
        ("a.csv", b"txet,n\nwarm,1\n", r"no column 'text'; did you mean 'txet'\?.*txet, n"),
        (
            "a.csv",
            b"id;text\n1;warm\n",
            "separated by semicolons, expected commas.*-delimiter ';'",
        ),
        ("a.tsv", b"id,text\n1,warm\n", "separated by commas, expected tabs.*--delimiter ','"),
        ("a.csv", b"text,n,text\n", "two columns named 'text'"),
        ("a.csv", "text\nwarm\n".encode("utf-16"), r"first line is not utf-8.*--encoding"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is a list, expected a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: Expecting value"),
        ("a.jsonl", b'{"txt": "a"}\n', r"no column 'text'; did you mean 'txt'\?"),
        ("a.parquet", b"PAR1 and nothing", "cannot be read"),
        ("a.json", b"[]", r"found a \.json file.*as \.jsonl"),
    ],
)
def test_inputs_that_cannot_be_used_say_why(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        open_(tmp_path / name)


def test_missing_file_and_folder_without_images(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        open_(tmp_path / "a.csv")
    with pytest.raises(InputError, match="has no images"):
        open_(tmp_path)
    with pytest.raises(InputError, match=r"is a folder, expected a csv file"):
        open_(tmp_path, format="csv")


def test_csv_keeps_quotes_line_breaks_blanks_and_leading_zeros(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\r\n007,"a ""b"",\r\nc"\r\n\r\n 8 ,caf\xc3\xa9\r\n')
    (batch,) = read(path)
    assert batch.kept.to_pylist() == [
        {"id": "007", "text": 'a "b",\r\nc'},
        {"id": " 8 ", "text": "café"},
    ]
    assert batch.values == [('a "b",\r\nc',), ("café",)]


def test_csv_rows_of_another_width_are_bad_and_lose_nothing(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1\n2,warm\n3,well, yes, warm\n")
    (batch,) = read(tmp_path / "a.csv")
    assert batch.errors == {
        0: "the row has 1 fields, expected 2",
        2: "the row has 4 fields, expected 2",
    }
    assert [row["text"] for row in batch.kept.to_pylist()] == ["", "warm", "well, yes, warm"]


@pytest.mark.parametrize("suffix", ["csv", "txt", "jsonl"])
def test_rows_in_another_encoding_are_bad_and_keep_their_bytes(tmp_path, suffix):
    lines = ["caf\xe9".encode("latin-1"), "café".encode()]
    if suffix == "csv":
        lines.insert(0, b"text")
    if suffix == "jsonl":
        lines = [b'{"text": "%s"}' % line for line in lines]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"\n".join(lines))
    (batch,) = read(path)
    assert list(batch.errors) == [0]
    assert "is not utf-8" in batch.errors[0]
    assert batch.kept.column("text").to_pylist() == [r"caf\xe9", "café"]
    if suffix == "jsonl":
        (raw,) = read(path, keep="lines")
        kept = [json.loads(line)["text"] for line in raw.kept.column(0).to_pylist()]
        assert kept == ["caf\udce9", "café"]
        return
    (named,) = read(path, encoding="latin-1")
    assert not named.errors
    assert named.kept.column("text")[0].as_py() == "café"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['1,"warm'], "line 2: a quotation mark is not closed; the row extends to line 2"),
        (["1,warm", '2,"cold', *["3,x"] * 1999], "line 3: a quotation mark is not closed"),
        (
            ["1,warm", '2,"cold', *["3,x"] * 1999, '4,"warm"', "5,x"],
            "line 3: a quotation mark is not closed; the row extends to line 2003",
        ),
        (['"1","warm', '"2","cold"'], "line 2: a quotation mark is not closed"),
        (['1,"warm', '2,cold "again"'], "line 2: a quotation mark is not closed"),
    ],
    ids=["last line", "no other", "another later", "all quoted", "in a text"],
)
def test_quotation_mark_that_is_not_closed_is_an_error_with_its_line(tmp_path, lines, message):
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *lines]) + "\n")
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.csv")


def test_text_after_a_closed_quotation_in_one_line_is_read_as_pandas_reads_it(tmp_path):
    content = 'id,text\n1,"5"" nails"\n2,5" nails\n3,"5" nails\n4,"a\nb"\n'
    (tmp_path / "a.csv").write_text(content)
    pd = pytest.importorskip("pandas")
    (batch,) = read(tmp_path / "a.csv")
    texts = [text for (text,) in batch.values]
    assert texts == ['5" nails', '5" nails', "5 nails", "a\nb"]
    assert texts == pd.read_csv(tmp_path / "a.csv").text.tolist()


def test_quotation_mark_that_is_not_closed_has_a_bound(tmp_path, monkeypatch):
    from enginery.core.datasets import delimited

    monkeypatch.setattr(delimited, "CELL_BYTES", 1 << 20)
    (tmp_path / "a.csv").write_text('text\n"warm\n' + "cold\n" * 300_000)
    import csv

    limit = csv.field_size_limit(1000)
    try:
        with pytest.raises(InputError, match="line 2: a quotation mark is not closed"):
            read(tmp_path / "a.csv")
    finally:
        csv.field_size_limit(limit)


@pytest.mark.more
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_fifty_thousand_columns_are_rejected_at_once(tmp_path, suffix):
    names = [f"column {index}" for index in range(50_000)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({name: ["x"] for name in names}), path)
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps({name: "x"}) + "\n" for name in names))
    else:
        mark = "," if suffix == "csv" else "\t"
        path.write_text(f"{mark.join(names)}\n{mark.join(names)}\n")
    with pytest.raises(InputError, match=r"has [\d,]+ columns or more, expected at most 4,096"):
        open_(path, "column 1")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a.txt", "a.png"])
def test_named_pipe_without_a_writer_is_rejected_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="is a named pipe, a socket or a device"):
        open_(tmp_path / name)


def test_endless_device_is_rejected():
    with pytest.raises(InputError, match="is a named pipe, a socket or a device"):
        open_(Path("/dev/zero"), format="text")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "txt"])
def test_file_of_zeros_without_a_line_break_is_read_in_bounded_memory(
    tmp_path, monkeypatch, suffix
):
    monkeypatch.setattr(batches, "CELL_BYTES", 1 << 20)
    path = tmp_path / f"a.{suffix}"
    path.touch()
    os.truncate(path, 1 << 34)  # no block of it is on the disk
    tracemalloc.start()
    with pytest.raises(InputError, match="line 1 is longer than 1 MiB"):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_names_of_columns_without_their_values(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,x\n")
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"text": "x"}\n')
    pq.write_table(pa.table({"id": [1], "text": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / "a.png").touch()
    found = {name: column_names(tmp_path / f"a.{name}") for name in ("csv", "jsonl", "parquet")}
    assert set(map(tuple, found.values())) == {("id", "text")}
    assert column_names(tmp_path / "a.txt") == ["text"]
    assert column_names(tmp_path / "a.png") == ["path"]


def test_only_the_columns_that_are_requested_are_read_of_parquet(tmp_path):
    table = pa.table({"a": [b"x" * 1000], "text": ["warm"], "n": [5]})
    pq.write_table(table, tmp_path / "a.parquet")
    reader = open_(tmp_path / "a.parquet", "n", "text", keep="nothing")
    assert reader.schema.names == ["text", "n"]
    (batch,) = reader.read(0)
    assert (batch.values, batch.kept) == ([(5, "warm")], None)


def test_two_columns_of_one_name_matter_only_where_they_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("n,text,n\n1,warm,2\n")
    (batch,) = read(tmp_path / "a.csv", keep="nothing")
    assert batch.values == [("warm",)]
    with pytest.raises(InputError, match="two columns named 'n'"):
        open_(tmp_path / "a.csv", "n", keep="nothing")


def test_line_without_an_end_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "CELL_BYTES", 1000)
    (tmp_path / "a.txt").write_text("warm\n" + "x" * 2000)
    with pytest.raises(InputError, match="line 2 is longer than"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("suffix", ["csv", "txt", "jsonl", "parquet"])
@pytest.mark.parametrize("skip", [0, 1, 9, 10, 24, 25])
def test_reading_goes_on_after_any_row(tmp_path, suffix, skip):
    texts = [f"text {index}" for index in range(25)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        path.write_text("text\n" + "\n".join(texts))
    elif suffix == "jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    elif suffix == "txt":
        path.write_text("\n".join(texts))
    else:
        pq.write_table(pa.table({"text": texts}), path, row_group_size=10)
    reader = open_(path, rows=4)
    batchs = list(reader.read(skip))
    assert [text for batch in batchs for (text,) in batch.values] == texts[skip:]
    assert [batch.first for batch in batchs] == [
        skip + sum(len(p.values) for p in batchs[:index]) for index in range(len(batchs))
    ]
    assert all(len(batch.values) <= 4 for batch in batchs)
    if batchs:
        assert reader.fraction_read() == 1


def test_parquet_without_rows(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="has no rows"):
        open_(tmp_path / "b.parquet")


def test_parquet_that_repeats_a_long_text_is_read_in_small_batchs(tmp_path):
    text = "warm and cold, " * 70_000  # a megabyte, stored once
    column = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), pa.array([text]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, store_schema=False)
    assert path.stat().st_size < 2 << 20
    before = pa.total_allocated_bytes()
    sizes, most = [], 0
    for batch in open_(path).read(0):
        sizes.append(sum(len(text) for (text,) in batch.values))
        most = max(most, pa.total_allocated_bytes() - before)
    assert sum(sizes) == 2000 * len(text)
    assert max(sizes) < BATCH_BYTES + len(text)
    assert most < 64 << 20


@pytest.mark.more
def test_parquet_with_huge_pages_is_rejected(tmp_path):
    texts = [f"{index}" + "a" * (3 << 20) for index in range(100)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match=r"row group 0 of column 'text' decompresses from .* to"):
        open_(path)
