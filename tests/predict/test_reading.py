import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginery.core.datasets.batches import PIECE_BYTES
from enginery.core.errors import InputError
from enginery.predict.config import PredictConfig
from enginery.predict.reading import open_input


def open_(path, *columns, raw=False, **options):
    return open_input(path, columns or ("text",), PredictConfig(**options), raw_lines=raw)


def read(path, *columns, skip=0, **options):
    return list(open_(path, *columns, **options).read(skip))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is empty; expected a line with the columns' names"),
        ("a.txt", b"", "is empty; expected one text a line"),
        ("a.jsonl", b"\n\n", "is empty; expected one JSON object a line"),
        ("a.csv", b"txet,n\nwarm,1\n", r"no column 'text'; did you mean 'txet'\?.*txet, n"),
        ("a.csv", b"id;text\n1;warm\n", "separated by semicolons: pass --delimiter ';'"),
        ("a.tsv", b"id,text\n1,warm\n", "separated by commas: pass --delimiter ','"),
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
    with pytest.raises(InputError, match="there is nothing of that name"):
        open_(tmp_path / "a.csv")
    with pytest.raises(InputError, match="no images in it"):
        open_(tmp_path)
    with pytest.raises(InputError, match=r"is a folder, expected a csv file"):
        open_(tmp_path, format="csv")


def test_csv_keeps_quotes_line_breaks_blanks_and_leading_zeros(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\r\n007,"a ""b"",\r\nc"\r\n\r\n 8 ,caf\xc3\xa9\r\n')
    (piece,) = read(path)
    assert piece.kept.to_pylist() == [
        {"id": "007", "text": 'a "b",\r\nc'}, {"id": " 8 ", "text": "café"},
    ]  # fmt: skip
    assert piece.values == [('a "b",\r\nc',), ("café",)]


def test_csv_rows_of_another_width_are_bad_and_lose_nothing(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1\n2,warm\n3,well, yes, warm\n")
    (piece,) = read(tmp_path / "a.csv")
    assert piece.errors == {0: "the row has 1 fields, expected 2",
                            2: "the row has 4 fields, expected 2"}  # fmt: skip
    assert [row["text"] for row in piece.kept.to_pylist()] == ["", "warm", "well, yes, warm"]


@pytest.mark.parametrize("suffix", ["csv", "txt", "jsonl"])
def test_rows_in_another_encoding_are_bad_and_keep_their_bytes(tmp_path, suffix):
    lines = ["caf\xe9".encode("latin-1"), "café".encode()]
    if suffix == "csv":
        lines.insert(0, b"text")
    if suffix == "jsonl":
        lines = [b'{"text": "%s"}' % line for line in lines]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"\n".join(lines))
    (piece,) = read(path)
    assert list(piece.errors) == [0]
    assert "is not utf-8" in piece.errors[0]
    assert piece.kept.column("text").to_pylist() == [r"caf\xe9", "café"]
    if suffix == "jsonl":
        (raw,) = read(path, raw=True)
        kept = [json.loads(line)["text"] for line in raw.kept.column(0).to_pylist()]
        assert kept == ["caf\udce9", "café"]
        return
    (named,) = read(path, encoding="latin-1")
    assert not named.errors
    assert named.kept.column("text")[0].as_py() == "café"


def test_quotation_mark_that_is_not_closed_has_a_bound(tmp_path, monkeypatch):
    from enginery.core.datasets import delimited

    monkeypatch.setattr(delimited, "CELL_BYTES", 1 << 20)
    (tmp_path / "a.csv").write_text('text\n"warm\n' + "cold\n" * 300_000)
    import csv

    limit = csv.field_size_limit(1000)
    try:
        with pytest.raises(InputError, match="Is a quotation mark not closed"):
            read(tmp_path / "a.csv")
    finally:
        csv.field_size_limit(limit)


def test_line_without_an_end_has_a_bound(tmp_path, monkeypatch):
    from enginery.core.datasets import batches as rows

    monkeypatch.setattr(rows, "CELL_BYTES", 1000)
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
    reader = open_(path, window=4)
    pieces = list(reader.read(skip))
    assert [text for piece in pieces for (text,) in piece.values] == texts[skip:]
    assert [piece.first for piece in pieces] == [
        skip + sum(len(p.values) for p in pieces[:index]) for index in range(len(pieces))
    ]
    assert all(len(piece.values) <= 4 for piece in pieces)
    if pieces:
        assert reader.done() == 1


def test_parquet_column_that_holds_no_text_and_table_without_rows(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="column 'text' holds int64, expected text"):
        open_(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="holds no rows"):
        open_(tmp_path / "b.parquet")


def test_parquet_that_repeats_a_long_text_is_read_in_small_pieces(tmp_path):
    text = "warm and cold, " * 70_000  # a megabyte, stored once
    column = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), pa.array([text]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, store_schema=False)
    assert path.stat().st_size < 2 << 20
    before = pa.total_allocated_bytes()
    sizes, most = [], 0
    for piece in open_(path).read(0):
        sizes.append(sum(len(text) for (text,) in piece.values))
        most = max(most, pa.total_allocated_bytes() - before)
    assert sum(sizes) == 2000 * len(text)
    assert max(sizes) < PIECE_BYTES + len(text)
    assert most < 64 << 20


def test_parquet_whose_pages_would_fill_memory_is_refused(tmp_path):
    texts = [f"{index}" + "a" * (3 << 20) for index in range(100)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match=r"row group 0 of column 'text' decompresses from .* to"):
        open_(path)
